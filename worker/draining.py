"""Draining: no new calls, and those that are open are waited for, or handed back when the patience is over."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.errors import Aborted, Unavailable

HandBack = Callable[[Aborted], None]

REASON = "DRAINING"


class Draining:
    """Counts the open calls of a worker's roles. Belongs to the event loop."""

    def __init__(self) -> None:
        self._is_draining = False
        self._open: dict[object, HandBack] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._is_draining

    @property
    def num_open_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    @contextmanager
    def call(self, hand_back: HandBack) -> Iterator[None]:
        """One call, for as long as the context lasts. Raises Unavailable while draining.

        `hand_back` is called at `expire`, once: it releases what the call holds and ends it with the error it gets.
        """
        if self._is_draining:
            raise Unavailable("the worker is draining; go elsewhere", reason=REASON)
        key = object()
        self._open[key] = hand_back
        self._is_idle.clear()
        try:
            yield
        finally:
            del self._open[key]
            if not self._open:
                self._is_idle.set()

    def begin(self) -> None:
        """Refuses new calls from now on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call is open. False: some still are."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def expire(self) -> None:
        """Hands back the calls that are still open: they go on elsewhere, from where they are."""
        self.begin()
        for hand_back in tuple(self._open.values()):
            hand_back(Aborted("handed back, as the worker is draining", reason=REASON))
