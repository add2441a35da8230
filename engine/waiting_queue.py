"""First-come queue whose members may be passed over, but only so often. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from engine.sequence import Sequence


class WaitingQueue:
    """Sequences without blocks, in the order in which they are admitted.

    One that does not fit now may be passed over by later ones `max_bypasses` times; then it is due, and
    nothing behind it is admitted until it is. So a large one waits only for what was there before that.
    """

    def __init__(self, max_bypasses: int) -> None:
        self._max_bypasses = max_bypasses
        self._sequences: OrderedDict[str, Sequence] = OrderedDict()
        self._bypass_counts: dict[str, int] = {}  # of those that were found not to fit

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def has_due(self) -> bool:
        """A sequence was passed over as often as it may be."""
        return any(count >= self._max_bypasses for count in self._bypass_counts.values())

    def append(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._sequences[seq.sequence_id] = seq

    def push_front(self, seq: Sequence) -> None:
        """Queue a preempted sequence: it has been admitted before."""
        self._sequences[seq.sequence_id] = seq
        self._sequences.move_to_end(seq.sequence_id, last=False)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is admitted or aborted."""
        del self._sequences[seq.sequence_id]
        self._bypass_counts.pop(seq.sequence_id, None)

    def first(self, count: int) -> list[Sequence]:
        """The first `count` sequences."""
        return list(islice(self._sequences.values(), count))

    def mark_unfit(self, seq: Sequence) -> bool:
        """Note that `seq` does not fit now. Returns True if it is due."""
        return self._bypass_counts.setdefault(seq.sequence_id, 0) >= self._max_bypasses

    def count_bypass(self, passed: Iterable[Sequence] | None = None) -> None:
        """Count one admission ahead of `passed`, by default of all that were found not to fit."""
        passed_ids = self._bypass_counts if passed is None else {s.sequence_id for s in passed}
        self._bypass_counts |= {i: self._bypass_counts[i] + 1 for i in passed_ids}
