"""Data frames over gRPC: unary calls with raw bytes both ways, as protobuf would copy the payload twice more."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from kv_transfer.errors import (
    ERRORS_BY_REASON,
    ChecksumMismatch,
    DuplicateFrame,
    EpochMismatch,
    FingerprintMismatch,
    Incomplete,
    KvTransferError,
    LinkLost,
    MalformedFrame,
    OutOfRange,
    PromptMismatch,
    TicketClosed,
    TicketUnknown,
    TransferTimeout,
)
from kv_transfer.frame import Buffer
from kv_transfer.transport import Sink

SERVICE = "baton.v1.KvDataService"
METHOD = "Write"
# Trailing metadata with the refusal's reason: several errors share a status.
REASON_KEY = "baton-kv-reason"

_STATUS_BY_ERROR: dict[type[KvTransferError], grpc.StatusCode] = {
    TicketUnknown: grpc.StatusCode.NOT_FOUND,
    TicketClosed: grpc.StatusCode.NOT_FOUND,
    EpochMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    FingerprintMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    PromptMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
    MalformedFrame: grpc.StatusCode.INVALID_ARGUMENT,
    OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    DuplicateFrame: grpc.StatusCode.ALREADY_EXISTS,
    Incomplete: grpc.StatusCode.ABORTED,
    TransferTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    LinkLost: grpc.StatusCode.UNAVAILABLE,
}

# A frozen peer has kept a call inside gRPC past its deadline; ours comes this much later.
_DEADLINE_SLACK_S = 0.5


def status_of(error: KvTransferError) -> grpc.StatusCode:
    """The gRPC status a refusal travels as, in this service and in the control service."""
    return _STATUS_BY_ERROR.get(type(error), grpc.StatusCode.ABORTED)


def error_of(error: grpc.aio.AioRpcError) -> KvTransferError:
    """The refusal as the peer raised it, or what the status says about the connection."""
    reason = dict(error.trailing_metadata() or ()).get(REASON_KEY)
    text = error.details() or error.code().name
    if isinstance(reason, str) and reason in ERRORS_BY_REASON:
        return ERRORS_BY_REASON[reason](text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeout(text)
    return LinkLost(f"{error.code().name}: {text}")


def write_handler(sink: Sink) -> grpc.GenericRpcHandler:
    """The data service in front of `sink`, to be added to a grpc.aio server."""

    async def write(frame: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            await sink.write(frame)
        except KvTransferError as error:
            await context.abort(status_of(error), str(error), ((REASON_KEY, error.reason),))
        return b""

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(write)
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})


class GrpcTransport:
    """Links over channels that the caller makes, with keepalive, and closes; an address is host:port."""

    kind = "grpc"

    def __init__(self, channel_for: Callable[[str], grpc.aio.Channel]) -> None:
        self._channel_for = channel_for

    def connect(self, address: str) -> "GrpcLink":
        """A link over the channel of `address`."""
        return GrpcLink(self._channel_for(address))


class GrpcLink:
    """A Link over a channel, which stays the caller's."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._write: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        self._is_closed = False

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        """See Link.send."""
        if self._is_closed:
            raise LinkLost("the link was closed on this side")
        # gRPC takes only bytes, so one copy is needed; the join is that copy.
        frame = b"".join((header, payload))
        try:
            async with asyncio.timeout(timeout_s + _DEADLINE_SLACK_S):
                await self._call(frame, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        except TimeoutError as error:
            raise TransferTimeout(f"the peer did not take a frame in {timeout_s} s") from error

    async def _call(self, frame: bytes, timeout_s: float) -> None:
        task = asyncio.current_task()
        try:
            await self._write(frame, timeout=timeout_s)
        except grpc.aio.UsageError as error:
            raise LinkLost(f"the channel was closed: {error}") from error
        except asyncio.CancelledError as error:
            # Closing the channel cancels its calls, which looks like a cancellation of this task.
            if task is not None and task.cancelling():
                raise
            raise LinkLost("the channel was closed during a send") from error

    async def close(self) -> None:
        """See Link.close."""
        self._is_closed = True
