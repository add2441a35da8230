"""`baton drill soak`: a mixed load for a long time, with cancels, and a worker lost every minute."""

import asyncio
import itertools
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.drill.answers import Asked, Scorecard
from bench.drill.asking import StreamPlan, keep_streams
from bench.drill.drill import Baseline, Drill
from bench.drill.errors import DrillFailed
from bench.drill.memory import MIB, MemoryCurve
from bench.drill.result import Findings, TableData
from bench.drill.sampler import MemorySampler
from bench.drill.screen import Stage
from bench.drill.striker import Striker
from bench.drill.strikes import ROLES, Phase, plan_strikes

_SAMPLE_INTERVAL_S = 5.0
_MIN_LIFE_S = 180.0  # a shorter life says nothing about a slope
_CURVE_WIDTH = 40


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long, how many of the requests are cancelled, and how often a worker is killed or frozen, in turns."""

    minutes: float = 20.0
    cancel_share: float = 0.15
    strike_interval_s: float = 60.0


async def run_soak(drill: Drill, baseline: Baseline, options: SoakOptions) -> Findings:
    """Runs the load to its end, as long as the cluster comes back from each strike."""
    soak = _Soak(drill, baseline, options)
    sampler = MemorySampler(drill.cluster)
    with drill.screen.stage(drill.run, round(options.minutes * 60)) as stage:
        async with sampler.every(_SAMPLE_INTERVAL_S):
            await soak.run(stage)
    return soak.findings(sampler.curves)


class _Soak:
    """The load and the strikes, and what has come of them."""

    def __init__(self, drill: Drill, baseline: Baseline, options: SoakOptions) -> None:
        self._drill = drill
        self._baseline = baseline
        self._options = options
        self._streams = Scorecard(baseline.expected)
        self._num_lost = 0
        self._problems: list[str] = []

    async def run(self, stage: Stage) -> None:
        """Until the time is over."""
        stopped = asyncio.Event()

        def on_done(asked: Asked) -> None:
            self._streams.add(asked)
            stage.say(f"{self._streams.status}, {self._num_lost} workers lost")

        drill, options, baseline = self._drill, self._options, self._baseline
        plan = StreamPlan(drill.num_streams, drill.seed, options.cancel_share, baseline.usual_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_streams(drill.asker, baseline.questions, plan, stopped, on_done))
            clock = group.create_task(_tick(stage))
            try:
                await self._strike(time.monotonic() + options.minutes * 60)
            except DrillFailed as error:  # what was found until then counts
                self._problems.append(f"given up after {self._num_lost} workers were lost: {error}")
            finally:
                stopped.set()
                clock.cancel()

    async def _strike(self, end_at_s: float) -> None:
        """At each interval: kills a prefill worker, a decode worker, freezes a prefill worker, a decode worker."""
        interval_s = self._options.strike_interval_s
        strikers = [Striker(self._drill.cluster, number) for number in (signal.SIGKILL, signal.SIGSTOP)]
        turns = itertools.cycle([striker for striker in strikers for _ in ROLES])
        due_at_s = time.monotonic() + interval_s
        plan = iter(
            plan_strikes(int(self._options.minutes * 60 / interval_s) + 1, list(Phase), ROLES, self._drill.seed)
        )
        # The last one early enough for its recoveries to be seen under load.
        while due_at_s <= end_at_s - interval_s / 2:
            await asyncio.sleep(due_at_s - time.monotonic())
            strike = next(plan)
            if await next(turns).strike(strike) is None:
                self._problems.append(f"{strike.phase.value}: a {strike.victim_role} worker could not be struck")
            else:
                self._num_lost += 1
            due_at_s += interval_s
        await asyncio.sleep(end_at_s - time.monotonic())

    def findings(self, curves: Sequence[MemoryCurve]) -> Findings:
        """What was found, with the memory of all processes."""
        minutes = self._options.minutes
        long_lived = [curve for curve in curves if curve.duration_s >= min(_MIN_LIFE_S, minutes * 30)]
        return Findings(
            violations=(*self._streams.problems, *self._problems),
            facts=(("duration", f"{minutes:g} minutes, {self._num_lost} workers lost"), *self._streams.facts()),
            tables=(memory_table(long_lived),),
            numbers={
                "minutes": minutes,
                "num_strikes": self._num_lost,
                **self._streams.numbers(),
                "memory": [memory_numbers(curve) for curve in curves],
            },
        )


async def _tick(stage: Stage) -> None:
    while True:
        await asyncio.sleep(1.0)
        stage.advance()


def memory_table(curves: Sequence[MemoryCurve]) -> TableData:
    """Memory by process, for people."""
    columns = ("memory", "pid", "lived", "MiB first", "MiB last", "MiB/min", "MiB/min, later half", "curve")
    rows = tuple(
        (
            curve.name,
            str(curve.pid),
            f"{curve.duration_s / 60:.1f} min",
            f"{curve.samples[0][1] / MIB:.0f}",
            f"{curve.samples[-1][1] / MIB:.0f}",
            f"{curve.growth_mib_per_min:+.2f}",
            f"{curve.later_half.growth_mib_per_min:+.2f}",
            curve.sparkline(_CURVE_WIDTH),
        )
        for curve in curves
    )
    return TableData(columns, rows)


def memory_numbers(curve: MemoryCurve) -> dict[str, Any]:
    """The same for programs, with all samples as (seconds, bytes)."""
    return {
        "name": curve.name,
        "pid": curve.pid,
        "growth_mib_per_min": curve.growth_mib_per_min,
        "growth_mib_per_min_later_half": curve.later_half.growth_mib_per_min,
        "samples": [[round(time_s, 1), size] for time_s, size in curve.samples],
    }
