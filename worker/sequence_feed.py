"""Carries what the engine's thread says of one sequence to the event loop."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import InternalError
from engine.sequence import FinishReason
from engine.step_plan import SequenceOutput

LayerListener = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class FeedItem:
    """Tokens that came since the last read, and the end if it came."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_token_id: int | None


class SequenceFeed:
    """An engine's `SequenceSink` read from one event loop. Tokens that come faster than they are read are joined.

    Times are of `time.monotonic`, in seconds. `on_layer` is called on the engine's thread.
    """

    def __init__(self, on_layer: LayerListener | None = None, on_started: Callable[[int], None] | None = None) -> None:
        """To be made on the event loop. `on_started` gets the number of cached tokens, on the engine's thread."""
        self.wants_layers = on_layer is not None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.num_cached_tokens = 0
        self._layer_listener = on_layer
        self._start_listener = on_started
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._failure: str | None = None

    def on_started(self, num_cached_tokens: int) -> None:
        """See `engine.engine.SequenceSink`."""
        self.started_at = time.monotonic()
        self.num_cached_tokens = num_cached_tokens
        if self._start_listener is not None:
            self._start_listener(num_cached_tokens)

    def on_layer(self, layer: int, start: int, end: int) -> None:
        """See `engine.engine.SequenceSink`."""
        if self._layer_listener is not None:
            self._layer_listener(layer, start, end)

    def on_output(self, output: SequenceOutput) -> None:
        """See `engine.engine.SequenceSink`."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._loop.call_soon_threadsafe(self._take, output)

    def on_failure(self, message: str) -> None:
        """See `engine.engine.SequenceSink`."""
        self._loop.call_soon_threadsafe(self._take_failure, message)

    async def next(self) -> FeedItem:
        """Waits for news; the wait is bounded by the call that owns it. Raises InternalError if a step failed."""
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise InternalError(self._failure)
        item = FeedItem(self._token_ids, self._finish_reason, self._stop_token_id)
        self._token_ids = []
        return item

    def _take(self, output: SequenceOutput) -> None:
        self._token_ids.extend(output.token_ids)
        self._finish_reason = output.finish_reason
        self._stop_token_id = output.stop_token_id
        self._news.set()

    def _take_failure(self, message: str) -> None:
        self._failure = message
        self._news.set()
