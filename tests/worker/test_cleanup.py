import asyncio

import pytest

from worker.cleanup import finish


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
