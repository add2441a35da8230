"""`baton drill messages`: KV messages get lost, damaged and doubled."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import fault_pb2
from bench.drill.answers import Asked, Scorecard
from bench.drill.asking import Asker
from bench.drill.drill import Baseline, Drill
from bench.drill.errors import DrillFailed
from bench.drill.injector import WorkerHit, injected
from bench.drill.questions import Question, QuestionShape
from bench.drill.result import Findings
from bench.drill.screen import Stage

# At most about 11 messages a prompt: four bad transfers in a row, after which the router gives up, stay rare.
MESSAGES_SHAPE = QuestionShape((40, 250), (16, 64))
# What makes a transfer fail; a message that arrives twice must do no harm.
_FATAL = ("drop", "corrupt")


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """Probabilities for each KV message, and how many requests are sent meanwhile."""

    num_requests: int = 400
    drop: float = 0.01
    corrupt: float = 0.01
    duplicate: float = 0.01


async def run_messages(drill: Drill, baseline: Baseline, options: MessageOptions) -> Findings:
    """Sends requests over faulty links."""
    fault = fault_pb2.KvMessageFault(
        seed=drill.seed, drop=options.drop, corrupt=options.corrupt, duplicate=options.duplicate
    )
    streams = Scorecard(baseline.expected)
    workers = [life for life in drill.cluster.roster.workers_up if life.role == "prefill"]
    began_at_s = time.monotonic()
    with drill.screen.stage(drill.run, options.num_requests) as stage:
        async with injected(workers, fault_pb2.InjectRequest(kv_messages=fault)) as injection:
            if len(injection.placed_in) < len(workers):
                raise DrillFailed(f"only {injection.placed_in} took the fault")
            await _ask_all(drill, baseline.questions, options.num_requests, streams, stage)
            hits = list(injection.hits)
    return _findings(streams, hits, time.monotonic() - began_at_s)


async def _ask_all(
    drill: Drill, questions: Sequence[Question], num_requests: int, streams: Scorecard, stage: Stage
) -> None:
    numbers = iter(range(num_requests))
    choice = random.Random(drill.seed)
    asker = drill.asker

    async def stream() -> None:
        for number in numbers:  # shared by all streams
            streams.add(await _ask(asker, choice.choice(questions), number))
            stage.advance()
            stage.say(streams.status)

    async with asyncio.TaskGroup() as group:
        for _ in range(drill.num_streams):
            group.create_task(stream())


async def _ask(asker: Asker, question: Question, number: int) -> Asked:
    # No cache: all KV of each prompt is to cross.
    return await asker.ask(question, str(number), salt=str(number))


def _findings(streams: Scorecard, hits: Sequence[WorkerHit], duration_s: float) -> Findings:
    messages = Counter(hit.what for _, hit in hits)
    hit_requests = {hit.request_id for _, hit in hits if hit.what in _FATAL}
    recovered = {asked.request_id for asked in streams.asked if asked.num_recoveries}
    counts = ", ".join(f"{count} {what}" for what, count in sorted(messages.items())) or "none"
    unharmed = len(hit_requests - recovered)
    violations = list(streams.problems)
    if not messages:
        violations.append("no message was hit: ask more requests, or raise the probabilities")
    return Findings(
        violations=tuple(violations),
        facts=(
            ("messages hit", counts),
            ("requests", f"{len(hit_requests)} with a lost or damaged message, {unharmed} of them not recovered"),
            *streams.facts(),
        ),
        numbers={
            "duration_s": duration_s,
            **streams.numbers(),
            "messages_hit": dict(messages),
            "num_requests_hit": len(hit_requests),
            "num_requests_hit_not_recovered": unharmed,
        },
    )
