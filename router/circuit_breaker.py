"""Who is left alone for a while after failing again and again: workers, and pairs of them. Pure.

The circuit breaker of M. Nygard, "Release It!" (2007): closed, open, and half-open for one trial at a time.
"""

from collections.abc import Hashable
from dataclasses import dataclass

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


@dataclass(slots=True)
class _Circuit:
    failures_in_a_row: int = 0
    opened_at_s: float = 0.0
    closed_again_at_s: float = 0.0
    is_on_trial: bool = False

    @property
    def is_tripped(self) -> bool:
        return self.failures_in_a_row >= FAILURES_TO_OPEN


class CircuitBreaker:
    """One circuit for each key that has failed and not succeeded since. Times of any monotonic clock, in seconds.

    | state     | allows | sent      | success | failure                         | neither |
    |-----------|--------|-----------|---------|---------------------------------|---------|
    | closed    | yes    | -         | closed  | open after FAILURES_TO_OPEN     | -       |
    | open      | no     | -         | closed  | open, for twice as long         | -       |
    | half-open | yes    | on trial  | closed  | open, for twice as long         | -       |
    | on trial  | no     | -         | closed  | open, for twice as long         | half-open |

    Failures of what was sent before the circuit opened do not count. Open becomes half-open when its pause is over:
    1 s at first, twice as long each time, 30 s at most.
    """

    def __init__(self) -> None:
        self._circuits: dict[Hashable, _Circuit] = {}

    def allows(self, key: Hashable, now_s: float) -> bool:
        """Whether a request may be sent there."""
        circuit = self._circuits.get(key)
        if circuit is None or not circuit.is_tripped:
            return True
        return now_s >= circuit.closed_again_at_s and not circuit.is_on_trial

    def blocked(self, now_s: float) -> list[Hashable]:
        """All keys that nothing may be sent to now."""
        return [key for key in list(self._circuits) if not self.allows(key, now_s)]

    def note_sent(self, key: Hashable) -> None:
        """A request was sent there; if the circuit is half-open, it is the trial."""
        circuit = self._circuits.get(key)
        if circuit is not None and circuit.is_tripped:
            circuit.is_on_trial = True

    def note_success(self, key: Hashable) -> None:
        """It works."""
        self._circuits.pop(key, None)

    def note_failure(self, key: Hashable, sent_at_s: float, now_s: float) -> bool:
        """What was sent there then has failed now. True if this opened the circuit."""
        circuit = self._circuits.setdefault(key, _Circuit())
        if circuit.is_tripped and sent_at_s <= circuit.opened_at_s:
            return False  # one event fails all that is under way: those after the first few tell nothing new
        circuit.failures_in_a_row += 1
        circuit.is_on_trial = False
        if not circuit.is_tripped:
            return False
        num_doublings = min(circuit.failures_in_a_row - FAILURES_TO_OPEN, 16)
        circuit.opened_at_s = now_s
        circuit.closed_again_at_s = now_s + min(FIRST_PAUSE_S * 2**num_doublings, MAX_PAUSE_S)
        return True

    def note_neither(self, key: Hashable) -> None:
        """A request ended that proved nothing, such as a cancelled one: another may be the trial."""
        circuit = self._circuits.get(key)
        if circuit is not None:
            circuit.is_on_trial = False

    def forget(self, name: str) -> None:
        """A worker has begun a new life: its circuit, and those of its pairs, are closed."""
        for key in [k for k in self._circuits if k == name or (isinstance(k, tuple) and name in k)]:
            del self._circuits[key]
