"""WorkerService: what this worker is and how loaded it is."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from baton.v1 import worker_pb2, worker_pb2_grpc
from worker.conversion import fingerprint_message
from worker.host import WorkerHost

ROLE_MESSAGES = {
    "prefill": worker_pb2.ROLE_PREFILL,
    "decode": worker_pb2.ROLE_DECODE,
    "mixed": worker_pb2.ROLE_MIXED,
}
MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class LandingCounts:
    """What a worker's landing zones count. Refused writes are since its start.

    Quarantined blocks are kept out of circulation because a write into them has not ended.
    """

    num_open_tickets: int
    stale_writes: int
    num_quarantined_blocks: int


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one host. `landing` tells of its landing zones, `is_ready` whether work may come."""

    def __init__(self, host: WorkerHost, landing: Callable[[], LandingCounts], is_ready: Callable[[], bool]) -> None:
        self._host = host
        self._landing = landing
        self._is_ready = is_ready

    async def GetWorkerInfo(  # noqa: N802 - the proto's name
        self, request: worker_pb2.GetWorkerInfoRequest, context: _Context
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Tells who this is."""
        host, config = self._host, self._host.config
        return worker_pb2.GetWorkerInfoResponse(
            worker=config.name,
            epoch=host.epoch,
            role=ROLE_MESSAGES[config.role],
            fingerprint=fingerprint_message(host.fingerprint),
            block_size_tokens=config.block_size,
            num_blocks=host.num_blocks,
            context_window_tokens=host.context_window_tokens,
            vocab_size=host.vocab_size,
            max_batch_sequences=config.max_batch_sequences,
            max_step_tokens=config.max_step_tokens,
            pid=os.getpid(),
        )

    async def WatchState(  # noqa: N802
        self, request: worker_pb2.WatchStateRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WatchStateResponse]:
        """Streams the load until the subscriber goes."""
        while True:
            changed = self._host.state.next_change()
            yield self._state()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_INTERVAL_S):
                    await changed.wait()
            await asyncio.sleep(MIN_INTERVAL_S)  # joins the changes of one burst of steps

    async def GetLedger(  # noqa: N802
        self, request: worker_pb2.GetLedgerRequest, context: _Context
    ) -> worker_pb2.GetLedgerResponse:
        """Tells who holds the KV blocks."""
        engine = self._host.engine
        if request.drop_prefix_cache:
            engine.drop_prefix_cache()
        load, landing = engine.load(), self._landing()
        return worker_pb2.GetLedgerResponse(
            total_blocks=load.ledger.total,
            free_blocks=load.ledger.free,
            cached_blocks=load.ledger.cached,
            owned_blocks=load.ledger.owned,
            in_flight_blocks=load.ledger.in_flight,
            num_sequences=load.num_sequences,
            num_open_tickets=landing.num_open_tickets,
            stale_writes=landing.stale_writes,
            repaired_blocks=load.num_repaired_blocks,
            num_prefilled_tokens=load.num_prefilled_tokens,
            quarantined_blocks=landing.num_quarantined_blocks,
        )

    def _state(self) -> worker_pb2.WatchStateResponse:
        load = self._host.engine.load()
        return worker_pb2.WatchStateResponse(
            epoch=self._host.epoch,
            num_free_blocks=load.ledger.free + load.ledger.cached,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_reserved=load.num_reserved,
            num_queued_tokens=load.num_queued_tokens,
            is_ready=self._is_ready(),
        )
