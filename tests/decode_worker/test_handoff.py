import pytest
import pytest_asyncio

from baton.errors import Aborted, DataLoss
from decode_worker.handoff_machine import Event
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kv_transfer.errors import Incomplete, TicketClosed
from kv_transfer.landing import TransferClaim
from worker.sequence_feed import SequenceFeed

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def reserved(workers):
    """The handoff of a sequence for which the engine holds blocks."""
    decode = workers[1]
    sequence = Sequence("s", [1] * 20, 20, SamplingParams(temperature=0.0, max_tokens=1))
    with decode.handoffs.call() as handoff:
        decode.host.engine.reserve(sequence, SequenceFeed())
        handoff.reserve(sequence)
        assert (await anext(handoff.outbox)).reserved.ticket.id == handoff.ticket_id
        yield handoff
        handoff.handle(Event.CALL_ENDED)


async def end_of(handoff):
    """What is told in the end, after all messages."""
    async for _ in handoff.outbox:
        pass


async def test_what_a_push_says_wrong_is_told_to_both_and_all_is_released_before(workers, reserved):
    error = DataLoss("the digest is another one")
    reserved.open_push("prefill-9")
    reserved.handle(Event.PUSH_REFUSED, error)
    assert workers[1].host.engine.load().num_sequences == 0
    assert reserved.push_over.result() is error
    with pytest.raises(DataLoss, match="digest"):
        await end_of(reserved)


async def test_who_ends_the_call_first_has_no_cause_to_tell_the_push(reserved):
    reserved.open_push("prefill-9")
    reserved.handle(Event.CALL_ENDED)
    reserved.hand_back(Aborted("too late to matter"))
    told = reserved.push_over.result()
    assert (told.reason, reserved.ticket_id in str(told)) == ("TICKET_CLOSED", True)


async def test_a_refused_commit_changes_nothing_until_it_is_told(reserved):
    """Which the push service does, with the error it gets here."""
    claim = TransferClaim(num_frames=0, kv_bytes=0, digest=0, prompt_hash=0)
    with pytest.raises(TicketClosed):
        reserved.commit(claim, 7)  # nobody has begun
    reserved.open_push("prefill-9")
    with pytest.raises(Incomplete):
        reserved.commit(claim, 7)
    assert not reserved.push_over.done()


async def test_a_prompt_that_is_computed_here_has_no_ticket(workers):
    decode = workers[1]
    sequence = Sequence("s", [1] * 20, 20, SamplingParams(temperature=0.0, max_tokens=1))
    with decode.handoffs.call() as handoff:
        decode.host.engine.add(sequence, SequenceFeed())
        handoff.queue(sequence)
        assert not (await anext(handoff.outbox)).reserved.HasField("ticket")
        with pytest.raises(TicketClosed):
            handoff.open_push("prefill-9")
        handoff.hand_back(Aborted("enough"))
        with pytest.raises(Aborted, match="enough"):
            await end_of(handoff)
        assert decode.host.engine.load().num_sequences == 0
