"""Tells subscribers on the event loop that the engine's load has changed."""

import asyncio


class StateFeed:
    """Wakes any number of waiters on every change reported from any thread."""

    def __init__(self) -> None:
        """To be made on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_notified = False
        self._is_closed = False

    def notify(self) -> None:
        """Reports a change; from any thread, cheap when one is already pending."""
        if not self._is_notified and not self._is_closed:
            self._is_notified = True
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Later reports are dropped: the loop is about to end."""
        self._is_closed = True

    def next_change(self) -> asyncio.Event:
        """Set at the next change: taken before a look at the state, it misses none that comes after the look."""
        return self._changed

    def _wake(self) -> None:
        self._is_notified = False
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
