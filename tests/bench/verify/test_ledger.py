"""Ledgers that are clean and those that are not, read from real servers."""

from collections.abc import AsyncIterator

import pytest

from baton.channel import bind, server
from baton.v1 import worker_pb2, worker_pb2_grpc
from bench.verify.ledger import WorkerPlace, check_ledgers, ledger_problem

CLEAN = {"total_blocks": 16, "free_blocks": 10, "cached_blocks": 6}


def _ledger(**counts: int) -> worker_pb2.GetLedgerResponse:
    return worker_pb2.GetLedgerResponse(**{**CLEAN, **counts})


@pytest.mark.parametrize("counts", [{}, {"stale_writes": 3}, {"free_blocks": 16, "cached_blocks": 0}])
def test_clean(counts: dict[str, int]) -> None:
    assert ledger_problem(_ledger(**counts)) == ""


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"free_blocks": 9}, "9 free + 6 cached + 0 owned + 0 in flight are 15 blocks, it has 16"),
        ({"cached_blocks": 7}, "are 17 blocks, it has 16"),
        ({"free_blocks": 8, "owned_blocks": 2}, "2 blocks owned"),
        ({"free_blocks": 8, "in_flight_blocks": 2}, "2 blocks in flight"),
        ({"free_blocks": 8, "in_flight_blocks": 2, "quarantined_blocks": 2}, "2 blocks in quarantine"),
        ({"repaired_blocks": 1}, "1 blocks without an owner"),
        ({"num_open_tickets": 1}, "1 open tickets"),
        ({"num_sequences": 4}, "4 sequences"),
    ],
)
def test_not_clean(counts: dict[str, int], told: str) -> None:
    assert told in ledger_problem(_ledger(**counts))


class LedgerServer(worker_pb2_grpc.WorkerServiceServicer):
    """Tells these ledgers one after the other, the last for ever."""

    def __init__(self) -> None:
        self.ledgers: list[worker_pb2.GetLedgerResponse] = [_ledger()]
        self.num_asked = 0
        self.address = ""

    async def GetLedger(self, request, context):  # noqa: N802 - the name in the .proto
        assert not request.drop_prefix_cache
        self.num_asked += 1
        return self.ledgers[min(self.num_asked, len(self.ledgers)) - 1]


@pytest.fixture
async def worker() -> AsyncIterator[LedgerServer]:
    servicer, running = LedgerServer(), server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, running)
    servicer.address = f"127.0.0.1:{bind(running, 0)}"
    await running.start()
    yield servicer
    await running.stop(grace=0)


async def test_waits_until_it_is_quiet(worker: LedgerServer) -> None:
    worker.ledgers = [_ledger(free_blocks=8, owned_blocks=2)] * 3 + [_ledger()]
    [check] = await check_ledgers([WorkerPlace("decode-0", worker.address)], timeout_s=30.0)
    assert (check.worker, check.problem, worker.num_asked) == ("decode-0", "", 4)


async def test_tells_what_is_held_when_the_time_is_over(worker: LedgerServer) -> None:
    worker.ledgers = [_ledger(free_blocks=8, owned_blocks=2)]
    [check] = await check_ledgers([WorkerPlace("decode-0", worker.address)], timeout_s=0.2)
    assert check.problem == "2 blocks owned"
    assert check.ledger == worker.ledgers[0]


async def test_a_worker_that_is_not_there_is_not_clean(worker: LedgerServer) -> None:
    places = [
        WorkerPlace("decode-0", "127.0.0.1:1"),
        WorkerPlace("decode-1", "", "restarting"),
        WorkerPlace("decode-2", worker.address),
    ]
    dead, lost, clean = await check_ledgers(places)
    assert "does not answer" in dead.problem
    assert "restarting" in lost.problem
    assert (dead.ledger, lost.ledger) == (None, None)
    assert clean.problem == ""
