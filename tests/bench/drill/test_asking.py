import asyncio
import itertools

import pytest

from baton.aio_client import AsyncClient
from bench.drill.asking import Asker, StreamPlan, keep_streams
from bench.drill.questions import Question

# The first tokens that InferenceServer knows.
REFUSED, DYING = 901, 902


def question(first_token=5, max_tokens=4, **fields):
    return Question(
        **{"number": 0, "token_ids": (first_token, 6), "temperature": 0.0, "seed": 3, **fields}, max_tokens=max_tokens
    )


@pytest.fixture
async def asker(inference):
    async with AsyncClient(inference.address) as client:
        yield Asker(client, "run", timeout_s=20.0)


async def test_a_question_is_asked_as_it_is_meant(asker, inference):
    asked = await asker.ask(question(), "7", salt="own")
    (request,) = inference.requests
    assert list(request.token_ids.ids) == [5, 6]
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (4, True)
    assert (request.sampling.temperature, request.sampling.seed) == (0, 3)
    assert (request.request_id, request.cache_salt) == ("run-7", "run-own")
    assert asked.request_id == "run-7"
    assert asked.token_ids == (0, 1, 2, 3)
    assert len(asked.token_times_s) == 4
    assert (asked.failure, asked.is_cancelled) == ("", False)
    assert asked.started_at_s <= asked.token_times_s[0] <= asked.ended_at_s


async def test_failures_keep_what_came_before(asker):
    dying = await asker.ask(question(DYING), "1", salt="")
    assert (dying.failure, dying.token_ids) == ("UNAVAILABLE", (0, 1))
    refused = await asker.ask(question(REFUSED), "2", salt="")
    assert (refused.failure, refused.message, refused.token_ids) == ("QUEUE_FULL", "the queue is full", ())


async def test_a_cancel_before_anything_is_sent(asker):
    asked = await asker.ask(question(), "1", salt="", cancel_after_s=0.0)
    assert asked.is_cancelled
    assert asked.token_ids == ()


async def test_a_cancel_on_the_way(asker, inference, eventually):
    inference.hold = asyncio.Event().wait
    asked = await asker.ask(question(), "1", salt="", cancel_after_s=0.05)
    assert asked.is_cancelled
    await eventually(lambda: inference.num_under_way == 0)


async def test_a_cancel_that_comes_too_late_changes_nothing(asker):
    asked = await asker.ask(question(), "1", salt="", cancel_after_s=60.0)
    assert not asked.is_cancelled
    assert len(asked.token_ids) == 4


async def test_a_stream_over_its_deadline_has_failed(inference):
    inference.hold = asyncio.Event().wait
    async with AsyncClient(inference.address) as client:
        asked = await Asker(client, "run", timeout_s=0.1).ask(question(), "1", salt="")
    assert asked.failure == "DEADLINE_EXCEEDED"


class TestStreams:
    async def run(self, asker, questions, plan, num_wanted):
        stopped, done = asyncio.Event(), []

        def on_done(asked):
            done.append(asked)
            if len(done) == num_wanted:
                stopped.set()

        async with asyncio.timeout(60):
            await keep_streams(asker, questions, plan, stopped, on_done)
        return done

    async def test_so_many_at_all_times_until_stopped(self, asker, inference):
        barrier = asyncio.Barrier(3)  # opens only when three are under way at once
        inference.hold = barrier.wait
        done = await self.run(asker, [question()], StreamPlan(3, seed=1), num_wanted=7)
        assert inference.most_under_way == 3
        assert len(done) == len(inference.requests) == 9  # what is under way at the end is waited for
        assert len({asked.request_id for asked in done}) == 9

    async def test_most_have_a_cache_of_their_own(self, asker, inference):
        await self.run(asker, [question()], StreamPlan(1, seed=1), num_wanted=40)
        salts = [request.cache_salt for request in inference.requests]
        assert 1 < salts.count("run-shared") < 20
        own = [salt for salt in salts if salt != "run-shared"]
        assert len(set(own)) == len(own)

    async def test_a_seed_asks_the_same_again(self, asker, inference):
        questions = [question(number=i, first_token=i) for i in range(5)]
        for _ in range(2):
            await self.run(asker, questions, StreamPlan(1, seed=4), num_wanted=10)
        firsts = [request.token_ids.ids[0] for request in inference.requests]
        assert firsts[:10] == firsts[10:]
        assert len(set(firsts)) > 1

    async def test_a_share_is_cancelled(self, asker, inference):
        numbers = itertools.count()

        async def hold():  # every other request takes for ever, unless it is cancelled
            if next(numbers) % 2:
                await asyncio.sleep(0.1)

        inference.hold = hold
        plan = StreamPlan(2, seed=1, cancel_share=1.0, usual_s=[0.05])
        done = await self.run(asker, [question()], plan, num_wanted=30)
        assert any(asked.is_cancelled for asked in done)
        assert all(asked.is_cancelled or not asked.failure for asked in done)
