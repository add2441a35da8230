import asyncio

import pytest

from baton import channel as channel_module
from baton.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.peers import MAX_PEERS, Peers


@pytest.fixture
async def peers():
    opened = Peers()
    yield opened
    await opened.close()


def is_shut(channel):
    return channel.get_state().name == "SHUTDOWN"


async def test_a_channel_is_kept_for_its_address(peers):
    assert peers.channel("127.0.0.1:1") is peers.channel("127.0.0.1:1")
    assert peers.channel("127.0.0.1:1") is not peers.channel("127.0.0.1:2")


async def test_the_longest_unused_is_closed_when_there_are_too_many(peers, eventually):
    opened = {i: peers.channel(f"127.0.0.1:{i}") for i in range(1, MAX_PEERS + 1)}
    peers.channel("127.0.0.1:1")  # used again: now 2 is the oldest
    peers.channel("127.0.0.1:1000")
    await eventually(lambda: is_shut(opened[2]))
    assert not any(is_shut(channel) for i, channel in opened.items() if i != 2)
    assert peers.channel("127.0.0.1:2") is not opened[2]


class Slow(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self):
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def GetLedger(self, request, context):  # noqa: N802 - the proto's name
        self.asked.set()
        await self.may_answer.wait()
        return worker_pb2.GetLedgerResponse(total_blocks=7)


async def test_what_goes_on_over_a_channel_ends_before_it_is_closed(peers, eventually):
    servicer, server = Slow(), channel_module.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{channel_module.bind(server, 0)}"
    await server.start()
    channel = peers.channel(address)
    call = worker_pb2_grpc.WorkerServiceStub(channel).GetLedger(worker_pb2.GetLedgerRequest(), timeout=10)
    async with asyncio.timeout(5):
        await servicer.asked.wait()
    for i in range(1, MAX_PEERS + 1):
        peers.channel(f"127.0.0.1:{i}")
    assert peers.channel(address) is not channel
    servicer.may_answer.set()
    assert (await call).total_blocks == 7
    await eventually(lambda: is_shut(channel))
    await server.stop(grace=0)


async def test_closing_closes_all():
    peers = Peers()
    opened = [peers.channel(f"127.0.0.1:{i}") for i in range(1, MAX_PEERS + 3)]
    await peers.close()
    assert all(is_shut(channel) for channel in opened[2:])
    assert not peers._closing
