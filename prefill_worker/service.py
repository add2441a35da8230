"""PrefillService: runs one prompt, gives out token 0 and pushes the KV."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from baton.errors import BatonError, InvalidRequest
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.sequence import Sequence
from kv_transfer.errors import KvTransferError
from prefill_worker.peers import Peers
from prefill_worker.push import Push, Pushed, open_push
from worker.cleanup import finish
from worker.conversion import REFUSALS, check_token_ids, refusal, sampling_params, transfer_error
from worker.host import WorkerHost
from worker.sequence_feed import SequenceFeed

_Context = grpc.aio.ServicerContext[Any, Any]
_Responses = AsyncGenerator[worker_pb2.PrefillResponse, None]


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """Serves one host's engine. What a call holds is released when the call ends, however it ends."""

    def __init__(self, host: WorkerHost, peers: Peers) -> None:
        self._host = host
        self._peers = peers

    async def Prefill(  # noqa: N802 - the proto's name
        self, request: worker_pb2.PrefillRequest, context: _Context
    ) -> _Responses:
        """See the proto."""
        arrived_at = time.monotonic()
        try:
            self._check(request)
            push = await open_push(self._host, self._peers, request.ticket) if request.HasField("ticket") else None
            try:
                # Closed here and now when the call ends, before the push is.
                async with aclosing(self._prefill(request, push, arrived_at)) as responses:
                    async for response in responses:
                        yield response
            finally:
                if push is not None:
                    await push.abort()
        except BatonError as error:
            raise error.at(stage="prefill", worker=self._host.config.name) from error

    async def _prefill(self, request: worker_pb2.PrefillRequest, push: Push | None, arrived_at: float) -> _Responses:
        engine, sequence = self._host.engine, _sequence(request)
        feed = _feed(sequence, push, self._host.kv_pool.layout.num_layers)
        try:
            engine.add(sequence, feed)
        except REFUSALS as error:
            raise refusal(error) from error
        try:
            first_token_id = await _first_token(feed, push)
            yield worker_pb2.PrefillResponse(first_token=_first_token_message(first_token_id, feed, arrived_at))
            if push is None:
                yield worker_pb2.PrefillResponse(pushed=worker_pb2.PrefillPushed())
                return
            computed_at = asyncio.get_running_loop().time()
            pushed = await push.commit(sequence.token_ids[: sequence.num_prompt_tokens], first_token_id)
            yield worker_pb2.PrefillResponse(pushed=_pushed_message(pushed, computed_at))
        finally:
            await finish(self._release(sequence, push))

    async def _release(self, sequence: Sequence, push: Push | None) -> None:
        # The source blocks are read until the push has stopped.
        if push is not None:
            await push.abort()
        self._host.engine.abort(sequence.sequence_id)

    def _check(self, request: worker_pb2.PrefillRequest) -> None:
        check_token_ids(list(request.token_ids), self._host.vocab_size)
        num_tokens = len(request.token_ids)
        if num_tokens == 0:
            raise InvalidRequest("token_ids must not be empty")
        if request.HasField("ticket") and request.ticket.num_prompt_tokens != num_tokens:
            raise InvalidRequest(f"the ticket is for {request.ticket.num_prompt_tokens} tokens, {num_tokens} were sent")


def _sequence(request: worker_pb2.PrefillRequest) -> Sequence:
    return Sequence(
        sequence_id=uuid.uuid4().hex,
        token_ids=list(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        sampling=sampling_params(request.sampling),
        cache_salt=request.cache_salt,
        hold_after_prefill=True,
    )


def _feed(sequence: Sequence, push: Push | None, num_layers: int) -> SequenceFeed:
    """Reports the sequence's KV to the push as it is computed: the cached tokens at its start, then each layer."""
    if push is None:
        return SequenceFeed()
    sender = push.sender

    def on_started(num_cached_tokens: int) -> None:
        sender.layer_ready(range(num_layers), range(num_cached_tokens), sequence.block_ids)

    def on_layer(layer: int, start: int, end: int) -> None:
        sender.layer_ready(range(layer, layer + 1), range(start, end), sequence.block_ids)

    return SequenceFeed(on_layer, on_started)


async def _first_token(feed: SequenceFeed, push: Push | None) -> int:
    """Waits for token 0; a push that fails meanwhile ends the wait, as its prefill is for nobody."""
    waiting = asyncio.ensure_future(feed.next())
    ends: set[asyncio.Future[Any]] = {waiting} if push is None else {waiting, push.sender.failed}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return (await waiting).token_ids[0]
    finally:
        waiting.cancel()
    assert push is not None
    error = push.sender.failed.result()
    raise transfer_error(error) if isinstance(error, KvTransferError) else error


def _first_token_message(token_id: int, feed: SequenceFeed, arrived_at: float) -> worker_pb2.PrefillFirstToken:
    started_at = feed.started_at or arrived_at
    return worker_pb2.PrefillFirstToken(
        token_id=token_id,
        queue_s=started_at - arrived_at,
        prefill_s=(feed.first_token_at or started_at) - started_at,
        num_cached_tokens=feed.num_cached_tokens,
    )


def _pushed_message(pushed: Pushed, computed_at: float) -> worker_pb2.PrefillPushed:
    return worker_pb2.PrefillPushed(
        kv_bytes=pushed.summary.kv_bytes,
        transfer_s=pushed.committed_at - pushed.summary.first_send_at,
        transfer_tail_s=pushed.committed_at - computed_at,
        transport="grpc",
    )
