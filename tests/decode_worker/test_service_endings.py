"""How decode calls end at each point of their life: cancelled, handed back, drained, or held and let go again."""

import asyncio
from contextlib import contextmanager

import grpc
import pytest
from worker_rig import HELLO, HELLO_ANSWER, decode_request, hand_over, prefill_request, read, read_tokens

from baton.errors import from_rpc_error
from prefill_worker.push import open_push
from worker.fault_injection import HoldSpec
from worker.fault_points import FaultPoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33
PROMPTLY_S = 30.0  # far less than anybody is held


async def failure_of(call):
    """What the call ends with, after whatever comes before it, in good time."""

    async def rest():
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(rest(), PROMPTLY_S)
    return from_rpc_error(caught.value)


@contextmanager
def held(worker, point):
    """Requests that come to the point stay there; yields the list of those that have come."""
    hits = []
    with worker.faults.hold(HoldSpec(point, max_hold_s=600), hits.append):
        yield hits


class Calls:
    """A request's two calls, as far as its stage needs them."""

    def __init__(self, prefill, decode):
        self.prefill_worker, self.decode_worker = prefill, decode

    def open(self, **fields):
        request = decode_request(PROMPT, request_id="r", max_tokens=200, **fields)
        self.decode = self.decode_worker.decode(request, timeout_s=60)

    async def push(self):
        ticket = (await read(self.decode, "reserved")).ticket
        self.prefill = self.prefill_worker.prefill(prefill_request(PROMPT, ticket, request_id="r"))

    def cancel(self):
        self.decode.cancel()
        if hasattr(self, "prefill"):
            self.prefill.cancel()


STAGES = ["accepted", "reserved", "receiving", "first step", "running", "prefilling here", "running here"]
POINTS = {"accepted": FaultPoint.RESERVING, "first step": FaultPoint.FIRST_STEP, "running": FaultPoint.DECODING}


@contextmanager
def kept_there(decode, stage):
    """What keeps a request at its stage."""
    if stage == "receiving":
        decode.gate.shut()
    try:
        if stage in POINTS:
            with held(decode, POINTS[stage]) as hits:
                yield hits
        else:
            yield []
    finally:
        decode.gate.open()


async def bring_to(stage, calls, hits, eventually):
    decode = calls.decode_worker
    calls.open(prefill_locally=stage.endswith("here"))
    if stage in ("receiving", "first step", "running"):
        await calls.push()
    if stage in POINTS:
        await eventually(lambda: hits)
    elif stage == "reserved":
        await read(calls.decode, "reserved")
    elif stage == "receiving":
        await eventually(lambda: decode.gate.frames)
    elif stage == "prefilling here":
        await eventually(lambda: decode.num_owned_blocks)
    elif stage == "running here":
        await read(calls.decode, "reserved")
        await read(calls.decode, "tokens")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancelled", "drained"])
async def test_a_call_ends_promptly_at_whatever_stage_and_all_is_released(workers, eventually, stage, how):
    prefill, decode = workers
    calls = Calls(prefill, decode)
    with kept_there(decode, stage) as hits:
        await bring_to(stage, calls, hits, eventually)
        if how == "cancelled":
            calls.decode.cancel()
        else:
            assert decode.draining.num_open_calls == 1
            decode.draining.expire()
            error = await failure_of(calls.decode)
            assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "DRAINING")
            assert error.metadata["worker"] == "decode-0"
        await eventually(lambda: decode.is_clean, PROMPTLY_S)
        assert await decode.draining.wait_idle(PROMPTLY_S)
    calls.cancel()


async def test_a_draining_worker_takes_no_new_calls_and_ends_those_it_has(workers):
    """A push for a call that is open is one of these."""
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    ticket = (await read(call, "reserved")).ticket
    decode.draining.begin()
    for request in (decode_request(PROMPT), decode_request(PROMPT, prefill_locally=True)):
        error = await failure_of(decode.decode(request))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert not await decode.draining.wait_idle(0)
    prefill_call = prefill.prefill(prefill_request(PROMPT, ticket))
    await read(prefill_call, "first_token")
    await read(call, "committed")
    assert (await read_tokens(call))[0] == HELLO_ANSWER[1:]
    assert await decode.draining.wait_idle(PROMPTLY_S)


async def test_the_sender_hears_that_a_request_was_handed_back(workers, eventually):
    """Both streams tell the router the same."""
    prefill, decode = workers
    calls = Calls(prefill, decode)
    with kept_there(decode, "receiving"):
        await bring_to("receiving", calls, [], eventually)
        decode.draining.expire()
        for call in (calls.decode, calls.prefill):
            error = await failure_of(call)
            assert (error.reason, error.metadata["worker"]) == ("DRAINING", "decode-0")


@pytest.mark.parametrize("stage", POINTS)
async def test_a_request_that_was_held_goes_on_as_if_nothing_had_been(workers, eventually, stage):
    prefill, decode = workers
    with held(decode, POINTS[stage]) as hits:
        handing = asyncio.create_task(hand_over(prefill, decode, decode_request(PROMPT, request_id="r")))
        await eventually(lambda: hits)
        assert not handing.done()
    assert (await handing).token_ids == HELLO_ANSWER
    assert {hit.request_id for hit in hits} == {"r"}
    # Before there is a push, the other worker is not known.
    assert {hit.peer for hit in hits} == {"" if stage == "accepted" else "prefill-0"}


async def test_each_message_of_tokens_passes_a_point(workers):
    """The first of them another one than those after it."""
    prefill, decode = workers
    passed = []
    with (
        decode.faults.hold(HoldSpec(FaultPoint.FIRST_STEP), passed.append),
        decode.faults.hold(HoldSpec(FaultPoint.DECODING), passed.append),
    ):
        calls = Calls(prefill, decode)
        calls.open()
        await calls.push()
        await read(calls.decode, "committed")
        for _ in range(3):
            await read(calls.decode, "tokens")
        calls.cancel()
    points = [hit.point for hit in passed]
    assert points[0] is FaultPoint.FIRST_STEP
    assert set(points[1:]) == {FaultPoint.DECODING}
    assert len(points) >= 3


async def test_a_sequence_that_lacks_blocks_is_handed_back_with_the_tokens_it_has(workers, eventually):
    """Two fill the pool; the less important one must go, and tells so after its last token."""
    _, decode = workers
    important = decode.decode(decode_request([1] * 216, 60, prefill_locally=True, priority=-1), timeout_s=110)
    other = decode.decode(decode_request([HELLO] * 216, 60, prefill_locally=True, priority=1), timeout_s=110)
    token_ids = []

    async def read_all():
        await read(other, "reserved")
        while True:
            token_ids.extend((await read(other, "tokens")).token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "PREEMPTED")
    await read(important, "reserved")
    assert len((await read_tokens(important))[0]) == 60
    await eventually(lambda: decode.is_clean)
    again = decode.decode(decode_request([HELLO] * 216, 60, prefill_locally=True), timeout_s=110)
    await read(again, "reserved")
    alone, _ = await read_tokens(again)
    assert 0 < len(token_ids) < 60
    assert token_ids == alone[: len(token_ids)]


@pytest.mark.parametrize("locally", [False, True])
async def test_the_priority_reaches_the_engine(workers, locally):
    _, decode = workers
    call = decode.decode(decode_request(PROMPT, priority=-7, max_tokens=300, prefill_locally=locally))
    await read(call, "reserved")
    (sequence,) = decode.host.engine._scheduler._sequences.values()
    assert sequence.priority == -7
    call.cancel()


async def test_a_push_hears_at_once_that_its_request_is_over(workers):
    """Also when it has nothing to say itself."""
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    ticket = (await read(call, "reserved")).ticket
    push = await open_push(prefill.host, prefill.peers, ticket)
    call.cancel()
    async with asyncio.timeout(PROMPTLY_S):
        await asyncio.wait({push.answer})
    error = push.answer.exception()
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "TICKET_CLOSED")
    assert ticket.id in str(error)
    assert push.stop()
