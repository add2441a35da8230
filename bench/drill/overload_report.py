"""What an overloaded cluster did with the requests it could not all serve. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bench.drill.memory import MIB, MemoryCurve
from bench.measurement import Measurement
from bench.statistics import median

MIN_GOODPUT_RATIO = 0.8
MAX_REJECTION_S = 0.1
MAX_GROWTH_MIB = 30.0
# A request that ends without an answer this close to its deadline was not rejected early: it ran out of time.
_DEADLINE_SHARE = 0.9


class Fate(Enum):
    """What became of one request."""

    ANSWERED = "answered in time"
    REJECTED = "rejected early"
    TIMED_OUT = "timed out"
    BROKEN = "broken off"


def fate(measurement: Measurement, deadline_s: float) -> Fate:
    """Broken off: it had tokens already when it failed, before its deadline."""
    if not measurement.failure:
        return Fate.ANSWERED
    if measurement.e2e_s >= _DEADLINE_SHARE * deadline_s:
        return Fate.TIMED_OUT
    return Fate.BROKEN if measurement.token_times_s else Fate.REJECTED


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload. Goodput is answers within the deadline per second.

    `curves` are the memory of all processes meanwhile; `num_prefilled_tokens` what all workers have prefilled.
    """

    capacity_per_s: float
    offered_per_s: float
    duration_s: float
    deadline_s: float
    prompt_tokens: int
    measurements: Sequence[Measurement]
    num_prefilled_tokens: int
    curves: Sequence[MemoryCurve]

    @property
    def counts(self) -> dict[Fate, int]:
        """Requests by fate."""
        counts = dict.fromkeys(Fate, 0)
        for measurement in self.measurements:
            counts[fate(measurement, self.deadline_s)] += 1
        return counts

    @property
    def goodput_ratio(self) -> float:
        """Goodput under overload through that at capacity."""
        return self.counts[Fate.ANSWERED] / self.duration_s / self.capacity_per_s

    @property
    def rejection_s(self) -> float | None:
        """Median seconds until a rejected request knew; None if none was rejected."""
        times_s = [m.e2e_s for m in self.measurements if fate(m, self.deadline_s) is Fate.REJECTED]
        return median(times_s) if times_s else None

    @property
    def num_rejected_prefilled(self) -> float:
        """Rejected requests that were prefilled at least, in prompts: what the others cannot have needed."""
        counts = self.counts
        needed = (sum(counts.values()) - counts[Fate.REJECTED]) * self.prompt_tokens
        return max(0, self.num_prefilled_tokens - needed) / self.prompt_tokens

    @property
    def num_unanswered_prefilled(self) -> float:
        """Requests without an answer that were prefilled, in prompts."""
        needed = self.counts[Fate.ANSWERED] * self.prompt_tokens
        return max(0, self.num_prefilled_tokens - needed) / self.prompt_tokens

    @property
    def violations(self) -> tuple[str, ...]:
        """What is not as it must be."""
        found = []
        if self.goodput_ratio < MIN_GOODPUT_RATIO:
            found.append(f"goodput fell to {self.goodput_ratio:.0%} of capacity, needed are {MIN_GOODPUT_RATIO:.0%}")
        if self.rejection_s is not None and self.rejection_s > MAX_REJECTION_S:
            found.append(f"rejected requests waited {self.rejection_s * 1e3:.0f} ms for it (median)")
        if self.counts[Fate.BROKEN]:
            found.append(f"{self.counts[Fate.BROKEN]} answers broke off after they had begun")
        if not self.num_prefilled_tokens:
            found.append("workers do not count the tokens they prefill: nothing is known of rejected prompts")
        elif self.num_rejected_prefilled:
            found.append(f"the prompts of at least {self.num_rejected_prefilled:.0f} rejected requests were prefilled")
        # Allocators take what they need for a load when they first meet it; after that nothing may grow.
        found += [
            f"{curve.name} still grew by {growth / MIB:.0f} MiB in the later half"
            for curve in self.curves
            if (growth := curve.later_half.growth_bytes) / MIB > MAX_GROWTH_MIB
        ]
        return tuple(found)
