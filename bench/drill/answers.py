"""What came of the requests of a drill, and whether it is right. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

HUNG_REASONS = ("DEADLINE_EXCEEDED", "HUNG")


class Verdict(Enum):
    """What one request came to."""

    RIGHT = "right"
    CANCELLED = "cancelled"  # by the drill, and right as far as it came
    WRONG = "wrong"
    FAILED = "failed"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client saw it. Times are of `time.monotonic`, in seconds; `failure` is a word, or empty.

    `is_cancelled`: the drill itself has ended it.
    """

    request_id: str
    question: int
    started_at_s: float
    ended_at_s: float
    token_ids: tuple[int, ...] = ()
    token_times_s: tuple[float, ...] = ()
    failure: str = ""
    message: str = ""
    is_cancelled: bool = False
    num_recoveries: int = 0
    recovery_reason: str = ""

    @property
    def longest_silence(self) -> tuple[float, float]:
        """From when until when the client heard nothing for longest: before the first token or between two."""
        times_s = (self.started_at_s, *self.token_times_s)
        return max(pairwise((*times_s, self.ended_at_s)), key=lambda gap: gap[1] - gap[0])


def judge(asked: Asked, expected: Sequence[int]) -> Verdict:
    """Compares with the answer of an undisturbed cluster, whose whole length must be there unless it was cancelled."""
    num_tokens = len(asked.token_ids)
    if list(asked.token_ids) != list(expected[:num_tokens]):
        return Verdict.WRONG
    if asked.is_cancelled:
        return Verdict.CANCELLED
    if asked.failure:
        return Verdict.HUNG if asked.failure in HUNG_REASONS else Verdict.FAILED
    return Verdict.RIGHT if num_tokens == len(expected) else Verdict.WRONG


def describe(asked: Asked, expected: Sequence[int]) -> str:
    """What is wrong with it, in one line."""
    place = next((i for i, (a, b) in enumerate(zip(asked.token_ids, expected, strict=False)) if a != b), None)
    if place is not None:
        got, wanted = asked.token_ids[place], expected[place]
        problem = f"token {place} is {got}, expected {wanted}"
    elif asked.failure:
        problem = f"{asked.failure} after {len(asked.token_ids)} of {len(expected)} tokens: {asked.message}"
    else:
        problem = f"{len(asked.token_ids)} of {len(expected)} tokens came"
    recovered = f" ({asked.num_recoveries} recoveries, last: {asked.recovery_reason})" if asked.num_recoveries else ""
    return f"{asked.request_id}, question {asked.question}: {problem}{recovered}"


class Scorecard:
    """Collects what requests came to; `expected` has the right answer of each question."""

    def __init__(self, expected: Sequence[Sequence[int]]) -> None:
        self.expected = expected
        self.asked: list[Asked] = []
        self.counts = dict.fromkeys(Verdict, 0)
        self.num_recovered = 0  # right after all, though something had happened to them
        self.problems: list[str] = []  # a line for each that is not as it must be

    @property
    def num_bad(self) -> int:
        """Wrong, failed or hung."""
        return len(self.problems)

    @property
    def status(self) -> str:
        """How it stands, in a few words."""
        return f"{len(self.asked)} streams, {self.num_recovered} recovered, {self.num_bad} bad"

    def add(self, asked: Asked) -> None:
        """One more has ended."""
        expected = self.expected[asked.question]
        verdict = judge(asked, expected)
        self.asked.append(asked)
        self.counts[verdict] += 1
        self.num_recovered += verdict is Verdict.RIGHT and asked.num_recoveries > 0
        if verdict in (Verdict.WRONG, Verdict.FAILED, Verdict.HUNG):
            self.problems.append(f"{verdict.value}: {describe(asked, expected)}")

    def facts(self) -> tuple[tuple[str, str], ...]:
        """The counts for people."""
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in self.counts.items())
        return (("streams", f"{len(self.asked)}: {counts}"), ("recovered", f"{self.num_recovered} streams"))

    def numbers(self) -> dict[str, Any]:
        """The counts for programs, with a line for each stream to which something has happened."""
        return {
            "streams": {verdict.value: count for verdict, count in self.counts.items()},
            "num_recovered": self.num_recovered,
            "hit": [
                _line(asked, judge(asked, self.expected[asked.question])) for asked in self.asked if _is_hit(asked)
            ],
        }


def _is_hit(asked: Asked) -> bool:
    return asked.num_recoveries > 0 or (bool(asked.failure) and not asked.is_cancelled)


def _line(asked: Asked, verdict: Verdict) -> dict[str, Any]:
    """Times are of `time.monotonic`, as those of strikes are."""
    silent_from_s, silent_until_s = asked.longest_silence
    return {
        "request_id": asked.request_id,
        "verdict": verdict.value,
        "failure": asked.failure,
        "num_recoveries": asked.num_recoveries,
        "recovery_reason": asked.recovery_reason,
        "started_at_s": round(asked.started_at_s, 3),
        "ended_at_s": round(asked.ended_at_s, 3),
        "silent_from_s": round(silent_from_s, 3),
        "silent_until_s": round(silent_until_s, 3),
    }
