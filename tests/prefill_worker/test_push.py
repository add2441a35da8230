import asyncio
import socket

import pytest
from worker_rig import HELLO, decode_request, prefilled, read

from baton.errors import Aborted, DataLoss, FailedPrecondition, NotFound, Unavailable
from baton.v1 import worker_pb2
from prefill_worker import push as push_module
from prefill_worker.push import open_push

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33


async def end(push):
    """Nothing is read any more, at once; nothing is sent any more, soon."""
    assert push.stop()
    assert await push.stopped()


async def test_kv_is_pushed_and_committed(workers):
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT, max_tokens=1))
    ticket = (await read(call, "reserved")).ticket
    async with prefilled(prefill.host, PROMPT) as (sequence, first_token_id):
        push = await open_push(prefill.host, prefill.peers, ticket)
        push.sender.layer_ready(range(30), range(33), sequence.block_ids)
        summary = await push.delivered()
        await push.commit(summary, PROMPT, first_token_id)
        await end(push)  # harmless now, twice as well
        await end(push)
    assert summary.kv_bytes == 33 * 46_080
    assert summary.first_send_at <= summary.last_ack_at
    assert (await read(call, "committed")).kv_bytes == 33 * 46_080


@pytest.mark.parametrize(
    ("field", "theirs"), [("kv_dtype", "bfloat16"), ("num_layers", 28), ("head_dim", 128), ("model", "another")]
)
async def test_a_pair_that_does_not_fit_is_refused_by_field_and_both_values(workers, scripted, field, theirs):
    """Nothing is sent."""
    prefill, _ = workers
    servicer, ticket = scripted
    setattr(ticket.fingerprint, field, theirs)
    ours = getattr(prefill.host.fingerprint, field)
    with pytest.raises(FailedPrecondition, match="decode-9") as caught:
        await open_push(prefill.host, prefill.peers, ticket)
    assert all(part in caught.value.message for part in (field, repr(ours), repr(theirs)))
    assert caught.value.reason == "FINGERPRINT_MISMATCH"
    assert servicer.num_open == 0


async def test_a_credit_for_less_than_a_token_ends_the_push(workers, scripted, eventually):
    prefill, _ = workers
    servicer, ticket = scripted
    servicer.script = servicer.open_without_credit
    with pytest.raises(FailedPrecondition, match="decode-9: the credit is too small"):
        await open_push(prefill.host, prefill.peers, ticket)
    await eventually(lambda: servicer.num_open == 0)


@pytest.mark.parametrize(("transports", "named"), [((), "none"), (("rdma", "ipc"), "rdma, ipc")])
async def test_without_a_common_transport_both_sides_are_named(workers, scripted, transports, named):
    prefill, _ = workers
    ticket = scripted[1]
    del ticket.endpoints[:]
    ticket.endpoints.extend(worker_pb2.Endpoint(transport=t, address="x") for t in transports)
    with pytest.raises(FailedPrecondition, match=f"grpc here, {named} there"):
        await open_push(prefill.host, prefill.peers, ticket)


async def test_the_first_endpoint_that_fits_is_taken(workers, scripted):
    prefill, _ = workers
    servicer, ticket = scripted
    servicer.script = servicer.open_only
    ticket.endpoints.insert(0, worker_pb2.Endpoint(transport="rdma", address="x"))
    push = await open_push(prefill.host, prefill.peers, ticket)
    await end(push)


async def test_a_peer_that_cannot_be_reached_is_named_at_once(workers, scripted):
    prefill, _ = workers
    ticket = scripted[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ticket.endpoints[0].address = f"127.0.0.1:{taken.getsockname()[1]}"
    async with asyncio.timeout(push_module.OPEN_TIMEOUT_S / 2):
        with pytest.raises(Unavailable, match="decode-9: ") as caught:
            await open_push(prefill.host, prefill.peers, ticket)
    assert caught.value.metadata == {"stage": "transfer", "worker": "decode-9"}


async def test_a_silent_peer_costs_the_time_limit_and_no_more(workers, scripted, monkeypatch, eventually):
    prefill, _ = workers
    servicer, ticket = scripted
    monkeypatch.setattr(push_module, "OPEN_TIMEOUT_S", 0.2)
    with pytest.raises(Unavailable, match=r"decode-9: .*not opened within 0.2 s"):
        await open_push(prefill.host, prefill.peers, ticket)
    await eventually(lambda: servicer.num_open == 0)


async def test_a_peer_out_of_step_is_refused(workers, scripted, eventually):
    prefill, _ = workers
    servicer, ticket = scripted
    servicer.script = servicer.commit_at_once
    with pytest.raises(Unavailable, match="expected opened of the decode worker, got committed"):
        await open_push(prefill.host, prefill.peers, ticket)
    await eventually(lambda: servicer.num_open == 0)


async def test_a_refusal_keeps_its_type_and_the_peers_name(workers):
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    ticket = (await read(call, "reserved")).ticket
    unknown = worker_pb2.Ticket()
    unknown.CopyFrom(ticket)
    unknown.id = "ab" * 16
    with pytest.raises(NotFound, match="decode-0: ") as caught:
        await open_push(prefill.host, prefill.peers, unknown)
    assert caught.value.reason == "TICKET_UNKNOWN"
    stale = worker_pb2.Ticket()
    stale.CopyFrom(ticket)
    stale.epoch = "0123456789abcdef"
    with pytest.raises(FailedPrecondition, match=f"0123456789abcdef.*{decode.host.epoch}") as caught:
        await open_push(prefill.host, prefill.peers, stale)
    assert caught.value.reason == "EPOCH_MISMATCH"
    call.cancel()


async def test_a_peer_that_does_not_commit_costs_the_time_limit(workers, scripted, monkeypatch, eventually):
    prefill, _ = workers
    servicer, ticket = scripted
    servicer.script = servicer.open_only
    monkeypatch.setattr(push_module, "COMMIT_TIMEOUT_S", 0.2)
    push = await open_push(prefill.host, prefill.peers, ticket)
    with pytest.raises(Unavailable, match=r"not commit within 0.2 s"):
        await push.commit(await push.delivered(), [1] * 16, 7)
    await end(push)
    await eventually(lambda: servicer.num_open == 0)


async def test_a_peer_that_leaves_before_the_commit_is_told(workers, scripted, eventually):
    prefill, _ = workers
    servicer, ticket = scripted
    servicer.script = servicer.open_and_leave
    push = await open_push(prefill.host, prefill.peers, ticket)
    await eventually(lambda: servicer.num_open == 0 and push._call.done())
    with pytest.raises(Unavailable, match="push") as caught:
        await push.commit(await push.delivered(), [1] * 16, 7)
    assert (caught.value.metadata["stage"], caught.value.metadata["worker"]) == ("transfer", ticket.worker)
    await end(push)


async def test_a_commit_with_the_kv_of_another_prompt_is_refused(workers):
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    ticket = (await read(call, "reserved")).ticket
    async with prefilled(prefill.host, PROMPT) as (sequence, first_token_id):
        push = await open_push(prefill.host, prefill.peers, ticket)
        push.sender.layer_ready(range(30), range(33), sequence.block_ids)
        with pytest.raises(FailedPrecondition) as caught:
            await push.commit(await push.delivered(), [1] * 33, first_token_id)
        await end(push)
    assert caught.value.reason == "PROMPT_MISMATCH"


async def test_frames_that_the_peer_refuses_fail_the_push_with_the_peers_reason(workers):
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    ticket = (await read(call, "reserved")).ticket

    class Corrupting:
        async def write(self, frame):
            await decode.sink.write(bytes(frame[:-1]) + bytes([frame[-1] ^ 1]))

    decode.gate._sink = Corrupting()
    async with prefilled(prefill.host, PROMPT) as (sequence, _):
        push = await open_push(prefill.host, prefill.peers, ticket)
        push.sender.layer_ready(range(30), range(33), sequence.block_ids)
        with pytest.raises(DataLoss) as caught:
            await push.delivered()
        await end(push)
    assert caught.value.reason == "CHECKSUM_MISMATCH"


async def test_an_aborted_push_ends_the_wait_at_the_peer(workers):
    prefill, decode = workers
    call = decode.decode(decode_request(PROMPT))
    ticket = (await read(call, "reserved")).ticket
    push = await open_push(prefill.host, prefill.peers, ticket)
    await end(push)
    with pytest.raises(Exception, match="push") as caught:
        await call.read()
    assert caught.value.code() is Aborted.code
