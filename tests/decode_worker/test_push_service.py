import asyncio

import grpc
import pytest
from worker_rig import (
    HELLO,
    HELLO_ANSWER,
    decode_request,
    hand_over,
    prefilled,
    read,
    read_tokens,
)

from baton.errors import BatonError
from baton.v1 import kv_transfer_pb2, worker_pb2
from kv_transfer.faulty_link import MessageFaults
from kv_transfer.frame import prompt_hash
from prefill_worker.push import open_push
from worker.conversion import fingerprint_message

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33


def opening(worker, ticket, **changes):
    """The opening of a push as it should be, but for the changes."""
    fields = {
        "ticket_id": ticket.id,
        "epoch": ticket.epoch,
        "fingerprint": fingerprint_message(worker.host.fingerprint),
        "transport": "grpc",
        "sender": "prefill-9",
    }
    return kv_transfer_pb2.PushRequest(open=kv_transfer_pb2.PushOpen(**(fields | changes)))


async def reserve(decode):
    """An open decode call and its ticket."""
    call = decode.decode(decode_request(PROMPT))
    return call, (await read(call, "reserved")).ticket


async def refused(call, code, *parts):
    """The call ends with this status, whose message has these parts."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is code, caught.value
    assert all(part in caught.value.details() for part in parts), caught.value.details()


async def open_by_hand(decode, request):
    push = decode.push()
    await push.write(request)
    return push


async def complete(prefill, decode_call, ticket, **changes):
    """Pushes all KV by hand, with what the commit says changed; returns the push after its commit."""
    async with prefilled(prefill.host, PROMPT) as (sequence, first_token_id):
        push = await open_push(prefill.host, prefill.peers, ticket)
        push.sender.layer_ready(range(30), range(len(PROMPT)), sequence.block_ids)
        summary = await push.sender.finish(10)
        fields = {
            "num_frames": summary.num_frames,
            "kv_bytes": summary.kv_bytes,
            "digest": summary.digest,
            "prompt_hash": prompt_hash(PROMPT),
            "first_token_id": first_token_id,
        }
        changed = {name: change(fields[name]) for name, change in changes.items()}
        commit = kv_transfer_pb2.PushCommit(**(fields | changed))
        await push._call.write(kv_transfer_pb2.PushRequest(commit=commit))
        return push


async def test_a_push_by_hand_is_decoded(workers):
    prefill, decode = workers
    call, ticket = await reserve(decode)
    push = await complete(prefill, call, ticket)
    await push.answer
    assert (await read(call, "committed")).kv_bytes == 33 * 46_080
    assert (await read_tokens(call))[0] == HELLO_ANSWER[1:]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"digest": lambda digest: digest ^ 1}, grpc.StatusCode.DATA_LOSS),
        ({"num_frames": lambda count: count + 1}, grpc.StatusCode.ABORTED),
        ({"kv_bytes": lambda count: count - 1}, grpc.StatusCode.ABORTED),
        ({"prompt_hash": lambda number: number ^ 1}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_commit_that_does_not_tell_what_arrived_is_never_decoded(workers, eventually, changes, code):
    """Both sides hear of it, and nothing of the transfer can be found in the cache."""
    prefill, decode = workers
    call, ticket = await reserve(decode)
    push = await complete(prefill, call, ticket, **changes)
    with pytest.raises(BatonError, match="decode-0") as caught:
        await push.answer
    assert caught.value.code is code
    await refused(call, code, "decode-0")
    await eventually(lambda: decode.is_clean)
    assert decode.num_cached_blocks == 0
    assert (await hand_over(prefill, decode, decode_request(PROMPT))).token_ids == HELLO_ANSWER


async def test_a_commit_before_all_has_arrived_is_never_decoded(workers, eventually):
    _, decode = workers
    call, ticket = await reserve(decode)
    push = await open_by_hand(decode, opening(decode, ticket))
    assert (await push.read()).HasField("opened")
    commit = kv_transfer_pb2.PushCommit(prompt_hash=prompt_hash(PROMPT), first_token_id=1)
    await push.write(kv_transfer_pb2.PushRequest(commit=commit))
    await refused(push, grpc.StatusCode.ABORTED, str(30 * 33), "missing")
    await refused(call, grpc.StatusCode.ABORTED, str(30 * 33), "missing")
    await eventually(lambda: decode.is_clean)


async def test_a_flipped_bit_on_the_way_fails_the_transfer(workers, eventually):
    """The frame is refused, and the sender tells of it; the decode worker never decodes."""
    prefill, decode = workers

    class Flipping:
        async def write(self, frame):
            flipped = bytearray(frame)
            flipped[-1] ^= 1
            await decode.sink.write(bytes(flipped))

    decode.gate._sink = Flipping()
    with pytest.raises(grpc.aio.AioRpcError, match="checksum") as caught:
        await hand_over(prefill, decode, decode_request(PROMPT))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    await eventually(lambda: decode.is_clean)
    assert decode.num_cached_blocks == 0


async def test_frames_that_come_twice_do_no_harm(workers):
    """The second copies are refused and counted."""
    prefill, decode = workers
    hits = []
    with prefill.faults.spoil_messages(MessageFaults(duplicate=1.0), hits.append):
        handed = await hand_over(prefill, decode, decode_request(PROMPT))
    assert handed.token_ids == HELLO_ANSWER
    assert len(hits) == decode.sink.stale_writes > 0
    assert len(decode.gate.frames) == 2 * len(hits)


async def test_frames_whose_first_answer_is_lost_do_no_harm(workers):
    """Something on the way sends them again: the sender hears of the second copy only, that it has come before."""
    prefill, decode = workers

    class Repeating:
        async def write(self, frame):
            await decode.sink.write(frame)
            await decode.sink.write(frame)

    decode.gate._sink = Repeating()
    assert (await hand_over(prefill, decode, decode_request(PROMPT))).token_ids == HELLO_ANSWER
    assert decode.sink.stale_writes == len(decode.gate.frames) > 0


async def test_another_epoch_is_refused_with_both(workers):
    """Meant for an earlier life. It does no harm to the owner of the ticket."""
    prefill, decode = workers
    call, ticket = await reserve(decode)
    stale = await open_by_hand(decode, opening(decode, ticket, epoch="0123456789abcdef"))
    await refused(stale, grpc.StatusCode.FAILED_PRECONDITION, "0123456789abcdef", decode.host.epoch)
    await complete(prefill, call, ticket)
    await read(call, "committed")
    assert (await read_tokens(call))[0] == HELLO_ANSWER[1:]


async def test_an_unknown_ticket_is_refused_by_its_id(workers):
    _, decode = workers
    unknown = worker_pb2.Ticket(id="ab" * 16, epoch=decode.host.epoch)
    push = await open_by_hand(decode, opening(decode, unknown))
    await refused(push, grpc.StatusCode.NOT_FOUND, "ab" * 16)


async def test_a_second_push_is_refused_and_does_no_harm_to_the_first(workers):
    prefill, decode = workers
    call, ticket = await reserve(decode)
    async with prefilled(prefill.host, PROMPT) as (sequence, first_token_id):
        push = await open_push(prefill.host, prefill.peers, ticket)
        second = await open_by_hand(decode, opening(decode, ticket))
        await refused(second, grpc.StatusCode.NOT_FOUND, ticket.id)
        push.sender.layer_ready(range(30), range(len(PROMPT)), sequence.block_ids)
        await push.commit(await push.delivered(), PROMPT, first_token_id)
    third = await open_by_hand(decode, opening(decode, ticket))
    await refused(third, grpc.StatusCode.NOT_FOUND, ticket.id)
    await read(call, "committed")
    assert (await read_tokens(call))[0] == HELLO_ANSWER[1:]


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [("kv_dtype", "bfloat16", "float32"), ("num_layers", 28, 30), ("num_kv_heads", 9, 3), ("protocol_version", 7, 1)],
)
async def test_another_fingerprint_is_refused_by_field_and_both_values(workers, eventually, field, theirs, ours):
    """Both sides hear of it at once, nobody hangs."""
    _, decode = workers
    call, ticket = await reserve(decode)
    fingerprint = fingerprint_message(decode.host.fingerprint)
    setattr(fingerprint, field, theirs)
    push = await open_by_hand(decode, opening(decode, ticket, fingerprint=fingerprint))
    parts = ["prefill-9", field, repr(theirs), repr(ours)]
    await refused(push, grpc.StatusCode.FAILED_PRECONDITION, *parts)
    await refused(call, grpc.StatusCode.FAILED_PRECONDITION, *parts)
    await eventually(lambda: decode.is_clean)


async def test_a_transport_that_is_not_offered_is_refused(workers):
    _, decode = workers
    call, ticket = await reserve(decode)
    push = await open_by_hand(decode, opening(decode, ticket, transport="carrier-pigeon"))
    await refused(push, grpc.StatusCode.INVALID_ARGUMENT, "carrier-pigeon")
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "carrier-pigeon")


async def test_messages_out_of_order_are_refused(workers):
    _, decode = workers
    commit = kv_transfer_pb2.PushRequest(commit=kv_transfer_pb2.PushCommit())
    await refused(await open_by_hand(decode, commit), grpc.StatusCode.INVALID_ARGUMENT, "expected open, got commit")
    call, ticket = await reserve(decode)
    push = await open_by_hand(decode, opening(decode, ticket))
    await push.read()
    await push.write(opening(decode, ticket))
    await refused(push, grpc.StatusCode.INVALID_ARGUMENT, "expected commit, got open")
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "expected commit, got open")


@pytest.mark.parametrize("ends", ["by cancelling", "by having nothing more to say"])
async def test_a_push_that_ends_without_commit_ends_the_request(workers, eventually, ends):
    """The sender died half-way."""
    _, decode = workers
    call, ticket = await reserve(decode)
    push = await open_by_hand(decode, opening(decode, ticket))
    await push.read()
    if ends == "by cancelling":
        push.cancel()
    else:
        await push.done_writing()
    async with asyncio.timeout(5):
        await refused(call, grpc.StatusCode.ABORTED, "ended", "commit")
    await eventually(lambda: decode.is_clean)
