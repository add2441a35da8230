import asyncio

import grpc
import pytest
import torch
from worker_rig import (
    ALPHABET,
    ALPHABET_ANSWER,
    COUNT,
    COUNT_ANSWER,
    HELLO,
    HELLO_ANSWER,
    decode_request,
    hand_over,
    prefill_request,
    prefilled,
    read,
    read_tokens,
)

from baton.v1 import request_pb2
from engine.text_codec import TextCodec
from kv_transfer.errors import TicketUnknown
from prefill_worker.push import open_push

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKEN_BYTES = 46_080  # K and V of one token, all layers, float32
LENGTH, STOP = request_pb2.FINISH_REASON_LENGTH, request_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def codec(model_dir):
    return TextCodec.from_directory(model_dir)


@pytest.mark.parametrize("num_tokens", [16, 32, 33])
async def test_a_prompt_is_decoded_from_the_kv_of_another_worker(workers, num_tokens):
    """At the block edges."""
    prefill, decode = workers
    handed = await hand_over(prefill, decode, decode_request([HELLO] * num_tokens))
    assert handed.token_ids == HELLO_ANSWER
    assert (handed.finished.reason, handed.finished.HasField("stop_token_id")) == (LENGTH, False)
    ticket = handed.ticket
    assert (ticket.num_cached_tokens, ticket.num_prompt_tokens, ticket.worker) == (0, num_tokens, "decode-0")
    assert handed.pushed.kv_bytes == handed.committed.kv_bytes == num_tokens * TOKEN_BYTES


async def test_only_what_the_decode_worker_lacks_is_sent(workers):
    prefill, decode = workers
    await hand_over(prefill, decode, decode_request([HELLO] * 33))
    again = await hand_over(prefill, decode, decode_request([HELLO] * 33))
    assert (again.ticket.num_cached_tokens, again.first_token.num_cached_tokens) == (32, 32)
    assert again.pushed.kv_bytes == TOKEN_BYTES
    prefill.host.engine.drop_prefix_cache()
    cold = await hand_over(prefill, decode, decode_request([HELLO] * 33))
    assert (cold.ticket.num_cached_tokens, cold.first_token.num_cached_tokens) == (32, 0)
    assert cold.pushed.kv_bytes == TOKEN_BYTES
    assert again.token_ids == cold.token_ids == HELLO_ANSWER


async def test_the_last_block_is_never_taken_from_the_cache_whole(workers):
    """With all blocks cached the last token must still be run."""
    prefill, decode = workers
    await hand_over(prefill, decode, decode_request([HELLO] * 32))
    again = await hand_over(prefill, decode, decode_request([HELLO] * 32))
    assert (again.ticket.num_cached_tokens, again.first_token.num_cached_tokens) == (16, 16)
    assert again.token_ids == HELLO_ANSWER


async def test_prompts_with_a_common_prefix_at_once(workers):
    prefill, decode = workers
    requests = [decode_request([HELLO] * num_tokens) for num_tokens in (33, 32, 33, 16)]
    handed = await asyncio.gather(*(hand_over(prefill, decode, request) for request in requests))
    assert [h.token_ids for h in handed] == [HELLO_ANSWER] * 4


@pytest.mark.parametrize("request_id", ["abc", ""])
async def test_the_same_client_id_twice_at_once(workers, codec, request_id):
    """No answer crosses."""
    prefill, decode = workers
    prompts = {ALPHABET: ALPHABET_ANSWER, COUNT: COUNT_ANSWER}
    handed = await asyncio.gather(
        *(hand_over(prefill, decode, decode_request(codec.encode(text), request_id=request_id)) for text in prompts)
    )
    assert [h.token_ids for h in handed] == list(prompts.values())


async def test_a_salt_keeps_caches_apart_on_both_sides(workers):
    prefill, decode = workers
    cached = []
    for salt in ("a", "a", "b", ""):
        handed = await hand_over(prefill, decode, decode_request([HELLO] * 33, 1, cache_salt=salt))
        cached.append((handed.ticket.num_cached_tokens, handed.first_token.num_cached_tokens))
    assert cached == [(0, 0), (32, 32), (0, 0), (0, 0)]


async def test_a_short_rest_is_prefilled_here(workers):
    """Conditional disaggregation: no ticket, and token 0 comes from this worker, with its timing."""
    prefill, decode = workers
    await hand_over(prefill, decode, decode_request([HELLO] * 32))
    call = decode.decode(decode_request([HELLO] * 33, local_prefill_max_tokens=1))
    reserved = await read(call, "reserved")
    assert not reserved.HasField("ticket")
    first = await read(call, "tokens")
    assert first.local_prefill.prefill_s > 0
    assert first.local_prefill.num_cached_tokens == 32
    token_ids, finished = await read_tokens(call)
    assert [*first.token_ids, *token_ids] == HELLO_ANSWER
    assert finished.reason == LENGTH


@pytest.mark.parametrize(("num_tokens", "limit"), [(33, 0), (34, 1), (7, 16)])
async def test_a_longer_rest_and_what_is_not_cached_at_all_is_not_prefilled_here(workers, num_tokens, limit):
    prefill, decode = workers
    await hand_over(prefill, decode, decode_request([HELLO] * 32, 1))
    call = decode.decode(decode_request([HELLO] * num_tokens, local_prefill_max_tokens=limit))
    assert (await read(call, "reserved")).HasField("ticket")
    call.cancel()


async def test_the_whole_prompt_is_prefilled_here_if_that_is_asked_for(workers, codec):
    _, decode = workers
    call = decode.decode(decode_request(codec.encode(ALPHABET), prefill_locally=True))
    assert not (await read(call, "reserved")).HasField("ticket")
    assert (await read_tokens(call))[0] == ALPHABET_ANSWER


async def test_a_last_token_0_ends_the_answer_at_the_commit(workers):
    prefill, decode = workers
    handed = await hand_over(prefill, decode, decode_request([HELLO] * 16, max_tokens=1))
    assert (handed.token_ids, handed.finished.reason) == (HELLO_ANSWER[:1], LENGTH)


async def test_a_stop_token_as_token_0_ends_the_answer_at_the_commit(workers, codec):
    prefill, decode = workers
    request = decode_request(codec.encode(ALPHABET), 16, stop_token_ids=ALPHABET_ANSWER[:1])
    handed = await hand_over(prefill, decode, request)
    assert handed.token_ids == ALPHABET_ANSWER[:1]
    assert (handed.finished.reason, handed.finished.stop_token_id) == (STOP, ALPHABET_ANSWER[0])


async def test_a_later_stop_token_is_the_last_one(workers, codec):
    prefill, decode = workers
    request = decode_request(codec.encode(ALPHABET), 16, stop_token_ids=[ALPHABET_ANSWER[2]])
    handed = await hand_over(prefill, decode, request)
    assert handed.token_ids == ALPHABET_ANSWER[:3]
    assert (handed.finished.reason, handed.finished.stop_token_id) == (STOP, ALPHABET_ANSWER[2])


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (decode_request([]), ["token_ids", "empty"]),
        (decode_request([1], max_tokens=0), ["max_tokens", "at least 1"]),
        (decode_request([1, 49152]), ["token_ids[1]", "49152"]),
        (decode_request([1] * 100, max_tokens=500), ["599", "38", "32", "512"]),
        (decode_request([1] * 100, max_tokens=500, prefill_locally=True), ["599", "38", "32", "512"]),
        (decode_request([1], max_tokens=9000), ["9001", "8192"]),
    ],
)
async def test_what_can_never_be_served_is_refused_at_once_with_the_numbers(workers, request_, parts):
    _, decode = workers
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(decode.decode(request_), "reserved")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert all(part in caught.value.details() for part in ["decode-0", *parts]), caught.value.details()


async def test_who_finds_no_room_is_refused_and_served_when_there_is(workers, eventually):
    """Nothing is prefilled for nothing, and the whole pool can be used."""
    prefill, decode = workers
    holder = decode.decode(decode_request([1] * 495))  # 496 tokens with the next one: 31 of 32 blocks
    await read(holder, "reserved")
    assert decode.num_owned_blocks == 31
    with pytest.raises(grpc.aio.AioRpcError, match="32") as caught:
        await read(decode.decode(decode_request([HELLO] * 16)), "reserved")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    small = await hand_over(prefill, decode, decode_request([HELLO] * 15, max_tokens=1))
    assert len(small.token_ids) == 1
    holder.cancel()
    await eventually(lambda: decode.is_clean)
    assert (await hand_over(prefill, decode, decode_request([HELLO] * 16))).token_ids == HELLO_ANSWER
    whole = decode.decode(decode_request([1] * 511, max_tokens=2))
    await read(whole, "reserved")
    assert decode.num_owned_blocks == 32
    whole.cancel()


async def test_a_reservation_lives_as_long_as_its_call(workers, eventually):
    """An open RPC is the lease: cancelled before any push, the ticket is worth nothing."""
    prefill, decode = workers
    call = decode.decode(decode_request([HELLO] * 33))
    ticket = (await read(call, "reserved")).ticket
    assert decode.num_owned_blocks == 3
    call.cancel()
    await eventually(lambda: decode.is_clean)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(prefill.prefill(prefill_request([HELLO] * 33, ticket)), "first_token")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert ticket.id in caught.value.details()


async def test_a_reservation_ends_with_its_deadline(workers, eventually):
    _, decode = workers
    call = decode.decode(decode_request([HELLO] * 33), timeout_s=0.3)
    await read(call, "reserved")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: decode.is_clean)


async def test_a_request_cancelled_in_the_middle_of_its_push(workers, eventually):
    """Blocks return, none of the half-written ones can be found, the sender is told."""
    prefill, decode = workers
    prompt = [HELLO] * 100  # half of its layers fill a frame
    call = decode.decode(decode_request(prompt))
    ticket = (await read(call, "reserved")).ticket
    async with prefilled(prefill.host, prompt) as (sequence, _):
        push = await open_push(prefill.host, prefill.peers, ticket)
        push.sender.layer_ready(range(15), range(len(prompt)), sequence.block_ids)
        await eventually(lambda: push.sender._kv_bytes > 0)
        call.cancel()
        await eventually(lambda: decode.is_clean)
        assert decode.num_cached_blocks == 0
        push.sender.layer_ready(range(15, 30), range(len(prompt)), sequence.block_ids)
        async with asyncio.timeout(5):
            assert "unknown" in str(await push.sender.failed)
        push.stop()
    assert decode.sink.stale_writes > 0
    assert (await hand_over(prefill, decode, decode_request([HELLO] * 33))).token_ids == HELLO_ANSWER


async def test_a_request_cancelled_while_it_is_decoded(workers, eventually):
    prefill, decode = workers
    call = decode.decode(decode_request([HELLO] * 33, max_tokens=400))
    ticket = (await read(call, "reserved")).ticket
    prefill_call = prefill.prefill(prefill_request([HELLO] * 33, ticket))
    await read(prefill_call, "first_token")
    await read(prefill_call, "pushed")
    await read(call, "committed")
    await read(call, "tokens")
    call.cancel()
    await eventually(lambda: decode.is_clean)


async def test_a_request_cancelled_while_it_is_prefilled_here(workers, eventually):
    _, decode = workers
    call = decode.decode(decode_request([HELLO] * 400, max_tokens=9, prefill_locally=True))
    await read(call, "reserved")
    call.cancel()
    await eventually(lambda: decode.is_clean)


async def test_a_late_write_does_not_reach_the_blocks_of_the_next_request(workers, eventually):
    """A's frame arrives when B has A's blocks; there is room for one of them only."""
    prefill, decode = workers
    holder = decode.decode(decode_request([1] * 447))  # leaves 4 blocks of 32
    await read(holder, "reserved")
    call = decode.decode(decode_request([HELLO] * 33, request_id="A"))
    ticket = (await read(call, "reserved")).ticket
    decode.gate.shut()
    late = prefill.prefill(prefill_request([HELLO] * 33, ticket))
    await read(late, "first_token")
    await eventually(lambda: decode.gate.frames)
    call.cancel()
    await eventually(lambda: decode.num_owned_blocks == 28)
    other = decode.decode(decode_request([HELLO] * 32, request_id="B"))
    ticket = (await read(other, "reserved")).ticket
    assert decode.sink.stale_writes == 0
    decode.gate.open()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(late, "pushed")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    before = decode.host.kv_pool._tensor.clone()
    for frame in decode.gate.frames:  # as a network may deliver them, when their sender has long given up
        with pytest.raises(TicketUnknown):
            await decode.sink.write(frame)
    assert decode.sink.stale_writes >= len(decode.gate.frames)
    assert torch.equal(decode.host.kv_pool._tensor, before)
    prefill_call = prefill.prefill(prefill_request([HELLO] * 32, ticket))
    first = await read(prefill_call, "first_token")
    await read(prefill_call, "pushed")
    await read(other, "committed")
    assert [first.token_id, *(await read_tokens(other))[0]] == HELLO_ANSWER
    holder.cancel()


async def test_an_answer_is_found_in_the_cache_by_the_next_turn(workers):
    """What was decoded is cached where it lives."""
    prefill, decode = workers
    turn = [HELLO] * 28
    handed = await hand_over(prefill, decode, decode_request(turn, max_tokens=6))
    call = decode.decode(decode_request([*turn, *handed.token_ids, HELLO]))
    assert (await read(call, "reserved")).num_cached_tokens == 32
    call.cancel()


@pytest.mark.parametrize("locally", [False, True])
async def test_all_is_released_when_the_call_is_closed_and_not_some_time_later(workers, locally):
    """As gRPC closes a call whose client went away while an answer was being written."""
    _, decode = workers
    responses = decode.decode_servicer.Decode(decode_request([HELLO] * 33, prefill_locally=locally), None)
    assert (await anext(responses)).HasField("reserved")
    await responses.aclose()
    assert decode.sink.num_open == 0
    assert decode.host.engine.load().num_sequences == 0
