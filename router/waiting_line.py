"""The order of those who wait for a place on workers. Pure."""

import bisect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_BYPASSES = 16
# So many from the front are looked at for one that fits: a thousand that wait cost no more than these.
ADMISSION_WINDOW = 16


@dataclass(eq=False, slots=True, kw_only=True)
class Waiter:
    """One request in line. `priority`: the lower, the earlier. `is_new`: it has had no place before."""

    priority: int
    is_new: bool
    arrival: int = field(default=-1, init=False)
    num_bypasses: int = field(default=0, init=False)

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Its place in the order: by priority, then those that have had a place, then by arrival."""
        return self.priority, self.is_new, self.arrival


W = TypeVar("W", bound=Waiter)


class WaitingLine(Generic[W]):
    """Who waits, in order of rank. Two rules keep anyone from waiting for ever:

    - Size. Those that do not fit now may be passed over by others behind them that do, each MAX_BYPASSES times; then
      nobody behind goes before. So a large request waits only for what was there until then, and while it waits for
      room that smaller ones do not leave, these use what there is.
    - Priority. After MAX_BYPASSES grants in a row that went to others, the one that came first of all goes next, and
      nobody before it. That is one grant in MAX_BYPASSES + 1: a crowd of less important ones does not stand in the
      way of the important, but each of them has its turn. With n waiters that came before it, a waiter sees at most
      (n + 1) * MAX_BYPASSES + n grants before its own, whatever comes.
    """

    def __init__(self) -> None:
        self._by_rank: list[W] = []
        self._by_arrival: OrderedDict[int, W] = OrderedDict()
        self._num_arrivals = 0
        self._num_grants_past_first = 0  # since another one became the first to have come

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, waiter: W) -> bool:
        return waiter.arrival in self._by_arrival

    def add(self, waiter: W) -> None:
        """It comes last among its equals."""
        waiter.arrival = self._num_arrivals
        self._num_arrivals += 1
        bisect.insort(self._by_rank, waiter, key=_rank)
        self._by_arrival[waiter.arrival] = waiter

    def remove(self, waiter: W) -> None:
        """It leaves; nothing happens if it is not there."""
        if waiter not in self:
            return
        if waiter is self._first_to_come():
            self._num_grants_past_first = 0
        del self._by_arrival[waiter.arrival]
        del self._by_rank[bisect.bisect_left(self._by_rank, waiter.rank, key=_rank)]

    def waiters(self) -> list[W]:
        """All of them, in order of rank."""
        return list(self._by_rank)

    def window(self) -> list[W]:
        """Those that may be next, in order."""
        if self._by_rank and self._num_grants_past_first >= MAX_BYPASSES:
            return [self._first_to_come()]
        return self._by_rank[:ADMISSION_WINDOW]

    def num_before(self, priority: int) -> int:
        """How many would stand before a new one of this priority."""
        return bisect.bisect_left(self._by_rank, (priority, True, self._num_arrivals), key=_rank)

    def take_next(self, fits: Callable[[W], bool]) -> W | None:
        """Takes out who gets a place now: the first that fits, unless one before it may not be passed over again."""
        passed: list[W] = []
        for waiter in self.window():
            if fits(waiter):
                self._grant(waiter, passed)
                return waiter
            if waiter.num_bypasses >= MAX_BYPASSES:
                return None
            passed.append(waiter)
        return None

    def _grant(self, waiter: W, passed: list[W]) -> None:
        self._num_grants_past_first += 1
        self.remove(waiter)
        for other in passed:
            other.num_bypasses += 1

    def _first_to_come(self) -> W:
        return next(iter(self._by_arrival.values()))


def _rank(waiter: Waiter) -> tuple[int, bool, int]:
    return waiter.rank
