"""Prompts that are computed in several chunks and sent while they are: what arrives is what was computed."""

import asyncio
import time

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM
from worker_rig import HELLO, Worker, load_host, stop_host

from baton.aio_client import AsyncClient
from baton.errors import Cancelled
from engine.text_codec import TextCodec
from router.server import RouterServer, RouterSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHUNK_TOKENS = 32
LENGTHS = (31, 32, 33, 63, 64, 65, 97, 200)
NUM_NEW = 8
LATE_S = 0.05


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chunking_host(model_dir, kernel_cache_dir):
    host = await load_host("prefill", model_dir, kernel_cache_dir, max_step_tokens=CHUNK_TOKENS)
    yield host
    await stop_host(host)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(chunking_host, workers, eventually):
    """A prefill worker with small chunks and the decode worker."""
    prefill = Worker(chunking_host)
    await prefill.start()
    yield prefill, workers[1]
    await eventually(lambda: prefill.is_clean)
    await prefill.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair, model_dir, eventually):
    router = RouterServer()
    address = await router.start(RouterSpec(str(model_dir), "smollm2", local_prefill_max_tokens=0))
    await router.set_workers([worker.address for worker in pair])
    await eventually(lambda: router.ready)
    async with AsyncClient(address, timeout_s=60.0) as opened:
        yield opened
    await router.stop(grace_s=0)


@pytest.fixture
def late_store(chunking_host, monkeypatch):
    """Each chunk's KV of the first and of a middle layer is written well after its forward pass has begun."""
    attention = chunking_host.engine._runner.attention
    store, chunks = attention.store, []

    def store_late(layer, key, value, step):
        if layer in (0, 15):
            time.sleep(LATE_S)
        if layer == 0:
            chunks.append(key.shape)
        store(layer, key, value, step)

    monkeypatch.setattr(attention, "store", store_late)
    return chunks


@pytest.fixture(scope="module")
def prompts(model_dir):
    """By length. They begin with a fact that is asked for at their end."""
    codec = TextCodec.from_directory(model_dir)
    fact, question = codec.encode("The red key is number 7319."), codec.encode(" The red key is number")
    filler = codec.encode(" Meanwhile the ships came in and the gulls went out." * 20)
    return {n: (fact + filler[: n - len(fact) - len(question)] + question)[:n] for n in LENGTHS}


@pytest.fixture(scope="module")
def expected(model_dir, prompts):
    """Greedy answers by transformers, which computes each prompt at once, by length."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return {n: _greedy(model, ids) for n, ids in prompts.items()}


@torch.inference_mode()
def _greedy(model, token_ids):
    ids = torch.tensor([token_ids])
    mask, options = torch.ones_like(ids), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, **options)[0, len(token_ids) :].tolist()


async def answer(client, token_ids, **options):
    stream = client.generate(token_ids, **({"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True} | options))
    await stream.read()
    return stream


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_no_chunk_is_sent_before_it_is_computed(client, prompts, expected, num_tokens):
    assert (await answer(client, prompts[num_tokens])).token_ids == expected[num_tokens]


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_nor_when_its_kv_is_written_late(client, late_store, pair, prompts, expected, num_tokens):
    stream = await answer(client, prompts[num_tokens])
    assert stream.token_ids == expected[num_tokens]
    assert stream.usage.decode_cached_tokens == 0
    assert len(late_store) == -(-num_tokens // CHUNK_TOKENS)


async def test_many_at_once_in_chunks_of_each_other(client, late_store, prompts, expected):
    streams = await asyncio.gather(*(answer(client, ids) for ids in prompts.values()))
    assert [stream.token_ids for stream in streams] == list(expected.values())


async def test_a_prompt_that_only_the_decode_worker_has(client, pair, prompts, expected):
    """And one that only the prefill worker has: what lacks is computed or sent, and nothing is waited for."""
    for loses_its_cache in pair:
        assert (await answer(client, prompts[97])).token_ids == expected[97]
        loses_its_cache.host.engine.drop_prefix_cache()
        stream = await answer(client, prompts[97])
        assert stream.token_ids == expected[97]
        cached = (stream.usage.prefill_cached_tokens, stream.usage.decode_cached_tokens)
        assert cached == ((0, 96) if loses_its_cache is pair[0] else (96, 0))


async def test_those_who_leave_in_mid_transfer_take_nothing_from_those_with_the_same_prompt(client, late_store):
    """Answers of 1 to 8 tokens to one prompt: all are beginnings of the same one."""
    whole = (await answer(client, [HELLO] * 48)).token_ids
    streams = [
        client.generate([HELLO] * 47 + [HELLO], temperature=0.0, max_tokens=n, ignore_eos=True, cache_salt="anew")
        for n in range(1, 9)
    ]
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await asyncio.sleep(3 * LATE_S)
    for left in (2, 5):
        streams[left].cancel()
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert [n for n, result in enumerate(results) if isinstance(result, Cancelled)] == [2, 5]
    assert [s.token_ids for n, s in enumerate(streams) if n not in (2, 5)] == [
        whole[: n + 1] for n in range(8) if n not in (2, 5)
    ]
