"""One request on its way through the cluster: a place, a try, and others if it fails, until the answer is whole."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.errors import BatonError, Unavailable
from baton.v1 import request_pb2
from router.admission import AdmissionQueue, Placement
from router.attempt import Attempt, Tokens
from router.forecast import Forecast
from router.membership import Membership
from router.outcome import Outcome
from router.policy import Claim
from router.recovery import Recovery, Retry, note_failure
from router.retry_budget import RetryBudget
from router.validation import PromptRequest
from router.worker_calls import WorkerCalls

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """A decode worker prefills by itself what it lacks of a prompt, if that is not longer than
    `local_prefill_max_tokens`. A request that has lost its place waits `recovery_patience_s` for workers.
    """

    local_prefill_max_tokens: int = 16
    recovery_patience_s: float = 30.0


@dataclass(slots=True)
class _Request:
    """One request under way: `token_ids` are those it has brought."""

    prompt: PromptRequest
    outcome: Outcome
    deadline_at: float
    token_ids: list[int] = field(default_factory=list)
    recovery: Recovery = field(default_factory=Recovery)

    def rest(self) -> PromptRequest:
        """What is still to be done, as a request: its prompt ends with the tokens that are there."""
        max_tokens = self.prompt.sampling.max_tokens - len(self.token_ids)
        return replace(
            self.prompt,
            token_ids=(*self.prompt.token_ids, *self.token_ids),
            sampling=replace(self.prompt.sampling, max_tokens=max_tokens),
        )

    def claim(self) -> Claim:
        rest = self.rest()
        num_tokens, max_tokens = len(rest.token_ids), rest.sampling.max_tokens
        headroom = min(max(self.recovery.headroom_tokens, 1), max_tokens)
        return Claim(num_tokens, max_tokens, num_tokens + headroom, self.recovery.avoid)

    def finish_if_whole(self) -> bool:
        """The last token is there, though nobody has said so: the worker died in between."""
        sampling = self.prompt.sampling
        if self.token_ids and self.token_ids[-1] in sampling.stop_token_ids:
            self.outcome.finish(request_pb2.FINISH_REASON_STOP, self.token_ids[-1])
        elif len(self.token_ids) >= sampling.max_tokens:
            self.outcome.finish(request_pb2.FINISH_REASON_LENGTH, None)
        else:
            return False
        return True


class Dispatcher:
    """Sends requests to workers."""

    def __init__(
        self, membership: Membership, queue: AdmissionQueue, forecast: Forecast, config: DispatchConfig
    ) -> None:
        self._membership = membership
        self._queue = queue
        self._forecast = forecast
        self._config = config
        self._budget = RetryBudget()

    def check_room(self) -> None:
        """Raises ResourceExhausted if the queue is full: before anything is spent on a request."""
        self._queue.check_room()

    def note_stopped(self, outcome: Outcome) -> None:
        """An answer is whole, though its workers would go on: for the forecast it has ended as any other."""
        self._forecast.note_end(time.monotonic(), outcome.num_tokens)

    async def run(self, prompt: PromptRequest, outcome: Outcome, deadline_at: float) -> Tokens:
        """Yields new token ids until the answer ends, and fills in `outcome`.

        `deadline_at` of `time.monotonic`, in seconds, bounds every call; the caller bounds the wait in the
        queue. Ending the iteration early cancels the calls, and so releases what they hold on the workers.
        """
        request = _Request(prompt, outcome, deadline_at)
        self._budget.note_request(time.monotonic())
        placement = await self._queue.admit(request.claim(), priority=prompt.priority, deadline_at=deadline_at)
        while True:
            workers, sent_at_s = placement.workers, time.monotonic()
            try:
                async with self._tokens(request, placement) as tokens:
                    async for token_ids in tokens:
                        request.token_ids += token_ids
                        yield token_ids
                break
            except BatonError as error:
                if request.finish_if_whole():
                    break
                retry = self._retry(request, error, workers, sent_at_s)
            placement = await self._readmit(request, retry)
        self._forecast.note_end(time.monotonic(), len(request.token_ids))

    def _retry(self, request: _Request, error: BatonError, workers: tuple[str, ...], sent_at_s: float) -> Retry:
        """What follows the failure of a try; raises the error that ends the request."""
        now_s, recovery = time.monotonic(), request.recovery
        taken_out = note_failure(self._membership.breaker, error, workers, sent_at_s, now_s)
        if taken_out is not None:
            logger.warning("%s left out for a while: failed again and again, last %s", " to ".join(taken_out), error)
        retry = recovery.on_failure(error, len(request.token_ids), workers)
        cause = recovery.cause or error
        if retry is None or now_s >= request.deadline_at:
            raise _ended(cause, request, "tried often enough")
        if retry.needs_budget and not self._budget.take(now_s):
            raise _ended(cause, request, "the cluster fails too often to try again")
        if not retry.after_news:
            request.outcome.note_recovery(error)
        return retry

    async def _readmit(self, request: _Request, retry: Retry) -> Placement:
        """A place for another try. Without workers for long, the request ends with what took its place away."""
        await asyncio.sleep(random.uniform(0.0, retry.max_delay_s))
        try:
            return await self._queue.readmit(
                request.claim(),
                priority=request.prompt.priority,
                patience_s=self._config.recovery_patience_s,
                after_news=retry.after_news,
            )
        except Unavailable as error:
            raise _ended(request.recovery.cause or error, request, error.message) from error

    @asynccontextmanager
    async def _tokens(self, request: _Request, placement: Placement) -> AsyncIterator[Tokens]:
        """The tokens that the chosen workers make. The request counts on them, and has its calls, while this lasts."""
        request.outcome.note_assigned(placement.decision.reason)
        rest = request.rest()
        async with AsyncExitStack() as stack:
            stack.enter_context(placement)
            calls = await stack.enter_async_context(WorkerCalls(rest, request.deadline_at))
            progress = _Progress(self._membership, self._forecast, placement, request.outcome.timeline)
            attempt = Attempt(rest, request.outcome, calls, progress)
            tokens = attempt.run(placement.prefill, placement.decode, self._config.local_prefill_max_tokens)
            yield await stack.enter_async_context(aclosing(tokens))


class _Progress:
    """Tells who wants to know how far a try has come: the load figures, the circuit breaker, the forecast."""

    def __init__(
        self, membership: Membership, forecast: Forecast, placement: Placement, timeline: request_pb2.Timeline
    ) -> None:
        self._membership = membership
        self._forecast = forecast
        self._placement = placement
        self._timeline = timeline  # says who really does the work
        self._granted_at_s = self._last_at_s = time.monotonic()
        self._is_decoding = False

    def on_prefilled(self) -> None:
        """See `attempt.Progress`."""
        now_s = time.monotonic()
        self._membership.note_prefilled(self._placement.prefilling)
        self._forecast.note_first_token(now_s, now_s - self._granted_at_s)
        self._last_at_s = now_s
        self._membership.breaker.note_success(self._timeline.prefill_worker)

    def on_tokens(self, num_tokens: int) -> None:
        """See `attempt.Progress`."""
        now_s = time.monotonic()
        self._forecast.note_tokens(now_s, now_s - self._last_at_s, num_tokens)
        self._last_at_s = now_s
        if not self._is_decoding:
            self._is_decoding = True
            prefill, decode = self._timeline.prefill_worker, self._timeline.decode_worker
            self._membership.breaker.note_success(decode)
            self._membership.breaker.note_success((prefill, decode))


def _ended(cause: BatonError, request: _Request, why: str) -> BatonError:
    """The error that ends a request: the first cause, and how often it was tried."""
    if request.outcome.timeline.num_recoveries:
        cause.metadata.setdefault("recoveries", str(request.outcome.timeline.num_recoveries))
        cause.metadata.setdefault("gave_up", why)
    return cause
