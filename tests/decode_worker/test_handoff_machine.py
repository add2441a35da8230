"""Every path of events through the table, among those that the world allows; and that the document tells the same."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
from transition_doc import documented

from decode_worker.handoff_machine import TRANSITIONS, Event, HandoffMachine, Instruction, State

CALL_TERMINALS = {Instruction.SEND_FINISHED, Instruction.FAIL_CALL}
PUSH_TERMINALS = {Instruction.ACKNOWLEDGE_PUSH, Instruction.END_PUSH}


@dataclass(frozen=True)
class World:
    """One call and what surrounds it. `instructions` are all so far that may come only once."""

    state: State = State.ACCEPTED
    instructions: frozenset[Instruction] = frozenset()
    has_engine_been_asked: bool = False
    is_held: bool = False  # the engine has blocks for it
    may_land: bool = False  # frames are let in, or are on their way into the blocks
    is_push_there: bool = False
    is_call_over: bool = False

    def after(self, event: Event) -> "World":
        state, instructions = TRANSITIONS[self.state, event]
        world = replace(self, state=state)
        if event in (Event.BLOCKS_RESERVED, Event.PREFILL_QUEUED):
            world = replace(world, has_engine_been_asked=True, is_held=True)
        elif event is Event.CALL_ENDED:
            world = replace(world, is_call_over=True)
        elif event is Event.DRAINED or (event is Event.COMMIT_VERIFIED and self.state is State.RECEIVING):
            world = replace(world, may_land=False)
        elif event is Event.PUSH_LOST:
            world = replace(world, is_push_there=False)
        for instruction in instructions:
            world = world.execute(instruction)
        return world

    def execute(self, instruction: Instruction) -> "World":
        once = set() if instruction is Instruction.REFUSE_PUSH else {instruction}
        assert not once & self.instructions, f"{instruction} twice"
        if instruction is Instruction.ACCEPT_PUSH:
            return replace(self, may_land=True, is_push_there=True, instructions=self.instructions | once)
        if instruction in PUSH_TERMINALS:
            assert self.is_push_there
            assert not PUSH_TERMINALS & self.instructions
        if instruction in CALL_TERMINALS:
            assert not self.is_call_over
            assert not CALL_TERMINALS & self.instructions
        if instruction in (Instruction.ACTIVATE, Instruction.FREE_BLOCKS):
            assert self.is_held
            assert not self.may_land
            assert instruction is Instruction.FREE_BLOCKS or Instruction.CLOSE_ZONE in self.instructions
        if instruction is Instruction.FREE_BLOCKS:
            return replace(self, is_held=False, instructions=self.instructions | once)
        return replace(self, instructions=self.instructions | once)

    def possible_events(self) -> list[Event]:
        impossible = set()
        if self.has_engine_been_asked:
            impossible |= {Event.BLOCKS_RESERVED, Event.PREFILL_QUEUED}
        if Instruction.CLOSE_ZONE not in self.instructions:
            impossible |= {Event.DRAINED, Event.DRAIN_TIMED_OUT}
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


def test_a_call_that_holds_nothing_to_write_to_has_ended_and_no_other():
    for world in WORLDS:
        freed = Instruction.FREE_BLOCKS in world.instructions
        assert world.state is State.ENDED or not freed
        assert world.is_held == (world.has_engine_been_asked and not freed)


def test_blocks_stay_until_the_call_is_over():
    for world in WORLDS:
        if Instruction.FREE_BLOCKS in world.instructions:
            assert world.is_call_over or CALL_TERMINALS & world.instructions


def test_it_runs_only_from_a_verified_commit_or_what_it_computes_itself():
    to_running = {pair for pair, (state, _) in TRANSITIONS.items() if state is State.RUNNING and pair[0] is not state}
    assert to_running == {(State.RECEIVING, Event.COMMIT_VERIFIED), (State.ACCEPTED, Event.PREFILL_QUEUED)}
    activating = {pair for pair, (_, instructions) in TRANSITIONS.items() if Instruction.ACTIVATE in instructions}
    assert activating == {(State.RECEIVING, Event.COMMIT_VERIFIED)}


def test_from_everywhere_the_end_of_the_call_and_the_drain_release_everything():
    for world in WORLDS:
        after = world.after(Event.CALL_ENDED)
        assert after.state in (State.DRAINING, State.QUARANTINED, State.ENDED)
        if after.state is not State.ENDED:
            after = after.after(Event.DRAINED)
        assert after.state is State.ENDED
        assert not after.is_held
        assert not after.may_land
        assert Instruction.OPEN_ZONE not in after.instructions or Instruction.CLOSE_ZONE in after.instructions
        was_accepted = Instruction.ACCEPT_PUSH in after.instructions
        assert not (was_accepted and after.is_push_there) or PUSH_TERMINALS & after.instructions


def test_nobody_waits_for_ever_for_a_failure_to_be_told():
    """As long as the call is there, it hears of every failure, in the very step of it."""
    for world in WORLDS:
        if world.state in (State.DRAINING, State.QUARANTINED, State.ENDED) and not world.is_call_over:
            assert CALL_TERMINALS & world.instructions


def test_a_second_push_is_refused_and_changes_nothing():
    for state in set(State) - {State.RESERVED}:
        assert TRANSITIONS[state, Event.PUSH_OPENED] == (state, (Instruction.REFUSE_PUSH,))


@pytest.mark.parametrize("late", [Event.PUSH_LOST, Event.SEQUENCE_LOST, Event.CALL_ENDED])
def test_the_first_cause_stays(late):
    machine = HandoffMachine()
    for event in (Event.BLOCKS_RESERVED, Event.PUSH_OPENED):
        machine.handle(event)
    first = ValueError("first")
    machine.handle(Event.PUSH_REFUSED, first)
    machine.handle(late, ValueError("later"))
    assert machine.cause is first


def test_what_does_not_matter_is_no_cause():
    """The push's call ends some time after its commit."""
    machine = HandoffMachine()
    for event in (Event.BLOCKS_RESERVED, Event.PUSH_OPENED, Event.COMMIT_VERIFIED):
        machine.handle(event)
    machine.handle(Event.PUSH_LOST, ValueError("of no interest"))
    cause = ValueError("the step failed")
    assert machine.handle(Event.SEQUENCE_LOST, cause) == (Instruction.FREE_BLOCKS, Instruction.FAIL_CALL)
    assert machine.cause is cause


def test_the_document_has_the_same_table():
    assert documented("Decode side", State, Event, Instruction) == TRANSITIONS
