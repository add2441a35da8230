import asyncio
import itertools

import pytest

from baton.aio_client import AsyncClient
from bench.load import Load, closed_loop, open_loop

# The first tokens that InferenceServer knows.
REFUSED, DYING, SHORT = [901], [902], [903]
PLAIN = [5, 6]


@pytest.fixture
async def load(inference):
    async with AsyncClient(inference.address) as client:
        yield Load(client, output_tokens=5, cache_salt="run-1", timeout_s=20.0)


async def test_a_request_is_greedy_exact_in_length_and_salted(load, inference):
    await closed_loop(load, [PLAIN], concurrency=1)
    (request,) = inference.requests
    assert list(request.token_ids.ids) == PLAIN
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (5, True)
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert request.cache_salt == "run-1"


async def test_every_token_has_the_time_of_its_piece(load):
    (seen,) = await closed_loop(load, [PLAIN], concurrency=1)
    assert not seen.failure
    times_s = seen.token_times_s  # pieces of 2, 2 and 1
    assert len(times_s) == 5
    assert times_s[0] == times_s[1]
    assert times_s[2] == times_s[3]
    assert [seen.started_at_s, *times_s, seen.ended_at_s] == sorted([seen.started_at_s, *times_s, seen.ended_at_s])
    assert seen.timeline.kv_bytes == 1000


async def test_failures_are_told_and_end_nothing_else(load):
    prompts = [PLAIN, REFUSED, PLAIN, DYING, SHORT, PLAIN]
    measurements = await closed_loop(load, prompts, concurrency=2)
    failures = {m.failure: m.message for m in measurements if m.failure}
    assert failures == {
        "QUEUE_FULL": "the queue is full",
        "UNAVAILABLE": "decode-0: gone",
        "WRONG_LENGTH": "4 tokens came, 5 were asked for",
    }
    assert sum(not m.failure for m in measurements) == 3


async def test_no_server_is_a_failure_of_each_request():
    async with AsyncClient("127.0.0.1:1") as client:
        measurements = await closed_loop(Load(client, 5, "", 5.0), [PLAIN, PLAIN], concurrency=1)
    assert [m.failure for m in measurements] == ["UNAVAILABLE"] * 2


async def test_a_closed_loop_keeps_exactly_so_many_under_way(load, inference):
    barrier = asyncio.Barrier(3)  # opens only when three are under way at once
    inference.hold = barrier.wait
    async with asyncio.timeout(20):
        measurements = await closed_loop(load, [PLAIN] * 9, concurrency=3)
    assert len(measurements) == len(inference.requests) == 9
    assert inference.most_under_way == 3


async def test_each_prompt_of_a_closed_loop_is_sent_once(load, inference):
    prompts = [[token_id] for token_id in range(1, 12)]
    await closed_loop(load, prompts, concurrency=4)
    assert sorted(list(request.token_ids.ids) for request in inference.requests) == prompts


async def test_an_open_loop_does_not_wait_for_answers(load, inference):
    barrier = asyncio.Barrier(4)  # no answer before the last request has come
    inference.hold = barrier.wait
    arrivals_s = [0.0, 0.02, 0.03, 0.05]
    async with asyncio.timeout(20):
        measurements = await open_loop(load, [PLAIN] * 4, arrivals_s)
    assert not any(m.failure for m in measurements)
    due_s = [m.started_at_s - measurements[0].started_at_s for m in measurements]
    assert due_s == pytest.approx(arrivals_s, abs=1e-9)


async def test_time_in_an_open_loop_counts_from_when_a_request_was_due(load, inference):
    released = asyncio.Event()
    inference.hold = released.wait
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, released.set)
    measurements = await open_loop(load, [PLAIN] * 2, [0.0, 0.05])
    # Both are let go at the same moment, 0.1 s after the first was due and 0.05 s after the second.
    first, second = measurements
    assert first.ttft_s >= 0.099
    assert first.ttft_s - second.ttft_s == pytest.approx(0.05, abs=0.04)


async def test_each_end_is_heard_of_once(inference):
    heard = []
    async with AsyncClient(inference.address) as client:
        load = Load(client, 5, "", 20.0, on_done=heard.append)
        measurements = await closed_loop(load, [PLAIN, REFUSED, PLAIN], concurrency=2)
    assert sorted(heard, key=id) == sorted(measurements, key=id)


async def test_cancelling_a_run_cancels_what_is_under_way(load, inference):
    all_arrived, all_gone = asyncio.Event(), asyncio.Event()
    num_arrived, num_gone = itertools.count(1), itertools.count(1)

    async def hold_for_ever():
        if next(num_arrived) == 3:
            all_arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            if next(num_gone) == 3:
                all_gone.set()

    inference.hold = hold_for_ever
    run = asyncio.create_task(closed_loop(load, [PLAIN] * 5, concurrency=3))
    await asyncio.wait_for(all_arrived.wait(), 20)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.wait_for(all_gone.wait(), 20)
    assert len(inference.requests) == 3
