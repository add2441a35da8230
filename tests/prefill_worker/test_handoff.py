import pytest
import pytest_asyncio
from worker_rig import HELLO, decode_request, prefill_request, read

from baton.errors import Aborted, InvalidRequest, Unavailable
from prefill_worker.handoff import Handoff
from prefill_worker.handoff_machine import Event
from prefill_worker.push import open_push
from worker.cleanup import Stragglers

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33


def handoff_of(worker, token_ids, on_started=lambda: None):
    return Handoff(worker.host, prefill_request(token_ids), Stragglers(), on_started)


@pytest_asyncio.fixture(loop_scope="session")
async def push(workers):
    """A push to a decode worker that has reserved blocks for the prompt."""
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    yield await open_push(prefill.host, prefill.peers, (await read(call, "reserved")).ticket)
    call.cancel()


async def end_of(handoff):
    """What is told in the end, and the messages before."""
    return [message async for message in handoff.outbox]


async def test_without_a_push_token_0_is_all(workers):
    prefill, started = workers[0], []
    handoff = handoff_of(prefill, PROMPT, lambda: started.append(1))
    handoff.open(None)
    handoff.handle(Event.ADMITTED)
    handoff.acknowledge_kv(None)
    assert not handoff.may_commit.is_set()
    assert (await anext(handoff.outbox)).first_token.token_id == handoff.first_token_id
    assert handoff.may_commit.is_set()
    handoff.handle(Event.COMMITTED)
    assert [message.WhichOneof("event") for message in await end_of(handoff)] == ["pushed"]
    assert started == [1]
    assert prefill.host.engine.load().num_sequences == 0


async def test_what_the_engine_refuses_ends_the_push(workers, push, eventually):
    """More tokens than the pool has."""
    prefill, _ = workers
    handoff = handoff_of(prefill, [1] * 1025)
    handoff.open(push)
    handoff.handle(Event.ADMITTED)
    with pytest.raises(InvalidRequest, match="1025"):
        await end_of(handoff)
    await eventually(push.answer.cancelled)
    assert push.stop()


async def test_all_is_released_in_the_step_that_ends_it(workers, push):
    prefill, _ = workers
    handoff = handoff_of(prefill, PROMPT)
    handoff.open(push)
    handoff.handle(Event.ADMITTED)
    assert prefill.host.engine.load().num_sequences == 1
    handoff.hand_back(Aborted("enough"))
    assert prefill.host.engine.load().num_sequences == 0
    handoff.handle(Event.PUSH_LOST, Unavailable("as it was stopped"))
    with pytest.raises(Aborted, match="enough"):
        await end_of(handoff)
    handoff.end_call()


async def test_a_push_that_opens_too_late_is_stopped(workers, push, eventually):
    handoff = handoff_of(workers[0], PROMPT)
    handoff.end_call()
    handoff.open(push)
    await eventually(push.answer.cancelled)
