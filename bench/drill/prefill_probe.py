"""Cancels single requests in mid-prefill and looks at what the worker computes for them afterwards."""

import asyncio
import random
import time
from dataclasses import dataclass

from baton.aio_client import AsyncStream
from bench.drill.drill import Drill
from bench.drill.questions import Question
from bench.drill.worker_reader import Ledgers, WorkerReader, num_prefilled_tokens

_TIMEOUT_S = 60.0
_BEGIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CancelProbe:
    """One cancel: for how long the prefill worker still held something of the sequence, and what it began meanwhile.

    `tokens_before` were computed, or in the step under way, when the cancel was sent; `tokens_after` are of steps
    that began later. A step has at most `chunk_tokens`, which take about `chunk_s`.
    """

    lived_on_s: float
    tokens_before: int
    tokens_after: int
    chunk_tokens: int
    chunk_s: float

    @property
    def chunks_lived_on(self) -> float:
        """How long the sequence lived on, in steps of the worker."""
        return self.lived_on_s / self.chunk_s

    @property
    def violation(self) -> str:
        """What is not as it must be, or nothing."""
        if self.tokens_before == 0:
            return "workers do not count the tokens they prefill: nothing is known of those after a cancel"
        if self.tokens_after > self.chunk_tokens:
            return f"{self.tokens_after} tokens were begun after a cancel, a chunk has {self.chunk_tokens}"
        return ""


async def probe_cancels(drill: Drill, question: Question, num_probes: int) -> list[CancelProbe]:
    """Sends the question alone, again and again, and cancels it at random moments of its prefill."""
    choice = random.Random(drill.seed)
    workers = [life for life in drill.cluster.roster.workers_up if life.role == "prefill"]
    async with WorkerReader.connected(workers) as reader:
        prober = _Prober(drill, reader, question, await reader.max_step_tokens())
        with drill.screen.stage(f"{drill.run}: in mid-prefill", num_probes) as stage:
            await prober.calibrate()
            probes: list[CancelProbe] = []
            for _ in range(num_probes):
                probes.append(await prober.probe(choice.random()))
                stage.advance()
    return probes


class _Prober:
    """Runs one request at a time; nothing else runs, so every count is this request's."""

    def __init__(self, drill: Drill, reader: WorkerReader, question: Question, chunk_tokens: int) -> None:
        self._drill = drill
        self._reader = reader
        self._question = question
        self._chunk_tokens = chunk_tokens
        self._prefill_s = 0.0
        self._num_asked = 0

    async def calibrate(self) -> None:
        """Measures how long the prefill takes if it is not cancelled: from its first step to the first token."""
        async with asyncio.timeout(_TIMEOUT_S):
            start = num_prefilled_tokens(await self._reader.ledgers())
            async with self._ask() as stream:
                await self._wait_for_begin(start)
                began_at_s = time.monotonic()
                await anext(stream)
        self._prefill_s = time.monotonic() - began_at_s

    async def probe(self, share: float) -> CancelProbe:
        """Cancels when this share of the time that the prefill takes is over."""
        async with asyncio.timeout(_TIMEOUT_S):
            start = num_prefilled_tokens(await self._reader.ledgers())
            async with self._ask():
                await self._wait_for_begin(start)
                await asyncio.sleep(share * self._prefill_s)
                before = num_prefilled_tokens(await self._reader.ledgers())
            cancelled_at_s = time.monotonic()
            ledgers = await self._reader.ledgers_when(_is_idle, _TIMEOUT_S)
        return CancelProbe(
            lived_on_s=time.monotonic() - cancelled_at_s,
            tokens_before=before - start,
            tokens_after=num_prefilled_tokens(ledgers) - before,
            chunk_tokens=self._chunk_tokens,
            chunk_s=self._prefill_s * self._chunk_tokens / len(self._question.token_ids),
        )

    def _ask(self) -> AsyncStream:
        self._num_asked += 1
        salt = f"{self._drill.run}-probe-{self._num_asked}"
        return self._drill.client.generate(self._question.token_ids, max_tokens=2, temperature=0.0, cache_salt=salt)

    async def _wait_for_begin(self, start: int) -> None:
        """Waits until the workers have begun to compute the prompt; only a while, in case that they do not count."""
        await self._reader.ledgers_when(lambda ledgers: num_prefilled_tokens(ledgers) > start, _BEGIN_TIMEOUT_S)


def _is_idle(ledgers: Ledgers) -> bool:
    """Nothing is held: blocks of a step under way neither."""
    return all(ledger.num_sequences == ledger.owned_blocks == 0 for ledger in ledgers.values() if ledger is not None)
