import asyncio

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.channel import (
    MAX_MESSAGE_BYTES,
    PortUnavailableError,
    add_health_and_reflection,
    bind,
    channel,
    server,
    sync_channel,
)
from baton.errors import InvalidRequest, ResourceExhausted, from_rpc_error
from baton.v1 import inference_pb2_grpc

SERVICE = "baton.v1.InferenceService"


def echo(grpc_server):
    async def respond(request, context):
        return request

    handlers = {"Call": grpc.unary_unary_rpc_method_handler(respond)}
    grpc_server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", handlers)])


async def test_messages_of_5_mb_pass_both_ways(serve):
    """gRPC's own limit is 4 MiB, at each end and in each direction."""
    address = await serve(echo)
    message = bytes(5_000_000)
    async with channel(address) as connection:
        assert await connection.unary_unary("/test.Echo/Call")(message, timeout=20) == message

    def call_sync():
        with sync_channel(address) as connection:
            return connection.unary_unary("/test.Echo/Call")(message, timeout=20)

    assert await asyncio.to_thread(call_sync) == message


async def test_a_message_over_the_limit_is_refused_and_the_channel_goes_on(serve):
    async with channel(await serve(echo)) as connection:
        call = connection.unary_unary("/test.Echo/Call")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MAX_MESSAGE_BYTES + 1), timeout=20)
        assert isinstance(from_rpc_error(caught.value), ResourceExhausted | InvalidRequest)
        assert await call(b"after", timeout=10) == b"after"


async def test_a_server_refuses_too_large_a_message_from_any_client(serve):
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(await serve(echo), unlimited) as connection:
        call = connection.unary_unary("/test.Echo/Call")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MAX_MESSAGE_BYTES + 1), timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(b"after", timeout=10) == b"after"


async def test_frequent_pings_during_a_silence_are_welcome(serve):
    """A server with gRPC's own limits ends this call with "Too many pings"."""

    async def respond_late(request, context):
        await asyncio.sleep(5.5)  # the silence itself is what is tested; "Too many pings" comes after 3.6 to 4.6 s
        return request

    def add(grpc_server):
        handlers = {"Call": grpc.unary_unary_rpc_method_handler(respond_late)}
        grpc_server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Late", handlers)])

    options = [
        ("grpc.keepalive_time_ms", 600),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(await serve(add), options) as connection:
        assert await connection.unary_unary("/test.Late/Call")(b"x", timeout=15) == b"x"


async def test_a_server_binds_loopback_unless_told_otherwise():
    listening = server()
    port = bind(listening, 0)
    hosts = {
        c.laddr.ip.removeprefix("::ffff:") for c in psutil.Process().net_connections("tcp") if c.laddr.port == port
    }
    await listening.stop(grace=0)
    assert hosts == {"127.0.0.1"}


async def test_a_taken_port_is_refused_with_the_address():
    first, second = server(), server()
    port = bind(first, 0)
    with pytest.raises(PortUnavailableError, match=f"127.0.0.1:{port}"):
        bind(second, port)
    await asyncio.gather(first.stop(grace=0), second.stop(grace=0))


async def test_a_foreign_host_is_refused():
    listening = server()
    with pytest.raises(PortUnavailableError, match=r"192\.0\.2\.1:0"):
        bind(listening, 0, host="192.0.2.1")
    await listening.stop(grace=0)


async def test_health_tells_alive_at_once_and_ready_when_set():
    listening = server()
    servicer = await add_health_and_reflection(listening, [SERVICE])
    port = bind(listening, 0)
    await listening.start()
    async with channel(f"127.0.0.1:{port}", internal=True) as connection:
        health = health_pb2_grpc.HealthStub(connection)

        async def status(name):
            return (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status

        assert await status("") == health_pb2.HealthCheckResponse.SERVING
        assert await status(SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        await servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        assert await status(SERVICE) == health_pb2.HealthCheckResponse.SERVING
    await listening.stop(grace=0)


async def test_reflection_lists_and_describes_the_services():
    listening = server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference_pb2_grpc.InferenceServiceServicer(), listening)
    await add_health_and_reflection(listening, [SERVICE])
    port = bind(listening, 0)
    await listening.start()
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    async with channel(f"127.0.0.1:{port}") as connection:
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        listed, described = [r async for r in stub.ServerReflectionInfo(iter(requests), timeout=5)]
    await listening.stop(grace=0)
    names = {s.name for s in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto
