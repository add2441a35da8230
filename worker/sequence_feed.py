"""Carries what the engine's thread says of one sequence to the event loop."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import Aborted, BatonError, InternalError
from engine.sequence import FinishReason
from engine.step_plan import SequenceOutput

HANDED_BACK = "KV blocks ran out, and others go first: the sequence is handed back with the tokens it has"
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
        self._failure: BatonError | None = None

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
        self._loop.call_soon_threadsafe(self._take_failure, InternalError(message))

    def on_handed_back(self) -> None:
        """See `engine.engine.SequenceSink`."""
        self._loop.call_soon_threadsafe(self._take_failure, Aborted(HANDED_BACK, reason="PREEMPTED"))

    async def next(self) -> FeedItem:
        """Waits for news; the wait is bounded by the call that owns it.

        Once all tokens are read, raises InternalError if a step failed, and Aborted with reason PREEMPTED if the
        sequence was handed back for lack of KV blocks.
        """
        await self._news.wait()
        if self._failure is not None and not self._token_ids:
            raise self._failure
        item = FeedItem(self._token_ids, self._finish_reason, self._stop_token_id)
        self._token_ids = []
        if self._failure is None:  # else it is the next news
            self._news.clear()
        return item

    def _take(self, output: SequenceOutput) -> None:
        self._token_ids.extend(output.token_ids)
        self._finish_reason = output.finish_reason
        self._stop_token_id = output.stop_token_id
        self._news.set()

    def _take_failure(self, failure: BatonError) -> None:
        self._failure = failure
        self._news.set()
