"""A running request is interrupted from outside, with the error it was given, and nobody else is."""

import asyncio
import contextlib

import pytest

from baton.errors import Cancelled, DeadlineExceeded
from router.running_requests import RunningRequest, RunningRequests


class Runner:
    """Requests that run until they are ended, each in its own task."""

    def __init__(self):
        self.requests = RunningRequests()
        self.tasks = []

    async def start(self, request_id):
        started = asyncio.Event()
        task = asyncio.create_task(self._run(RunningRequest(request_id), started))
        self.tasks.append(task)
        await started.wait()
        return task

    async def _run(self, request, started):
        with self.requests.entered(request), request:
            started.set()
            await asyncio.Event().wait()


@pytest.fixture
async def runner():
    runner = Runner()
    yield runner
    for task in runner.tasks:
        task.cancel()
    await asyncio.gather(*runner.tasks, return_exceptions=True)
    assert runner.requests.num_running == 0


async def test_only_requests_with_exactly_this_id_are_ended(runner):
    tasks = {request_id: await runner.start(request_id) for request_id in ("a", "ab", "abc", "A")}
    assert runner.requests.abort("a") == 1
    with pytest.raises(Cancelled, match="request a was aborted") as caught:
        await tasks.pop("a")
    assert caught.value.reason == "ABORTED_BY_ID"
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks.values())
    assert runner.requests.num_running == 3
    assert [runner.requests.abort(request_id) for request_id in ("", "b", "abcd")] == [0, 0, 0]


async def test_all_that_share_an_id_are_ended_and_each_is_counted_once(runner):
    tasks = [await runner.start("abc") for _ in range(3)]
    assert (runner.requests.abort("abc"), runner.requests.abort("abc")) == (3, 0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Cancelled] * 3
    assert runner.requests.abort("abc") == 0


async def test_the_first_error_counts():
    request = RunningRequest("r")

    async def run():
        with request:
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    assert request.end(DeadlineExceeded("first"))
    assert not request.end(Cancelled("second"))
    with pytest.raises(DeadlineExceeded, match="first"):
        await task
    assert task.cancelling() == 0


async def test_who_is_ended_before_its_block_does_not_enter_it():
    request = RunningRequest("r")
    request.end(Cancelled("early"))
    with pytest.raises(Cancelled, match="early"), request:
        pytest.fail("entered")


async def test_who_is_ended_after_its_block_goes_on():
    request = RunningRequest("r")
    with request:
        await asyncio.sleep(0)
    request.end(Cancelled("late"))
    await asyncio.sleep(0)


async def test_an_end_that_meets_the_last_result_is_still_the_end():
    """What is waited for is there already when the end comes: whoever was told that it was ended is right."""
    request, result = RunningRequest("r"), asyncio.get_running_loop().create_future()

    async def run():
        with request:
            await result

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    result.set_result(None)
    assert request.end(Cancelled("in the same moment"))
    with pytest.raises(Cancelled, match="in the same moment"):
        await task


async def test_an_interruption_that_gets_lost_on_its_way_is_still_the_end():
    request = RunningRequest("r")

    async def run():
        with request, contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    assert request.end(Cancelled("ended"))
    with pytest.raises(Cancelled, match="ended"):
        await task


async def test_a_cancelled_task_stays_cancelled_even_if_the_request_was_ended_too():
    request = RunningRequest("r")

    async def run():
        with request:
            await asyncio.Event().wait()

    for end_first in (True, False):
        request = RunningRequest("r")
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        if end_first:
            request.end(Cancelled("ended"))
        task.cancel()
        request.end(Cancelled("ended"))
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_another_error_of_the_block_passes_and_the_task_can_go_on():
    """Such as one of the clean-up after the interruption."""
    request = RunningRequest("r")

    async def interrupted():
        with request:
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("clean-up")

    async def run():
        with pytest.raises(ValueError, match="clean-up"):
            await interrupted()
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        return asyncio.current_task().cancelling()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    request.end(Cancelled("ended"))
    assert await task == 0
