"""What another thread says arrives on the event loop: joined, complete, and with its end."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from baton.errors import Aborted, InternalError
from engine.sequence import FinishReason
from engine.step_plan import SequenceOutput
from worker.sequence_feed import FeedItem, SequenceFeed

TIMEOUT_S = 10.0


def _on_engine_thread(say: Callable[[], None]) -> None:
    """Runs `say` to its end on another thread while the loop stands still."""
    thread = threading.Thread(target=say)
    thread.start()
    thread.join(TIMEOUT_S)


def _tokens(*token_ids: int) -> SequenceOutput:
    return SequenceOutput("a", token_ids)


async def _next(feed: SequenceFeed) -> FeedItem:
    return await asyncio.wait_for(feed.next(), TIMEOUT_S)


async def test_tokens_that_came_since_the_last_read_are_joined() -> None:
    feed = SequenceFeed()
    _on_engine_thread(lambda: [feed.on_output(_tokens(i)) for i in range(3)] and None)
    await asyncio.sleep(0)
    assert await _next(feed) == FeedItem([0, 1, 2], None, None)
    _on_engine_thread(lambda: feed.on_output(_tokens(3)))
    assert await _next(feed) == FeedItem([3], None, None)


async def test_the_end_comes_with_the_last_tokens() -> None:
    feed = SequenceFeed()

    def say() -> None:
        feed.on_output(_tokens(7))
        feed.on_output(SequenceOutput("a", (2,), FinishReason.STOP, 2))

    _on_engine_thread(say)
    await asyncio.sleep(0)
    assert await _next(feed) == FeedItem([7, 2], FinishReason.STOP, 2)


async def test_a_reader_that_waits_is_woken() -> None:
    feed = SequenceFeed()
    reader = asyncio.create_task(_next(feed))
    await asyncio.sleep(0)
    assert not reader.done()
    _on_engine_thread(lambda: feed.on_output(_tokens(5)))
    assert (await reader).token_ids == [5]


async def test_nothing_is_lost_or_doubled_between_a_fast_writer_and_a_reader() -> None:
    feed, count = SequenceFeed(), 2000

    def say() -> None:
        for i in range(count - 1):
            feed.on_output(_tokens(i))
        feed.on_output(SequenceOutput("a", (count - 1,), FinishReason.LENGTH))

    thread = threading.Thread(target=say)
    thread.start()
    received: list[int] = []
    item = await _next(feed)
    received += item.token_ids
    while item.finish_reason is None:
        item = await _next(feed)
        received += item.token_ids
    thread.join(TIMEOUT_S)
    assert received == list(range(count))


def _failing(feed: SequenceFeed) -> None:
    feed.on_failure("the step failed: OSError")


async def _check_end(feed: SequenceFeed, end: Callable[[SequenceFeed], None]) -> None:
    """The next news is this end, however often it is asked for."""
    for _ in range(2):
        with pytest.raises(InternalError if end is _failing else Aborted) as raised:
            await _next(feed)
        if end is _failing:
            assert raised.value.message == "the step failed: OSError"
        else:
            assert raised.value.reason == "PREEMPTED"
            assert "blocks ran out" in raised.value.message


ends = pytest.mark.parametrize("end", [_failing, SequenceFeed.on_handed_back])


@ends
@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3]])
async def test_an_end_without_an_answer_comes_after_all_tokens(
    end: Callable[[SequenceFeed], None], token_ids: list[int]
) -> None:
    feed = SequenceFeed()

    def say() -> None:
        for token_id in token_ids:
            feed.on_output(_tokens(token_id))
        end(feed)

    _on_engine_thread(say)
    await asyncio.sleep(0)  # all of it has come before the first look
    if token_ids:
        assert await _next(feed) == FeedItem(token_ids, None, None)
    await _check_end(feed, end)


@ends
async def test_a_reader_that_waits_hears_of_an_end_without_an_answer(end: Callable[[SequenceFeed], None]) -> None:
    feed = SequenceFeed()
    _on_engine_thread(lambda: feed.on_output(_tokens(5)))
    assert (await _next(feed)).token_ids == [5]
    reader = asyncio.create_task(_check_end(feed, end))
    await asyncio.sleep(0)
    assert not reader.done()
    _on_engine_thread(lambda: end(feed))
    await reader


async def test_starts_and_layers_are_passed_on_at_once_on_the_thread_they_come_on() -> None:
    heard: list[tuple[object, ...]] = []

    def hear(*what: int) -> None:
        heard.append((threading.current_thread().name, *what))

    feed = SequenceFeed(on_layer=hear, on_started=hear)
    assert feed.wants_layers

    def say() -> None:
        threading.current_thread().name = "engine"
        feed.on_started(16)
        feed.on_layer(0, 16, 20)

    _on_engine_thread(say)
    assert heard == [("engine", 16), ("engine", 0, 16, 20)]
    assert feed.num_cached_tokens == 16


async def test_without_listeners_nothing_is_wanted() -> None:
    feed = SequenceFeed()
    assert not feed.wants_layers
    feed.on_started(4)
    feed.on_layer(0, 0, 4)
    assert feed.num_cached_tokens == 4


async def test_times_are_of_the_start_and_the_first_token() -> None:
    feed = SequenceFeed()
    assert feed.started_at is feed.first_token_at is None
    feed.on_started(0)
    feed.on_output(_tokens(1))
    first = feed.first_token_at
    feed.on_output(_tokens(2))
    assert feed.first_token_at == first
    assert feed.started_at is not None
    assert first is not None
    assert feed.started_at <= first
