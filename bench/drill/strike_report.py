"""What strikes did to the streams that ran meanwhile, by phase and victim. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.drill.answers import Asked, Scorecard, Verdict, judge
from bench.drill.strikes import Phase, Struck
from bench.statistics import median


@dataclass(slots=True)
class Row:
    """One phase and victim's role. `silences_s` are the longest silences of the streams hit, in seconds."""

    phase: Phase
    victim_role: str
    num_strikes: int = 0
    num_hit: int = 0
    num_recoveries: int = 0
    silences_s: list[float] = field(default_factory=list)
    num_wrong: int = 0
    num_failed: int = 0

    @property
    def median_silence_s(self) -> float | None:
        """None if no stream was hit."""
        return median(self.silences_s) if self.silences_s else None

    @property
    def worst_silence_s(self) -> float | None:
        """None if no stream was hit."""
        return max(self.silences_s, default=None)


def strike_rows(strikes: Sequence[Struck], streams: Scorecard) -> list[Row]:
    """A row for each phase and victim's role that was struck, in the order of a request's life.

    A stream is hit if it recovered, failed, hung or is wrong; it counts for the strike that explains it best.
    """
    rows: dict[tuple[Phase, str], Row] = {}
    for struck in strikes:
        _row(rows, struck).num_strikes += 1
    for asked in streams.asked:
        verdict = judge(asked, streams.expected[asked.question])
        is_well = verdict in (Verdict.RIGHT, Verdict.CANCELLED)
        cause = None if is_well and not asked.num_recoveries else blamed(asked, strikes)
        if cause is None:
            continue
        row = _row(rows, cause)
        row.num_hit += 1
        row.num_recoveries += asked.num_recoveries
        row.num_wrong += verdict is Verdict.WRONG
        row.num_failed += verdict in (Verdict.FAILED, Verdict.HUNG)
        row.silences_s.append(_silence_s(asked))
    order = list(Phase)
    return sorted(rows.values(), key=lambda row: (order.index(row.phase), row.victim_role))


def usual_silences_s(streams: Scorecard) -> list[float]:
    """The longest silence of each stream that nothing has happened to, for comparison."""
    return [_silence_s(asked) for asked in streams.asked if not asked.num_recoveries and not asked.failure]


def blamed(asked: Asked, strikes: Sequence[Struck]) -> Struck | None:
    """The strike during a stream that explains best what happened to it; None if there was none.

    For one that failed the last before its end, else the one nearest to the beginning of its longest silence.
    """
    during = [struck for struck in strikes if asked.started_at_s <= struck.at_s <= asked.ended_at_s]
    hurt_at_s = asked.ended_at_s if asked.failure else asked.longest_silence[0]
    return min(during, key=lambda struck: abs(struck.at_s - hurt_at_s), default=None)


def _silence_s(asked: Asked) -> float:
    silent_from_s, silent_until_s = asked.longest_silence
    return silent_until_s - silent_from_s


def _row(rows: dict[tuple[Phase, str], Row], struck: Struck) -> Row:
    key = struck.strike.phase, struck.strike.victim_role
    return rows.setdefault(key, Row(*key))
