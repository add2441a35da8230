"""A worker loads the real model into the memory it is given, and answers."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.model_store import model_fingerprint
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from kv_transfer.fingerprint import PROTOCOL_VERSION, Fingerprint
from worker.host import WorkerConfig, WorkerHost, load_worker
from worker.sequence_feed import SequenceFeed
from worker.state_feed import StateFeed

BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4  # layers, key and value, heads, tokens, numbers, bytes of one
TIMEOUT_S = 60.0


def _config(model_dir: Path, kernel_cache_dir: Path, **values: object) -> WorkerConfig:
    options = {"dtype": "float32", "kv_memory_bytes": 12 * BLOCK_BYTES + 1, **values}
    return WorkerConfig("decode-0", "decode", model_dir, kernel_cache_dir, **options)  # type: ignore[arg-type]


async def _answer(host: WorkerHost, prompt: list[int], max_tokens: int) -> tuple[list[int], SequenceFeed]:
    feed, tokens = SequenceFeed(), list[int]()
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    host.engine.add(Sequence("a", list(prompt), len(prompt), sampling), feed)
    while True:
        item = await asyncio.wait_for(feed.next(), TIMEOUT_S)
        tokens += item.token_ids
        if item.finish_reason is not None:
            assert item.finish_reason is FinishReason.LENGTH
            return tokens, feed


async def test_the_real_model(model_dir: Path, kernel_cache_dir: Path) -> None:
    torch.set_num_threads(1)
    progress: list[str] = []
    state = StateFeed()
    config = _config(model_dir, kernel_cache_dir)
    host = await asyncio.to_thread(load_worker, config, state, progress.append)
    assert progress == ["preparing kernels", "loading weights", "allocating 12 KV blocks", "hashing weights"]
    assert host.fingerprint == Fingerprint(PROTOCOL_VERSION, model_fingerprint(model_dir), "float32", 30, 3, 64)
    assert (host.num_blocks, host.kv_pool.num_blocks, host.engine.load().ledger.total) == (12, 12, 12)
    assert (host.context_window_tokens, host.vocab_size) == (8192, 49152)
    changed = state.next_change()
    host.engine.start()
    try:
        prompt = list(range(1000, 1040))
        tokens, first = await _answer(host, prompt, 4)
        again, second = await _answer(host, prompt, 4)
        assert again == tokens
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
        await asyncio.wait_for(changed.wait(), TIMEOUT_S)
        # What the transfer pool reads is what the engine wrote: all of the prompt's keys, none of it zero.
        block_ids = list(range(host.num_blocks))
        assert any(host.kv_pool.read(block_ids, range(1), range(16 * host.num_blocks)))
    finally:
        state.close()
        await asyncio.to_thread(host.engine.stop, TIMEOUT_S)
    host.engine.load().ledger.check()
    assert host.engine.load().ledger.owned == 0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"role": "both"}, "role is 'both'; it must be one of prefill, decode, mixed"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32, bfloat16, float16"),
        ({"dtype": "float16"}, "float16 needs a CUDA device"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_step_tokens": 8, "max_batch_sequences": 16}, "max_batch_sequences is 16 and max_step_tokens 8"),
    ],
)
def test_what_cannot_run_is_refused_by_name(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WorkerConfig(**{"name": "w", "role": "mixed", "model_dir": Path(), "kernel_cache_dir": Path(), **values})  # type: ignore[arg-type]


def test_float16_is_for_cuda() -> None:
    WorkerConfig("w", "mixed", Path(), Path(), dtype="float16", device="cuda:1")


async def test_memory_for_less_than_a_block_is_refused(model_dir: Path, kernel_cache_dir: Path) -> None:
    config = _config(model_dir, kernel_cache_dir, kv_memory_bytes=BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match=f"{BLOCK_BYTES - 1}, one KV block of this model is {BLOCK_BYTES}"):
        load_worker(config, StateFeed(), lambda _: None)
