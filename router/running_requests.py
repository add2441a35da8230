"""The requests that are being served. Each is itself, whatever its client calls it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from baton.errors import Cancelled


class RunningRequest:
    """One request under way, which can be ended from outside with an error.

    Whatever runs inside of its `with` block is interrupted then: the block raises the error.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancels_before = 0

    def end(self, error: Exception) -> bool:
        """Ends the request, at once or, if its block is still to be entered, then. False: it was ended before."""
        if self._error is not None:
            return False
        self._error = error
        if self._task is not None:
            self._task.cancel()
        return True

    def __enter__(self) -> Self:
        if self._error is not None:
            raise self._error
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancels_before = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._error is None:
            return
        # As in asyncio.timeout: if somebody else has cancelled the task too, it stays cancelled.
        is_ours_alone = task.uncancel() <= self._num_cancels_before
        if is_ours_alone and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise self._error from None


class RunningRequests:
    """All of one router, in its event loop."""

    def __init__(self) -> None:
        self._running: set[RunningRequest] = set()

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @contextmanager
    def entered(self, request: RunningRequest) -> Iterator[None]:
        """Counts the request among those that run while the context lasts."""
        self._running.add(request)
        try:
            yield
        finally:
            self._running.discard(request)

    def abort(self, request_id: str) -> int:
        """Ends every request that has exactly this id, with Cancelled; returns how many this call has ended."""
        named = [request for request in self._running if request.request_id == request_id]
        return sum(
            request.end(Cancelled(f"request {request_id} was aborted by its id", reason="ABORTED_BY_ID"))
            for request in named
        )
