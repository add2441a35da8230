"""FaultService: breaks things on purpose for as long as a call is open. Never served unless faults are allowed."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from baton.errors import InvalidRequest
from baton.v1 import fault_pb2, fault_pb2_grpc
from engine.block_pool import OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kv_transfer.faulty_link import MessageFaults
from worker.fault_injection import FaultHit, HoldSpec, InjectedFaults, OnHit
from worker.fault_points import FaultPoint
from worker.host import WorkerHost
from worker.sequence_feed import SequenceFeed

_logger = logging.getLogger(__name__)

MAX_HOLD_S = 600.0
_POINT_PREFIX = "FAULT_POINT_"

_Context = grpc.aio.ServicerContext[Any, Any]


class FaultServicer(fault_pb2_grpc.FaultServiceServicer):
    """Puts faults in place in one worker. The open call is the fault: its end, however it comes, lifts it."""

    def __init__(self, host: WorkerHost, faults: InjectedFaults) -> None:
        """`faults` are those that the worker's other services pass by."""
        self._host = host
        self._faults = faults

    async def Inject(  # noqa: N802 - the proto's name
        self, request: fault_pb2.InjectRequest, context: _Context
    ) -> AsyncIterator[fault_pb2.InjectResponse]:
        """See the proto. INVALID_ARGUMENT for a fault that cannot be."""
        hits: asyncio.Queue[FaultHit] = asyncio.Queue()
        with self._place(request, hits.put_nowait) as in_place:
            yield fault_pb2.InjectResponse(in_place=in_place)
            while True:
                yield fault_pb2.InjectResponse(hit=_hit_message(await hits.get()))

    @contextmanager
    def _place(self, request: fault_pb2.InjectRequest, on_hit: OnHit) -> Iterator[fault_pb2.InPlace]:
        kind = request.WhichOneof("fault")
        if kind is None:
            raise InvalidRequest("fault is missing: set one of hold, kv_messages, memory")
        worker, what = self._host.config.name, " ".join(str(getattr(request, kind)).split())
        with self._fault(request, on_hit) as num_blocks:
            _logger.warning("%s: fault in place: %s %s", worker, kind, what)
            try:
                yield fault_pb2.InPlace(num_blocks=num_blocks)
            finally:
                _logger.warning("%s: fault lifted: %s %s", worker, kind, what)

    @contextmanager
    def _fault(self, request: fault_pb2.InjectRequest, on_hit: OnHit) -> Iterator[int]:
        """The fault for the time of the block; yields the KV blocks it has taken."""
        if request.HasField("memory"):
            with taken_blocks(self._host, request.memory.num_blocks) as num_blocks:
                yield num_blocks
        elif request.HasField("hold"):
            with self._faults.hold(_hold_spec(request.hold), on_hit):
                yield 0
        else:
            with self._faults.spoil_messages(_message_faults(request.kv_messages), on_hit):
                yield 0


@contextmanager
def taken_blocks(host: WorkerHost, num_blocks: int) -> Iterator[int]:
    """Takes KV blocks from a worker and gives them back in the end; yields how many: fewer if fewer are free.

    They are those of reserved sequences that never run, so the ledger counts them as in flight.
    """
    size = host.config.block_size
    most_blocks = min((host.context_window_tokens - 1) // size, host.num_blocks)
    sequence_ids: list[str] = []
    num_missing, num_next = num_blocks, most_blocks
    try:
        while (num_next := min(num_next, num_missing)) > 0:
            sequence = _placeholder(num_next * size)
            try:
                host.engine.reserve(sequence, SequenceFeed())
            except OutOfBlocks:
                num_next //= 2
                continue
            sequence_ids.append(sequence.sequence_id)
            num_missing -= num_next
        yield num_blocks - num_missing
    finally:
        for sequence_id in sequence_ids:
            host.engine.abort(sequence_id)


def _placeholder(num_tokens: int) -> Sequence:
    """A sequence that needs exactly the blocks of so many tokens, and has a prompt like no other."""
    sequence_id = uuid.uuid4().hex
    return Sequence(
        sequence_id=sequence_id,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),  # whose KV is never held
        cache_salt=sequence_id,
    )


def _hold_spec(hold: fault_pb2.HoldFault) -> HoldSpec:
    name = fault_pb2.FaultPoint.Name(hold.point) if hold.point in fault_pb2.FaultPoint.values() else str(hold.point)
    try:
        point = FaultPoint(name.removeprefix(_POINT_PREFIX).lower())
    except ValueError:
        raise InvalidRequest(f"hold.point is {name}: name a point of a request's life") from None
    if not 0 <= hold.max_hold_s <= MAX_HOLD_S:
        raise InvalidRequest(f"hold.max_hold_s is {hold.max_hold_s}; it must be from 0 to {MAX_HOLD_S} s")
    if point is FaultPoint.PREFILLING and hold.max_hold_s > 0:
        raise InvalidRequest("hold.max_hold_s must be 0 at PREFILLING: a step cannot be held, only noticed")
    return HoldSpec(point, hold.num_skipped, hold.max_hits, hold.max_hold_s)


def _message_faults(faults: fault_pb2.KvMessageFault) -> MessageFaults:
    try:
        return MessageFaults(
            seed=faults.seed,
            drop=faults.drop,
            corrupt=faults.corrupt,
            duplicate=faults.duplicate,
            delay=faults.delay,
            delay_s=faults.delay_s,
            bytes_per_s=faults.bytes_per_s,
        )
    except ValueError as error:
        raise InvalidRequest(f"kv_messages.{error}") from error


def _hit_message(hit: FaultHit) -> fault_pb2.Hit:
    name = "UNSPECIFIED" if hit.point is None else hit.point.name
    return fault_pb2.Hit(point=_POINT_PREFIX + name, request_id=hit.request_id, peer=hit.peer, what=hit.what)
