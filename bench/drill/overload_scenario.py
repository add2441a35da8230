"""`baton drill overload`: three times more requests than the cluster can answer in time."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.arrivals import poisson_arrivals
from bench.drill.drill import Baseline, Drill
from bench.drill.errors import DrillFailed
from bench.drill.memory import MIB
from bench.drill.overload_report import Overload
from bench.drill.result import Findings
from bench.drill.sampler import MemorySampler
from bench.drill.screen import Stage
from bench.drill.worker_reader import WorkerReader, num_prefilled_tokens
from bench.load import Load, open_loop
from bench.measurement import Measurement
from bench.prompts import PromptShape, make_prompts
from bench.statistics import median

_LEVEL_S = 8.0
_SAMPLE_INTERVAL_S = 5.0
_LEVELS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    """Deadlines are `deadline_factor` times the median of unloaded answers; arrivals `rate_factor` times capacity."""

    deadline_factor: float = 3.0
    rate_factor: float = 3.0
    capacity_s: float = 60.0
    overload_s: float = 120.0
    prompt_tokens: int = 50
    output_tokens: int = 24


async def run_overload(drill: Drill, baseline: Baseline, options: OverloadOptions) -> Findings:
    """Finds the capacity, then offers more; the baseline's answers are the unloaded ones.

    Raises DrillFailed if not even one request is answered in time.
    """
    info = await drill.client.model_info()
    prompts = _prompts(info.vocab_size, options.prompt_tokens, drill.seed)
    unloaded_s = median(baseline.alone_s)
    deadline_s = options.deadline_factor * unloaded_s
    load = Load(drill.client, options.output_tokens, f"overload-{drill.seed}", deadline_s)
    total_s = round(len(_LEVELS) * _LEVEL_S + options.capacity_s + options.overload_s)
    with drill.screen.stage(drill.run, total_s) as stage:
        concurrency = await _best_concurrency(load, prompts, stage)
        stage.say(f"capacity with {concurrency} at a time")
        capacity_per_s = await _goodput(load, prompts, concurrency, options.capacity_s)
        stage.advance(round(options.capacity_s))
        overload = await _overload(drill, load, prompts, capacity_per_s, options, stage)
    return _findings(overload, unloaded_s, concurrency)


def _prompts(vocab_size: int, num_tokens: int, seed: int) -> Iterator[list[int]]:
    """No two alike, so that no prefix cache helps: more than will ever be asked for."""
    for batch in itertools.count():
        yield from make_prompts(1000, PromptShape(num_tokens), vocab_size=vocab_size, seed=seed + batch)


async def _best_concurrency(load: Load, prompts: Iterator[list[int]], stage: Stage) -> int:
    """The number of requests at a time with the best goodput, doubling until it has fallen twice in a row."""
    goodputs: dict[int, float] = {}
    for level in _LEVELS:
        stage.say(f"{level} at a time")
        goodputs[level] = await _goodput(load, prompts, level, _LEVEL_S)
        stage.advance(round(_LEVEL_S))
        if _has_fallen_twice(goodputs):
            break
    best = max(goodputs, key=lambda level: goodputs[level])
    if not goodputs[best]:
        raise DrillFailed(f"no request was answered within its deadline of {load.timeout_s:.2f} s")
    return best


def _has_fallen_twice(goodputs: dict[int, float]) -> bool:
    last = list(goodputs.values())[-3:]
    return len(last) == 3 and last[0] > last[1] > last[2]


async def _goodput(load: Load, prompts: Iterator[list[int]], concurrency: int, duration_s: float) -> float:
    """Answers per second of a closed loop within this time."""
    end_at_s = time.monotonic() + duration_s
    answered = 0

    async def stream() -> None:
        nonlocal answered
        while time.monotonic() < end_at_s:
            measurement = await load.send(next(prompts), time.monotonic())
            answered += not measurement.failure and measurement.ended_at_s <= end_at_s

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(stream())
    return answered / duration_s


async def _overload(
    drill: Drill,
    load: Load,
    prompts: Iterator[list[int]],
    capacity_per_s: float,
    options: OverloadOptions,
    stage: Stage,
) -> Overload:
    offered_per_s = options.rate_factor * capacity_per_s
    arrivals_s = poisson_arrivals(offered_per_s, round(offered_per_s * options.overload_s), drill.seed)
    stage.say(f"{offered_per_s:.1f} requests per second, capacity is {capacity_per_s:.1f}")
    sampler = MemorySampler(drill.cluster)
    step_s = options.overload_s / len(arrivals_s)
    counted = replace(load, on_done=lambda _: stage.advance(step_s))
    async with WorkerReader.connected(drill.cluster.roster.workers_up) as reader:
        prefilled = num_prefilled_tokens(await reader.ledgers())
        async with sampler.every(_SAMPLE_INTERVAL_S):
            measurements = await open_loop(counted, list(itertools.islice(prompts, len(arrivals_s))), arrivals_s)
        prefilled_after = num_prefilled_tokens(await reader.ledgers())
    return Overload(
        capacity_per_s=capacity_per_s,
        offered_per_s=offered_per_s,
        duration_s=options.overload_s,
        deadline_s=load.timeout_s,
        prompt_tokens=options.prompt_tokens,
        measurements=measurements,
        num_prefilled_tokens=prefilled_after - prefilled,
        curves=sampler.curves,
    )


def _findings(overload: Overload, unloaded_s: float, concurrency: int) -> Findings:
    counts = overload.counts
    rejection = "" if overload.rejection_s is None else f", known after {overload.rejection_s * 1e3:.0f} ms (median)"
    fates = ", ".join(f"{count} {fate.value}" for fate, count in counts.items())
    growth = ", ".join(
        f"{curve.name} {curve.growth_bytes / MIB:+.0f} ({curve.later_half.growth_bytes / MIB:+.0f} in its later half)"
        for curve in overload.curves
    )
    return Findings(
        violations=overload.violations,
        facts=(
            ("unloaded", f"{unloaded_s:.2f} s for an answer, so the deadline is {overload.deadline_s:.2f} s"),
            ("capacity", f"{overload.capacity_per_s:.2f} answers in time per second, {concurrency} at a time"),
            ("offered", f"{overload.offered_per_s:.2f} requests per second for {overload.duration_s:.0f} s"),
            ("goodput", f"{overload.goodput_ratio:.0%} of capacity"),
            ("requests", f"{fates}{rejection}"),
            ("prefilled", f"{overload.num_unanswered_prefilled:.1f} prompts of requests without an answer"),
            ("of rejected", f"at least {overload.num_rejected_prefilled:.1f} prompts were prefilled"),
            ("memory, MiB", growth),
        ),
        numbers=_numbers(overload, unloaded_s, concurrency),
    )


def _numbers(overload: Overload, unloaded_s: float, concurrency: int) -> dict[str, Any]:
    return {
        "unloaded_s": unloaded_s,
        "deadline_s": overload.deadline_s,
        "concurrency": concurrency,
        "capacity_per_s": overload.capacity_per_s,
        "offered_per_s": overload.offered_per_s,
        "goodput_ratio": overload.goodput_ratio,
        "requests": {fate.value: count for fate, count in overload.counts.items()},
        "failures": _failures(overload.measurements),
        "rejection_s": overload.rejection_s,
        "num_prefilled_tokens": overload.num_prefilled_tokens,
        "num_rejected_prefilled": overload.num_rejected_prefilled,
        "num_unanswered_prefilled": overload.num_unanswered_prefilled,
        "growth_bytes": {curve.name: curve.growth_bytes for curve in overload.curves},
        "growth_bytes_later_half": {curve.name: curve.later_half.growth_bytes for curve in overload.curves},
    }


def _failures(measurements: Sequence[Measurement]) -> dict[str, int]:
    return dict(Counter(m.failure for m in measurements if m.failure))
