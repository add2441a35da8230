import asyncio
import logging

import grpc
import pytest

from baton.channel import channel
from baton.errors import InternalError, InvalidRequest, ResourceExhausted, Unavailable, Unimplemented, from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
SECRET = "the prompt " * 2000


def service(kind, behaviour):
    def add(server):
        handlers = {"Call": getattr(grpc, f"{kind}_rpc_method_handler")(behaviour)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", handlers)])

    return add


async def responses_of(connection, kind, metadata=()):
    """What arrives until the call ends, and the error that ended it."""
    request = iter([b"x"]) if kind.startswith("stream") else b"x"
    call = getattr(connection, kind)("/test.Service/Call")(request, timeout=10, metadata=metadata)
    responses = []
    try:
        if kind.endswith("unary"):
            responses.append(await call)
        else:
            async for response in call:
                responses.append(response)  # noqa: PERF401 - what came before an error counts
    except grpc.aio.AioRpcError as error:
        return responses, from_rpc_error(error)
    return responses, None


def handler(kind, *, responses=(), error=None):
    async def unary(request, context):
        if error:
            raise error
        return responses[0]

    async def stream(request, context):
        for response in responses:
            yield response
        if error:
            raise error

    return unary if kind.endswith("unary") else stream


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_unchanged(serve, kind):
    address = await serve(service(kind, handler(kind, responses=[b"one"])))
    async with channel(address) as connection:
        assert await responses_of(connection, kind) == ([b"one"], None)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_typed_error_keeps_its_code(serve, kind):
    error = ResourceExhausted("queue full", retry_after_s=2)
    address = await serve(service(kind, handler(kind, error=error)))
    async with channel(address) as connection:
        _, received = await responses_of(connection, kind)
    assert isinstance(received, ResourceExhausted)
    assert (received.message, received.retry_after_s) == ("queue full", 2)


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_an_error_after_the_first_message_keeps_its_code_too(serve, kind):
    address = await serve(service(kind, handler(kind, responses=[b"1", b"2"], error=Unavailable("gone"))))
    async with channel(address) as connection:
        responses, received = await responses_of(connection, kind)
    assert responses == [b"1", b"2"]
    assert isinstance(received, Unavailable)


@pytest.mark.parametrize("kind", KINDS)
async def test_anything_else_is_internal_logged_and_tells_nothing(serve, kind, caplog):
    """An exception of 20 kB with the prompt in it."""
    address = await serve(service(kind, handler(kind, error=ValueError(SECRET))))
    with caplog.at_level(logging.ERROR):
        async with channel(address) as connection:
            _, received = await responses_of(connection, kind, metadata=[("x-request-id", "r-17")])
    assert isinstance(received, InternalError)
    assert "the prompt" not in received.message
    assert "Traceback" not in received.message
    (record,) = caplog.records
    assert "r-17" in record.getMessage()
    assert record.exc_info


async def test_a_handler_may_write_by_itself(serve):
    async def write(request, context):
        await context.write(b"1")
        raise Unavailable("gone")

    async with channel(await serve(service("unary_stream", write))) as connection:
        responses, received = await responses_of(connection, "unary_stream")
    assert responses == [b"1"]
    assert isinstance(received, Unavailable)


async def test_a_call_the_handler_ended_itself_stays_as_it_is(serve, caplog):
    async def fail(request, context):
        context.set_trailing_metadata((("x-timeline", "0.5"),))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    async with channel(await serve(service("unary_unary", fail))) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await connection.unary_unary("/test.Service/Call")(b"", timeout=10)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "draining")
    assert not caplog.records


async def test_trailing_metadata_set_before_an_error_stays(serve):
    async def fail(request, context):
        context.set_trailing_metadata((("x-timeline", "0.5"),))
        raise Unavailable("gone")

    async with channel(await serve(service("unary_unary", fail))) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await connection.unary_unary("/test.Service/Call")(b"", timeout=10)
    assert ("x-timeline", "0.5") in list(caught.value.trailing_metadata())
    assert isinstance(from_rpc_error(caught.value), Unavailable)


async def test_an_error_of_a_server_behind_passes_through(serve):
    behind = await serve(service("unary_unary", handler("unary_unary", error=Unavailable("decode-0: full"))))
    async with channel(behind) as inner:

        async def forward(request, context):
            return await inner.unary_unary("/test.Service/Call")(request, timeout=10)

        async with channel(await serve(service("unary_unary", forward))) as connection:
            _, received = await responses_of(connection, "unary_unary")
    assert isinstance(received, Unavailable)
    assert received.message == "decode-0: full"


async def test_cancellation_reaches_the_handler_and_is_no_error(serve, caplog):
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(request, context):
        started.set()
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with channel(await serve(service("unary_stream", wait))) as connection:
        call = connection.unary_stream("/test.Service/Call")(b"", timeout=30)
        await asyncio.wait_for(started.wait(), 10)
        call.cancel()
        await asyncio.wait_for(ended.wait(), 10)
    assert not caplog.records


async def test_methods_that_are_not_there_are_unimplemented(serve, caplog):
    def add(server):
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference_pb2_grpc.InferenceServiceServicer(), server)

    async with channel(await serve(add)) as connection:
        stub = inference_pb2_grpc.InferenceServiceStub(connection)
        for call in (
            stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10),
            connection.unary_unary("/baton.v1.InferenceService/Nothing")(b"", timeout=10),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert isinstance(from_rpc_error(caught.value), Unimplemented)
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_are_no_message_are_an_invalid_request(serve, kind):
    async def unary(request, context):
        return await anext(request) if kind.startswith("stream") else request

    async def stream(request, context):
        yield await unary(request, context)

    def add(server):
        method = getattr(grpc, f"{kind}_rpc_method_handler")(
            unary if kind.endswith("unary") else stream,
            request_deserializer=inference_pb2.GenerateRequest.FromString,
            response_serializer=inference_pb2.GenerateRequest.SerializeToString,
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", {"Call": method})])

    address = await serve(add)
    async with channel(address) as connection:  # b"x" is a field without its value
        _, error = await responses_of(connection, kind)
        assert isinstance(error, InvalidRequest)
        assert "UTF-8" in error.message


async def test_a_client_that_is_gone_is_not_told_and_nobody_else_is(serve, caplog):
    """It leaves while the handler is busy; what the handler writes and raises after that reaches nobody."""
    is_called, is_over = asyncio.Event(), asyncio.Event()

    async def stream(request, context):
        is_called.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
        try:
            await context.write(b"late")
            raise ResourceExhausted("too late")
        finally:
            is_over.set()

    address = await serve(service("unary_stream", stream))
    async with channel(address) as connection:
        call = connection.unary_stream("/test.Service/Call")(b"x", timeout=10)
        await is_called.wait()
        call.cancel()
        async with asyncio.timeout(5):
            await is_over.wait()
        await asyncio.sleep(0.05)
    assert caplog.text == ""
