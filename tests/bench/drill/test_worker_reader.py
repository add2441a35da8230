import asyncio

import pytest

from baton.channel import bind, server
from baton.v1 import worker_pb2, worker_pb2_grpc
from bench.drill.drill import check_quiet
from bench.drill.roster import Life
from bench.drill.worker_reader import WorkerReader, num_prefilled_tokens


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Shows one ledger after the other, the last one for ever."""

    def __init__(self, *ledgers, max_step_tokens=512):
        self.ledgers = list(ledgers)
        self.max_step_tokens = max_step_tokens

    async def GetLedger(self, request, context):  # noqa: N802 - the name in the .proto
        return self.ledgers.pop(0) if len(self.ledgers) > 1 else self.ledgers[0]

    async def GetWorkerInfo(self, request, context):  # noqa: N802 - the name in the .proto
        return worker_pb2.GetWorkerInfoResponse(max_step_tokens=self.max_step_tokens)


def ledger(**fields):
    return worker_pb2.GetLedgerResponse(total_blocks=8, free_blocks=8, **fields)


@pytest.fixture
async def start():
    running = []

    async def start(name, worker):
        started = server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, started)
        life = Life(name, name.split("-")[0], len(running), f"127.0.0.1:{bind(started, 0)}")
        await started.start()
        running.append(started)
        return life

    yield start
    await asyncio.gather(*(started.stop(grace=0) for started in running))


async def test_ledgers_come_by_name_and_none_of_who_is_gone(start):
    lives = [
        await start("prefill-0", Worker(ledger(num_prefilled_tokens=5))),
        Life("decode-0", "decode", 9, "127.0.0.1:1"),
    ]
    async with WorkerReader.connected(lives) as reader:
        ledgers = await reader.ledgers()
    assert ledgers["prefill-0"].num_prefilled_tokens == 5
    assert ledgers["decode-0"] is None
    assert num_prefilled_tokens(ledgers) == 5


async def test_it_waits_for_a_condition_but_not_for_ever(start):
    worker = Worker(*(ledger(num_prefilled_tokens=n) for n in range(4)))
    async with WorkerReader.connected([await start("prefill-0", worker)]) as reader:
        found = await reader.ledgers_when(lambda ledgers: num_prefilled_tokens(ledgers) >= 2, 20.0)
        assert num_prefilled_tokens(found) == 2
        found = await reader.ledgers_when(lambda ledgers: num_prefilled_tokens(ledgers) >= 9, 0.05)
        assert num_prefilled_tokens(found) == 3


async def test_the_longest_step_of_all(start):
    lives = [await start(f"prefill-{i}", Worker(ledger(), max_step_tokens=n)) for i, n in enumerate((64, 512))]
    async with WorkerReader.connected(lives) as reader:
        assert await reader.max_step_tokens() == 512


async def test_quiet_comes_when_all_ledgers_are_clean(start):
    lives = [
        await start("prefill-0", Worker(ledger())),
        await start("decode-0", Worker(ledger(num_sequences=1), ledger(num_open_tickets=1), ledger())),
    ]
    check = await check_quiet(lives)
    assert check.problems == ()
    assert 0 < check.seconds < 10
