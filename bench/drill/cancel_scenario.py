"""`baton drill cancel`: requests are cancelled at every moment of their lives."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.drill.answers import Scorecard, Verdict
from bench.drill.drill import Baseline, Drill, check_quiet
from bench.drill.ledgers import QuietCheck
from bench.drill.prefill_probe import CancelProbe, probe_cancels
from bench.drill.result import Findings
from bench.drill.screen import Stage

IDLE_LIMIT_S = 1.0
# Of the cancels, those that come before anything was sent; the others are spread over the request's life.
_BEFORE_SENT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class CancelOptions:
    """How many requests are cancelled, and how many cancels in mid-prefill are looked at one by one."""

    num_requests: int = 1000
    num_probes: int = 20


async def run_cancels(drill: Drill, baseline: Baseline, options: CancelOptions) -> Findings:
    """Cancels requests at random moments, then looks at what goes on for them."""
    streams = Scorecard(baseline.expected)
    began_at_s = time.monotonic()
    with drill.screen.stage(drill.run, options.num_requests) as stage:
        await _cancel_all(drill, baseline, options.num_requests, streams, stage)
        idle = await check_quiet(drill.cluster.roster.workers_up)
    longest = max(baseline.questions, key=lambda question: len(question.token_ids))
    probes = await probe_cancels(drill, longest, options.num_probes)
    return _findings(streams, idle, probes, time.monotonic() - began_at_s)


async def _cancel_all(drill: Drill, baseline: Baseline, num_requests: int, streams: Scorecard, stage: Stage) -> None:
    numbers = iter(range(num_requests))
    choice = random.Random(drill.seed)
    asker = drill.asker

    async def stream() -> None:
        for number in numbers:  # shared by all streams
            question = choice.choice(baseline.questions)
            after_s = 0.0
            if choice.random() >= _BEFORE_SENT_SHARE:
                after_s = choice.random() * baseline.usual_s[question.number]
            streams.add(await asker.ask(question, str(number), salt=str(number), cancel_after_s=after_s))
            stage.advance()

    async with asyncio.TaskGroup() as group:
        for _ in range(drill.num_streams):
            group.create_task(stream())


def _findings(streams: Scorecard, idle: QuietCheck, probes: Sequence[CancelProbe], duration_s: float) -> Findings:
    cancelled = [asked for asked in streams.asked if asked.is_cancelled]
    num_before_token = sum(not asked.token_ids for asked in cancelled)
    worst_s = max((probe.lived_on_s for probe in probes), default=0.0)
    worst_chunks = max((probe.chunks_lived_on for probe in probes), default=0.0)
    worst_tokens = max((probe.tokens_after for probe in probes), default=0)
    return Findings(
        violations=(
            *streams.problems,
            *idle.violations(IDLE_LIMIT_S),
            *(violation for probe in probes if (violation := probe.violation)),
        ),
        facts=(
            ("cancelled", f"{len(cancelled)}, {num_before_token} of them before their first token"),
            ("ended before", f"{streams.counts[Verdict.RIGHT]} requests were faster than their cancel"),
            *streams.facts(),
            ("idle", f"{idle.seconds:.2f} s after the last cancel"),
            (
                "in mid-prefill",
                f"{len(probes)} cancels: the sequence lived for at most {worst_s:.2f} s ({worst_chunks:.1f} chunks) "
                f"more, {worst_tokens} tokens were begun for it",
            ),
        ),
        numbers={
            "duration_s": duration_s,
            **streams.numbers(),
            "num_cancelled_before_first_token": num_before_token,
            "idle": asdict(idle),
            "probes": [asdict(probe) for probe in probes],
        },
    )
