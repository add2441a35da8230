"""What every scenario works with, and what must hold after each of them."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from baton.aio_client import AsyncClient
from bench.drill.answers import Asked, Verdict, judge
from bench.drill.asking import Asker
from bench.drill.cluster import DrillCluster
from bench.drill.errors import DrillFailed
from bench.drill.ledgers import QuietCheck, ledger_problems
from bench.drill.questions import Question
from bench.drill.result import Findings
from bench.drill.roster import Life
from bench.drill.screen import Screen, Stage
from bench.drill.worker_reader import WorkerReader

QUIET_LIMIT_S = 2.0
RESTART_TIMEOUT_S = 180.0
_GIVE_UP_QUIET_S = 15.0
_EXIT_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Drill:
    """One scenario's means: the cluster and who asks it, choices by `seed`, and `run`, a name like no other's."""

    cluster: DrillCluster
    client: AsyncClient
    screen: Screen
    run: str
    seed: int
    num_streams: int

    @property
    def asker(self) -> Asker:
        """Asks in the name of this run."""
        return Asker(self.client, self.run)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What an undisturbed cluster answers, by question; seconds that takes alone, and beside other requests."""

    questions: Sequence[Question]
    expected: Sequence[Sequence[int]]
    alone_s: Sequence[float]
    usual_s: Sequence[float]


async def take_baseline(drill: Drill, questions: Sequence[Question]) -> Baseline:
    """Asks each question alone, then all at once; raises DrillFailed unless both give the same answers."""
    asker = Asker(drill.client, f"{drill.run}-before")
    with drill.screen.stage(f"{drill.run}: undisturbed answers", 2 * len(questions)) as stage:
        alone = []
        for question in questions:
            alone.append(await asker.ask(question, f"alone-{question.number}", salt=f"alone-{question.number}"))
            stage.advance()
        together = await _ask_all(drill, asker, questions, stage)
    expected = [list(asked.token_ids) for asked in alone]
    for asked in (*alone, *together):
        if judge(asked, expected[asked.question]) is not Verdict.RIGHT:
            raise DrillFailed(f"even undisturbed, an answer is not right: {asked.failure} {asked.message} {asked}")
    alone_s, usual_s = ([asked.ended_at_s - asked.started_at_s for asked in group] for group in (alone, together))
    return Baseline(questions, expected, alone_s, usual_s)


async def _ask_all(drill: Drill, asker: Asker, questions: Sequence[Question], stage: Stage) -> list[Asked]:
    limit = asyncio.Semaphore(drill.num_streams)

    async def ask(question: Question) -> Asked:
        async with limit:
            asked = await asker.ask(question, f"together-{question.number}", salt=f"together-{question.number}")
        stage.advance()
        return asked

    return await asyncio.gather(*map(ask, questions))


async def check_quiet(workers: Sequence[Life]) -> QuietCheck:
    """Waits until the ledgers of all these workers are clean, to be called when the last request has ended."""
    began_at_s = time.monotonic()
    async with WorkerReader.connected(workers) as reader:
        ledgers = await reader.ledgers_when(lambda ledgers: not ledger_problems(ledgers), _GIVE_UP_QUIET_S)
    return QuietCheck(time.monotonic() - began_at_s, ledger_problems(ledgers))


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What was found once the faults had ended: on the survivors at once, on all when all were back."""

    at_once: QuietCheck
    at_full_strength: QuietCheck
    num_lost: int
    lost_unstruck: tuple[str, ...]
    left_alive: tuple[str, ...]

    @property
    def findings(self) -> Findings:
        """What is not as it must be, and the rest in words and numbers."""
        lost = [f"lost though it was not struck: {life}" for life in self.lost_unstruck]
        orphans = [f"{process} of an earlier life is still there" for process in self.left_alive]
        # Those that have just come back may be slow to answer; what counts is what they say.
        quiet = [*self.at_once.violations(QUIET_LIMIT_S), *self.at_full_strength.violations(math.inf)]
        clean = "not clean" if self.at_once.problems else f"clean after {self.at_once.seconds:.2f} s of quiet"
        gone = f"{self.num_lost} lives lost, {len(self.left_alive)} of their processes still there"
        facts = (("ledgers", clean), ("processes", gone))
        return Findings((*quiet, *lost, *orphans), facts, numbers={"aftermath": asdict(self)})


async def check_aftermath(drill: Drill) -> Aftermath:
    """Looks at ledgers and processes; to be called when the last request has ended."""
    cluster = drill.cluster
    at_once = await check_quiet(cluster.roster.workers_up)
    await cluster.wait_for_full_strength(RESTART_TIMEOUT_S)
    current = list(cluster.roster.current.values())
    await cluster.holds_within(lambda: not cluster.processes.alive(current), _EXIT_TIMEOUT_S)
    return Aftermath(
        at_once=at_once,
        at_full_strength=await check_quiet(cluster.roster.workers_up),
        num_lost=cluster.roster.num_lost,
        lost_unstruck=tuple(cluster.roster.lost_unstruck),
        left_alive=tuple(cluster.processes.alive(current)),
    )
