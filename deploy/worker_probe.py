"""Asks running workers for their KV blocks and queues, straight over gRPC."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.channel import channel
from baton.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's load now. `free_blocks` are all that a new request can have, cached ones included."""

    free_blocks: int
    total_blocks: int
    num_running: int
    num_waiting: int
    num_reserved: int


async def probe_workers(addresses: Sequence[str]) -> list[WorkerLoad | None]:
    """The load of each worker, None for one that does not answer within 2 s."""
    return list(await asyncio.gather(*map(_probe, addresses)))


async def _probe(address: str) -> WorkerLoad | None:
    async with channel(address) as connection:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(connection)  # type: ignore[no-untyped-call]
        try:
            ledger = await stub.GetLedger(worker_pb2.GetLedgerRequest(), timeout=_TIMEOUT_S)
            states = stub.WatchState(worker_pb2.WatchStateRequest(), timeout=_TIMEOUT_S)
            state = await states.read()
        except grpc.RpcError:
            return None
        if not isinstance(state, worker_pb2.WatchStateResponse):  # the stream ended without a message
            return None
        states.cancel()
    return WorkerLoad(
        free_blocks=ledger.free_blocks + ledger.cached_blocks,
        total_blocks=ledger.total_blocks,
        num_running=state.num_running,
        num_waiting=state.num_waiting,
        num_reserved=state.num_reserved,
    )
