import asyncio

import pytest

from baton.errors import FailedPrecondition, ResourceExhausted, Unavailable
from router import admission
from router.admission import AdmissionQueue
from router.forecast import Forecast
from router.membership import Assignment
from router.policy import Claim


@pytest.fixture
def forecast():
    return Forecast()


@pytest.fixture
async def make_queue(membership, forecast):
    """An admission queue over the membership; nobody may wait in it in the end."""
    made = []

    def make(max_waiting=3, **settings):
        made.append(AdmissionQueue(membership, max_waiting, forecast, **settings))
        return made[-1]

    yield make
    for queue in made:
        assert queue.num_waiting == 0
        await queue.close()


@pytest.fixture
def queue(make_queue):
    return make_queue()


@pytest.fixture
def full(membership, follow, pair, assigned):
    """A context in which the decode worker is full."""

    async def enter():
        await follow(*pair)
        return assigned(membership.member("decode-0"), Assignment(0, 64))

    return enter


def claim(num_prompt_tokens=3, max_tokens=5):
    return Claim(num_prompt_tokens, max_tokens, num_prompt_tokens + 1)


async def admitted(queue, num_prompt_tokens=3, *, priority=0, timeout_s=30.0):
    """Has a place for a moment; returns who was chosen."""
    deadline_at = queue._clock() + timeout_s
    async with asyncio.timeout(30):
        placement = await queue.admit(claim(num_prompt_tokens), priority=priority, deadline_at=deadline_at)
    async with placement:
        return placement.decision


async def readmitted(queue, num_prompt_tokens=3, *, priority=0, patience_s=30.0, after_news=False):
    """As `admitted`, for one that has lost its place."""
    async with asyncio.timeout(30):
        placement = await queue.readmit(
            claim(num_prompt_tokens), priority=priority, patience_s=patience_s, after_news=after_news
        )
    async with placement:
        return placement.decision


async def test_room_is_given_at_once(queue, follow, pair):
    await follow(*pair)
    decision = await admitted(queue)
    assert (decision.prefill, decision.decode) == ("prefill-0", "decode-0")
    assert queue.num_waiting == 0


async def test_who_waits_is_served_in_order_when_there_is_room(queue, full, eventually):
    order = []

    async def ask(i):
        await admitted(queue)
        order.append(i)

    async with await full():
        waiting = [asyncio.create_task(ask(i)) for i in range(3)]
        await eventually(lambda: queue.num_waiting == 3)
        assert order == []
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]
    assert queue.num_waiting == 0


async def test_a_full_queue_refuses_at_once_with_both_numbers_and_a_hint(queue, full, eventually):
    async with await full():
        waiting = [asyncio.create_task(admitted(queue)) for _ in range(3)]
        await eventually(lambda: queue.num_waiting == 3)
        with pytest.raises(ResourceExhausted, match=r"3 requests wait already, the limit is 3") as caught:
            await admitted(queue)
        assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 1.0)
    await asyncio.gather(*waiting)


async def test_who_was_in_the_queue_before_is_not_refused_for_a_full_one(queue, full, eventually):
    async with await full():
        waiting = [asyncio.create_task(admitted(queue)) for _ in range(3)]
        await eventually(lambda: queue.num_waiting == 3)
        again = asyncio.create_task(readmitted(queue))
        await eventually(lambda: queue.num_waiting == 4)
    await asyncio.gather(again, *waiting)


async def test_who_gives_up_leaves_the_queue_to_the_next(queue, full, eventually):
    async with await full():
        first = asyncio.create_task(admitted(queue))
        await eventually(lambda: queue.num_waiting == 1)
        second = asyncio.create_task(admitted(queue))
        await eventually(lambda: queue.num_waiting == 2)
        first.cancel()
        await asyncio.wait({first})
        assert queue.num_waiting == 1
    await second
    assert queue.num_waiting == 0


async def test_without_workers_all_who_wait_are_refused_after_one_patience(queue, monkeypatch):
    """Together, and not one patience after another."""
    monkeypatch.setattr(admission, "NO_WORKERS_PATIENCE_S", 0.2)
    first = asyncio.create_task(admitted(queue))
    results = await asyncio.gather(first, *(admitted(queue) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 3
    assert "ready workers: none" in results[0].message
    assert results[0].retry_after_s == 1.0


async def test_patience_starts_anew_with_an_empty_queue(queue, follow, pair, monkeypatch):
    monkeypatch.setattr(admission, "NO_WORKERS_PATIENCE_S", 0.1)
    with pytest.raises(Unavailable):
        await admitted(queue)
    monkeypatch.setattr(admission, "NO_WORKERS_PATIENCE_S", 30.0)
    waiting = asyncio.create_task(admitted(queue))
    await follow(*pair)
    await waiting


async def test_half_a_pair_is_unavailable(queue, follow, pair, monkeypatch):
    monkeypatch.setattr(admission, "NO_WORKERS_PATIENCE_S", 0.1)
    await follow(pair[0])
    with pytest.raises(Unavailable, match=r"pair.*ready workers: prefill-0"):
        await admitted(queue)


async def test_workers_that_do_not_fit_are_told_by_field_and_both_values(queue, follow, start_worker, monkeypatch):
    monkeypatch.setattr(admission, "NO_WORKERS_PATIENCE_S", 0.1)
    prefill = await start_worker("p0", "prefill")
    decode = await start_worker("d0", "decode", fingerprint={"kv_dtype": "bfloat16"})
    await follow(prefill, decode)
    with pytest.raises(FailedPrecondition, match=r"p0 and d0: kv_dtype .*'float32'.*'bfloat16'") as caught:
        await admitted(queue)
    assert caught.value.reason == "FINGERPRINT_MISMATCH"
