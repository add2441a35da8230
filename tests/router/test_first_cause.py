import asyncio
import time

import pytest

from baton.errors import Aborted, DataLoss, NotFound, Unavailable
from router import first_cause
from router.first_cause import Reads

CONSEQUENCE = Aborted("the push ended", reason="PUSH_ENDED")
CAUSE = DataLoss("a frame was damaged", reason="CHECKSUM")


class Stream:
    """A worker's stream: each read ends with the next answer that the test gives."""

    def __init__(self):
        self._answers = asyncio.Queue()
        self.num_begun = self.num_cancelled = 0

    def brings(self, message):
        self._answers.put_nowait(message)

    def fails(self, error):
        self._answers.put_nowait(error)

    async def read(self):
        self.num_begun += 1
        try:
            answer = await self._answers.get()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(answer, Exception):
            raise answer
        return "event", answer


@pytest.fixture
def streams():
    return Stream(), Stream()


async def test_a_read_brings_its_message(streams):
    prefill, decode = streams
    async with Reads() as reads:
        first, second = reads.start(prefill.read()), reads.start(decode.read())
        decode.brings("committed")
        prefill.brings("token")
        assert await reads.result(second) == "committed"
        assert await reads.result(first) == "token"


async def test_all_are_under_way_at_once(streams, eventually):
    async with Reads() as reads:
        for stream in streams:
            reads.start(stream.read())
        await eventually(lambda: [stream.num_begun for stream in streams] == [1, 1])


async def test_one_that_follows_begins_when_the_earlier_one_is_done(streams, eventually):
    prefill, _ = streams
    async with Reads() as reads:
        first = reads.start(prefill.read())
        second = reads.start_after(first, prefill.read)
        await eventually(lambda: prefill.num_begun == 1)
        prefill.brings("token")
        await eventually(lambda: prefill.num_begun == 2)
        prefill.brings("pushed")
        assert await reads.result(second) == "pushed"
        assert await reads.result(first) == "token"


async def test_one_that_follows_fails_with_the_earlier_one(streams):
    prefill, _ = streams
    async with Reads() as reads:
        first = reads.start(prefill.read())
        second = reads.start_after(first, prefill.read)
        prefill.fails(CAUSE)
        with pytest.raises(DataLoss):
            await reads.result(second)
    assert prefill.num_begun == 1


async def test_a_failure_of_another_ends_the_wait(streams):
    """Nothing comes of the prefill's stream any more if the decode worker has died."""
    prefill, decode = streams
    async with Reads() as reads:
        first = reads.start(prefill.read())
        reads.start(decode.read())
        decode.fails(CAUSE)
        with pytest.raises(DataLoss, match="damaged"):
            await reads.result(first)
    assert prefill.num_cancelled == 1


async def test_what_was_brought_is_told_whatever_happened_to_others(streams, eventually):
    """A first token goes to the client even if the push fails."""
    prefill, decode = streams
    async with Reads() as reads:
        first, second = reads.start(prefill.read()), reads.start(decode.read())
        prefill.brings("token")
        decode.fails(CAUSE)
        await eventually(lambda: first.done() and second.done())
        assert await reads.result(first) == "token"
        with pytest.raises(DataLoss):
            await reads.result(second)


@pytest.mark.parametrize("reason", sorted(first_cause.CONSEQUENCES))
async def test_a_consequence_waits_for_its_cause(streams, reason, eventually):
    prefill, decode = streams
    async with Reads() as reads:
        first, second = reads.start(prefill.read()), reads.start(decode.read())
        waiting = asyncio.create_task(reads.result(second))
        prefill.fails(Aborted("given up", reason=reason))
        await eventually(first.done)
        for _ in range(10):
            await asyncio.sleep(0)
            assert not waiting.done()
        decode.fails(CAUSE)
        with pytest.raises(DataLoss, match="damaged"):
            await waiting


async def test_a_cause_does_not_wait_for_anything(streams, monkeypatch):
    monkeypatch.setattr(first_cause, "FIRST_CAUSE_PATIENCE_S", 60.0)
    prefill, decode = streams
    async with Reads() as reads, asyncio.timeout(30):
        first = reads.start(prefill.read())
        reads.start(decode.read())
        decode.fails(Unavailable("the worker died"))
        with pytest.raises(Unavailable):
            await reads.result(first)


async def test_the_cause_is_told_though_the_consequence_was_first(streams, eventually):
    prefill, decode = streams
    async with Reads() as reads:
        first, second = reads.start(prefill.read()), reads.start(decode.read())
        prefill.fails(CONSEQUENCE)
        decode.fails(CAUSE)
        await eventually(lambda: first.done() and second.done())
        for read in (first, second):
            with pytest.raises(DataLoss):
                await reads.result(read)


async def test_without_a_cause_in_time_the_consequence_is_told(streams, monkeypatch):
    monkeypatch.setattr(first_cause, "FIRST_CAUSE_PATIENCE_S", 0.05)
    prefill, decode = streams
    began_at = time.monotonic()
    async with Reads() as reads:
        first = reads.start(prefill.read())
        reads.start(decode.read())
        prefill.fails(CONSEQUENCE)
        with pytest.raises(Aborted, match="the push ended"):
            await reads.result(first)
    assert time.monotonic() - began_at >= 0.05
    assert decode.num_cancelled == 1


async def test_a_message_of_another_is_no_cause(streams, monkeypatch):
    monkeypatch.setattr(first_cause, "FIRST_CAUSE_PATIENCE_S", 0.05)
    prefill, decode = streams
    async with Reads() as reads:
        first = reads.start(prefill.read())
        reads.start(decode.read())
        prefill.fails(CONSEQUENCE)
        decode.brings("committed")
        with pytest.raises(Aborted):
            await reads.result(first)


async def test_of_several_consequences_one_is_told(streams):
    async with Reads() as reads:
        first, second = (reads.start(stream.read()) for stream in streams)
        for stream in streams:
            stream.fails(NotFound("no such ticket", reason="TICKET_UNKNOWN"))
        for read in (first, second):
            with pytest.raises(NotFound):
                await reads.result(read)


async def test_brought_tells_a_message_and_nothing_else(streams, eventually):
    prefill, decode = streams
    async with Reads() as reads:
        first, second = reads.start(prefill.read()), reads.start(decode.read())
        third = reads.start(decode.read())
        assert reads.brought(first) is None  # under way
        prefill.brings("token")
        decode.fails(CAUSE)
        await eventually(lambda: first.done() and second.done())
        assert reads.brought(first) == "token"
        assert reads.brought(second) is None  # failed
    assert reads.brought(third) is None  # cancelled
    assert reads.brought(first) == "token"


async def test_a_read_is_waited_for_only_so_long(streams):
    prefill, _ = streams
    async with Reads() as reads:
        read = reads.start(prefill.read())
        await reads.wait(read, 0.01)
        assert not read.done()
        prefill.brings("pushed")
        await reads.wait(read, 30.0)
        assert reads.brought(read) == "pushed"


async def test_all_reads_end_with_the_context(streams, eventually):
    prefill, decode = streams
    before = asyncio.all_tasks()

    async def deliver():
        async with Reads() as reads:
            read = reads.start(prefill.read())
            reads.start_after(read, prefill.read)
            reads.start(decode.read())
            await eventually(lambda: prefill.num_begun == decode.num_begun == 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await deliver()
    assert (prefill.num_cancelled, decode.num_cancelled) == (1, 1)
    assert asyncio.all_tasks() == before


async def test_cancelling_who_waits_ends_the_reads(streams, eventually):
    prefill, decode = streams
    before = asyncio.all_tasks()

    async def deliver():
        async with Reads() as reads:
            reads.start(decode.read())
            await reads.result(reads.start(prefill.read()))

    task = asyncio.create_task(deliver())
    await eventually(lambda: prefill.num_begun == decode.num_begun == 1)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert (prefill.num_cancelled, decode.num_cancelled) == (1, 1)
    assert asyncio.all_tasks() == before


async def test_failures_that_nobody_asked_for_are_no_noise(streams, eventually):
    """The loop must not complain of exceptions that were never retrieved."""
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with Reads() as reads:
        tasks = [reads.start(stream.read()) for stream in streams]
        for stream in streams:
            stream.fails(CAUSE)
        await eventually(lambda: all(task.done() for task in tasks))
        tasks.clear()
    del reads
    await asyncio.sleep(0)
    assert complaints == []
