"""DecodeService: reserves blocks, waits for the KV or computes it, generates."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.errors import BatonError, InvalidRequest
from baton.v1 import worker_pb2, worker_pb2_grpc
from decode_worker.handoff import Handoff
from decode_worker.handoff_machine import Event
from decode_worker.handoffs import Handoffs
from engine.sequence import Sequence
from worker.cleanup import finish
from worker.conversion import REFUSALS, check_token_ids, refusal, sampling_params
from worker.draining import Draining
from worker.fault_points import NO_FAULTS, FaultPoint, FaultPoints
from worker.host import WorkerHost
from worker.sequence_feed import SequenceFeed

_Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """Serves one host's engine. What a call holds is released when the call ends, however it ends."""

    def __init__(
        self, host: WorkerHost, handoffs: Handoffs, draining: Draining, faults: FaultPoints = NO_FAULTS
    ) -> None:
        self._host = host
        self._handoffs = handoffs
        self._draining = draining
        self._faults = faults

    async def Decode(  # noqa: N802 - the proto's name
        self, request: worker_pb2.DecodeRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        """See the proto."""
        try:
            with self._handoffs.call() as handoff, self._draining.call(handoff.hand_back):
                self._check(request)
                work = asyncio.create_task(self._work(request, handoff), name=f"decode {request.request_id}")
                try:
                    async for response in handoff.outbox:
                        yield response
                finally:
                    # Releases everything before anything else happens; the rest is housekeeping.
                    handoff.handle(Event.CALL_ENDED)
                    work.cancel()
                    await finish(asyncio.wait({work}))
        except BatonError as error:
            raise error.at(stage="decode", worker=self._host.config.name) from error

    async def _work(self, request: worker_pb2.DecodeRequest, handoff: Handoff) -> None:
        """Brings the request to the engine, and what the engine makes of it to the call."""
        arrived_at = time.monotonic()
        try:
            await self._faults.reach(FaultPoint.RESERVING, request.request_id)
            feed = SequenceFeed()
            if request.prefill_locally or not self._reserve(request, handoff, feed):
                feed = SequenceFeed()
                self._add(request, handoff, feed)
                await self._pass_on(request, handoff, feed, arrived_at)
            else:
                await self._pass_on(request, handoff, feed)
        except Exception as error:  # noqa: BLE001 - the root of the task; the call raises it
            handoff.handle(Event.SEQUENCE_LOST, error)

    def _reserve(self, request: worker_pb2.DecodeRequest, handoff: Handoff, feed: SequenceFeed) -> bool:
        """True: blocks are reserved for KV to come. False: the cache lacks so little that it is better run here."""
        engine, sequence = self._host.engine, _sequence(request)
        try:
            num_cached_tokens = engine.reserve(sequence, feed)
        except REFUSALS as error:
            raise refusal(error) from error
        num_lacking_tokens = sequence.num_prompt_tokens - num_cached_tokens
        if num_cached_tokens > 0 and num_lacking_tokens <= request.local_prefill_max_tokens:
            engine.abort(sequence.sequence_id)
            return False
        handoff.reserve(sequence)
        return True

    def _add(self, request: worker_pb2.DecodeRequest, handoff: Handoff, feed: SequenceFeed) -> None:
        sequence = _sequence(request)
        try:
            self._host.engine.add(sequence, feed)
        except REFUSALS as error:
            raise refusal(error) from error
        handoff.queue(sequence)

    async def _pass_on(
        self, request: worker_pb2.DecodeRequest, handoff: Handoff, feed: SequenceFeed, arrived_at: float | None = None
    ) -> None:
        """Tokens as they come, then the end. With `arrived_at`, the first ones tell of their prefill here."""
        point = FaultPoint.FIRST_STEP
        while True:
            item = await feed.next()
            if item.token_ids:
                await self._faults.reach(point, request.request_id, handoff.sender)
                point = FaultPoint.DECODING
                tokens = worker_pb2.DecodeTokens(token_ids=item.token_ids)
                if arrived_at is not None:
                    _add_timing(tokens, feed, arrived_at)
                    arrived_at = None
                handoff.outbox.put(worker_pb2.DecodeResponse(tokens=tokens))
            if item.finish_reason is not None:
                handoff.finish(item.finish_reason, item.stop_token_id)
                return
            # Tokens that come while these are on their way are joined.
            await handoff.outbox.sent()

    def _check(self, request: worker_pb2.DecodeRequest) -> None:
        check_token_ids(list(request.token_ids), self._host.vocab_size)
        if not request.token_ids or request.stopping.max_tokens < 1:
            raise InvalidRequest("token_ids must not be empty and stopping.max_tokens must be at least 1")


def _sequence(request: worker_pb2.DecodeRequest) -> Sequence:
    # An id of our own: clients may use theirs twice at once.
    return Sequence(
        sequence_id=uuid.uuid4().hex,
        token_ids=list(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        sampling=sampling_params(request.sampling, request.stopping),
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _add_timing(tokens: worker_pb2.DecodeTokens, feed: SequenceFeed, arrived_at: float) -> None:
    started_at = feed.started_at or arrived_at
    tokens.local_prefill.num_cached_tokens = feed.num_cached_tokens
    tokens.local_prefill.queue_s = started_at - arrived_at
    tokens.local_prefill.prefill_s = (feed.first_token_at or started_at) - started_at
