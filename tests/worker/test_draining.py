import asyncio
from contextlib import ExitStack

import pytest

from baton.errors import Aborted, Unavailable
from worker.draining import Draining


def never(error):
    raise AssertionError(error)


async def test_without_calls_it_is_idle():
    assert await Draining().wait_idle(0)


async def test_it_is_idle_when_the_last_call_has_ended():
    draining = Draining()
    with ExitStack() as calls:
        calls.enter_context(draining.call(never))
        with draining.call(never):
            assert draining.num_open_calls == 2
        assert not await draining.wait_idle(0)
        waiting = asyncio.create_task(draining.wait_idle(5))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting
    assert draining.num_open_calls == 0
    with draining.call(never):
        assert not await draining.wait_idle(0)


async def test_no_new_calls_while_those_that_are_open_go_on():
    draining = Draining()
    with draining.call(never):
        assert not draining.is_draining
        draining.begin()
        draining.begin()
        assert draining.is_draining
        with pytest.raises(Unavailable, match="is draining") as caught, draining.call(never):
            raise AssertionError("not reached")
        assert caught.value.reason == "DRAINING"
        assert draining.num_open_calls == 1
    assert await draining.wait_idle(0)


async def test_a_call_that_fails_has_ended_too():
    draining = Draining()
    with pytest.raises(ValueError, match="no"), draining.call(never):
        raise ValueError("no")
    assert await draining.wait_idle(0)


async def test_at_the_end_of_its_patience_every_open_call_is_handed_back():
    draining, errors = Draining(), []
    with draining.call(errors.append):
        pass
    with ExitStack() as calls:
        for _ in range(2):
            calls.enter_context(draining.call(errors.append))
        draining.expire()
        assert draining.is_draining
    assert [(type(error), error.reason) for error in errors] == [(Aborted, "DRAINING")] * 2
    assert all("is draining" in str(error) for error in errors)


async def test_a_call_may_end_while_it_is_handed_back():
    """As when one call's end ends another one."""
    draining = Draining()
    first, second = ExitStack(), ExitStack()
    first.enter_context(draining.call(lambda _: second.close()))
    second.enter_context(draining.call(lambda _: first.close()))
    draining.expire()
    first.close()
    assert await draining.wait_idle(0)
