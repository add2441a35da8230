"""What can go wrong, as exceptions, and their one form on the wire: a gRPC status with google.rpc details."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "baton"
MAX_MESSAGE_BYTES = 400
# The status travels in the trailers, whose hard limit hides the code of whatever is longer.
MAX_DETAILS_BYTES = 700
_MAX_METADATA_VALUE_BYTES = 100
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path in the message, such as sampling.top_p, and what is wrong."""

    field: str
    description: str


class BatonError(Exception):
    """Anything that ends a request other than its answer.

    `code` is the gRPC status code, `reason` a word for programs, `retry_after_s` a hint in seconds,
    `metadata` says where (stage, worker) and what else a program may want to know.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[FieldViolation] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})

    def at(self, *, stage: str, worker: str) -> Self:
        """This error with its place, in metadata and in front of the message; the first place told stays."""
        if "worker" in self.metadata:
            return self
        return type(self)(
            f"{worker}: {self.message}",
            reason=self.reason,
            retry_after_s=self.retry_after_s,
            violations=self.violations,
            metadata={**self.metadata, "stage": stage, "worker": worker},
        )


class InvalidRequest(BatonError):
    """The request can never be served as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"


class NotFound(BatonError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    """No such model is served."""

    default_reason = "MODEL_NOT_FOUND"


class ResourceExhausted(BatonError):
    """No room now; it may work later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class Unavailable(BatonError):
    """Nobody there to serve the request, or the one who did went away."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(BatonError):
    """The time given for the request is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    """The request was cancelled."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class FailedPrecondition(BatonError):
    """The two sides do not fit together, or the state does not allow it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class DataLoss(BatonError):
    """Bytes arrived other than they were sent."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class Aborted(BatonError):
    """Given up half-way; trying the whole again may help."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class Unimplemented(BatonError):
    """The server does not know this call or option."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class InternalError(BatonError):
    """A fault of ours. The server's log has more under the request's id."""


_BY_CODE: Mapping[grpc.StatusCode, type[BatonError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        NotFound,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        FailedPrecondition,
        DataLoss,
        Aborted,
        Unimplemented,
        InternalError,
    )
}


_CONNECTION_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,  # "Stream removed": the socket was closed under a running call
        grpc.StatusCode.INTERNAL,  # a reset in the middle of a message
        grpc.StatusCode.CANCELLED,  # the server stopped without waiting for the call
    }
)


def class_of(code: grpc.StatusCode) -> type[BatonError]:
    """The error class of a status code; InternalError for those without one."""
    return _BY_CODE.get(code, InternalError)


def to_status(error: BatonError) -> grpc.Status:
    """The error as code, message and google.rpc details, cut to fit into the trailers (< 1 kB).

    Details are ErrorInfo, RetryInfo and BadRequest, in this order; what no longer fits is left out.
    """
    number: int = error.code.value[0]
    status = status_pb2.Status(code=number, message=cut(error.message, MAX_MESSAGE_BYTES))
    for detail in _details(error):
        packed = status_pb2.Status()
        packed.details.add().Pack(detail)
        if status.ByteSize() + packed.ByteSize() <= MAX_DETAILS_BYTES:
            status.MergeFrom(packed)
    result: grpc.Status = rpc_status.to_status(status)
    return result


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """The exception for a failed call, sync or asyncio: the BatonError that the server raised, if it was one.

    Codes that Baton does not use become InternalError with the code in the message.
    """
    code = error.code()
    message = error.details() or code.name
    if code not in _BY_CODE:
        return InternalError(f"{code.name}: {message}", reason=code.name)
    return _unpack(_BY_CODE[code], message, _rich_status(error))


def from_peer_error(error: grpc.RpcError) -> BatonError:
    """As from_rpc_error, for a call between Baton's own processes.

    These tell a reason with each status, so a status without one is gRPC's own: the connection broke, because
    the peer died or stopped, and that is always Unavailable.
    """
    if error.code() in _CONNECTION_CODES and not _rich_status(error).details:
        message = f"the connection broke ({error.details()}); try again"
        return Unavailable(message, reason="CONNECTION_LOST", retry_after_s=1.0)
    return from_rpc_error(error)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call of a servicer with this error; trailing metadata set before stays."""
    status = to_status(error)
    trailers = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.details, trailers)


def cut(text: str, max_bytes: int) -> str:
    """The text, or its beginning and an ellipsis if it is longer than this in UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode(errors="ignore") + "…"


def _details(error: BatonError) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in error.metadata.items():
        info.metadata[key] = cut(value, _MAX_METADATA_VALUE_BYTES)
    details: list[Message] = [info]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    # One BadRequest each, so that those which fit are kept when not all do.
    for violation in error.violations:
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(
            field=cut(violation.field, _MAX_METADATA_VALUE_BYTES),
            description=cut(violation.description, MAX_MESSAGE_BYTES // 2),
        )
        details.append(bad_request)
    return details


def _rich_status(error: grpc.RpcError) -> status_pb2.Status:
    trailers: Any = error.trailing_metadata() or ()  # pairs, of another type in each kind of call
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # not ours: the code and the message alone still say what happened
                break
    return status_pb2.Status()


def _unpack(kind: type[BatonError], message: str, status: status_pb2.Status) -> BatonError:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_s = None
    violations = []
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad_request):
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        else:
            detail.Unpack(info)
    if info.reason == ModelNotFound.default_reason:
        kind = ModelNotFound
    return kind(
        message,
        reason=info.reason,
        retry_after_s=retry_after_s,
        violations=violations,
        metadata=dict(info.metadata),
    )
