"""`baton drill kill` and `freeze`: workers die, or stop, in every phase of a request."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.drill.answers import Asked, Scorecard
from bench.drill.asking import StreamPlan, keep_streams
from bench.drill.drill import Baseline, Drill
from bench.drill.errors import DrillFailed
from bench.drill.result import Findings, TableData
from bench.drill.screen import Stage
from bench.drill.strike_report import Row, strike_rows, usual_silences_s
from bench.drill.striker import Striker
from bench.drill.strikes import Strike, Struck
from bench.statistics import median

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class StrikeOptions:
    """`name` is kill or freeze, `plan` makes the strikes for a seed."""

    name: str
    plan: Callable[[int], Sequence[Strike]]
    resume_after_s: float | None = None


class _Run:
    """What has happened so far."""

    def __init__(self, baseline: Baseline) -> None:
        self.streams = Scorecard(baseline.expected)
        self.strikes: list[Struck] = []
        self.missed: list[Strike] = []
        self.failure = ""

    def note(self, strike: Strike, struck: Struck | None, stage: Stage) -> None:
        """A strike was carried out, or could not be."""
        stage.advance()
        phase = strike.phase.value
        if struck is None:
            self.missed.append(strike)
            stage.line(f"  {phase}: no request came there, no {strike.victim_role} worker was struck", "yellow")
        else:
            self.strikes.append(struck)
            stage.line(f"  {len(self.strikes):>4}  {phase:<21} {struck.victim:<12} {struck.request_id}", "dim")


async def run_strikes(drill: Drill, baseline: Baseline, options: StrikeOptions) -> Findings:
    """Strikes while streams run, as long as the cluster comes back from each."""
    plan = options.plan(drill.seed)
    run = _Run(baseline)
    began_at_s = time.monotonic()
    with drill.screen.stage(drill.run, len(plan)) as stage:
        await _strike_under_load(drill, baseline, options, plan, run, stage)
    return _findings(run, time.monotonic() - began_at_s)


async def _strike_under_load(
    drill: Drill, baseline: Baseline, options: StrikeOptions, plan: Sequence[Strike], run: _Run, stage: Stage
) -> None:
    stopped = asyncio.Event()
    striker = Striker(drill.cluster, SIGNALS[options.name], options.resume_after_s)

    def on_done(asked: Asked) -> None:
        run.streams.add(asked)
        stage.say(run.streams.status)

    streams = StreamPlan(drill.num_streams, drill.seed)
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_streams(drill.asker, baseline.questions, streams, stopped, on_done))
        try:
            for strike in plan:
                run.note(strike, await striker.strike(strike), stage)
        except DrillFailed as error:  # what was found until then counts
            run.failure = str(error)
        finally:
            stopped.set()
            await striker.close()


def _findings(run: _Run, duration_s: float) -> Findings:
    rows = strike_rows(run.strikes, run.streams)
    missed = [f"{strike.phase.value}: a {strike.victim_role} worker could not be struck" for strike in run.missed]
    usual_s = usual_silences_s(run.streams) or [0.0]
    if run.failure:
        missed.append(f"given up after {len(run.strikes)} strikes: {run.failure}")
    return Findings(
        violations=(*run.streams.problems, *missed),
        facts=(
            ("strikes", f"{len(run.strikes)} in {duration_s:.0f} s"),
            *run.streams.facts(),
            ("silence else", f"{median(usual_s):.1f} s p50, {max(usual_s):.1f} s worst in streams that were not hit"),
        ),
        tables=(_table(rows),),
        numbers={
            "duration_s": duration_s,
            **run.streams.numbers(),
            "usual_silence_s": {"median": median(usual_s), "worst": max(usual_s)},
            "rows": [_row_numbers(row) for row in rows],
            "strikes": [_strike_numbers(struck) for struck in run.strikes],
        },
    )


def _table(rows: Sequence[Row]) -> TableData:
    columns = ("phase", "victim", "strikes", "streams hit", "recoveries", "silence p50", "worst", "wrong", "errors")
    return TableData(columns, tuple(_cells(row) for row in rows))


def _cells(row: Row) -> tuple[str, ...]:
    silences = (row.median_silence_s, row.worst_silence_s)
    return (
        row.phase.value,
        row.victim_role,
        str(row.num_strikes),
        str(row.num_hit),
        str(row.num_recoveries),
        *("" if value is None else f"{value:.1f} s" for value in silences),
        str(row.num_wrong),
        str(row.num_failed),
    )


def _row_numbers(row: Row) -> dict[str, Any]:
    return {
        "phase": row.phase.value,
        "victim_role": row.victim_role,
        "num_strikes": row.num_strikes,
        "num_streams_hit": row.num_hit,
        "num_recoveries": row.num_recoveries,
        "median_silence_s": row.median_silence_s,
        "worst_silence_s": row.worst_silence_s,
        "num_wrong": row.num_wrong,
        "num_errors": row.num_failed,
    }


def _strike_numbers(struck: Struck) -> dict[str, Any]:
    return {
        "phase": struck.strike.phase.value,
        "victim": struck.victim,
        "pid": struck.pid,
        "request_id": struck.request_id,
        "at_s": round(struck.at_s, 3),
    }
