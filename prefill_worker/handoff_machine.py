"""What a prefill worker does with one call, from its arrival to the return of its blocks. Pure: docs/handoff.md."""

from enum import Enum

from worker.state_machine import StateMachine


class State(Enum):
    """Where the call stands. Without a ticket there is a push of nothing to nobody, which always succeeds."""

    OPENING = "opening"  # holds nothing; a push is being opened
    QUEUED = "queued"  # the push is open; not in the engine's hands yet
    COMPUTING = "computing"  # holds blocks, which are computed and read
    SAMPLED = "sampled"  # token 0 is there, some KV is not acknowledged
    DELIVERED = "delivered"  # all KV is acknowledged, token 0 is not there
    COMMITTING = "committing"  # both are there; the decode worker is asked to commit
    STOPPING = "stopping"  # over; reads of the blocks may go on
    STUCK = "stuck"  # over; a read has gone on for too long
    ENDED = "ended"  # holds nothing any more


class Event(Enum):
    """What happens to it."""

    PUSH_OPENED = "push opened"
    ADMITTED = "admitted"  # may go to the engine now
    FIRST_TOKEN = "first token"
    KV_ACKNOWLEDGED = "KV acknowledged"  # all of it; nothing reads the blocks any more
    COMMITTED = "committed"  # says the decode worker
    PUSH_LOST = "push lost"  # not opened, refused, broken, or late
    SEQUENCE_LOST = "sequence lost"  # the engine has refused it, failed it or handed it back
    HANDED_BACK = "handed back"  # the worker drains, and its patience is over
    CALL_ENDED = "call ended"  # for whatever reason
    READS_STOPPED = "reads stopped"
    STOP_TIMED_OUT = "stop timed out"


class Instruction(Enum):
    """What is to be done."""

    START_PREFILL = "start prefill"  # SEQUENCE_LOST follows if the engine refuses
    SEND_FIRST_TOKEN = "send first token"
    COMMIT = "commit"
    SEND_PUSHED = "send pushed"  # terminal for the call
    FAIL_CALL = "fail call"  # with the first cause; terminal for the call
    STOP_PUSH = "stop push"  # READS_STOPPED follows, at once or later; until then perhaps STOP_TIMED_OUT
    REPORT_STUCK = "report stuck"
    FREE_BLOCKS = "free blocks"


_S, _E, _I = State, Event, Instruction

Transitions = dict[tuple[State, Event], tuple[State, tuple[Instruction, ...]]]

# What does not stand below cannot matter any more, or cannot come: the state stays, and nothing is done.
_PROGRESS: Transitions = {
    (_S.OPENING, _E.PUSH_OPENED): (_S.QUEUED, ()),
    (_S.QUEUED, _E.ADMITTED): (_S.COMPUTING, (_I.START_PREFILL,)),
    (_S.COMPUTING, _E.FIRST_TOKEN): (_S.SAMPLED, (_I.SEND_FIRST_TOKEN,)),
    (_S.COMPUTING, _E.KV_ACKNOWLEDGED): (_S.DELIVERED, ()),
    (_S.SAMPLED, _E.KV_ACKNOWLEDGED): (_S.COMMITTING, (_I.COMMIT,)),
    (_S.DELIVERED, _E.FIRST_TOKEN): (_S.COMMITTING, (_I.SEND_FIRST_TOKEN, _I.COMMIT)),
    (_S.COMMITTING, _E.COMMITTED): (_S.ENDED, (_I.FREE_BLOCKS, _I.SEND_PUSHED)),
    (_S.STOPPING, _E.READS_STOPPED): (_S.ENDED, (_I.FREE_BLOCKS,)),
    (_S.STOPPING, _E.STOP_TIMED_OUT): (_S.STUCK, (_I.REPORT_STUCK,)),
    (_S.STUCK, _E.READS_STOPPED): (_S.ENDED, (_I.FREE_BLOCKS,)),
    # The call has ended while its push was being opened.
    (_S.ENDED, _E.PUSH_OPENED): (_S.ENDED, (_I.STOP_PUSH,)),
}
_WITH_BLOCKS = (_S.COMPUTING, _S.SAMPLED, _S.DELIVERED, _S.COMMITTING)
_FAILURES = (_E.PUSH_LOST, _E.SEQUENCE_LOST, _E.HANDED_BACK)
_ENDS: Transitions = (
    {(_S.OPENING, event): (_S.ENDED, (_I.FAIL_CALL,)) for event in _FAILURES}
    | {(_S.QUEUED, event): (_S.ENDED, (_I.STOP_PUSH, _I.FAIL_CALL)) for event in (*_FAILURES, _E.COMMITTED)}
    | {(state, event): (_S.STOPPING, (_I.STOP_PUSH, _I.FAIL_CALL)) for state in _WITH_BLOCKS for event in _FAILURES}
    # Not asked to commit yet, the decode worker is out of step.
    | {(state, _E.COMMITTED): (_S.STOPPING, (_I.STOP_PUSH, _I.FAIL_CALL)) for state in _WITH_BLOCKS[:-1]}
    | {(_S.OPENING, _E.CALL_ENDED): (_S.ENDED, ()), (_S.QUEUED, _E.CALL_ENDED): (_S.ENDED, (_I.STOP_PUSH,))}
    | {(state, _E.CALL_ENDED): (_S.STOPPING, (_I.STOP_PUSH,)) for state in _WITH_BLOCKS}
)

TRANSITIONS: Transitions = {(state, event): (state, ()) for state in State for event in Event} | _ENDS | _PROGRESS


class HandoffMachine(StateMachine[State, Event, Instruction]):
    """The machine of one call."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS, State.OPENING)
