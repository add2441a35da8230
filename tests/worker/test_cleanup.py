import asyncio

import pytest

from worker.cleanup import Stragglers, finish


async def test_the_result_or_the_error_is_that_of_the_work():
    async def work(result):
        await asyncio.sleep(0)
        if isinstance(result, Exception):
            raise result
        return result

    assert await finish(work(5)) == 5
    with pytest.raises(ValueError, match="no"):
        await finish(work(ValueError("no")))


@pytest.mark.parametrize("num_cancellations", [1, 3])
async def test_a_cancelled_caller_waits_for_the_end(num_cancellations):
    may_end, has_begun = asyncio.Event(), asyncio.Event()
    steps = []

    async def work():
        has_begun.set()
        await may_end.wait()
        steps.append("worked")

    async def caller():
        try:
            await finish(work())
        finally:
            steps.append("left")

    task = asyncio.create_task(caller())
    await has_begun.wait()
    for _ in range(num_cancellations):
        task.cancel()
        await asyncio.sleep(0)  # lets the cancellation arrive
    assert not task.done()
    may_end.set()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert steps == ["worked", "left"]


async def test_a_straggler_runs_on_until_it_is_done_or_given_up():
    stragglers, may_end = Stragglers(), asyncio.Event()
    ended = []

    async def release(name, event):
        try:
            await event.wait()
            ended.append(name)
        except asyncio.CancelledError:
            ended.append(f"{name} given up")
            raise

    stragglers.start(release("first", may_end))
    stragglers.start(release("second", asyncio.Event()))
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.sleep(0)
    assert ended == ["first"]
    await stragglers.close()
    await stragglers.close()
    assert ended == ["first", "second given up"]
