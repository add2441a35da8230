from enum import Enum

import pytest

from worker.state_machine import Reactor, StateMachine


class Door(Enum):
    OPEN = 1
    SHUT = 2
    LOCKED = 3


class Push(Enum):
    PULL = 1
    PUSH = 2
    LOCK = 3


class Do(Enum):
    CREAK = 1
    SLAM = 2
    CLICK = 3


TABLE = {(state, event): (state, ()) for state in Door for event in Push} | {
    (Door.SHUT, Push.PULL): (Door.OPEN, (Do.CREAK,)),
    (Door.OPEN, Push.PUSH): (Door.SHUT, (Do.CREAK, Do.SLAM)),
    (Door.SHUT, Push.LOCK): (Door.LOCKED, (Do.CLICK,)),
    (Door.OPEN, Push.LOCK): (Door.OPEN, (Do.CLICK,)),
}


def test_the_table_decides():
    door = StateMachine(TABLE, Door.OPEN)
    assert door.handle(Push.PUSH) == (Do.CREAK, Do.SLAM)
    assert door.state is Door.SHUT
    assert door.handle(Push.PUSH) == ()
    assert door.state is Door.SHUT


def test_the_error_of_the_first_event_that_changes_the_state_is_the_cause():
    door = StateMachine(TABLE, Door.OPEN)
    errors = [ValueError(str(i)) for i in range(4)]
    door.handle(Push.PULL, errors[0])  # nothing follows
    door.handle(Push.LOCK, errors[1])  # something follows, but the state stays
    assert door.cause is None
    door.handle(Push.PUSH, errors[2])
    door.handle(Push.LOCK, errors[3])
    assert door.cause is errors[2]


def test_an_event_out_of_an_action_waits_for_the_actions_before_it():
    door, done = StateMachine(TABLE, Door.OPEN), []

    def creak():
        done.append("creak")
        reactor.handle(Push.LOCK)
        assert door.state is Door.SHUT

    actions = {Do.CREAK: creak, Do.SLAM: lambda: done.append("slam"), Do.CLICK: lambda: done.append("click")}
    reactor = Reactor(door, actions)
    reactor.handle(Push.PUSH)
    assert done == ["creak", "slam", "click"]
    assert door.state is Door.LOCKED


def test_what_an_action_raises_reaches_who_brought_the_event_and_the_machine_goes_on():
    door, done = StateMachine(TABLE, Door.OPEN), []

    def slam():
        raise RuntimeError("off its hinges")

    reactor = Reactor(door, {Do.CREAK: lambda: done.append("creak"), Do.SLAM: slam, Do.CLICK: list})
    with pytest.raises(RuntimeError, match="hinges"):
        reactor.handle(Push.PUSH)
    reactor.handle(Push.PULL)
    assert done == ["creak", "creak"]
    assert door.state is Door.OPEN
