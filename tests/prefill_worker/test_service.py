import asyncio

import grpc
import pytest
from worker_rig import (
    ALPHABET,
    ALPHABET_ANSWER,
    HELLO,
    HELLO_ANSWER,
    decode_request,
    hand_over,
    prefill_request,
    read,
)

from baton.errors import from_rpc_error
from engine.text_codec import TextCodec

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33
LONG = [HELLO] * 480  # four steps, of 128 tokens


async def reserve(decode, token_ids=PROMPT):
    call = decode.decode(decode_request(token_ids))
    return call, (await read(call, "reserved")).ticket


async def refused(call, code, *parts):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is code, caught.value
    assert all(part in caught.value.details() for part in parts), caught.value.details()


async def test_token_0_comes_without_a_decode_worker(workers, model_dir):
    prefill, _ = workers
    call = prefill.prefill(prefill_request(TextCodec.from_directory(model_dir).encode(ALPHABET)))
    first = await read(call, "first_token")
    assert first.token_id == ALPHABET_ANSWER[0]
    assert first.prefill_s > 0
    assert first.queue_s >= 0
    assert (await read(call, "pushed")).kv_bytes == 0
    assert await call.read() is grpc.aio.EOF


async def test_a_prompt_is_found_in_the_cache_the_next_time(workers):
    prefill, _ = workers
    cached = []
    for _ in range(2):
        call = prefill.prefill(prefill_request(PROMPT))
        cached.append((await read(call, "first_token")).num_cached_tokens)
        await read(call, "pushed")
    assert cached == [0, 32]


async def test_a_prompt_of_several_steps_is_pushed_as_it_is_computed(workers):
    """More tokens than a step has; frames leave before the last step."""
    prefill, decode = workers
    call, ticket = await reserve(decode, LONG)
    prefill_call = prefill.prefill(prefill_request(LONG, ticket))
    await read(prefill_call, "first_token")
    pushed = await read(prefill_call, "pushed")
    assert pushed.kv_bytes == 480 * 46_080
    assert pushed.transport == "grpc"
    assert 0 < pushed.transfer_tail_s < pushed.transfer_s
    await read(call, "committed")
    call.cancel()


@pytest.mark.parametrize(
    ("token_ids", "parts"), [([], ["empty"]), ([1, 49152], ["token_ids[1]", "49152"]), ([1] * 1025, ["1025", "1024"])]
)
async def test_what_can_never_be_served_is_refused_with_the_numbers(workers, token_ids, parts):
    """The pool has 64 blocks of 16 tokens."""
    prefill, _ = workers
    call = prefill.prefill(prefill_request(token_ids))
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "prefill-0", *parts)


async def test_what_needs_the_whole_pool_is_served(workers):
    """Cancelled once it runs, as its tokens are of no interest."""
    prefill, _ = workers
    call = prefill.prefill(prefill_request([1] * 1024))
    waiting = asyncio.create_task(call.read())
    while prefill.num_owned_blocks == 0:
        await asyncio.wait({waiting}, timeout=0.01)
        assert not waiting.done()
    assert prefill.num_owned_blocks == 64
    call.cancel()
    await asyncio.wait({waiting})


async def test_a_ticket_for_another_number_of_tokens_is_refused_with_both(workers):
    prefill, decode = workers
    call, ticket = await reserve(decode)
    wrong = prefill.prefill(prefill_request([HELLO] * 32, ticket))
    await refused(wrong, grpc.StatusCode.INVALID_ARGUMENT, "33", "32")
    call.cancel()


async def test_a_prompt_of_another_text_is_never_decoded(workers):
    """The ticket is for as many tokens, but others."""
    prefill, decode = workers
    call, ticket = await reserve(decode)
    wrong = prefill.prefill(prefill_request([1] * 33, ticket))
    await read(wrong, "first_token")
    await refused(wrong, grpc.StatusCode.FAILED_PRECONDITION)
    await refused(call, grpc.StatusCode.FAILED_PRECONDITION)


async def test_a_ticket_of_another_life_or_fingerprint_is_refused(workers):
    """The decode worker goes on waiting for the right one."""
    prefill, decode = workers
    call, ticket = await reserve(decode)
    epoch, ticket.epoch = ticket.epoch, "0123456789abcdef"
    stale = prefill.prefill(prefill_request(PROMPT, ticket))
    await refused(stale, grpc.StatusCode.FAILED_PRECONDITION, "0123456789abcdef", epoch)
    ticket.epoch, ticket.fingerprint.kv_dtype = epoch, "bfloat16"
    misfit = prefill.prefill(prefill_request(PROMPT, ticket))
    await refused(misfit, grpc.StatusCode.FAILED_PRECONDITION, "kv_dtype", "float32", "bfloat16")
    ticket.fingerprint.kv_dtype = "float32"
    right = prefill.prefill(prefill_request(PROMPT, ticket))
    await read(right, "first_token")
    await read(right, "pushed")
    await read(call, "committed")
    call.cancel()


async def test_a_prefill_cancelled_in_the_middle_of_its_push_ends_both(workers, eventually):
    """Token 0 is there, its KV is on its way."""
    prefill, decode = workers
    call, ticket = await reserve(decode)
    decode.gate.shut()
    prefill_call = prefill.prefill(prefill_request(PROMPT, ticket))
    await read(prefill_call, "first_token")
    await eventually(lambda: decode.gate.frames)
    prefill_call.cancel()
    await eventually(lambda: prefill.is_clean)
    await refused(call, grpc.StatusCode.ABORTED, "ended", "before", "commit")
    decode.gate.open()
    await eventually(lambda: decode.is_clean)
    assert decode.num_cached_blocks == 0
    assert (await hand_over(prefill, decode, decode_request(PROMPT))).token_ids == HELLO_ANSWER


async def test_a_prefill_cancelled_while_it_is_computed_stops(workers, eventually):
    """Long before the last of its 8 steps."""
    prefill, _ = workers
    call = prefill.prefill(prefill_request([HELLO] * 1000))
    reading = asyncio.create_task(call.read())
    await eventually(lambda: prefill.num_owned_blocks)
    call.cancel()
    await asyncio.wait({reading})
    await eventually(lambda: prefill.is_clean)
    assert prefill.num_cached_blocks <= 4 * 128 // 16


async def test_a_prefill_stops_when_its_decode_worker_gives_up(workers, eventually):
    """Nobody computes to the end what nobody can use."""
    prefill, decode = workers
    call, ticket = await reserve(decode, LONG)
    prefill_call = prefill.prefill(prefill_request(LONG, ticket))
    reading = asyncio.create_task(prefill_call.read())
    await eventually(lambda: decode.gate.frames)
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await eventually(lambda: prefill.is_clean)
    assert prefill.num_cached_blocks < 480 // 16


async def test_a_decode_worker_that_dies_is_unavailable(workers, eventually):
    """Seen from the survivor: what it held is released, and it says who is gone, lest it be taken for the sick one."""
    prefill, decode = workers
    _, ticket = await reserve(decode)
    decode.gate.shut()
    prefill_call = prefill.prefill(prefill_request(PROMPT, ticket))
    await read(prefill_call, "first_token")
    await eventually(lambda: decode.gate.frames)
    await decode.server.stop(grace=0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(prefill_call, "pushed")
    error = from_rpc_error(caught.value)
    place = (error.metadata["stage"], error.metadata["worker"])
    assert (error.code, place) == (grpc.StatusCode.UNAVAILABLE, ("transfer", "decode-0"))
    await eventually(lambda: prefill.is_clean)


async def test_a_cancelled_prompt_takes_nothing_from_one_that_shares_its_prefix(workers):
    prefill, decode = workers
    requests = [decode_request(PROMPT) for _ in range(3)]
    running = [asyncio.create_task(hand_over(prefill, decode, request)) for request in requests]
    cancelled = prefill.prefill(prefill_request(PROMPT))
    await read(cancelled, "first_token")
    cancelled.cancel()
    handed = await asyncio.gather(*running)
    assert [h.token_ids for h in handed] == [HELLO_ANSWER] * 3


@pytest.mark.parametrize("has_ticket", [False, True])
async def test_all_is_released_when_the_call_is_closed_and_not_some_time_later(workers, has_ticket):
    prefill, decode = workers
    call, ticket = await reserve(decode)
    request = prefill_request(PROMPT, ticket if has_ticket else None)
    responses = prefill.prefill_servicer.Prefill(request, None)
    assert (await anext(responses)).HasField("first_token")
    await responses.aclose()
    assert prefill.host.engine.load().num_sequences == 0
    call.cancel()
