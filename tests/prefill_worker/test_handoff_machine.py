"""Every path of events through the table, among those that the world allows; and that the document tells the same."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
from transition_doc import documented

from prefill_worker.handoff_machine import TRANSITIONS, Event, HandoffMachine, Instruction, State

TERMINALS = {Instruction.SEND_PUSHED, Instruction.FAIL_CALL}
OVER = {State.STOPPING, State.STUCK, State.ENDED}


@dataclass(frozen=True)
class World:
    """One call and what surrounds it. `instructions` are all so far; each may come only once."""

    state: State = State.OPENING
    instructions: frozenset[Instruction] = frozenset()
    events: frozenset[Event] = frozenset()
    is_held: bool = False  # the engine has blocks for it
    is_read: bool = False  # frames are, or may yet be, made of the blocks
    is_push_open: bool = False
    is_call_over: bool = False

    def after(self, event: Event) -> "World":
        state, instructions = TRANSITIONS[self.state, event]
        world = replace(self, state=state, events=self.events | {event})
        if event is Event.PUSH_OPENED:
            world = replace(world, is_push_open=True)
        elif event is Event.CALL_ENDED:
            world = replace(world, is_call_over=True)
        elif event in (Event.READS_STOPPED, Event.KV_ACKNOWLEDGED):
            world = replace(world, is_read=False)
        elif event is Event.COMMITTED:
            world = replace(world, is_push_open=False)
        for instruction in instructions:
            world = world.execute(instruction)
        return world

    def execute(self, instruction: Instruction) -> "World":
        assert instruction not in self.instructions, f"{instruction} twice"
        world = replace(self, instructions=self.instructions | {instruction})
        if instruction is Instruction.START_PREFILL:
            return replace(world, is_held=True, is_read=True)
        if instruction is Instruction.STOP_PUSH:
            return replace(world, is_push_open=False)
        if instruction is Instruction.COMMIT:
            assert {Event.FIRST_TOKEN, Event.KV_ACKNOWLEDGED} <= self.events
            assert Instruction.SEND_FIRST_TOKEN in self.instructions
            assert not self.is_read
        if instruction in TERMINALS:
            assert not self.is_call_over
            assert not TERMINALS & self.instructions
            assert instruction is Instruction.FAIL_CALL or Instruction.COMMIT in self.instructions
        if instruction is Instruction.FREE_BLOCKS:
            assert self.is_held
            assert not self.is_read
            return replace(world, is_held=False)
        return world

    def possible_events(self) -> list[Event]:
        impossible = set()
        if self.events & {Event.PUSH_OPENED}:
            impossible |= {Event.PUSH_OPENED}
        else:  # all that a push, or what comes after it, may say
            impossible |= {Event.ADMITTED, Event.COMMITTED}
        if Instruction.START_PREFILL not in self.instructions:
            impossible |= {Event.FIRST_TOKEN, Event.KV_ACKNOWLEDGED}
        if Instruction.STOP_PUSH not in self.instructions:
            impossible |= {Event.READS_STOPPED, Event.STOP_TIMED_OUT}
        return [event for event in Event if event not in impossible]


def reachable() -> set[World]:
    """Every world that any number of events leads to; `execute` checks each step on the way."""
    found, due = {World()}, [World()]
    while due:
        world = due.pop()
        new = {world.after(event) for event in world.possible_events()} - found
        found |= new
        due += new
    return found


WORLDS = reachable()


def test_every_event_is_answered_in_every_state():
    assert set(TRANSITIONS) == set(product(State, Event))


def test_every_state_is_reached():
    assert {world.state for world in WORLDS} == set(State)


def test_blocks_are_held_from_the_start_of_the_prefill_until_they_are_freed():
    for world in WORLDS:
        was_started = Instruction.START_PREFILL in world.instructions
        assert world.is_held == (was_started and Instruction.FREE_BLOCKS not in world.instructions)
        assert not (world.is_held and world.state is State.ENDED)


def test_blocks_stay_until_the_call_is_over():
    for world in WORLDS:
        if Instruction.FREE_BLOCKS in world.instructions:
            assert world.is_call_over or TERMINALS & world.instructions or world.state is State.ENDED


def test_from_everywhere_the_end_of_the_call_and_of_the_reads_release_everything():
    for world in WORLDS:
        after = world.after(Event.CALL_ENDED)
        assert after.state in OVER
        if after.state is not State.ENDED:
            after = after.after(Event.READS_STOPPED)
        assert after.state is State.ENDED
        assert not after.is_held
        assert not after.is_push_open


def test_a_push_that_is_opened_too_late_is_stopped():
    for world in WORLDS:
        if world.state in OVER and Event.PUSH_OPENED not in world.events:
            assert not world.after(Event.PUSH_OPENED).is_push_open


def test_nobody_waits_for_ever_for_a_failure_to_be_told():
    """As long as the call is there, it hears of every failure, in the very step of it."""
    for world in WORLDS:
        if world.state in OVER and not world.is_call_over:
            assert TERMINALS & world.instructions


@pytest.mark.parametrize(
    "order", [(Event.FIRST_TOKEN, Event.KV_ACKNOWLEDGED), (Event.KV_ACKNOWLEDGED, Event.FIRST_TOKEN)]
)
def test_token_0_and_the_last_acknowledgement_come_in_either_order(order):
    machine = HandoffMachine()
    for event in (Event.PUSH_OPENED, Event.ADMITTED, order[0]):
        assert Instruction.COMMIT not in machine.handle(event)
    assert machine.handle(order[1])[-1] is Instruction.COMMIT


@pytest.mark.parametrize("state", [State.QUEUED, State.COMPUTING, State.SAMPLED, State.DELIVERED])
def test_a_decode_worker_that_commits_unasked_is_out_of_step(state):
    assert Instruction.FAIL_CALL in TRANSITIONS[state, Event.COMMITTED][1]


def test_the_first_cause_stays():
    machine = HandoffMachine()
    for event in (Event.PUSH_OPENED, Event.ADMITTED):
        machine.handle(event)
    first = ValueError("first")
    machine.handle(Event.SEQUENCE_LOST, first)
    machine.handle(Event.PUSH_LOST, ValueError("as it was stopped"))
    assert machine.cause is first


def test_the_document_has_the_same_table():
    assert documented("Prefill side", State, Event, Instruction) == TRANSITIONS
