"""State machines as data, without I/O: events in, instructions out. Pure."""

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
I = TypeVar("I", bound=Enum)  # noqa: E741 - an instruction


class StateMachine(Generic[S, E, I]):
    """A state, the table that says what follows from each event in it, and the first cause of a failure."""

    def __init__(self, transitions: Mapping[tuple[S, E], tuple[S, tuple[I, ...]]], start: S) -> None:
        """`transitions` has every pair of state and event."""
        self._transitions = transitions
        self.state = start
        self.cause: Exception | None = None

    def handle(self, event: E, error: Exception | None = None) -> tuple[I, ...]:
        """Takes the event and returns what is to be done about it, in this order.

        `error` is what the event tells of. The one of the first event that changed the state is the cause; those
        after it are consequences, and one that changes nothing has no say.
        """
        state, instructions = self._transitions[self.state, event]
        if self.cause is None and state is not self.state:
            self.cause = error
        self.state = state
        return instructions


class Reactor(Generic[S, E, I]):
    """Executes what a machine says, one event after the other."""

    def __init__(self, machine: StateMachine[S, E, I], actions: Mapping[I, Callable[[], None]]) -> None:
        """`actions` has every instruction."""
        self._machine = machine
        self._actions = actions
        self._due: deque[tuple[E, Exception | None]] = deque()
        self._is_busy = False

    def handle(self, event: E, error: Exception | None = None) -> None:
        """Executes all that follows from the event; an event out of an action follows when that transition is done.

        Raises what an action raises, to whom the event came from; what else was due is done with the next event.
        """
        self._due.append((event, error))
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._due:
                for instruction in self._machine.handle(*self._due.popleft()):
                    self._actions[instruction]()
        finally:
            self._is_busy = False
