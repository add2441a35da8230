"""Reads from several workers at once, of which one cause of failure is told: the first."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from baton.errors import BatonError

# A failed handoff shows on both workers' streams; so long the other one may take to tell the cause.
FIRST_CAUSE_PATIENCE_S = 0.5
# What one worker says when the other one has given up.
CONSEQUENCES = frozenset({"PUSH_ENDED", "TICKET_UNKNOWN", "TICKET_CLOSED", "LINK_LOST"})

Read = asyncio.Task[tuple[str, Any]]


class Reads:
    """A group of reads, each of which brings (event, message). Those under way end with the context."""

    def __init__(self) -> None:
        self._reads: set[Read] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for read in self._reads:
            read.cancel()
        await asyncio.wait(self._reads)
        _failures(self._reads)  # marks them as seen

    def start(self, read: Coroutine[Any, Any, tuple[str, Any]]) -> Read:
        """Begins one."""
        task = asyncio.create_task(read, name="read of a worker's stream")
        self._reads.add(task)
        return task

    def start_after(self, earlier: Read, read: Callable[[], Awaitable[tuple[str, Any]]]) -> Read:
        """Begins one that follows `earlier` on the same stream, and fails as that does."""

        async def follow() -> tuple[str, Any]:
            await asyncio.wait({earlier})
            earlier.result()
            return await read()

        return self.start(follow())

    async def result(self, read: Read) -> Any:
        """The message that `read` brings. Raises the first cause as soon as any of the group has failed."""
        while not read.done() and not _failures(self._reads):
            pending = {task for task in self._reads if not task.done()}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if read.done() and _failure(read) is None:
            _, message = read.result()
            return message
        raise await self._first_cause()

    async def wait(self, read: Read, timeout_s: float) -> None:
        """Waits until `read` is done, but no longer than this."""
        await asyncio.wait({read}, timeout=timeout_s)

    def brought(self, read: Read) -> Any | None:
        """The message that `read` has brought, None if it is under way or has failed."""
        return read.result()[1] if read.done() and not read.cancelled() and _failure(read) is None else None

    async def _first_cause(self) -> BaseException:
        """The failure that the others follow from, if it shows in time."""
        if all(_is_consequence(failure) for failure in _failures(self._reads)):
            await asyncio.wait(self._reads, timeout=FIRST_CAUSE_PATIENCE_S)
        failures = _failures(self._reads)
        return next((failure for failure in failures if not _is_consequence(failure)), failures[0])


def _is_consequence(failure: BaseException) -> bool:
    return isinstance(failure, BatonError) and failure.reason in CONSEQUENCES


def _failures(reads: set[Read]) -> list[BaseException]:
    return [failure for read in reads if (failure := _failure(read)) is not None]


def _failure(read: Read) -> BaseException | None:
    return read.exception() if read.done() and not read.cancelled() else None
