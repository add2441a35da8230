import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

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
from kv_transfer.grpc_transport import REASON_KEY, GrpcLink, write_handler


class ScriptedSink:
    """Raises what it is told to, or waits for ever."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.entered = asyncio.Event()
        self.received: list[Buffer] = []

    async def write(self, frame: Buffer) -> None:
        self.entered.set()
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        self.received.append(frame)


@pytest.fixture
def sink() -> ScriptedSink:
    return ScriptedSink()


@pytest.fixture
async def server(sink: ScriptedSink) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((write_handler(sink),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield server, f"127.0.0.1:{port}"
    await server.stop(grace=None)


@pytest.fixture
async def channel(server: tuple[grpc.aio.Server, str]) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server[1]) as channel:
        yield channel


async def test_a_frame_arrives_as_one_message(sink: ScriptedSink, channel: grpc.aio.Channel) -> None:
    payload = bytearray(b"x" * (1 << 20))
    await GrpcLink(channel).send(b"h" * 64, memoryview(payload), 10)
    assert sink.received == [b"h" * 64 + payload]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TicketUnknown, "NOT_FOUND"),
        (TicketClosed, "NOT_FOUND"),
        (EpochMismatch, "FAILED_PRECONDITION"),
        (FingerprintMismatch, "FAILED_PRECONDITION"),
        (PromptMismatch, "FAILED_PRECONDITION"),
        (ChecksumMismatch, "DATA_LOSS"),
        (MalformedFrame, "INVALID_ARGUMENT"),
        (OutOfRange, "OUT_OF_RANGE"),
        (DuplicateFrame, "ALREADY_EXISTS"),
        (Incomplete, "ABORTED"),
    ],
)
async def test_a_refusal_crosses_as_status_reason_and_text(
    sink: ScriptedSink, channel: grpc.aio.Channel, error: type[KvTransferError], status: str
) -> None:
    sink.error = error("what and why")
    call = channel.unary_unary("/baton.v1.KvDataService/Write")
    with pytest.raises(grpc.aio.AioRpcError) as raw:
        await call(b"frame", timeout=10)
    assert raw.value.code().name == status
    assert dict(raw.value.trailing_metadata())[REASON_KEY] == error.reason
    with pytest.raises(error, match=r"^what and why$"):
        await GrpcLink(channel).send(b"h", b"p", 10)


def test_reasons_are_distinct_and_cover_every_error() -> None:
    assert set(ERRORS_BY_REASON.values()) == set(KvTransferError.__subclasses__())


async def test_a_receiver_that_takes_nothing_times_out(sink: ScriptedSink, channel: grpc.aio.Channel) -> None:
    sink.hangs = True
    with pytest.raises(TransferTimeout):
        await GrpcLink(channel).send(b"h", b"p", 0.2)


async def test_a_frozen_peer_times_out() -> None:
    """The kernel accepts the connection, but nobody ever answers, as with a stopped process."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frozen.getsockname()[1]}") as channel:
            began = loop.time()
            with pytest.raises(TransferTimeout):
                await GrpcLink(channel).send(b"h", b"p", 0.2)
            assert loop.time() - began < 1.5


async def test_a_peer_that_is_not_there_is_a_lost_link(server: tuple[grpc.aio.Server, str]) -> None:
    await server[0].stop(grace=None)
    async with grpc.aio.insecure_channel(server[1]) as channel:
        with pytest.raises(LinkLost, match="UNAVAILABLE"):
            await GrpcLink(channel).send(b"h", b"p", 10)


async def test_a_peer_that_goes_away_during_a_send_is_a_lost_link(
    sink: ScriptedSink, server: tuple[grpc.aio.Server, str], channel: grpc.aio.Channel
) -> None:
    sink.hangs = True
    sending = asyncio.create_task(GrpcLink(channel).send(b"h", b"p", 10))
    await asyncio.wait_for(sink.entered.wait(), 10)
    await server[0].stop(grace=None)
    with pytest.raises(LinkLost):
        await sending


async def test_a_channel_closed_during_a_send_is_a_lost_link_not_a_cancellation(
    sink: ScriptedSink, channel: grpc.aio.Channel
) -> None:
    sink.hangs = True
    link = GrpcLink(channel)
    sending = asyncio.create_task(link.send(b"h", b"p", 10))
    await asyncio.wait_for(sink.entered.wait(), 10)
    await channel.close()
    with pytest.raises(LinkLost):
        await sending
    with pytest.raises(LinkLost):
        await link.send(b"h", b"p", 10)


async def test_a_cancelled_send_is_a_cancellation(sink: ScriptedSink, channel: grpc.aio.Channel) -> None:
    sink.hangs = True
    sending = asyncio.create_task(GrpcLink(channel).send(b"h", b"p", 10))
    await asyncio.wait_for(sink.entered.wait(), 10)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_a_closed_link_sends_nothing(sink: ScriptedSink, channel: grpc.aio.Channel) -> None:
    link = GrpcLink(channel)
    await link.close()
    with pytest.raises(LinkLost, match="closed on this side"):
        await link.send(b"h", b"p", 10)
    assert sink.received == []


TAKER = """
import asyncio, grpc.aio
from kv_transfer.grpc_transport import write_handler

class Taker:
    async def write(self, frame):
        pass

async def serve():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((write_handler(Taker()),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(serve())
"""


async def test_a_stopped_then_killed_process_costs_no_more_than_the_deadline() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", TAKER, stdout=asyncio.subprocess.PIPE)
    loop = asyncio.get_running_loop()
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            link = GrpcLink(channel)
            await link.send(b"h", b"p", 10)
            process.send_signal(signal.SIGSTOP)
            began = loop.time()
            sends = (link.send(b"h" * 64, bytes(1 << 20), 0.3) for _ in range(4))
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(result) for result in results] == [TransferTimeout] * 4
            assert loop.time() - began < 1.5
            process.kill()
            with pytest.raises(LinkLost):
                await link.send(b"h", b"p", 10)
            assert loop.time() - began < 3
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), 10)
