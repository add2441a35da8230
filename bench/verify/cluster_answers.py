"""Asks the cluster, as any client does."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.aio_client import AsyncClient, AsyncStream
from baton.answer import GenerateOptions
from baton.errors import BatonError
from bench.report import path_name
from bench.verify.cases import Case
from bench.verify.comparison import Answer

CONCURRENCY = 4  # so that answers are generated in batches


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """What came of one request. `failure` tells why none did; the rest is then empty.

    `path` is such as disaggregated, `num_cached_tokens` what the decode side (or else the prefill side) had of the
    prompt, `usage` the counts (prompt, completion) that the cluster tells.
    """

    answer: Answer | None
    failure: str = ""
    text: str = ""
    usage: tuple[int, int] = (0, 0)
    path: str = ""
    num_cached_tokens: int = 0
    num_recoveries: int = 0


async def ask_cluster(
    client: AsyncClient, cases: Sequence[Case], salt: str, *, timeout_s: float, on_done: Callable[[], None]
) -> list[ClusterAnswer]:
    """All answers, in the order of the cases, a few under way at a time.

    Each case has a part of the prefix cache of its own, by `salt`: it finds what it left there before, and nothing
    else.
    """
    under_way = asyncio.Semaphore(CONCURRENCY)

    async def ask(i: int, case: Case) -> ClusterAnswer:
        async with under_way:
            answer = await _ask(client, case, f"{salt}-{i}", timeout_s)
        on_done()
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(i, case)) for i, case in enumerate(cases)]
    return [task.result() for task in tasks]


async def _ask(client: AsyncClient, case: Case, salt: str, timeout_s: float) -> ClusterAnswer:
    options: GenerateOptions = {**case.options, "cache_salt": salt, "timeout_s": timeout_s}
    try:
        stream = client.generate(case.prompt, **options)
        async with stream:
            await stream.read()
    except BatonError as error:
        return ClusterAnswer(None, failure=f"{error.reason}: {error.message}")
    return _answer(stream)


def _answer(stream: AsyncStream) -> ClusterAnswer:
    usage, timeline = stream.usage, stream.timeline
    if usage is None or timeline is None or stream.finish_reason is None:
        return ClusterAnswer(None, failure="the answer has no end")
    return ClusterAnswer(
        Answer(tuple(stream.token_ids), stream.finish_reason, stream.stop_token_id),
        text=stream.text,
        usage=(usage.prompt_tokens, usage.completion_tokens),
        path=path_name(timeline),
        num_cached_tokens=usage.decode_cached_tokens or usage.prefill_cached_tokens,
        num_recoveries=timeline.num_recoveries,
    )
