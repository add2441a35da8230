"""Reads ledgers and loads of workers, straight over gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import grpc

from baton.channel import channel
from baton.v1 import worker_pb2, worker_pb2_grpc
from bench.drill.roster import Life

Ledgers = Mapping[str, worker_pb2.GetLedgerResponse | None]

_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.01


class WorkerReader:
    """Connections to some lives of workers; a life that does not answer reads as None."""

    def __init__(self, stubs: dict[str, Any]) -> None:
        self._stubs = stubs

    @classmethod
    @asynccontextmanager
    async def connected(cls, workers: Sequence[Life]) -> AsyncIterator[Self]:
        """Connections for the time of the block."""
        async with AsyncExitStack() as stack:
            stubs = {}
            for worker in workers:
                connection = await stack.enter_async_context(channel(worker.address))
                stubs[worker.name] = worker_pb2_grpc.WorkerServiceStub(connection)  # type: ignore[no-untyped-call]
            yield cls(stubs)

    async def ledgers(self) -> Ledgers:
        """Each worker's ledger now, by name."""
        found = await asyncio.gather(*(_ledger(stub) for stub in self._stubs.values()))
        return dict(zip(self._stubs, found, strict=True))

    async def ledgers_when(self, condition: Callable[[Ledgers], bool], timeout_s: float) -> Ledgers:
        """The first ledgers of which the condition holds, or those at the end of this time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ledgers = await self.ledgers()
            if condition(ledgers) or time.monotonic() >= deadline_s:
                return ledgers
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def max_step_tokens(self) -> int:
        """Most tokens that any of them computes in one step. Raises grpc.RpcError."""
        request = worker_pb2.GetWorkerInfoRequest()
        infos = [await stub.GetWorkerInfo(request, timeout=_TIMEOUT_S) for stub in self._stubs.values()]
        return max(int(info.max_step_tokens) for info in infos)


def num_prefilled_tokens(ledgers: Ledgers) -> int:
    """Prompt tokens computed by all these workers since their start; one that does not answer counts as 0."""
    return sum(ledger.num_prefilled_tokens for ledger in ledgers.values() if ledger is not None)


async def _ledger(stub: Any) -> worker_pb2.GetLedgerResponse | None:
    try:
        ledger: worker_pb2.GetLedgerResponse = await stub.GetLedger(worker_pb2.GetLedgerRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError:
        return None
    return ledger
