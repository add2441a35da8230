import asyncio
import time
from functools import partial

import pytest

from baton.errors import Aborted, DataLoss, InternalError, InvalidRequest, NotFound, ResourceExhausted, Unavailable
from baton.v1 import request_pb2, worker_pb2
from router.membership import Assignment
from router.outcome import Outcome
from router.retry_budget import RetryBudget

STOP_ID = 100  # token 0 of the scripted workers


@pytest.fixture
def dispatch(dispatch, make_dispatcher):
    """Without any retry: how one try goes, and how its failure is told."""
    dispatcher = make_dispatcher()
    dispatcher._budget = RetryBudget(capacity=0, per_request=0, per_second=0)
    return partial(dispatch, dispatcher=dispatcher)


@pytest.fixture
async def followed(pair, follow):
    await follow(*pair)
    return pair


async def test_a_pair_serves_a_request(dispatch, followed, is_idle):
    token_ids, outcome = await dispatch()
    assert token_ids == [100, 101, 102, 103]
    assert (outcome.num_tokens, outcome.reason) == (4, request_pb2.FINISH_REASON_LENGTH)
    timeline = outcome.timeline
    assert timeline.path == request_pb2.PATH_DISAGGREGATED
    assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")
    assert (timeline.kv_bytes, timeline.transport) == (5, "grpc")
    assert followed[0].prefill_requests[0].ticket.id == "t1"
    assert is_idle()


async def test_the_load_counts_until_token_0_on_one_side_and_to_the_end_on_the_other(
    dispatch, followed, membership, messages, eventually, is_idle
):
    prefill, decode = followed
    may_prefill, may_finish = asyncio.Event(), asyncio.Event()

    async def slow_prefill(request):
        await may_prefill.wait()
        async for response in prefill.prefill_at_once(request):
            yield response

    async def slow_decode(request):
        yield messages.reserved()
        yield messages.committed()
        await may_finish.wait()
        yield messages.finished()

    prefill.prefill, decode.decode = slow_prefill, slow_decode
    running = asyncio.create_task(dispatch())

    def sent(name):
        view = membership.member(name).view()
        return view.sent_sequences, view.sent_prompt_tokens, view.sent_blocks

    await eventually(lambda: prefill.open_calls)
    assert sent("prefill-0") == (1, 3, 0)
    assert sent("decode-0") == (1, 0, 1)
    may_prefill.set()
    await eventually(lambda: sent("prefill-0")[1] == 0)
    assert sent("decode-0") == (1, 0, 1)
    may_finish.set()
    await running
    assert is_idle()


async def test_a_full_decode_worker_is_asked_again_and_nothing_was_prefilled_for_it(dispatch, followed, is_idle):
    prefill, decode = followed
    decode.before_decode += [ResourceExhausted("full")] * 2
    waiting = asyncio.create_task(dispatch())
    while not waiting.done():
        decode.report()
        await asyncio.wait({waiting}, timeout=0.01)
    assert waiting.result()[0] == [100, 101, 102, 103]
    assert len(decode.decode_requests) == 3
    assert len(prefill.prefill_requests) == 1
    assert is_idle()


async def test_a_full_prefill_worker_is_asked_again_with_a_new_reservation(dispatch, followed, eventually):
    prefill, decode = followed
    prefill.before_prefill.append(ResourceExhausted("full"))
    waiting = asyncio.create_task(dispatch())
    while not waiting.done():
        prefill.report()
        await asyncio.wait({waiting}, timeout=0.01)
    assert waiting.result()[0] == [100, 101, 102, 103]
    assert len(decode.decode_requests) == 2
    await eventually(lambda: not decode.open_calls)


async def test_room_is_looked_for_elsewhere_after_a_refusal(dispatch, follow, pair, start_worker):
    other = await start_worker("decode-1", "decode")
    pair[1].before_decode.append(ResourceExhausted("full"))
    await follow(*pair, other)
    waiting = asyncio.create_task(dispatch())
    while not waiting.done():
        pair[1].report(num_running=1)  # so it looks fuller than the other one
        await asyncio.wait({waiting}, timeout=0.01)
    assert waiting.result()[1].timeline.decode_worker == "decode-1"


async def test_one_token_needs_no_decode_worker(dispatch, prompt_request, followed, is_idle):
    token_ids, outcome = await dispatch(prompt_request(max_tokens=1))
    assert token_ids == [100]
    assert outcome.reason == request_pb2.FINISH_REASON_LENGTH
    assert outcome.timeline.path == request_pb2.PATH_LOCAL_PREFILL
    assert not followed[1].decode_requests
    assert not followed[0].prefill_requests[0].HasField("ticket")
    assert is_idle()


async def test_a_stop_token_as_token_0_ends_it_and_releases_the_reservation(
    dispatch, prompt_request, followed, messages, eventually, is_idle
):

    async def wait(request):
        yield messages.reserved()
        await asyncio.Event().wait()

    followed[1].decode = wait
    token_ids, outcome = await dispatch(prompt_request(stop_token_ids=[STOP_ID]))
    assert token_ids == [STOP_ID]
    assert (outcome.reason, outcome.stop_token_id) == (request_pb2.FINISH_REASON_STOP, STOP_ID)
    await eventually(lambda: not followed[1].open_calls)
    assert is_idle()


async def test_a_stop_token_of_the_decode_worker_is_told(dispatch, prompt_request, followed, messages):
    async def stop(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101, 7)
        finished = worker_pb2.DecodeFinished(reason=request_pb2.FINISH_REASON_STOP, stop_token_id=7)
        yield worker_pb2.DecodeResponse(finished=finished)

    followed[1].decode = stop
    token_ids, outcome = await dispatch(prompt_request(max_tokens=9, stop_token_ids=[7]))
    assert token_ids == [100, 101, 7]
    assert (outcome.reason, outcome.stop_token_id) == (request_pb2.FINISH_REASON_STOP, 7)


async def test_a_decode_worker_that_holds_the_prompt_needs_no_prefill_worker(dispatch, followed):
    async def alone(request):
        yield worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved())
        timing = worker_pb2.LocalPrefill(queue_s=0.0, prefill_s=0.001, num_cached_tokens=16)
        yield worker_pb2.DecodeResponse(tokens=worker_pb2.DecodeTokens(token_ids=[100], local_prefill=timing))
        yield worker_pb2.DecodeResponse(tokens=worker_pb2.DecodeTokens(token_ids=[101, 102, 103]))
        yield worker_pb2.DecodeResponse(finished=worker_pb2.DecodeFinished(reason=request_pb2.FINISH_REASON_LENGTH))

    followed[1].decode = alone
    token_ids, outcome = await dispatch()
    assert token_ids == [100, 101, 102, 103]
    assert outcome.timeline.path == request_pb2.PATH_LOCAL_PREFILL
    assert outcome.timeline.prefill_worker == outcome.timeline.decode_worker == "decode-0"
    assert 0 < outcome.timeline.prefill_s <= 0.001
    assert outcome.decode_cached_tokens == 16
    assert not followed[0].prefill_requests


async def test_a_mixed_worker_serves_alone_and_counts_once(dispatch, follow, membership, start_worker, messages):
    worker = await start_worker("mixed-0", "mixed")
    await follow(worker)
    counted = []

    async def alone(request):
        view = membership.member("mixed-0").view()
        counted.append((view.sent_sequences, view.sent_prompt_tokens, view.sent_blocks))
        async for response in worker.decode_at_once(request):
            yield response

    worker.decode = alone
    token_ids, outcome = await dispatch()
    assert token_ids == [100, 101, 102, 103]
    assert counted == [(1, 3, 1)]
    assert worker.decode_requests[0].prefill_locally
    assert outcome.timeline.path == request_pb2.PATH_LOCAL_PREFILL


@pytest.mark.parametrize("stage", ["reserve", "first token", "decode"])
async def test_a_cancelled_request_ends_both_calls(dispatch, followed, messages, stage, eventually, is_idle):
    prefill, decode = followed
    reached, never, has_token = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stop_at(here):
        if here == stage:
            reached.set()
            await never.wait()

    async def prefilling(request):
        await stop_at("first token")
        yield messages.first_token(100)
        has_token.set()
        await never.wait()

    async def decoding(request):
        await stop_at("reserve")
        yield messages.reserved()
        if stage == "decode":
            await has_token.wait()
            yield messages.committed()
            await stop_at("decode")
        await never.wait()

    prefill.prefill, decode.decode = prefilling, decoding
    running = asyncio.create_task(dispatch())
    async with asyncio.timeout(5):
        await reached.wait()
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    await eventually(lambda: not prefill.open_calls and not decode.open_calls)
    assert bool(prefill.prefill_requests) == (stage != "reserve")
    assert is_idle()


async def test_a_request_that_expires_in_the_queue_is_sent_to_nobody(dispatch, followed, membership, assigned):
    async with assigned(membership.member("decode-0"), Assignment(0, 64)):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await dispatch()
    token_ids, _ = await dispatch()
    assert token_ids == [100, 101, 102, 103]
    assert len(followed[1].decode_requests) == 1


async def wait_for_ever(request):
    await asyncio.Event().wait()
    yield


def failing(*first, error):
    """A script that sends `first`, then fails."""

    async def script(request):
        for message in first:
            yield message
        raise error

    return script


async def test_a_failed_prefill_ends_the_reservation(dispatch, followed, messages, eventually, is_idle):
    async def hold(request):
        yield messages.reserved()
        await asyncio.Event().wait()

    followed[1].decode = hold
    followed[0].before_prefill.append(InternalError("the step failed"))
    with pytest.raises(InternalError, match="prefill-0: the step failed") as caught:
        await dispatch()
    assert caught.value.metadata["stage"] == "prefill"
    await eventually(lambda: not followed[1].open_calls)
    assert is_idle()


async def test_a_failed_reservation_asks_no_prefill_worker(dispatch, followed, is_idle):
    followed[1].before_decode.append(InvalidRequest("never fits"))
    with pytest.raises(InvalidRequest, match="decode-0: never fits"):
        await dispatch()
    assert not followed[0].prefill_requests
    assert is_idle()


async def test_a_decode_worker_that_fails_before_the_first_token_ends_the_prefill(
    dispatch, followed, messages, eventually
):
    """Nobody waits for a prefill that nobody can use."""
    followed[0].prefill = wait_for_ever
    followed[1].decode = failing(messages.reserved(), error=InternalError("broken"))
    with pytest.raises(InternalError, match="decode-0: broken"):
        await dispatch()
    await eventually(lambda: not followed[0].open_calls)


async def test_a_worker_that_dies_in_the_middle_is_unavailable(dispatch, followed, messages, is_idle, eventually):
    """Seen from the router."""
    decode = followed[1]
    decoding = asyncio.Event()

    async def die(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101)
        decoding.set()
        await asyncio.Event().wait()

    decode.decode = die
    outcome = Outcome(time.monotonic())
    running = asyncio.create_task(dispatch(outcome=outcome))
    async with asyncio.timeout(5):
        await decoding.wait()
    await eventually(lambda: outcome.num_tokens == 2)
    await decode.server.stop(grace=0)
    with pytest.raises(Unavailable, match="decode-0"):
        await running
    await eventually(is_idle)


async def test_a_worker_that_refuses_connections_is_unavailable(dispatch, followed, is_idle):
    """It died and the router has not heard of it yet."""
    await followed[1].server.stop(grace=0)
    with pytest.raises(Unavailable):
        await dispatch()


PUSH_ENDED = Aborted("prefill-0 ended the push", reason="PUSH_ENDED")
TICKET_UNKNOWN = NotFound("no such ticket", reason="TICKET_UNKNOWN")


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_the_cause_at_the_prefill_worker_wins_over_its_consequence(dispatch, followed, messages, first):
    prefill, decode = followed
    told = asyncio.Event()

    async def fail_there(request):
        yield messages.first_token(100)
        if first == "decode":
            await told.wait()
        raise DataLoss("a bit flipped")

    async def fail_here(request):
        yield messages.reserved()
        told.set()
        raise PUSH_ENDED

    prefill.prefill, decode.decode = fail_there, fail_here
    with pytest.raises(DataLoss, match="prefill-0: a bit flipped"):
        await dispatch()


@pytest.mark.parametrize("has_token", [False, True])
async def test_the_cause_at_the_decode_worker_wins_over_its_consequence(dispatch, followed, messages, has_token):
    prefill, decode = followed
    told = asyncio.Event()

    async def fail_there(request):
        if has_token:
            yield messages.first_token(100)
        told.set()
        raise TICKET_UNKNOWN

    async def fail_here(request):
        yield messages.reserved()
        await told.wait()
        raise InternalError("the step failed")

    prefill.prefill, decode.decode = fail_there, fail_here
    with pytest.raises(InternalError, match="decode-0: the step failed"):
        await dispatch()


async def test_a_consequence_alone_is_told_as_it_is(dispatch, followed, messages, monkeypatch):
    monkeypatch.setattr("router.first_cause.FIRST_CAUSE_PATIENCE_S", 0.05)
    followed[0].prefill = wait_for_ever
    followed[1].decode = failing(messages.reserved(), error=PUSH_ENDED)
    with pytest.raises(Aborted, match="ended the push"):
        await dispatch()


async def test_an_answer_is_whole_without_the_prefill_workers_account(dispatch, followed, messages, is_idle):
    """The decode worker has the KV: what becomes of the prefill worker is no matter any more."""
    followed[0].prefill = failing(messages.first_token(100), error=Unavailable("going down"))

    async def committed_first(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101, 102, 103)
        yield messages.finished()

    followed[1].decode = committed_first
    # The commit is there before the prefill worker fails: both streams are read at once.
    token_ids, outcome = await dispatch()
    assert token_ids == [100, 101, 102, 103]
    assert outcome.timeline.kv_bytes == 0
    assert is_idle()


async def test_a_worker_that_leaves_the_table_finishes_what_it_has(
    dispatch, followed, membership, messages, eventually
):
    decoding, may_finish = asyncio.Event(), asyncio.Event()

    async def slow(request):
        yield messages.reserved()
        yield messages.committed()
        decoding.set()
        await may_finish.wait()
        yield messages.tokens(101)
        yield messages.finished()

    followed[1].decode = slow
    running = asyncio.create_task(dispatch())
    async with asyncio.timeout(5):
        await decoding.wait()
    await membership.set_workers([])
    may_finish.set()
    assert (await running)[0] == [100, 101]
