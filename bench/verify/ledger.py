"""Whether a worker accounts for all of its KV blocks, and holds none once nothing runs."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.channel import channel
from baton.errors import from_rpc_error
from baton.v1 import worker_pb2, worker_pb2_grpc

QUIET_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker to ask. `address` is host:port; empty if it is not there, `detail` then says why."""

    name: str
    address: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """A worker's last ledger, None if it gave none; `problem` is why it is not clean, or empty."""

    worker: str
    ledger: worker_pb2.GetLedgerResponse | None
    problem: str = ""


def ledger_problem(ledger: worker_pb2.GetLedgerResponse) -> str:
    """Why the ledger of a worker with nothing to do is not clean, or nothing. Refused writes are no fault of its."""
    parts = (ledger.free_blocks, ledger.cached_blocks, ledger.owned_blocks, ledger.in_flight_blocks)
    if sum(parts) != ledger.total_blocks:
        free, cached, owned, in_flight = parts
        return (
            f"{free} free + {cached} cached + {owned} owned + {in_flight} in flight are {sum(parts)} blocks, "
            f"it has {ledger.total_blocks}"
        )
    if ledger.repaired_blocks:
        return f"{ledger.repaired_blocks} blocks without an owner had to be put right since its start"
    held = {
        "blocks in quarantine": ledger.quarantined_blocks,
        "blocks owned": ledger.owned_blocks,
        "blocks in flight": ledger.in_flight_blocks,
        "open tickets": ledger.num_open_tickets,
        "sequences": ledger.num_sequences,
    }
    return ", ".join(f"{count} {what}" for what, count in held.items() if count)


async def check_ledgers(places: Sequence[WorkerPlace], timeout_s: float = QUIET_TIMEOUT_S) -> list[LedgerCheck]:
    """Each worker's ledger as soon as it is clean, or as it is after `timeout_s`."""
    return list(await asyncio.gather(*(_check(place, timeout_s) for place in places)))


async def _check(place: WorkerPlace, timeout_s: float) -> LedgerCheck:
    if not place.address:
        return LedgerCheck(place.name, None, f"is not there: {place.detail}")
    deadline_s = time.monotonic() + timeout_s
    async with channel(place.address) as connection:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(connection)  # type: ignore[no-untyped-call]
        while True:
            try:
                ledger = await stub.GetLedger(worker_pb2.GetLedgerRequest(), timeout=_CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                return LedgerCheck(place.name, None, f"does not answer: {from_rpc_error(error)}")
            problem = ledger_problem(ledger)
            if not problem or time.monotonic() >= deadline_s:
                return LedgerCheck(place.name, ledger, problem)
            await asyncio.sleep(_POLL_INTERVAL_S)
