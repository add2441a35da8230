"""Cleaning up in spite of cancellation, and after the call is gone."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[None, None, T]) -> T:
    """Runs `work` to its end, also if the caller is cancelled meanwhile; only then the cancellation goes on.

    For what releases things: a call that has failed is often cancelled too, by the peer that hears of it, and
    would else stop half-way through. `work` must have its own time limit.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


class Stragglers:
    """Owns releases that may outlast their calls: each waits until nothing touches some blocks any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, release: Coroutine[None, None, None]) -> None:
        """Runs the release to its end, or to `close`."""
        task = asyncio.create_task(release, name="late release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up those that still wait."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
