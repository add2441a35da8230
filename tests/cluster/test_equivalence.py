"""Output through the cluster against transformers: the same model in one process, without any of our code."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.aio_client import AsyncClient, AsyncStream
from baton.v1 import request_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Shorter and longer than a KV block (16 tokens) and a prefill chunk (512), and exactly at their edges.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513, 1024, 1025, 2000)
NUM_TOKENS = 64


def _load(model_dir: Path, dtype: torch.dtype):
    torch.set_num_threads(1)  # two would fight with the workers for their cores
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True).eval()


@pytest.fixture(scope="module")
def reference(model_dir: Path):
    return _load(model_dir, torch.float32)


@torch.inference_mode()
def _greedy(model, token_ids: list[int], num_tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(token_ids) :].tolist()


def _generate(cluster, token_ids: list[int], **options):
    with cluster.client() as client, client.generate(token_ids, ignore_eos=True, **options) as stream:
        stream.read()
    return stream


async def _generate_all(address: str, prompts: list[list[int]], options: list[dict]) -> list[AsyncStream]:
    async with AsyncClient(address) as client:

        async def one(token_ids: list[int], chosen: dict) -> AsyncStream:
            async with client.generate(token_ids, ignore_eos=True, **chosen) as stream:
                await stream.read()
            return stream

        return await asyncio.gather(*map(one, prompts, options))


@pytest.fixture(scope="module")
def answers(cluster, prompt_of):
    """Answers to prompts of all lengths, asked for at once, by length."""
    prompts = [prompt_of(length, length) for length in LENGTHS]
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
    streams = asyncio.run(_generate_all(cluster.address, prompts, [options] * len(prompts)))
    return dict(zip(LENGTHS, streams, strict=True))


@pytest.mark.parametrize("num_prompt_tokens", LENGTHS)
def test_greedy_equals_transformers(answers, reference, prompt_of, num_prompt_tokens):
    token_ids, stream = prompt_of(num_prompt_tokens, num_prompt_tokens), answers[num_prompt_tokens]
    assert len(token_ids) == num_prompt_tokens
    assert list(stream.token_ids) == _greedy(reference, token_ids, NUM_TOKENS)
    assert stream.timeline.path == request_pb2.PATH_DISAGGREGATED
    # Each of the prompt's tokens crossed once, but those whose KV the decode worker held from other prompts.
    num_crossed = num_prompt_tokens - stream.usage.decode_cached_tokens
    assert stream.timeline.kv_bytes == num_crossed * 30 * 2 * 3 * 64 * 4


def test_a_repeated_prompt_hits_the_caches_and_gives_the_same(cluster, reference, prompt_of):
    for num_prompt_tokens in (15, 16, 17, 32, 33, 100):
        token_ids = prompt_of(7000 + num_prompt_tokens, num_prompt_tokens)
        expected = _greedy(reference, token_ids, 8)
        answers = [_generate(cluster, token_ids, max_tokens=8, temperature=0.0) for _ in range(3)]
        assert [list(a.token_ids) for a in answers] == [expected] * 3
        # All whole blocks but that of the last token, which is always run; whichever worker computed the rest.
        num_cached = (num_prompt_tokens - 1) // 16 * 16
        assert [a.usage.decode_cached_tokens for a in answers] == [0, num_cached, num_cached]


def test_32_at_once_equal_one_by_one(cluster, prompt_of):
    prompts = [prompt_of(9000 + i, 3 + 11 * i) for i in range(32)]
    alone = [list(_generate(cluster, p, max_tokens=24, temperature=0.0).token_ids) for p in prompts]
    cluster.drop_prefix_caches()
    at_once = asyncio.run(_generate_all(cluster.address, prompts, [{"max_tokens": 24, "temperature": 0.0}] * 32))
    assert [list(stream.token_ids) for stream in at_once] == alone


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch_of_32(cluster, prompt_of):
    capital = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    options = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.95}
    alone = [list(_generate(cluster, capital, seed=seed, **options).token_ids) for seed in (42, 42, 0)]
    assert alone[0] == alone[1]
    assert alone[0] != alone[2]
    prompts = [capital] * 3 + [prompt_of(5000 + i, 5 + 7 * i) for i in range(29)]
    seeds = [42, 0, 42, *range(100, 129)]
    at_once = asyncio.run(_generate_all(cluster.address, prompts, [{**options, "seed": seed} for seed in seeds]))
    assert [list(stream.token_ids) for stream in at_once[:3]] == [alone[0], alone[2], alone[0]]


@torch.inference_mode()
def test_bfloat16_differs_from_transformers_only_within_rounding(bf16_cluster, model_dir, reference, prompt_of):
    """Each token must be transformers' choice, given the tokens before it, unless the two best are closer than
    bfloat16 rounds: as far as transformers' own bfloat16 logits are from its float32 logits.
    """
    model = _load(model_dir, torch.bfloat16)
    for num_prompt_tokens in (1, 16, 33, 200, 513):
        token_ids = prompt_of(3000 + num_prompt_tokens, num_prompt_tokens)
        answer = list(_generate(bf16_cluster, token_ids, max_tokens=NUM_TOKENS, temperature=0.0).token_ids)
        inputs = torch.tensor([token_ids + answer[:-1]])
        rounded = model(inputs).logits[0, num_prompt_tokens - 1 :].float()
        exact = reference(inputs).logits[0, num_prompt_tokens - 1 :]
        best = rounded.max(dim=-1)
        rounding = (rounded - exact).abs().gather(1, best.indices[:, None])[:, 0].max()
        chosen = rounded.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert ((best.values - chosen) <= 2 * rounding).all()
