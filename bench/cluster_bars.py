"""The bars of the handoff: prefill and decode on two workers against one that does both, in real clusters."""

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.aio_client import AsyncClient
from baton.v1 import request_pb2
from bench.bar import Bar, BarsFailed, ratio_of_medians
from bench.load import Load, closed_loop
from bench.prompts import PromptShape, make_prompts
from bench.statistics import median
from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.lifecycle import start_cluster, stop_cluster

TTFT_PROMPT_TOKENS = 512
TRANSFER_PROMPT_TOKENS = 1024
TTFT_LIMIT = 1.15
EXPOSED_LIMIT = 0.20
# Enough for the request to be handed over and decoded; with 1, the prefill worker would answer alone.
OUTPUT_TOKENS = 4
PAIRS_PER_REPEAT = 2
_WARMUP_PAIRS = 2
_TIMEOUT_S = 120.0

_OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClusterSamples:
    """Seconds. TTFT of the same prompts through both clusters, as the client sees it; and each transfer's time."""

    ttft_disaggregated_s: list[float] = field(default_factory=list)
    ttft_mixed_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    transfer_tail_s: list[float] = field(default_factory=list)


def cluster_bars(samples: ClusterSamples) -> list[Bar]:
    """The two bars."""
    disaggregated_ms, mixed_ms = median(samples.ttft_disaggregated_s) * 1e3, median(samples.ttft_mixed_s) * 1e3
    tail_ms, transfer_ms = median(samples.transfer_tail_s) * 1e3, median(samples.transfer_s) * 1e3
    return [
        Bar(
            f"TTFT of {TTFT_PROMPT_TOKENS} tokens, two workers / one",
            ratio_of_medians(samples.ttft_disaggregated_s, samples.ttft_mixed_s),
            TTFT_LIMIT,
            f"{disaggregated_ms:.0f} / {mixed_ms:.0f} ms",
            is_limit=True,
        ),
        Bar(
            f"transfer of {TRANSFER_PROMPT_TOKENS} tokens, exposed / whole",
            ratio_of_medians(samples.transfer_tail_s, samples.transfer_s),
            EXPOSED_LIMIT,
            f"{tail_ms:.1f} / {transfer_ms:.1f} ms",
            is_limit=True,
        ),
    ]


def measure_clusters(
    model_dir: Path, model_name: str, dtype: str, *, repeats: int, on_progress: _OnProgress
) -> ClusterSamples:
    """Starts both clusters, asks one at a time, and leaves nothing of them. Raises BarsFailed, ClusterError."""
    pair = ClusterSpec(model_dir=model_dir.as_posix(), model_name=model_name, dtype=dtype, name=f"pair-{os.getpid()}")
    single = replace(pair, name=f"mixed-{os.getpid()}", num_prefill=0, num_decode=0, num_mixed=1)
    with ExitStack() as stack:
        on_progress("starting a cluster of one prefill and one decode worker")
        pair_record = stack.enter_context(_cluster(pair))
        on_progress("starting a cluster of one mixed worker")
        single_record = stack.enter_context(_cluster(single))
        samples = asyncio.run(_measure(pair_record, single_record, repeats, on_progress))
        on_progress("stopping both clusters")
    return samples


@contextmanager
def _cluster(spec: ClusterSpec) -> Iterator[ClusterRecord]:
    store = RecordStore()
    record = start_cluster(spec, store)
    try:
        yield record
    finally:
        stop_cluster(record, store, grace_s=0)


async def _measure(
    pair_record: ClusterRecord, single_record: ClusterRecord, repeats: int, on_progress: _OnProgress
) -> ClusterSamples:
    samples = ClusterSamples()
    salt = f"bench-{secrets.token_hex(8)}"
    async with AsyncClient(pair_record.router_address) as pair_client, AsyncClient(single_record.router_address) as one:
        vocab_size = (await pair_client.model_info()).vocab_size
        pair, single = (Load(client, OUTPUT_TOKENS, salt, _TIMEOUT_S) for client in (pair_client, one))
        num_pairs = _WARMUP_PAIRS + repeats * PAIRS_PER_REPEAT
        prompts = make_prompts(num_pairs, PromptShape(TTFT_PROMPT_TOKENS), vocab_size=vocab_size, seed=1)
        for number, prompt in enumerate(prompts):
            on_progress(f"time to first token, prompt {number + 1} of {num_pairs}")
            disaggregated_s, mixed_s = await _ttfts(pair, single, prompt, pair_first=number % 2 == 0)
            if number >= _WARMUP_PAIRS:
                samples.ttft_disaggregated_s.append(disaggregated_s)
                samples.ttft_mixed_s.append(mixed_s)
        prompts = make_prompts(repeats, PromptShape(TRANSFER_PROMPT_TOKENS), vocab_size=vocab_size, seed=2)
        for number, prompt in enumerate(prompts):
            on_progress(f"transfer, prompt {number + 1} of {repeats}")
            _, timeline = await _ask(pair, prompt, request_pb2.PATH_DISAGGREGATED)
            samples.transfer_s.append(timeline.transfer_s)
            samples.transfer_tail_s.append(timeline.transfer_tail_s)
    return samples


async def _ttfts(pair: Load, single: Load, prompt: list[int], *, pair_first: bool) -> tuple[float, float]:
    """One after the other, in turns as to which is first, so that a drift of the machine meets both alike."""
    if pair_first:
        disaggregated_s, _ = await _ask(pair, prompt, request_pb2.PATH_DISAGGREGATED)
    mixed_s, _ = await _ask(single, prompt, request_pb2.PATH_LOCAL_PREFILL)
    if not pair_first:
        disaggregated_s, _ = await _ask(pair, prompt, request_pb2.PATH_DISAGGREGATED)
    return disaggregated_s, mixed_s


async def _ask(load: Load, prompt: list[int], path: request_pb2.Path) -> tuple[float, request_pb2.Timeline]:
    """TTFT and timeline of one request that must go this way. Raises BarsFailed."""
    (measurement,) = await closed_loop(load, [prompt], concurrency=1)
    timeline, ttft_s = measurement.timeline, measurement.ttft_s
    if measurement.failure or timeline is None or ttft_s is None:
        raise BarsFailed(f"a request failed: {measurement.failure} {measurement.message}")
    if timeline.path != path:
        taken, wanted = (request_pb2.Path.Name(value) for value in (timeline.path, path))
        raise BarsFailed(f"a request took {taken} instead of {wanted}: {timeline.path_reason}")
    return ttft_s, timeline
