"""A change wakes everyone who took its event before."""

import asyncio
import threading

from worker.state_feed import StateFeed

TIMEOUT_S = 10.0


async def _let_it_wake() -> None:
    """What `notify` schedules runs before what is scheduled after it."""
    await asyncio.sleep(0)


async def test_a_change_from_another_thread_wakes_all() -> None:
    feed = StateFeed()
    events = [feed.next_change() for _ in range(3)]
    assert not any(event.is_set() for event in events)
    threading.Thread(target=feed.notify).start()
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), TIMEOUT_S)


async def test_each_change_has_its_own_event() -> None:
    feed = StateFeed()
    for _ in range(3):
        event = feed.next_change()
        feed.notify()
        await _let_it_wake()
        assert event.is_set()
        assert not feed.next_change().is_set()


async def test_a_burst_is_one_change_and_the_next_burst_another() -> None:
    feed = StateFeed()
    first = feed.next_change()
    for _ in range(100):
        feed.notify()
    await _let_it_wake()
    second = feed.next_change()
    assert first.is_set()
    await _let_it_wake()
    assert not second.is_set()
    feed.notify()
    await _let_it_wake()
    assert second.is_set()


async def test_closed_it_reports_no_more() -> None:
    feed = StateFeed()
    event = feed.next_change()
    feed.close()
    feed.notify()
    await _let_it_wake()
    assert not event.is_set()


def test_closed_it_outlives_its_loop() -> None:
    """The engine's last step may end after the event loop."""

    async def make() -> StateFeed:
        feed = StateFeed()
        feed.close()
        return feed

    asyncio.run(make()).notify()
