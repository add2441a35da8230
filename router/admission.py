"""The router's queue: requests wait here, in order, until workers have room for them."""

import asyncio

from baton.errors import BatonError, FailedPrecondition, ResourceExhausted, Unavailable
from kv_transfer.fingerprint import mismatch
from router.membership import Membership
from router.policy import Decision, Refusal, choose
from router.worker_view import WorkerView

RETRY_AFTER_S = 1.0
# A worker that restarts is back within seconds. Those who wait together share this patience: none waits for
# those before it to lose theirs.
NO_WORKERS_PATIENCE_S = 1.0


class AdmissionQueue:
    """First come, first served. At most `max_waiting` wait; later ones are refused at once."""

    def __init__(self, membership: Membership, max_waiting: int) -> None:
        self._membership = membership
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._lacking_since: float | None = None  # since when those who wait have seen no workers
        self._turn = asyncio.Lock()  # asyncio's lock is fair: those who wait get it in their order

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return self._num_waiting

    async def admit(self, num_prompt_tokens: int, max_tokens: int) -> Decision:
        """Waits for room; the caller has the deadline.

        Raises ResourceExhausted when the queue is full, Unavailable without workers for a second,
        FailedPrecondition if no prefill worker fits any decode worker.
        """
        if self._num_waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._num_waiting} requests wait already, the limit is {self._max_waiting}; try again later",
                reason="QUEUE_FULL",
                retry_after_s=RETRY_AFTER_S,
            )
        return await self._wait_for_room(num_prompt_tokens, max_tokens)

    async def readmit(self, num_prompt_tokens: int, max_tokens: int) -> Decision:
        """As `admit`, for a request that a worker has just refused though it looked as if it would fit: waits
        for news first, and is not refused for a full queue, since it was in the queue before.
        """
        await self._membership.wait_for_change()
        return await self._wait_for_room(num_prompt_tokens, max_tokens)

    async def _wait_for_room(self, num_prompt_tokens: int, max_tokens: int) -> Decision:
        self._num_waiting += 1
        try:
            async with self._turn:
                while not isinstance(
                    choice := choose(num_prompt_tokens, max_tokens, self._membership.views()), Decision
                ):
                    await self._wait_for_news(choice)
                self._lacking_since = None
                return choice
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._lacking_since = None

    async def _wait_for_news(self, refusal: Refusal) -> None:
        if refusal is Refusal.NO_ROOM:
            self._lacking_since = None
            await self._membership.wait_for_change()
            return
        if self._lacking_since is None:
            self._lacking_since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(self._lacking_since + NO_WORKERS_PATIENCE_S):
                await self._membership.wait_for_change()
        except TimeoutError:
            raise self._error(refusal) from None

    def _error(self, refusal: Refusal) -> BatonError:
        ready = [view for view in self._membership.views() if view.is_ready]
        if refusal is Refusal.MISMATCH:
            return FailedPrecondition(
                f"{refusal.value}: {_difference(ready)}; start them with the same model and dtype",
                reason="FINGERPRINT_MISMATCH",
            )
        names = ", ".join(sorted(view.name for view in ready)) or "none"
        return Unavailable(f"{refusal.value}; ready workers: {names}", retry_after_s=RETRY_AFTER_S)


def _difference(views: list[WorkerView]) -> str:
    """What keeps the first two of these apart."""
    pairs = ((p, d) for p in views if p.can_prefill for d in views if d.can_decode)
    found = (f"{p.name} and {d.name}: {text}" for p, d in pairs if (text := mismatch(p.fingerprint, d.fingerprint)))
    return next(found, "they have just changed")
