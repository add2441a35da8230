"""The root of every call on a server: whatever a handler raises becomes one typed status."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from baton.answer import request_id_of
from baton.errors import BatonError, InternalError, InvalidRequest, Unimplemented, abort, from_rpc_error

_logger = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # generic in its stub only
_Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, _Context], Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for bytes that are no message: gRPC itself would answer UNKNOWN, with a class name."""

    def error(self) -> InvalidRequest:
        return InvalidRequest("the request is not a valid message: it is cut off, or a text in it is not UTF-8")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of asyncio handlers into statuses.

    A BatonError keeps its code, a failed call to another server the code it came with; anything else is
    logged with the request's id and reaches the client as INTERNAL without its text. Cancellation passes.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Wraps the method's handler, whichever side of it streams."""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        kind = _kind(handler)
        wrap = _streaming if handler.response_streaming else _unary
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: _Handler = make_handler(
            wrap(getattr(handler, kind), method),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return wrapped


def _kind(handler: "grpc.RpcMethodHandler[Any, Any]") -> str:
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def attempt(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return attempt


def _checked(request: Any) -> Any:
    """The request, or each of its messages when it is read. Raises InvalidRequest for one that is no message."""
    if isinstance(request, _Malformed):
        raise request.error()
    return _checked_messages(request) if isinstance(request, AsyncIterator) else request


async def _checked_messages(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _unary(behaviour: _Behaviour, method: str) -> _Behaviour:
    async def handle(request: Any, context: _Context) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except Exception as error:  # noqa: BLE001 - the root of the call's task
            return await _abort(error, request, context, method)

    return handle


def _streaming(behaviour: _Behaviour, method: str) -> _Behaviour:
    async def handle(request: Any, context: _Context) -> None:
        try:
            responses = behaviour(_checked(request), context)
            if inspect.isasyncgen(responses):
                await _write_all(responses, context)
            else:
                await responses
        except Exception as error:  # noqa: BLE001 - the root of the call's task
            await _abort(error, request, context, method)

    return handle


async def _write_all(responses: AsyncIterator[Any], context: _Context) -> None:
    async with aclosing(responses):  # type: ignore[type-var] # an async generator, as inspect has said
        async for response in responses:
            await context.write(response)


async def _abort(error: Exception, request: Any, context: _Context, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):  # the handler has ended the call itself
        raise error
    if _is_unreachable(error):
        return
    try:
        await abort(context, _typed(error, request, context, method))
    except grpc.aio.BaseError as refusal:
        if not _is_unreachable(refusal):
            raise


def _is_unreachable(error: Exception) -> bool:
    """The client has gone in the same moment, so there is nobody to tell; gRPC has an error of its own for that."""
    return isinstance(error, grpc.aio.InternalError)


def _typed(error: Exception, request: Any, context: _Context, method: str) -> BatonError:
    if isinstance(error, BatonError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error)
    if isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unimplemented(f"{method} is not implemented here")
    request_id = _request_id(request, context)
    _logger.error("request %s: %s failed", request_id or "without id", method, exc_info=error)
    return InternalError(f"internal error in {method}; the server's log has more under the request's id")


def _request_id(request: Any, context: _Context) -> str:
    named = getattr(request, "request_id", "")
    if named:
        return str(named)
    return request_id_of(context.invocation_metadata())
