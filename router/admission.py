"""The router's queue: requests wait here, in order, until workers have room for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.errors import FailedPrecondition, ResourceExhausted, Unavailable
from router.membership import Membership
from router.policy import Decision, Refusal, choose

RETRY_AFTER_S = 1.0
# A worker that restarts is back within seconds; one request's patience for that, not the queue's.
NO_WORKERS_PATIENCE_S = 1.0


class AdmissionQueue:
    """First come, first served. At most `max_waiting` wait; later ones are refused at once."""

    def __init__(self, membership: Membership, max_waiting: int) -> None:
        self._membership = membership
        self._max_waiting = max_waiting
        self._num_waiting = 0
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
        async with self._place(), self._turn:
            while True:
                choice = choose(num_prompt_tokens, max_tokens, self._membership.views())
                if isinstance(choice, Decision):
                    return choice
                if choice is Refusal.NO_ROOM:
                    await self._membership.wait_for_change()
                else:
                    await self._wait_for_workers(choice)

    async def wait_for_room(self) -> None:
        """Waits for any change: a worker has just refused what looked as if it would fit."""
        await self._membership.wait_for_change()

    async def _wait_for_workers(self, refusal: Refusal) -> None:
        try:
            async with asyncio.timeout(NO_WORKERS_PATIENCE_S):
                while self._is_still(refusal):
                    await self._membership.wait_for_change()
        except TimeoutError:
            raise self._unavailable(refusal) from None

    def _is_still(self, refusal: Refusal) -> bool:
        return choose(1, 2, self._membership.views()) is refusal

    def _unavailable(self, refusal: Refusal) -> Exception:
        infos = self._membership.infos()
        if refusal is Refusal.NO_PAIR and len({i.fingerprint.SerializeToString(deterministic=True) for i in infos}) > 1:
            names = ", ".join(sorted(i.worker for i in infos))
            return FailedPrecondition(
                f"{refusal.value}: the model or KV type of {names} differ; start them with the same model and dtype",
                reason="FINGERPRINT_MISMATCH",
            )
        known = ", ".join(sorted(i.worker for i in infos)) or "none"
        return Unavailable(
            f"no ready pair of prefill and decode workers; workers known: {known}", retry_after_s=RETRY_AFTER_S
        )

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._num_waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._num_waiting} requests wait already, the limit is {self._max_waiting}; try again later",
                reason="QUEUE_FULL",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
