"""What a decode worker does with one call, from its arrival to the return of its blocks. Pure: docs/handoff.md."""

from enum import Enum

from worker.state_machine import StateMachine


class State(Enum):
    """Where the call stands."""

    ACCEPTED = "accepted"  # holds nothing yet
    RESERVED = "reserved"  # holds blocks; its ticket is out, for one push
    RECEIVING = "receiving"  # a push is open: KV may land
    RUNNING = "running"  # its sequence is computed; nothing can land
    DRAINING = "draining"  # over; its zone is closed, writes may be in flight
    QUARANTINED = "quarantined"  # over; a write has been in flight for too long
    ENDED = "ended"  # holds nothing any more


class Event(Enum):
    """What happens to it."""

    BLOCKS_RESERVED = "blocks reserved"  # for KV to come
    PREFILL_QUEUED = "prefill queued"  # the prompt is computed here
    PUSH_OPENED = "push opened"
    PUSH_REFUSED = "push refused"  # something that the push has said is wrong, such as its commit
    PUSH_LOST = "push lost"  # it has ended, and no commit was verified
    COMMIT_VERIFIED = "commit verified"  # by the landing zone, which refuses it while a write is in flight
    FINISHED = "finished"  # the last token is there
    SEQUENCE_LOST = "sequence lost"  # the engine has refused it, failed it or handed it back
    HANDED_BACK = "handed back"  # the worker drains, and its patience is over
    CALL_ENDED = "call ended"  # for whatever reason
    DRAINED = "drained"  # the zone is closed and no write is in flight
    DRAIN_TIMED_OUT = "drain timed out"


class Instruction(Enum):
    """What is to be done."""

    OPEN_ZONE = "open zone"
    SEND_RESERVED = "send reserved"
    ACCEPT_PUSH = "accept push"
    REFUSE_PUSH = "refuse push"  # the one that the event came from; another may be open
    CLOSE_ZONE = "close zone"  # DRAINED follows, at once or later; until then perhaps DRAIN_TIMED_OUT
    ACTIVATE = "activate"  # lets the sequence run; FINISHED follows if token 0 was the last one
    ACKNOWLEDGE_PUSH = "acknowledge push"  # terminal for the push
    END_PUSH = "end push"  # terminal for the push
    SEND_COMMITTED = "send committed"
    SEND_FINISHED = "send finished"  # terminal for the call
    FAIL_CALL = "fail call"  # with the first cause; terminal for the call
    REPORT_QUARANTINE = "report quarantine"
    FREE_BLOCKS = "free blocks"


_S, _E, _I = State, Event, Instruction

Transitions = dict[tuple[State, Event], tuple[State, tuple[Instruction, ...]]]

# What does not stand below cannot matter any more, or cannot come: the state stays, and nothing is done.
_RULES: Transitions = {
    (_S.ACCEPTED, _E.BLOCKS_RESERVED): (_S.RESERVED, (_I.OPEN_ZONE, _I.SEND_RESERVED)),
    (_S.ACCEPTED, _E.PREFILL_QUEUED): (_S.RUNNING, (_I.SEND_RESERVED,)),
    (_S.ACCEPTED, _E.SEQUENCE_LOST): (_S.ENDED, (_I.FAIL_CALL,)),
    (_S.ACCEPTED, _E.HANDED_BACK): (_S.ENDED, (_I.FAIL_CALL,)),
    (_S.ACCEPTED, _E.CALL_ENDED): (_S.ENDED, ()),
    (_S.RESERVED, _E.PUSH_OPENED): (_S.RECEIVING, (_I.ACCEPT_PUSH,)),
    (_S.RESERVED, _E.SEQUENCE_LOST): (_S.DRAINING, (_I.CLOSE_ZONE, _I.FAIL_CALL)),
    (_S.RESERVED, _E.HANDED_BACK): (_S.DRAINING, (_I.CLOSE_ZONE, _I.FAIL_CALL)),
    (_S.RESERVED, _E.CALL_ENDED): (_S.DRAINING, (_I.CLOSE_ZONE,)),
    (_S.RECEIVING, _E.COMMIT_VERIFIED): (
        _S.RUNNING,
        (_I.CLOSE_ZONE, _I.ACTIVATE, _I.ACKNOWLEDGE_PUSH, _I.SEND_COMMITTED),
    ),
    (_S.RECEIVING, _E.PUSH_REFUSED): (_S.DRAINING, (_I.CLOSE_ZONE, _I.END_PUSH, _I.FAIL_CALL)),
    (_S.RECEIVING, _E.PUSH_LOST): (_S.DRAINING, (_I.CLOSE_ZONE, _I.FAIL_CALL)),
    (_S.RECEIVING, _E.SEQUENCE_LOST): (_S.DRAINING, (_I.CLOSE_ZONE, _I.END_PUSH, _I.FAIL_CALL)),
    (_S.RECEIVING, _E.HANDED_BACK): (_S.DRAINING, (_I.CLOSE_ZONE, _I.END_PUSH, _I.FAIL_CALL)),
    (_S.RECEIVING, _E.CALL_ENDED): (_S.DRAINING, (_I.CLOSE_ZONE, _I.END_PUSH)),
    (_S.RUNNING, _E.FINISHED): (_S.ENDED, (_I.FREE_BLOCKS, _I.SEND_FINISHED)),
    (_S.RUNNING, _E.SEQUENCE_LOST): (_S.ENDED, (_I.FREE_BLOCKS, _I.FAIL_CALL)),
    (_S.RUNNING, _E.HANDED_BACK): (_S.ENDED, (_I.FREE_BLOCKS, _I.FAIL_CALL)),
    (_S.RUNNING, _E.CALL_ENDED): (_S.ENDED, (_I.FREE_BLOCKS,)),
    (_S.DRAINING, _E.DRAINED): (_S.ENDED, (_I.FREE_BLOCKS,)),
    (_S.DRAINING, _E.DRAIN_TIMED_OUT): (_S.QUARANTINED, (_I.REPORT_QUARANTINE,)),
    (_S.QUARANTINED, _E.DRAINED): (_S.ENDED, (_I.FREE_BLOCKS,)),
    # The call has ended while it was on its way to the engine.
    (_S.ENDED, _E.BLOCKS_RESERVED): (_S.ENDED, (_I.FREE_BLOCKS,)),
    (_S.ENDED, _E.PREFILL_QUEUED): (_S.ENDED, (_I.FREE_BLOCKS,)),
}
# A ticket is for one push, and only from the moment on when it is out.
_REFUSALS: Transitions = {
    (state, event): (state, (_I.REFUSE_PUSH,)) for state in State for event in (_E.PUSH_OPENED, _E.COMMIT_VERIFIED)
}

TRANSITIONS: Transitions = {(state, event): (state, ()) for state in State for event in Event} | _REFUSALS | _RULES


class HandoffMachine(StateMachine[State, Event, Instruction]):
    """The machine of one call."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS, State.ACCEPTED)
