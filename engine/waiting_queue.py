"""Queue in order of importance whose members may be overtaken, but only so often. Pure."""

import heapq
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """Sequences without blocks, in the order in which they are admitted: by priority, of equals the oldest first.

    A younger one may overtake an older one, because it is more important or shorter or fits where the other
    does not, but only `max_bypasses` times. Then the older one is due: it comes first, of several that are due
    the oldest, and nothing behind it is admitted until it is. So it waits only for what was there before that.
    """

    def __init__(self, max_bypasses: int) -> None:
        self._max_bypasses = max_bypasses
        self._sequences: dict[str, Sequence] = {}
        self._bypass_counts: dict[str, int] = {}
        self._unfit: set[str] = set()  # those that were found not to fit into the available blocks

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def claims_blocks(self) -> bool:
        """A sequence that is due waits for blocks: nobody else may take them."""
        return any(self._bypass_counts[i] >= self._max_bypasses for i in self._unfit)

    def append(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._sequences[seq.sequence_id] = seq
        self._bypass_counts[seq.sequence_id] = 0

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is admitted or aborted."""
        del self._sequences[seq.sequence_id]
        del self._bypass_counts[seq.sequence_id]
        self._unfit.discard(seq.sequence_id)

    def first(self, count: int) -> list[Sequence]:
        """The first `count` sequences."""
        return heapq.nsmallest(count, self._sequences.values(), key=self._order)

    def is_due(self, seq: Sequence) -> bool:
        """`seq` waits here and was overtaken as often as it may be."""
        return self._bypass_counts.get(seq.sequence_id, -1) >= self._max_bypasses

    def may_admit(self, seq: Sequence) -> bool:
        """No older one is due: admitting `seq` would not overtake anybody too often."""
        return not any(s.arrival < seq.arrival and self.is_due(s) for s in self._sequences.values())

    def mark_unfit(self, seq: Sequence) -> None:
        """Note that `seq` does not fit now: reservations of blocks overtake it too."""
        self._unfit.add(seq.sequence_id)

    def count_admission(self, seq: Sequence) -> None:
        """Count that `seq`, already removed, was admitted: it has overtaken all that are older."""
        for waiting in self._sequences.values():
            if waiting.arrival < seq.arrival:
                self._bypass_counts[waiting.sequence_id] += 1

    def count_reservation(self) -> None:
        """Count a reservation of blocks: it has overtaken those that do not fit."""
        for sequence_id in self._unfit:
            self._bypass_counts[sequence_id] += 1

    def _order(self, seq: Sequence) -> tuple[int, int, int]:
        return (0, 0, seq.arrival) if self.is_due(seq) else (1, *seq.rank)
