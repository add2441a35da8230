"""DecodeService: reserves blocks, waits for the KV or computes it, generates."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from baton.errors import BatonError, InvalidRequest
from baton.v1 import worker_pb2, worker_pb2_grpc
from decode_worker.handoffs import Handoff, Handoffs
from engine.sequence import FinishReason, Sequence
from worker.cleanup import finish
from worker.conversion import FINISH_REASONS, REFUSALS, check_token_ids, refusal, sampling_params
from worker.host import WorkerHost
from worker.sequence_feed import SequenceFeed

_Context = grpc.aio.ServicerContext[Any, Any]
_Responses = AsyncGenerator[worker_pb2.DecodeResponse, None]


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """Serves one host's engine. What a call holds is released when the call ends, however it ends."""

    def __init__(self, host: WorkerHost, handoffs: Handoffs) -> None:
        self._host = host
        self._handoffs = handoffs

    async def Decode(  # noqa: N802 - the proto's name
        self, request: worker_pb2.DecodeRequest, context: _Context
    ) -> _Responses:
        """See the proto."""
        try:
            self._check(request)
            sequence, feed = self._sequence(request), SequenceFeed()
            if self._reserve(sequence, feed, request):
                responses = self._decode_delivered(sequence, feed)
            else:
                responses = self._decode_alone(self._sequence(request))
            # Closed here and now when the call ends: what they hold is released before anything else happens.
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except BatonError as error:
            raise error.at(stage="decode", worker=self._host.config.name) from error

    def _reserve(self, sequence: Sequence, feed: SequenceFeed, request: worker_pb2.DecodeRequest) -> bool:
        """True: blocks are reserved for KV to come. False: the prompt, or what the cache lacks of it, is run here."""
        engine, num_tokens = self._host.engine, len(sequence.token_ids)
        if request.prefill_locally:
            return False
        try:
            num_cached_tokens = engine.reserve(sequence, feed)
        except REFUSALS as error:
            raise refusal(error) from error
        if num_cached_tokens == 0 or num_tokens - num_cached_tokens > request.local_prefill_max_tokens:
            return True
        engine.abort(sequence.sequence_id)
        return False

    async def _decode_delivered(self, sequence: Sequence, feed: SequenceFeed) -> _Responses:
        """The reserved sequence's KV comes from a prefill worker, with token 0."""
        engine, num_tokens = self._host.engine, len(sequence.token_ids)
        num_cached = sequence.num_cached_tokens
        handoff: Handoff | None = None
        try:
            handoff = self._handoffs.open(sequence.sequence_id, sequence.token_ids, num_cached, sequence.block_ids)
            ticket = self._handoffs.ticket(handoff, num_cached, num_tokens)
            yield worker_pb2.DecodeResponse(
                reserved=worker_pb2.DecodeReserved(ticket=ticket, num_cached_tokens=num_cached)
            )
            delivery = await handoff.delivery
            # Closed before the sequence runs: from here on only its own steps write to its blocks.
            await self._handoffs.close(handoff)
            first = engine.activate(sequence.sequence_id, delivery.first_token_id)
            yield worker_pb2.DecodeResponse(committed=worker_pb2.DecodeCommitted(kv_bytes=delivery.kv_bytes))
            if first.finish_reason is not None:
                yield _finished(first.finish_reason, first.stop_token_id)
                return
            async for response in _generated(feed):
                yield response
        finally:
            await finish(self._release(sequence, handoff))

    async def _release(self, sequence: Sequence, handoff: Handoff | None) -> None:
        if handoff is None or await self._handoffs.close(handoff):
            self._host.engine.abort(sequence.sequence_id)

    async def _decode_alone(self, sequence: Sequence) -> _Responses:
        """Prefills and decodes here."""
        engine, arrived_at, feed = self._host.engine, time.monotonic(), SequenceFeed()
        try:
            engine.add(sequence, feed)
        except REFUSALS as error:
            raise refusal(error) from error
        try:
            yield worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved())
            is_first = True
            async for response in _generated(feed):
                if is_first and response.HasField("tokens"):
                    _add_timing(response.tokens, feed, arrived_at)
                    is_first = False
                yield response
        finally:
            engine.abort(sequence.sequence_id)

    def _check(self, request: worker_pb2.DecodeRequest) -> None:
        check_token_ids(list(request.token_ids), self._host.vocab_size)
        if not request.token_ids or request.stopping.max_tokens < 1:
            raise InvalidRequest("token_ids must not be empty and stopping.max_tokens must be at least 1")

    def _sequence(self, request: worker_pb2.DecodeRequest) -> Sequence:
        # An id of our own: clients may use theirs twice at once.
        return Sequence(
            sequence_id=uuid.uuid4().hex,
            token_ids=list(request.token_ids),
            num_prompt_tokens=len(request.token_ids),
            sampling=sampling_params(request.sampling, request.stopping),
            cache_salt=request.cache_salt,
        )


async def _generated(feed: SequenceFeed) -> _Responses:
    """Tokens as they come, then the end."""
    while True:
        item = await feed.next()
        if item.token_ids:
            yield worker_pb2.DecodeResponse(tokens=worker_pb2.DecodeTokens(token_ids=item.token_ids))
        if item.finish_reason is not None:
            yield _finished(item.finish_reason, item.stop_token_id)
            return


def _finished(reason: FinishReason, stop_token_id: int | None) -> worker_pb2.DecodeResponse:
    finished = worker_pb2.DecodeFinished(reason=FINISH_REASONS[reason])
    if stop_token_id is not None:
        finished.stop_token_id = stop_token_id
    return worker_pb2.DecodeResponse(finished=finished)


def _add_timing(tokens: worker_pb2.DecodeTokens, feed: SequenceFeed, arrived_at: float) -> None:
    started_at = feed.started_at or arrived_at
    tokens.local_prefill.num_cached_tokens = feed.num_cached_tokens
    tokens.local_prefill.queue_s = started_at - arrived_at
    tokens.local_prefill.prefill_s = (feed.first_token_at or started_at) - started_at
