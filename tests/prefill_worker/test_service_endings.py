"""How prefill calls end at each point of their life: cancelled, drained, or held and let go again."""

import asyncio
import logging
import socket
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from worker_rig import HELLO, HELLO_ANSWER, SlowPool, decode_request, hand_over, prefill_request, read

from baton.errors import Aborted, from_rpc_error
from kv_transfer import sender as sender_module
from prefill_worker import push as push_module
from prefill_worker.service import PrefillServicer
from worker.draining import Draining
from worker.fault_injection import HoldSpec
from worker.fault_points import FaultPoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33  # three blocks
LONG = [HELLO] * 480  # four steps
PROMPTLY_S = 30.0  # far less than anybody is held


async def failure_of(call):
    """What the call ends with, after whatever comes before it, in good time."""

    async def rest():
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(rest(), PROMPTLY_S)
    return from_rpc_error(caught.value)


async def reserve(decode, token_ids=PROMPT):
    call = decode.decode(decode_request(token_ids), timeout_s=60)
    return call, (await read(call, "reserved")).ticket


@contextmanager
def held(worker, point):
    """Requests that come to the point stay there; yields the list of those that have come."""
    hits = []
    with worker.faults.hold(HoldSpec(point, max_hold_s=600), hits.append):
        yield hits


@contextmanager
def silent_address():
    """Where a connection is taken, and nothing said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


POINTS = {"queued": FaultPoint.QUEUED, "pushed": FaultPoint.PUSHED}
STAGES = ["opening", "queued", "computing", "sampled", "pushed", "without a ticket"]


@contextmanager
def kept_there(prefill, stage):
    """What keeps a request at its stage, and tells that it is there: without a point of its own, its frames wait."""
    with held(prefill, POINTS.get(stage, FaultPoint.PUSHING)) as hits, silent_address() as address:
        yield hits, address


async def bring_to(stage, prefill, ticket, hits, address, eventually):
    if stage == "opening":
        ticket.endpoints[0].address = address
    request = prefill_request(LONG, None if stage == "without a ticket" else ticket, request_id="r")
    call = prefill.prefill(request)
    if stage == "opening":
        await eventually(lambda: prefill.draining.num_open_calls)
    elif stage in ("computing", "without a ticket"):
        await eventually(lambda: prefill.num_owned_blocks)
    elif stage == "sampled":
        await read(call, "first_token")
        await eventually(lambda: hits)
    else:
        await eventually(lambda: hits)
    return call


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancelled", "drained"])
async def test_a_call_ends_promptly_at_whatever_stage_and_all_is_released(workers, monkeypatch, eventually, stage, how):
    prefill, decode = workers
    monkeypatch.setattr(push_module, "OPEN_TIMEOUT_S", 600.0)
    decode_call, ticket = await reserve(decode, LONG)
    with kept_there(prefill, stage) as (hits, address):
        call = await bring_to(stage, prefill, ticket, hits, address, eventually)
        if how == "cancelled":
            call.cancel()
        else:
            assert prefill.draining.num_open_calls == 1
            prefill.draining.expire()
            error = await failure_of(call)
            assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "DRAINING")
            assert error.metadata["worker"] == "prefill-0"
        await eventually(lambda: prefill.is_clean, PROMPTLY_S)
        assert await prefill.draining.wait_idle(PROMPTLY_S)
        if stage in ("queued", "computing", "sampled", "pushed"):
            assert (await failure_of(decode_call)).reason == "PUSH_ENDED"
    decode_call.cancel()


async def test_a_draining_worker_takes_no_new_calls_and_ends_those_it_has(workers):
    prefill, decode = workers
    with held(prefill, FaultPoint.QUEUED) as hits:
        handing = asyncio.create_task(hand_over(prefill, decode, decode_request(PROMPT)))
        while not hits:
            await asyncio.wait({handing}, timeout=0.01)
        prefill.draining.begin()
        error = await failure_of(prefill.prefill(prefill_request(PROMPT)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not await prefill.draining.wait_idle(0)
    assert (await handing).token_ids == HELLO_ANSWER
    assert await prefill.draining.wait_idle(PROMPTLY_S)


@pytest.mark.parametrize("point", [FaultPoint.QUEUED, FaultPoint.PUSHING, FaultPoint.PUSHED])
async def test_a_request_that_was_held_goes_on_as_if_nothing_had_been(workers, eventually, point):
    prefill, decode = workers
    with held(prefill, point) as hits:
        handing = asyncio.create_task(hand_over(prefill, decode, decode_request(PROMPT, request_id="r")))
        await eventually(lambda: hits)
        assert not handing.done()
    assert (await handing).token_ids == HELLO_ANSWER
    assert {(hit.peer, hit.point) for hit in hits} == {("decode-0", point)}


async def test_the_first_step_of_a_prefill_is_noticed_once(workers, eventually):
    prefill, decode = workers
    hits = []
    with prefill.faults.hold(HoldSpec(FaultPoint.PREFILLING), hits.append):
        decode_call, ticket = await reserve(decode, LONG)
        call = prefill.prefill(prefill_request(LONG, ticket, request_id="r"))
        await read(call, "first_token")
        await eventually(lambda: hits)
        await read(call, "pushed")
        await read(prefill.prefill(prefill_request(PROMPT, request_id="alone")), "first_token")
        await eventually(lambda: len(hits) == 2)
    assert [(hit.request_id, hit.peer) for hit in hits] == [("r", "decode-0"), ("alone", "")]
    decode_call.cancel()


async def test_the_priority_reaches_the_engine(workers, eventually):
    prefill, _ = workers
    call = prefill.prefill(prefill_request([1] * 1000, priority=-7))
    await eventually(lambda: prefill.host.engine._scheduler._sequences)
    (sequence,) = prefill.host.engine._scheduler._sequences.values()
    assert sequence.priority == -7
    call.cancel()


async def test_a_prefill_that_waits_hears_at_once_that_its_push_is_over(workers, eventually):
    """Before it has computed anything, and though it is held."""
    prefill, decode = workers
    with held(prefill, FaultPoint.QUEUED) as hits:
        decode_call, ticket = await reserve(decode)
        call = prefill.prefill(prefill_request(PROMPT, ticket))
        await eventually(lambda: hits)
        decode_call.cancel()
        error = await failure_of(call)
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "TICKET_CLOSED")
    assert prefill.num_cached_blocks == 0


async def test_kv_that_does_not_arrive_after_the_prefill_costs_the_time_limit(workers, monkeypatch):
    prefill, decode = workers
    monkeypatch.setattr(push_module, "DELIVERY_TIMEOUT_S", 0.2)
    decode_call, ticket = await reserve(decode)
    decode.gate.shut()
    call = prefill.prefill(prefill_request(PROMPT, ticket))
    await read(call, "first_token")
    error = await failure_of(call)
    assert (error.code, "did not take all KV within 0.2 s" in str(error)) == (grpc.StatusCode.UNAVAILABLE, True)
    assert (error.metadata["stage"], error.metadata["worker"]) == ("transfer", "decode-0")
    decode.gate.open()
    decode_call.cancel()


async def test_a_decode_worker_that_commits_unasked_is_out_of_step(workers, scripted):
    prefill, _ = workers
    servicer, ticket = scripted
    servicer.script = servicer.open_and_commit
    with held(prefill, FaultPoint.QUEUED):
        error = await failure_of(prefill.prefill(prefill_request([HELLO] * 16, ticket)))
    assert (error.code, "was not asked" in str(error)) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_blocks_that_are_read_for_too_long_are_kept_and_freed_at_last(workers, monkeypatch, caplog, eventually):
    """The call does not wait for that."""
    prefill, decode = workers
    monkeypatch.setattr(sender_module.PushSender.abort, "__defaults__", (0.05,))
    slow = SlowPool(prefill.host.kv_pool)
    servicer = PrefillServicer(replace(prefill.host, kv_pool=slow), prefill.peers, Draining())
    decode_call, ticket = await reserve(decode)
    responses = servicer.Prefill(prefill_request(PROMPT, ticket), None)
    with caplog.at_level(logging.ERROR):
        assert (await anext(responses)).HasField("first_token")
        assert await asyncio.to_thread(slow.has_begun.wait, PROMPTLY_S)
        await asyncio.wait_for(responses.aclose(), PROMPTLY_S)
        await eventually(lambda: "a read of its 3 blocks has not ended" in caplog.text)
    assert prefill.num_owned_blocks == 3
    assert (await failure_of(decode_call)).reason == "PUSH_ENDED"
    slow.may_go_on.set()
    await eventually(lambda: prefill.is_clean)
    await servicer.close_all()


async def test_a_worker_that_stops_waits_for_no_read(workers, eventually):
    prefill, decode = workers
    slow, draining = SlowPool(prefill.host.kv_pool), Draining()
    servicer = PrefillServicer(replace(prefill.host, kv_pool=slow), prefill.peers, draining)
    decode_call, ticket = await reserve(decode)
    responses = servicer.Prefill(prefill_request(PROMPT, ticket), None)
    assert (await anext(responses)).HasField("first_token")
    assert await asyncio.to_thread(slow.has_begun.wait, PROMPTLY_S)
    draining.expire()
    with pytest.raises(Aborted, match="draining"):
        await asyncio.wait_for(anext(responses), PROMPTLY_S)
    await asyncio.wait_for(servicer.close_all(), PROMPTLY_S)
    assert prefill.num_owned_blocks == 3
    slow.may_go_on.set()
    # What the stop left to the end of the process is given back for the tests after this one.
    for sequence_id in tuple(prefill.host.engine._sinks):
        prefill.host.engine.abort(sequence_id)
    await failure_of(decode_call)
