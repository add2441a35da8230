"""Bursts of thousands of tiny requests: each ends once, right or refused, and none of them is remembered."""

import asyncio

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.aio_client import AsyncClient
from baton.errors import ResourceExhausted

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_REQUESTS, AT_ONCE = 2000, 500
MAX_GROWTH_BYTES = 20 << 20
PROMPTS = [[start + step for step in range(1 + start % 3)] for start in range(500, 540)]


@pytest.fixture(scope="module")
def first_tokens(model_dir):
    """The most likely token after each prompt, by transformers."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [int(model(torch.tensor([ids])).logits[0, -1].argmax()) for ids in PROMPTS]


async def _burst(address):
    """Each request's token ids, or the error it ended with."""

    async def one(number):
        stream = client.generate(PROMPTS[number % len(PROMPTS)], temperature=0.0, max_tokens=1, ignore_eos=True)
        try:
            await stream.read()
        except ResourceExhausted as error:
            return error.reason
        return tuple(stream.token_ids)

    results = []
    async with AsyncClient(address, timeout_s=590.0) as client:
        for start in range(0, NUM_REQUESTS, AT_ONCE):
            results += await asyncio.gather(*(one(number) for number in range(start, start + AT_ONCE)))
    return results


def _memory_bytes(cluster):
    return psutil.Process(cluster.status.router.report.pid).memory_info().rss


def test_all_are_answered_where_all_may_wait(cluster, first_tokens):
    results = asyncio.run(_burst(cluster.address))
    assert results == [(first_tokens[number % len(PROMPTS)],) for number in range(NUM_REQUESTS)]
    cluster.wait_until_clean()


def test_all_are_answered_or_refused_where_only_some_may_wait(short_queue_cluster, first_tokens):
    """The second of two bursts finds a router that has grown as far as it needs to. Prompts this short hardly wait in
    the router: a prefill worker takes hundreds at once.
    """
    asyncio.run(_burst(short_queue_cluster.address))
    before_bytes = _memory_bytes(short_queue_cluster)
    results = asyncio.run(_burst(short_queue_cluster.address))
    wrong = [
        number
        for number, result in enumerate(results)
        if result not in ("QUEUE_FULL", (first_tokens[number % len(PROMPTS)],))
    ]
    assert not wrong
    assert len(results) == NUM_REQUESTS
    short_queue_cluster.wait_until_clean()
    assert _memory_bytes(short_queue_cluster) - before_bytes < MAX_GROWTH_BYTES
