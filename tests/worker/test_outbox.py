import asyncio

import pytest

from worker.outbox import Outbox


async def rest_of(outbox):
    return [message async for message in outbox]


async def test_messages_come_in_order_and_then_the_end():
    outbox = Outbox()
    outbox.put(1)
    outbox.put(2)
    outbox.end()
    assert await rest_of(outbox) == [1, 2]
    assert await rest_of(outbox) == []


async def test_the_error_comes_after_the_messages_before_it():
    outbox = Outbox()
    outbox.put(1)
    outbox.end(ValueError("first"))
    outbox.end(ValueError("second"))
    outbox.end()
    outbox.put(2)
    assert await anext(outbox) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await anext(outbox)


@pytest.mark.parametrize("says", ["message", "end", "error"])
async def test_who_waits_hears_at_once(says):
    outbox = Outbox()
    waiting = asyncio.create_task(rest_of(outbox))
    await asyncio.sleep(0)
    assert not waiting.done()
    if says == "message":
        outbox.put(1)
    outbox.end(ValueError("no") if says == "error" else None)
    await asyncio.wait({waiting}, timeout=5)
    if says == "error":
        assert isinstance(waiting.exception(), ValueError)
    else:
        assert waiting.result() == [1] * (says == "message")


async def test_a_message_counts_as_sent_when_the_next_one_is_asked_for():
    """Until then the call may still be writing it."""
    outbox = Outbox()
    await outbox.sent()  # of nothing
    outbox.put(1)
    sent = asyncio.create_task(outbox.sent())
    assert await anext(outbox) == 1
    await asyncio.sleep(0)
    assert not sent.done()
    next_one = asyncio.create_task(anext(outbox))
    await asyncio.wait({sent}, timeout=5)
    assert sent.done()
    outbox.put(2)
    assert await next_one == 2
