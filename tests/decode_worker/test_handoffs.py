import asyncio
import logging
from contextlib import contextmanager

import grpc
import pytest
from worker_rig import HELLO, HELLO_ANSWER, SlowPool, decode_request, hand_over, prefill_request, read

from baton.errors import from_rpc_error
from baton.v1 import worker_pb2, worker_pb2_grpc
from decode_worker import handoffs as handoffs_module
from kv_transfer.errors import EpochMismatch, TicketClosed, TicketUnknown
from worker.conversion import fingerprint_from

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [HELLO] * 33  # three blocks


async def reserve(decode, token_ids=PROMPT):
    call = decode.decode(decode_request(token_ids))
    return call, (await read(call, "reserved")).ticket


@contextmanager
def stuck_writes(decode):
    """Writes begin, and do not end within the context."""
    slow = SlowPool(decode.host.kv_pool)
    decode.sink._pool = slow
    try:
        yield slow
    finally:
        slow.may_go_on.set()
        decode.sink._pool = decode.host.kv_pool


async def push_until_it_is_stuck(prefill, decode, slow):
    """A request whose KV is on its way into its blocks; returns its calls."""
    call, ticket = await reserve(decode)
    prefill_call = prefill.prefill(prefill_request(PROMPT, ticket))
    assert await asyncio.to_thread(slow.has_begun.wait, 30)
    return call, prefill_call


async def failure_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return from_rpc_error(caught.value)


async def test_a_ticket_says_all_that_a_sender_needs(workers):
    prefill, decode = workers
    await hand_over(prefill, decode, decode_request([HELLO] * 16))
    call, ticket = await reserve(decode, [HELLO] * 20)
    assert (ticket.num_cached_tokens, ticket.num_prompt_tokens) == (16, 20)
    assert (ticket.worker, ticket.epoch) == ("decode-0", decode.host.epoch)
    assert [(e.transport, e.address) for e in ticket.endpoints] == [("grpc", decode.handoffs.address)]
    assert fingerprint_from(ticket.fingerprint) == decode.host.fingerprint
    call.cancel()


async def test_no_ticket_comes_twice(workers):
    tickets = set()
    for _ in range(100):
        with workers[1].handoffs.call() as handoff:
            tickets.add(handoff.ticket_id)
    assert len(tickets) == 100


async def test_a_handoff_is_found_by_its_ticket_as_long_as_its_call_lasts(workers, eventually):
    decode = workers[1]
    handoffs, epoch = decode.handoffs, decode.host.epoch
    call, ticket = await reserve(decode)
    with pytest.raises(EpochMismatch):
        handoffs.find(ticket.id, "0123456789abcdef")
    with pytest.raises(TicketUnknown, match="ab" * 16):
        handoffs.find("ab" * 16, epoch)
    handoff = handoffs.find(ticket.id, epoch)
    assert handoff.ticket_id == ticket.id
    handoff.open_push("prefill-9")
    assert handoff.sender == "prefill-9"
    with pytest.raises(TicketClosed, match=ticket.id):
        handoff.open_push("prefill-8")
    assert handoff.sender == "prefill-9"
    call.cancel()
    await eventually(lambda: decode.is_clean)
    with pytest.raises(TicketUnknown, match=ticket.id):
        handoffs.find(ticket.id, epoch)


async def test_the_router_hears_of_a_lost_push_at_once_though_a_write_goes_on(workers, monkeypatch, eventually):
    """The blocks wait for the write; the call does not."""
    prefill, decode = workers
    monkeypatch.setattr(handoffs_module, "DRAIN_TIMEOUT_S", 600.0)
    with stuck_writes(decode) as slow:
        call, prefill_call = await push_until_it_is_stuck(prefill, decode, slow)
        prefill_call.cancel()
        async with asyncio.timeout(30):
            error = await failure_of(call)
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "PUSH_ENDED")
        assert decode.num_owned_blocks == 3
        assert decode.handoffs.num_quarantined_blocks == 0
    await eventually(lambda: decode.is_clean)
    assert decode.num_cached_blocks == 0


async def test_blocks_that_do_not_drain_are_quarantined_and_come_back_when_they_do(
    workers, monkeypatch, caplog, eventually
):
    prefill, decode = workers
    monkeypatch.setattr(handoffs_module, "DRAIN_TIMEOUT_S", 0.05)
    with stuck_writes(decode) as slow, caplog.at_level(logging.ERROR):
        call, prefill_call = await push_until_it_is_stuck(prefill, decode, slow)
        call.cancel()
        await eventually(lambda: decode.handoffs.num_quarantined_blocks == 3)
        assert "3 blocks stay out of circulation" in caplog.text
        stub = worker_pb2_grpc.WorkerServiceStub(decode.channel)
        ledger = await stub.GetLedger(worker_pb2.GetLedgerRequest(), timeout=10)
        assert (ledger.quarantined_blocks, ledger.in_flight_blocks, ledger.num_open_tickets) == (3, 3, 1)
        assert (await failure_of(prefill_call)).code is grpc.StatusCode.NOT_FOUND
        rest = decode.decode(decode_request([1] * 447))  # all but those three
        await read(rest, "reserved")
        full = decode.decode(decode_request([HELLO] * 32))
        assert (await failure_of(full)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        rest.cancel()
    await eventually(lambda: decode.is_clean)
    assert decode.handoffs.num_quarantined_blocks == 0
    assert (await hand_over(prefill, decode, decode_request(PROMPT))).token_ids == HELLO_ANSWER


async def test_a_worker_that_stops_waits_for_no_write(workers, eventually):
    prefill, decode = workers
    with stuck_writes(decode) as slow:
        call, prefill_call = await push_until_it_is_stuck(prefill, decode, slow)
        call.cancel()
        await failure_of(prefill_call)
        async with asyncio.timeout(30):
            await decode.handoffs.close_all()
        assert decode.num_owned_blocks == 3
    # What the stop left to the end of the process is given back for the tests after this one.
    await eventually(lambda: decode.sink.num_open == 0)
    for sequence_id in tuple(decode.host.engine._sinks):
        decode.host.engine.abort(sequence_id)
