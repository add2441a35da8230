"""The order of those who wait for a place on workers. Pure."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.policy import Claim

MAX_BYPASSES = 16
# So many from the front are looked at for one that fits; a thousand that wait cost no more than that.
ADMISSION_WINDOW = 16


@dataclass(eq=False, slots=True)
class Waiter:
    """One request in line. `priority`: the lower, the earlier.

    `since_s` and `patience_s` say how long it waits where there are no workers, `deadline_at_s` when its answer is
    worth nothing any more; None for one that had a place before. Times of one monotonic clock.
    """

    claim: Claim
    priority: int
    since_s: float
    patience_s: float
    deadline_at_s: float | None
    arrival: int = field(default=-1, init=False)
    num_bypasses: int = field(default=0, init=False)

    @property
    def is_new(self) -> bool:
        """It had no place before."""
        return self.deadline_at_s is not None

    @property
    def is_due(self) -> bool:
        """It was passed over as often as it may be: nobody goes before it any more."""
        return self.num_bypasses >= MAX_BYPASSES

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Its place: due ones first, in order of arrival; then by priority, those who had a place, arrival."""
        if self.is_due:
            return (0, 0, False, self.arrival)
        return (1, self.priority, self.is_new, self.arrival)


class WaitingLine:
    """Who waits.

    Whoever fits may go before those that do not fit now, or are less important; each of these counts it, and one
    that was passed over MAX_BYPASSES times goes next, whatever comes. So neither a large nor a lowly request starves.
    """

    def __init__(self) -> None:
        self._waiters: set[Waiter] = set()
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters))

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._waiters

    def add(self, waiter: Waiter) -> None:
        """Comes last among its equals."""
        waiter.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiters.add(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Leaves without a place; nothing happens if it is not there."""
        self._waiters.discard(waiter)

    def grant(self, waiter: Waiter) -> None:
        """Leaves for a place: whoever stands before it, or came before it, was passed over once more."""
        self._waiters.discard(waiter)
        rank = waiter.rank
        for other in self._waiters:
            if other.rank < rank or other.arrival < waiter.arrival:
                other.num_bypasses += 1

    def candidates(self) -> list[Waiter]:
        """Those to be looked at now, in order. If one that is due does not fit, those after it must wait."""
        return heapq.nsmallest(ADMISSION_WINDOW, self._waiters, key=lambda w: w.rank)

    def num_before(self, priority: int) -> int:
        """How many would stand before a new one of this priority."""
        return sum(w.is_due or w.priority <= priority for w in self._waiters)
