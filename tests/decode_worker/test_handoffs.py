import asyncio
import logging

import pytest
from worker_rig import decode_request, read

from baton.errors import Aborted
from kv_transfer.errors import EpochMismatch, Incomplete, TicketClosed, TicketUnknown, TransferTimeout
from kv_transfer.frame import prompt_hash
from kv_transfer.landing import TransferClaim
from worker.conversion import fingerprint_from

pytestmark = pytest.mark.asyncio(loop_scope="session")

EMPTY = TransferClaim(num_frames=0, kv_bytes=0, digest=0, prompt_hash=0)


@pytest.fixture
def handoffs(workers):
    """Handoffs whose zones lie in blocks 0 and 1, which no sequence has: the tests end them all."""
    return workers[1].handoffs


async def test_a_ticket_says_all_that_a_sender_needs(handoffs, workers):
    host = workers[1].host
    handoff = handoffs.open("s", [1] * 20, 16, [0, 1])
    ticket = handoffs.ticket(handoff, 16, 20)
    assert (ticket.num_cached_tokens, ticket.num_prompt_tokens) == (16, 20)
    assert (ticket.worker, ticket.epoch) == ("decode-0", host.epoch)
    assert [(e.transport, e.address) for e in ticket.endpoints] == [("grpc", workers[1].handoffs.address)]
    assert fingerprint_from(ticket.fingerprint) == host.fingerprint
    assert await handoffs.close(handoff)


async def test_no_ticket_comes_twice(handoffs):
    opened = [handoffs.open("s", [1] * 20, 0, [0, 1]) for _ in range(100)]
    assert len({handoff.ticket_id for handoff in opened}) == 100
    for handoff in opened:
        await handoffs.close(handoff)


async def test_a_transfer_of_nothing_can_be_committed(handoffs):
    """Everything about the order of calls; what is verified is the landing zone's to test."""
    handoff = handoffs.open("s", [1] * 16, 16, [0])
    handoffs.begin(handoff.ticket_id, handoffs._host.epoch)
    digest = 0x2D06800538D394C2  # XXH3-64 of no bytes
    handoffs.commit(handoff.ticket_id, TransferClaim(0, 0, digest, prompt_hash([1] * 16)), first_token_id=7)
    delivery = await handoff.delivery
    assert (delivery.first_token_id, delivery.kv_bytes) == (7, 0)
    handoffs.fail(handoff.ticket_id, Aborted("too late to matter"))
    assert (await handoff.delivery).first_token_id == 7
    assert await handoffs.close(handoff)


async def test_a_refused_commit_delivers_nothing(handoffs):
    handoff = handoffs.open("s", [1] * 20, 0, [0, 1])
    with pytest.raises(TicketClosed):
        handoffs.commit(handoff.ticket_id, EMPTY, 7)  # nobody has begun
    handoffs.begin(handoff.ticket_id, handoffs._host.epoch)
    with pytest.raises(Incomplete):
        handoffs.commit(handoff.ticket_id, EMPTY, 7)
    assert not handoff.delivery.done()
    await handoffs.close(handoff)


async def test_only_one_sender_may_begin_and_in_this_life(handoffs):
    handoff = handoffs.open("s", [1] * 20, 0, [0, 1])
    with pytest.raises(EpochMismatch):
        handoffs.begin(handoff.ticket_id, "another")
    handoffs.begin(handoff.ticket_id, handoffs._host.epoch)
    with pytest.raises(TicketClosed):
        handoffs.begin(handoff.ticket_id, handoffs._host.epoch)
    await handoffs.close(handoff)


async def test_a_failure_reaches_who_waits(handoffs):
    handoff = handoffs.open("s", [1] * 20, 0, [0, 1])
    handoffs.fail(handoff.ticket_id, Aborted("the sender went away"))
    with pytest.raises(Aborted, match="went away"):
        await handoff.delivery
    await handoffs.close(handoff)


async def test_a_closed_handoff_takes_nothing_any_more(handoffs):
    handoff = handoffs.open("s", [1] * 20, 0, [0, 1])
    assert await handoffs.close(handoff)
    with pytest.raises(TicketUnknown):
        handoffs.begin(handoff.ticket_id, handoffs._host.epoch)
    with pytest.raises(TicketUnknown, match=handoff.ticket_id):
        handoffs.commit(handoff.ticket_id, EMPTY, 7)
    handoffs.fail(handoff.ticket_id, Aborted("nobody listens"))
    assert not handoff.delivery.done()
    assert await handoffs.close(handoff)  # closing twice is fine


async def test_a_failure_nobody_waited_for_leaves_no_complaint(handoffs):
    """asyncio complains of exceptions that nobody has looked at: here an error, as of any warning."""
    handoff = handoffs.open("s", [1] * 20, 0, [0, 1])
    handoffs.fail(handoff.ticket_id, Aborted("gone"))
    await handoffs.close(handoff)
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        del handoff
    finally:
        loop.set_exception_handler(None)
    assert complaints == []


async def test_blocks_of_a_zone_that_does_not_drain_stay_out_of_circulation(workers, monkeypatch, caplog, eventually):
    """While a write may still land, nobody else gets the blocks."""
    _, decode = workers

    async def stuck(ticket_id, timeout_s):
        raise TransferTimeout(f"writes for ticket {ticket_id} are in flight")

    call = decode.decode(decode_request([1] * 33))
    ticket = (await read(call, "reserved")).ticket
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(decode.sink, "close", stuck)
        call.cancel()
        await eventually(lambda: "out of circulation" in caplog.text)
    assert decode.num_owned_blocks == 3
    # What the test held back is given back for those after it.
    await decode.sink.close(ticket.id, 1.0)
    (sequence_id,) = decode.host.engine._sinks
    decode.host.engine.abort(sequence_id)
