"""Sends many requests to a cluster, and measures each from the client's side."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.aio_client import AsyncClient
from baton.errors import BatonError
from bench.measurement import Measurement

_Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Load:
    """How each prompt is sent: greedy, for exactly `output_tokens` tokens whatever they are.

    `cache_salt` keeps the prefix cache of other runs out. `on_done` hears of each request as it ends.
    """

    client: AsyncClient
    output_tokens: int
    cache_salt: str
    timeout_s: float
    on_done: Callable[[Measurement], None] = lambda _: None

    async def send(self, prompt: _Prompt, due_at_s: float) -> Measurement:
        """One request, from `due_at_s` of `time.monotonic` to its end, good or bad."""
        token_times_s: list[float] = []
        stream = self.client.generate(
            prompt,
            max_tokens=self.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            cache_salt=self.cache_salt,
            timeout_s=self.timeout_s,
        )
        failure = message = ""
        try:
            async with stream:
                async for chunk in stream:
                    token_times_s += [time.monotonic()] * len(chunk.token_ids)
        except BatonError as error:
            failure, message = error.reason or error.code.name, error.message
        ended_at_s = time.monotonic()
        if not failure and len(token_times_s) != self.output_tokens:
            failure = "WRONG_LENGTH"
            message = f"{len(token_times_s)} tokens came, {self.output_tokens} were asked for"
        measurement = Measurement(due_at_s, ended_at_s, tuple(token_times_s), stream.timeline, failure, message)
        self.on_done(measurement)
        return measurement


async def closed_loop(load: Load, prompts: Sequence[_Prompt], concurrency: int) -> list[Measurement]:
    """Keeps `concurrency` requests under way until all prompts are answered; in the order of their starts."""
    remaining = iter(prompts)

    async def stream() -> list[Measurement]:
        # `remaining` is shared by all streams: each prompt goes to one of them.
        return [await load.send(prompt, time.monotonic()) for prompt in remaining]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream()) for _ in range(concurrency)]
    measurements = [measurement for task in tasks for measurement in task.result()]
    return sorted(measurements, key=lambda measurement: measurement.started_at_s)


async def open_loop(load: Load, prompts: Sequence[_Prompt], arrivals_s: Sequence[float]) -> list[Measurement]:
    """Sends each prompt at its time in seconds from now, whether or not earlier ones are answered; in that order."""
    began_at_s = time.monotonic()
    tasks: list[asyncio.Task[Measurement]] = []
    async with asyncio.TaskGroup() as group:
        for prompt, arrival_s in zip(prompts, arrivals_s, strict=True):
            due_at_s = began_at_s + arrival_s
            await asyncio.sleep(max(due_at_s - time.monotonic(), 0.0))
            tasks.append(group.create_task(load.send(prompt, due_at_s)))
    return [task.result() for task in tasks]
