"""Cleaning up in spite of cancellation."""

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
