"""Asks a cluster, and keeps streams going while it is hurt."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.aio_client import AsyncClient, AsyncStream
from baton.errors import BatonError, Cancelled
from bench.drill.answers import Asked
from bench.drill.questions import Question

STREAM_TIMEOUT_S = 60.0
_HUNG_SLACK_S = 5.0  # gRPC ends a call at its deadline; one that outlives it hangs
_PAUSE_AFTER_FAILURE_S = 0.2
_SHARED_CACHE_PROBABILITY = 0.2

OnDone = Callable[[Asked], None]


@dataclass(frozen=True, slots=True)
class Asker:
    """Sends questions to a router. `run` makes request ids and cache salts of this run different from others'."""

    client: AsyncClient
    run: str
    timeout_s: float = STREAM_TIMEOUT_S

    async def ask(self, question: Question, name: str, *, salt: str, cancel_after_s: float | None = None) -> Asked:
        """One request from beginning to end; `cancel_after_s` 0 cancels it before anything of it is sent."""
        started_at_s = time.monotonic()
        stream = self.client.generate(
            question.token_ids,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            ignore_eos=True,
            cache_salt=f"{self.run}-{salt}",
            request_id=f"{self.run}-{name}",
            timeout_s=self.timeout_s,
        )
        cancelling = _cancel_later(stream, cancel_after_s)
        token_times_s: list[float] = []
        failure = message = ""
        is_cancelled = False
        try:
            async with asyncio.timeout(self.timeout_s + _HUNG_SLACK_S), stream:
                async for chunk in stream:
                    token_times_s += [time.monotonic()] * len(chunk.token_ids)
        except Cancelled as error:
            is_cancelled = cancel_after_s is not None
            failure, message = error.reason, error.message
        except BatonError as error:
            failure, message = error.reason or error.code.name, error.message
        except TimeoutError:
            failure, message = "HUNG", f"no end {_HUNG_SLACK_S:.0f} s after its deadline"
        finally:
            if cancelling is not None:
                cancelling.cancel()
        return Asked(
            request_id=f"{self.run}-{name}",
            question=question.number,
            started_at_s=started_at_s,
            ended_at_s=time.monotonic(),
            token_ids=tuple(stream.token_ids),
            token_times_s=tuple(token_times_s),
            failure=failure,
            message=message,
            is_cancelled=is_cancelled,
            num_recoveries=stream.timeline.num_recoveries if stream.timeline else 0,
            recovery_reason=stream.timeline.recovery_reason if stream.timeline else "",
        )


def _cancel_later(stream: AsyncStream, after_s: float | None) -> asyncio.TimerHandle | None:
    if after_s is None:
        return None
    if after_s <= 0:
        stream.cancel()
        return None
    return asyncio.get_running_loop().call_later(after_s, stream.cancel)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A closed loop: `num_streams` at all times, of which `cancel_share` are cancelled on the way.

    A cancelled one ends after a random part of `usual_s`, the seconds that each question usually takes.
    """

    num_streams: int
    seed: int
    cancel_share: float = 0.0
    usual_s: Sequence[float] = ()


async def keep_streams(
    asker: Asker, questions: Sequence[Question], plan: StreamPlan, stopped: asyncio.Event, on_done: OnDone
) -> None:
    """Asks random questions until `stopped`; then returns when the last stream has ended."""

    async def stream(index: int) -> None:
        choice = random.Random(f"{plan.seed}/{index}")
        number = 0
        while not stopped.is_set():
            question = choice.choice(questions)
            # Mostly a cache of its own: else every prompt would soon be cached, and no KV be moved any more.
            salt = "shared" if choice.random() < _SHARED_CACHE_PROBABILITY else f"{index}-{number}"
            cancel_after_s = None
            if choice.random() < plan.cancel_share:
                cancel_after_s = choice.random() * plan.usual_s[question.number]
            asked = await asker.ask(question, f"{index}-{number}", salt=salt, cancel_after_s=cancel_after_s)
            on_done(asked)
            number += 1
            if asked.failure and not asked.is_cancelled:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async with asyncio.TaskGroup() as group:
        for index in range(plan.num_streams):
            group.create_task(stream(index), name=f"stream {index}")
