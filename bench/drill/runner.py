"""Runs scenarios, one after the other, against one cluster that is started for them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.aio_client import AsyncClient
from bench.drill.cluster import DrillCluster, drill_cluster
from bench.drill.drill import RESTART_TIMEOUT_S, Baseline, Drill, check_aftermath, take_baseline
from bench.drill.errors import DrillFailed
from bench.drill.processes import left_of
from bench.drill.questions import Question, QuestionShape, make_questions
from bench.drill.result import Findings
from bench.drill.screen import Screen
from deploy.cluster_spec import ClusterSpec
from engine.text_codec import TextCodec


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario, and how many questions of what shape it asks. `workers_needed` is for each role."""

    name: str
    run: Callable[[Drill, Baseline], Awaitable[Findings]]
    num_questions: int = 12
    shape: QuestionShape = field(default_factory=QuestionShape)
    workers_needed: int = 1


def run_drill(
    spec: ClusterSpec, scenarios: Sequence[Scenario], screen: Screen, *, seed: int, num_streams: int
) -> list[tuple[str, Findings]]:
    """Starts a cluster, runs the scenarios, and shows what each has found; returns it by name.

    The last one, "shutdown", tells whether anything of the cluster is left. After a scenario that cannot be carried
    out none follows. Raises ClusterError; nothing is left running then either.
    """
    found: list[tuple[str, Findings]] = []

    def note(name: str, findings: Findings) -> None:
        found.append((name, findings))
        screen.show(name, findings)

    with drill_cluster(spec) as cluster:
        asyncio.run(_run_all(_Drills(cluster, screen, seed, num_streams), scenarios, note))
    left = [*cluster.processes.alive(), *left_of(cluster.record)]
    note("shutdown", Findings(tuple(f"{process} is left of the cluster" for process in left)))
    return found


@dataclass(frozen=True, slots=True)
class _Drills:
    """What the drills of all scenarios have in common."""

    cluster: DrillCluster
    screen: Screen
    seed: int
    num_streams: int

    def drill(self, client: AsyncClient, run: str) -> Drill:
        return Drill(self.cluster, client, self.screen, run, self.seed, self.num_streams)


async def _run_all(drills: _Drills, scenarios: Sequence[Scenario], note: Callable[[str, Findings], None]) -> None:
    cluster = drills.cluster
    encode = TextCodec.from_directory(Path(cluster.spec.model_dir)).encode
    async with AsyncClient(cluster.record.router_address) as client:
        for run, scenario in zip(_run_names(scenarios), scenarios, strict=True):
            questions = make_questions(scenario.num_questions, scenario.shape, encode, drills.seed)
            findings, can_go_on = await run_scenario(drills.drill(client, run), scenario, questions)
            note(run, findings)
            if not can_go_on:
                return


async def run_scenario(drill: Drill, scenario: Scenario, questions: Sequence[Question]) -> tuple[Findings, bool]:
    """What one scenario has found, its aftermath included, and whether the cluster is in a state for more."""
    findings, problems = Findings(()), []
    try:
        async with drill.cluster.watched():
            await drill.cluster.wait_for_full_strength(RESTART_TIMEOUT_S)
            findings += await scenario.run(drill, await take_baseline(drill, questions))
            findings += (await check_aftermath(drill)).findings
    except* DrillFailed as failed:
        problems = [f"the drill cannot go on: {reason}" for reason in _reasons(failed)]
    return findings + Findings(tuple(problems)), not problems


def _reasons(failed: BaseExceptionGroup[BaseException]) -> list[str]:
    """The messages in a group, and in the groups in it."""
    return [
        reason
        for error in failed.exceptions
        for reason in (_reasons(error) if isinstance(error, BaseExceptionGroup) else [str(error)])
    ]


def _run_names(scenarios: Sequence[Scenario]) -> list[str]:
    """Names that differ: kill, freeze, kill-2."""
    names = [scenario.name for scenario in scenarios]
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]
