"""A request whose workers fail goes on with others; its client sees every token once."""

import asyncio
import random
import time

import pytest

from baton.errors import (
    Aborted,
    BatonError,
    DataLoss,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from baton.v1 import request_pb2
from router import membership as membership_module
from router.circuit_breaker import FAILURES_TO_OPEN
from router.outcome import Outcome
from router.recovery import HEADROOM_TOKENS, MAX_TRIES_WITHOUT_PROGRESS
from router.retry_budget import RetryBudget

ANSWER = list(range(100, 112))
GONE = Unavailable("it died")
PREEMPTED = Aborted("no blocks", reason="PREEMPTED")
DRAINING = Aborted("it leaves", reason="DRAINING")


@pytest.fixture
async def two_pairs(start_worker, follow):
    """By name."""
    roles = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
    workers = {name: await start_worker(name, role) for name, role in roles.items()}
    await follow(*workers.values())
    return workers


def fails_after(script, num_messages, error):
    """The script's first messages, then the failure."""

    async def failing(request):
        num_left = num_messages
        async for response in script(request):
            if num_left == 0:
                break
            num_left -= 1
            yield response
        raise error

    return failing


def once(worker, method, num_messages, error):
    """Breaks a worker's script for its next call only."""
    whole = getattr(worker, method)
    broken = fails_after(whole, num_messages, error)

    async def script(request):
        setattr(worker, method, whole)
        async for response in broken(request):
            yield response

    setattr(worker, method, script)


def token_by_token(worker, messages):
    """A decode script with a message for each token."""

    async def script(request):
        yield messages.reserved()
        yield messages.committed()
        first = 100 + max(0, len(request.token_ids) - 3)
        for token_id in range(first + 1, first + request.stopping.max_tokens):
            yield messages.tokens(token_id)
        yield messages.finished()

    worker.decode = script


POINTS = {
    "before the reservation": ("decode", 0, 0),
    "after the reservation": ("decode", 1, 0),
    "before the first token": ("prefill", 0, 0),
    "after the first token": ("decode", 1, 1),
    "after the commit": ("decode", 2, 1),
    "after three tokens": ("decode", 4, 3),
    "after the last token": ("decode", 13, 12),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("error", [GONE, DataLoss("damaged"), InternalError("a step failed"), DRAINING])
async def test_wherever_a_worker_fails_the_answer_is_whole(
    dispatch, prompt_request, two_pairs, messages, point, error, eventually, is_idle
):
    role, num_messages, num_tokens_there = POINTS[point]
    for name in ("decode-0", "decode-1"):
        token_by_token(two_pairs[name], messages)
    once(two_pairs[f"{role}-0"], role, num_messages, error)
    token_ids, outcome = await dispatch(prompt_request(max_tokens=12, seed=9, temperature=0.8))
    assert token_ids == ANSWER
    assert (outcome.num_tokens, outcome.reason) == (12, request_pb2.FINISH_REASON_LENGTH)
    await eventually(is_idle)
    await eventually(lambda: not any(worker.open_calls for worker in two_pairs.values()))
    if num_tokens_there == 12:
        assert outcome.timeline.num_recoveries == 0
        return
    assert outcome.timeline.num_recoveries == 1
    assert error.message in outcome.timeline.recovery_reason
    last = two_pairs["decode-1"].decode_requests[-1:] or two_pairs["decode-0"].decode_requests[-1:]
    assert len(last[0].token_ids) + last[0].stopping.max_tokens == 3 + 12
    assert last[0].sampling.seed == 9
    if role == "decode":
        assert outcome.timeline.decode_worker == "decode-1"
        # The first token comes from elsewhere and may have been a moment later than the failure.
        there = [*ANSWER[: max(num_tokens_there, 1)]]
        assert list(last[0].token_ids) in ([1, 2, 3, *there], [1, 2, 3] if num_tokens_there < 2 else None)


async def test_the_first_tokens_time_is_the_first_tokens_time(dispatch, prompt_request, two_pairs, messages):
    """What comes after a recovery changes nothing about the past."""
    for name in ("decode-0", "decode-1"):
        token_by_token(two_pairs[name], messages)
    once(two_pairs["decode-0"], "decode", 4, GONE)
    _, outcome = await dispatch(prompt_request(max_tokens=12))
    t = outcome.timeline
    parts = (t.queue_s, t.reserve_s, t.dispatch_s, t.prefill_queue_s, t.prefill_s)
    assert sum(parts) == pytest.approx(t.ttft_s)
    assert t.kv_bytes == 10  # of both transfers


async def test_what_failed_tries_took_before_the_first_token_was_waiting(dispatch, prompt_request, two_pairs):
    once(two_pairs["prefill-0"], "prefill", 0, GONE)
    _, outcome = await dispatch()
    t = outcome.timeline
    parts = (t.queue_s, t.reserve_s, t.dispatch_s, t.prefill_queue_s, t.prefill_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(t.ttft_s)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_fails_whenever_no_token_is_lost_doubled_or_changed(
    dispatch, prompt_request, two_pairs, messages, seed, eventually, is_idle
):
    draw = random.Random(seed)

    def flaky(worker, method):
        whole = getattr(worker, method)

        def script(request):
            if draw.random() < 0.4:
                error = draw.choice([GONE, DRAINING, PREEMPTED, DataLoss("damaged"), InternalError("bug")])
                return fails_after(whole, draw.randrange(8), error)(request)
            return whole(request)

        setattr(worker, method, script)

    for name, worker in two_pairs.items():
        role = name.split("-")[0]
        if role == "decode":
            token_by_token(worker, messages)
        flaky(worker, role)
    outcome, failure, token_ids = Outcome(time.monotonic()), None, None
    try:
        token_ids, _ = await dispatch(prompt_request(max_tokens=12), outcome)
    except BatonError as error:
        failure = error
    if failure is None:
        assert token_ids == ANSWER
    else:
        assert failure.metadata["recoveries"] == str(outcome.timeline.num_recoveries)
        assert outcome.num_tokens < 12
    await eventually(is_idle)
    await eventually(lambda: not any(worker.open_calls for worker in two_pairs.values()))


async def test_a_worker_that_falls_silent_loses_its_requests(
    monkeypatch, dispatch, prompt_request, two_pairs, messages, eventually
):
    """Frozen: its connections stay open and nothing comes any more."""
    monkeypatch.setattr(membership_module, "SILENCE_LIMIT_S", 0.2)
    decode = two_pairs["decode-0"]
    frozen = asyncio.Event()

    async def freeze(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101)
        decode.is_silent = True
        frozen.set()
        await asyncio.Event().wait()

    decode.decode = freeze
    running = asyncio.create_task(dispatch(prompt_request(max_tokens=12)))
    async with asyncio.timeout(5):
        await frozen.wait()
    while not running.done():  # all others go on speaking
        for name in ("prefill-0", "prefill-1", "decode-1"):
            two_pairs[name].report()
        await asyncio.wait({running}, timeout=0.02)
    token_ids, outcome = running.result()
    assert token_ids == ANSWER
    assert outcome.timeline.decode_worker == "decode-1"
    assert "silent" in outcome.timeline.recovery_reason
    await eventually(lambda: not decode.open_calls)


async def test_a_preempted_request_comes_back_when_there_is_room_to_grow(
    dispatch, prompt_request, followed_pair, messages, eventually
):
    decode = followed_pair[1]
    token_by_token(decode, messages)
    once(decode, "decode", 3, PREEMPTED)
    num_free = HEADROOM_TOKENS // 16
    decode.report(num_free_blocks=num_free)
    await eventually(lambda: decode.num_subscriptions)
    running = asyncio.create_task(dispatch(prompt_request(max_tokens=200)))
    await eventually(lambda: len(decode.decode_requests) == 1)
    await asyncio.wait({running}, timeout=0.2)
    assert len(decode.decode_requests) == 1  # five tokens and 64 more do not fit into four blocks
    decode.report(num_free_blocks=num_free + 1)
    token_ids, _ = await running
    assert token_ids == list(range(100, 300))


@pytest.fixture
async def followed_pair(pair, follow):
    await follow(*pair)
    return pair


async def test_tries_are_bounded_and_the_first_cause_is_told(dispatch, two_pairs, is_idle, eventually):
    for name in ("decode-0", "decode-1"):
        two_pairs[name].before_decode += [InternalError(f"broken {i}") for i in range(20)]
    with pytest.raises(InternalError, match="broken 0") as caught:
        await dispatch()
    assert caught.value.metadata["recoveries"] == str(MAX_TRIES_WITHOUT_PROGRESS - 1)
    num_tries = sum(len(two_pairs[name].decode_requests) for name in ("decode-0", "decode-1"))
    assert num_tries == MAX_TRIES_WITHOUT_PROGRESS
    await eventually(is_idle)


async def test_an_empty_budget_ends_the_request_with_its_failure(dispatch, make_dispatcher, two_pairs):
    dispatcher = make_dispatcher()
    dispatcher._budget = RetryBudget(capacity=0, per_request=0, per_second=0)
    two_pairs["decode-0"].before_decode.append(GONE)
    with pytest.raises(Unavailable, match="it died"):
        await dispatch(dispatcher=dispatcher)


async def test_without_other_workers_the_cause_is_told_after_a_while(dispatch, make_dispatcher, followed_pair):
    dispatcher = make_dispatcher(recovery_patience_s=0.1)
    decode = followed_pair[1]
    decode.before_decode.append(GONE)
    decode.report(is_ready=False)
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await dispatch(dispatcher=dispatcher)


async def test_a_request_that_is_wrong_is_not_tried_again(dispatch, two_pairs):
    two_pairs["decode-0"].before_decode.append(InvalidRequest("never fits"))
    with pytest.raises(InvalidRequest):
        await dispatch()
    assert not two_pairs["decode-1"].decode_requests


async def test_a_full_worker_in_mid_stream_is_no_failure(dispatch, prompt_request, two_pairs, messages, eventually):
    for name in ("decode-0", "decode-1"):
        token_by_token(two_pairs[name], messages)
    once(two_pairs["decode-0"], "decode", 4, ResourceExhausted("full"))
    running = asyncio.create_task(dispatch(prompt_request(max_tokens=12)))
    while not running.done():
        two_pairs["decode-0"].report(num_running=2)
        await asyncio.wait({running}, timeout=0.01)
    token_ids, outcome = running.result()
    assert token_ids == ANSWER
    assert outcome.timeline.num_recoveries == 0


async def test_a_sick_worker_is_taken_out_and_comes_fully_back(
    dispatch, make_dispatcher, membership, two_pairs, eventually
):
    dispatcher = make_dispatcher()
    sick = two_pairs["decode-0"]
    sick.before_decode += [InternalError("broken")] * FAILURES_TO_OPEN
    num_sent = 0
    while num_sent < 50 and len(sick.before_decode) > 0:
        num_sent += 1
        assert (await dispatch(dispatcher=dispatcher))[0] == [100, 101, 102, 103]
    assert {v.name for v in membership.views()} == {"prefill-0", "prefill-1", "decode-1"}
    num_asked = len(sick.decode_requests)
    for _ in range(6):
        await dispatch(dispatcher=dispatcher)
    assert len(sick.decode_requests) == num_asked
    await eventually(lambda: "decode-0" in {v.name for v in membership.views()})
    for _ in range(4):
        await dispatch(dispatcher=dispatcher)
    assert len(sick.decode_requests) >= num_asked + 2


async def test_wrong_requests_take_no_worker_out(dispatch, make_dispatcher, membership, followed_pair):
    dispatcher = make_dispatcher()
    followed_pair[1].before_decode += [InvalidRequest("too long")] * 20
    for _ in range(20):
        with pytest.raises(InvalidRequest):
            await dispatch(dispatcher=dispatcher)
    assert (await dispatch(dispatcher=dispatcher))[0] == [100, 101, 102, 103]


async def test_the_deadline_bounds_all_tries(dispatch, followed_pair):
    followed_pair[1].before_decode += [GONE] * 1000
    began_at = time.monotonic()
    with pytest.raises(BatonError):
        await dispatch(timeout_s=0.5)
    assert time.monotonic() - began_at < 5.0
