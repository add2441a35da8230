import asyncio
import time

import pytest

from baton.errors import FailedPrecondition, ResourceExhausted, Unavailable
from router import admission
from router.admission import AdmissionQueue
from router.circuit_breaker import FAILURES_TO_OPEN
from router.forecast import MARGIN, Forecast
from router.membership import Assignment
from router.policy import Claim
from router.waiting_line import MAX_BYPASSES


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


class Clock:
    """Stands still until it is set."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def full(membership, follow, pair, assigned):
    """A context in which the decode worker is full."""

    async def enter():
        await follow(*pair)
        return assigned(membership.member("decode-0"), Assignment(0, 64))

    return enter


def claim(num_prompt_tokens=3, max_tokens=5):
    return Claim(num_prompt_tokens, max_tokens, num_prompt_tokens + 1)


async def place(queue, num_prompt_tokens=3, *, priority=0, timeout_s=30.0):
    """A place, to be released."""
    deadline_at = queue._clock() + timeout_s
    async with asyncio.timeout(30):
        return await queue.admit(claim(num_prompt_tokens), priority=priority, deadline_at=deadline_at)


async def admitted(queue, num_prompt_tokens=3, **how):
    """Has a place for a moment; returns who was chosen."""
    with await place(queue, num_prompt_tokens, **how) as placement:
        return placement.decision


async def readmitted(queue, num_prompt_tokens=3, *, priority=0, patience_s=30.0, after_news=False):
    """As `admitted`, for one that has lost its place."""
    async with asyncio.timeout(30):
        placement = await queue.readmit(
            claim(num_prompt_tokens), priority=priority, patience_s=patience_s, after_news=after_news
        )
    with placement:
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


async def test_the_important_come_first_and_of_equals_those_who_had_a_place(make_queue, full, eventually):
    queue, order = make_queue(10), []

    async def ask(name, admit, priority):
        await admit(queue, priority=priority)
        order.append(name)

    arrivals = [
        ("low", admitted, 5),
        ("new", admitted, 0),
        ("low again", readmitted, 5),
        ("newer", admitted, 0),
        ("urgent", admitted, -1),
        ("again", readmitted, 0),
    ]
    waiting = []
    async with await full():
        for name, admit, priority in arrivals:
            waiting.append(asyncio.create_task(ask(name, admit, priority)))
            await eventually(lambda: queue.num_waiting == len(waiting))
    await asyncio.gather(*waiting)
    assert order == ["urgent", "again", "new", "newer", "low again", "low"]


async def test_small_ones_pass_a_large_one_so_often_and_no_more(queue, follow, membership, pair, assigned, eventually):
    await follow(*pair)
    order = []

    async def ask(name, num_prompt_tokens):
        await admitted(queue, num_prompt_tokens)
        order.append(name)

    async with assigned(membership.member("decode-0"), Assignment(0, 60)):
        large = asyncio.create_task(ask("large", 100))
        await eventually(lambda: queue.num_waiting == 1)
        for _ in range(MAX_BYPASSES):
            await admitted(queue)
        small = asyncio.create_task(ask("small", 3))
        await eventually(lambda: queue.num_waiting == 2)
        pair[0].report(num_queued_tokens=1)
        await eventually(lambda: membership.member("prefill-0").view().load_queued_tokens == 1)
        assert order == []
    await asyncio.gather(large, small)
    assert order == ["large", "small"]


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


async def test_who_held_up_others_and_leaves_lets_them_in(queue, follow, membership, pair, assigned, eventually):
    """Though nothing changes on the workers."""
    await follow(*pair)
    async with assigned(membership.member("decode-0"), Assignment(0, 60)):
        large = asyncio.create_task(admitted(queue, 100))
        await eventually(lambda: queue.num_waiting == 1)
        for _ in range(MAX_BYPASSES):
            await admitted(queue)
        small = asyncio.create_task(admitted(queue))
        await eventually(lambda: queue.num_waiting == 2)
        large.cancel()
        await small


async def test_a_place_counts_on_the_workers_from_the_grant_to_its_release(queue, follow, membership, pair, is_idle):
    await follow(*pair)
    placement = await place(queue, 40)
    prefill, decode = (membership.member(name).view() for name in ("prefill-0", "decode-0"))
    assert (prefill.sent_sequences, prefill.sent_prompt_tokens, prefill.sent_blocks) == (1, 40, 0)
    assert (decode.sent_sequences, decode.sent_prompt_tokens, decode.sent_blocks) == (1, 0, 3)
    placement.release()
    assert is_idle()
    placement.release()
    assert is_idle()


async def test_a_worker_that_serves_alone_has_the_prompt_and_the_blocks(queue, follow, membership, start_worker):
    await follow(await start_worker("m0", "mixed"))
    with await place(queue, 40):
        view = membership.member("m0").view()
        assert (view.sent_sequences, view.sent_prompt_tokens, view.sent_blocks) == (1, 40, 3)


async def test_those_who_come_together_are_counted_one_after_another(make_queue, follow, membership, start_worker):
    """Nobody is placed on figures that the one before has made stale."""
    await follow(await start_worker("p0", "prefill"), await start_worker("d0", "decode", max_batch_sequences=4))
    queue, most = make_queue(100), 0

    async def ask():
        nonlocal most
        with await place(queue):
            most = max(most, membership.member("d0").view().sent_sequences)
            await asyncio.sleep(0)

    await asyncio.gather(*(ask() for _ in range(50)))
    assert most == 4


@pytest.mark.parametrize("num_turns", range(8))
async def test_whenever_a_waiter_is_cancelled_it_keeps_no_place(queue, full, is_idle, eventually, num_turns):
    async with await full():
        waiting = asyncio.create_task(place(queue))
        await eventually(lambda: queue.num_waiting == 1)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    if not waiting.cancelled():
        waiting.result().release()
    assert is_idle()


async def test_a_place_given_to_one_who_is_cancelled_before_it_knows_is_given_back(queue, full, is_idle, eventually):
    async with await full():
        waiting = asyncio.create_task(place(queue))
        await eventually(lambda: queue.num_waiting == 1)
    for _ in range(100):
        if queue.num_waiting == 0:  # it has its place, and learns of it in the next turn
            break
        await asyncio.sleep(0)
    assert not waiting.done()
    assert not is_idle()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert is_idle()


async def test_a_thousand_wait_and_a_burst_beyond_is_refused_at_once(make_queue, full, is_idle, eventually):
    queue, most, refused = make_queue(1000), 0, []

    async def ask():
        nonlocal most
        try:
            await admitted(queue, timeout_s=1000.0)
        except ResourceExhausted as error:
            refused.append(error.reason)
        most = max(most, queue.num_waiting)

    async with await full():
        asking = [asyncio.create_task(ask()) for _ in range(1500)]
        await eventually(lambda: len(refused) == 500)
        assert queue.num_waiting == 1000
    await asyncio.gather(*asking)
    assert most == 1000
    assert refused == ["QUEUE_FULL"] * 500
    assert is_idle()


async def test_all_leave_at_once(make_queue, full, is_idle, eventually):
    queue = make_queue(1000)
    async with await full():
        asking = [asyncio.create_task(admitted(queue)) for _ in range(1000)]
        await eventually(lambda: queue.num_waiting == 1000)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert queue.num_waiting == 0
    assert is_idle()


async def test_new_ones_share_their_patience_and_others_have_their_own(make_queue, clock, eventually):
    queue, began_at_s = make_queue(clock=clock), clock.now_s
    again = asyncio.create_task(readmitted(queue, patience_s=5.0))
    await eventually(lambda: queue.num_waiting == 1)
    first = asyncio.create_task(admitted(queue))
    await eventually(lambda: queue.num_waiting == 2)
    clock.now_s = began_at_s + 0.9
    second = asyncio.create_task(admitted(queue))
    later = asyncio.create_task(readmitted(queue, patience_s=5.0))
    await eventually(lambda: queue.num_waiting == 4)
    clock.now_s = began_at_s + 1.0
    await asyncio.wait({first, second})
    assert [type(task.exception()) for task in (first, second)] == [Unavailable] * 2
    assert queue.num_waiting == 2
    clock.now_s = began_at_s + 5.0
    await asyncio.wait({again})
    assert queue.num_waiting == 1
    clock.now_s = began_at_s + 5.9
    await asyncio.wait({later})
    assert [type(task.exception()) for task in (again, later)] == [Unavailable] * 2


async def test_patience_begins_when_the_workers_are_gone(make_queue, clock, full, membership, pair, eventually):
    queue = make_queue(clock=clock)
    async with await full():
        waiting = asyncio.create_task(readmitted(queue, patience_s=5.0))
        await eventually(lambda: queue.num_waiting == 1)
        clock.now_s += 100.0
        await membership.set_workers([])
        await eventually(lambda: queue._lacking_since_s is not None)
        clock.now_s += 4.9
        await membership.set_workers([worker.address for worker in pair])
    assert (await waiting).decode == "decode-0"


async def test_who_comes_after_all_others_have_gone_has_the_whole_patience(make_queue, clock, eventually):
    queue = make_queue(clock=clock)
    for _ in range(2):
        waiting = asyncio.create_task(admitted(queue))
        await eventually(lambda: queue.num_waiting == 1)
        clock.now_s += 60.0
        with pytest.raises(Unavailable):
            await waiting


async def test_after_news_waits_though_there_is_room(queue, follow, membership, pair):
    """A worker has just said that it is full, whatever it said before."""
    await follow(*pair)
    news = asyncio.create_task(membership.wait_for_change())
    again = asyncio.create_task(readmitted(queue, after_news=True))
    for _ in range(20):
        await asyncio.sleep(0)
        assert news.done() or not again.done()
    pair[1].report(num_running=1)
    assert (await again).decode == "decode-0"
    await news


async def test_pairs_that_fail_too_often_are_no_workers(queue, follow, membership, pair, monkeypatch):
    monkeypatch.setattr(admission, "NO_WORKERS_PATIENCE_S", 0.1)
    await follow(*pair)
    for _ in range(10):
        membership.breaker.note_failure(("prefill-0", "decode-0"), time.monotonic(), time.monotonic())
    with pytest.raises(Unavailable, match=r"failed too often.*ready workers: decode-0, prefill-0"):
        await admitted(queue)


async def test_of_those_who_come_to_a_half_open_circuit_one_is_the_trial(queue, follow, membership, pair, eventually):
    await follow(*pair)
    for _ in range(FAILURES_TO_OPEN):
        membership.breaker.note_failure("decode-0", time.monotonic() - 60.0, time.monotonic() - 60.0)
    trial = await place(queue)
    waiting = asyncio.create_task(admitted(queue))
    await eventually(lambda: queue.num_waiting == 1)
    trial.release()
    assert (await waiting).decode == "decode-0"


@pytest.fixture
def slow(forecast, clock):
    """Now a first token takes 1 s, each other one 0.1 s, and a place comes free each 2 s."""
    forecast.note_grant(clock.now_s - 4.0, 0.0)
    forecast.note_grant(clock.now_s - 2.0, 0.0)
    forecast.note_grant(clock.now_s, 10.0)
    forecast.note_first_token(clock.now_s, 1.0)
    forecast.note_tokens(clock.now_s, 1.0, 10)
    forecast.note_end(clock.now_s, 30)
    forecast.note_release(clock.now_s)  # one goes as another asks for its place


NEEDED_S = MARGIN * (1.0 + 5 * 0.1)  # by a request for five tokens


@pytest.mark.usefixtures("slow")
async def test_who_cannot_be_in_time_is_refused_at_once_with_the_times_and_a_hint(make_queue, clock, full):
    queue = make_queue(clock=clock)
    async with await full():
        with pytest.raises(ResourceExhausted, match=r"about 1\.[67] s .* deadline is in 1\.6 s") as caught:
            await admitted(queue, timeout_s=1.6)
        assert caught.value.reason == "DEADLINE_UNREACHABLE"
        assert 0.1 <= caught.value.retry_after_s <= 60.0
        assert queue.num_waiting == 0


@pytest.mark.usefixtures("slow")
async def test_on_idle_workers_everybody_may_try(make_queue, clock, follow, pair):
    await follow(*pair)
    queue = make_queue(clock=clock)
    with await place(queue, timeout_s=0.01), pytest.raises(ResourceExhausted):
        await place(queue, timeout_s=0.01)


@pytest.mark.usefixtures("slow")
async def test_those_who_stand_before_count_and_others_do_not(make_queue, clock, full, eventually):
    queue = make_queue(clock=clock)
    async with await full():
        waiting = [asyncio.create_task(admitted(queue, priority=p, timeout_s=1000.0)) for p in (0, 5)]
        await eventually(lambda: queue.num_waiting == 2)
        for priority, num_ahead in ((-1, 0), (0, 1), (4, 1), (5, 2)):
            needed_s = NEEDED_S + num_ahead * MARGIN * 2.0
            with pytest.raises(ResourceExhausted) as caught:
                await admitted(queue, priority=priority, timeout_s=needed_s - 0.01)
            assert caught.value.retry_after_s == pytest.approx(2 * 2.0)  # when those who wait now are served
            more = asyncio.create_task(admitted(queue, priority=priority, timeout_s=needed_s + 0.01))
            await eventually(lambda: queue.num_waiting == 3)
            more.cancel()
            await asyncio.wait({more})
    await asyncio.gather(*waiting)


@pytest.mark.usefixtures("slow")
async def test_who_has_waited_too_long_leaves_its_place_to_the_next(make_queue, clock, full, pair, eventually):
    queue = make_queue(clock=clock)
    async with await full() as filling:
        late = asyncio.create_task(admitted(queue, timeout_s=2.0))
        await eventually(lambda: queue.num_waiting == 1)
        in_time = asyncio.create_task(admitted(queue, timeout_s=8.0))
        await eventually(lambda: queue.num_waiting == 2)
        clock.now_s += 0.5
        filling.blocks = 32  # it goes on to run, and leaves room
        pair[1].report(num_running=1)
        assert (await in_time).decode == "decode-0"
        with pytest.raises(ResourceExhausted, match=r"deadline is in 1\.5 s") as caught:
            await late
        assert caught.value.reason == "DEADLINE_UNREACHABLE"


@pytest.mark.usefixtures("slow")
async def test_old_news_does_not_turn_anybody_away(make_queue, clock, full, eventually):
    queue = make_queue(clock=clock)
    clock.now_s += 10.1
    async with await full():
        waiting = asyncio.create_task(admitted(queue, timeout_s=0.01))
        await eventually(lambda: queue.num_waiting == 1)
    await waiting


@pytest.mark.usefixtures("slow")
async def test_a_place_counts_in_the_forecast_until_its_release(make_queue, clock, follow, pair, forecast):
    await follow(*pair)
    queue = make_queue(clock=clock)
    before_s = forecast.seconds_needed(clock.now_s, 5, 0)
    placement = await place(queue)
    assert forecast.seconds_needed(clock.now_s, 5, 0) > before_s
    for _ in range(2):
        placement.release()
        assert forecast.seconds_needed(clock.now_s, 5, 0) == pytest.approx(before_s)


@pytest.mark.usefixtures("slow")
async def test_who_had_a_place_is_not_refused_for_a_late_end(make_queue, clock, full, eventually):
    queue = make_queue(clock=clock)
    async with await full():
        waiting = asyncio.create_task(readmitted(queue))
        await eventually(lambda: queue.num_waiting == 1)
    await waiting


async def test_a_fault_of_ours_is_told_to_all_who_wait(queue, full, monkeypatch, eventually):
    def fail(*_):
        raise ZeroDivisionError

    async with await full():
        waiting = [asyncio.create_task(admitted(queue)) for _ in range(3)]
        await eventually(lambda: queue.num_waiting == 3)
        monkeypatch.setattr(admission, "choose", fail)
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError] * 3


async def test_close_ends_granting(queue, full, eventually):
    async with await full():
        waiting = asyncio.create_task(admitted(queue))
        await eventually(lambda: queue.num_waiting == 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await queue.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "grant places"]
        await queue.close()
