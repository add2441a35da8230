"""Greedy tokens are those of transformers' generate, whatever the chunks, the blocks and the company."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model import LoadedModel
from engine.native_kernels import NativeKernels
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.step_plan import ScheduledSequence, StepPlan

CPU = torch.device("cpu")
BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64)
CHUNKS = (16, 24, 32)
NUM_NEW = 6
NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def expected(model_dir: Path, text_ids: list[int]) -> dict[int, list[int]]:
    """The first tokens after the first n of the text, by transformers with its own cache and attention."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = {}
    for length in LENGTHS:
        ids = torch.tensor([text_ids[:length]])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens[length] = answer[0, length:].tolist()
    return tokens


@pytest.fixture(scope="module")
def runner(loaded_model: tuple[LoadedModel, NativeKernels | None]) -> Runner:
    loaded, kernels = loaded_model
    return Runner(loaded, NUM_BLOCKS, CPU, kernels)


class Generation:
    """One sequence on its way: prompt in chunks, then a token a step, in blocks of its own."""

    def __init__(self, prompt: list[int], block_ids: list[int], chunk_tokens: int) -> None:
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.block_ids = block_ids
        self.chunk_tokens = chunk_tokens

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.num_prompt + NUM_NEW

    def next_part(self, name: str) -> ScheduledSequence:
        start = self.num_computed
        end = min(start + self.chunk_tokens, len(self.tokens))
        blocks = tuple(self.block_ids[: -(-end // BLOCK_SIZE)])
        return ScheduledSequence(name, start, tuple(self.tokens[start:end]), blocks, end == len(self.tokens), GREEDY)

    def take(self, part: ScheduledSequence, sampled: dict[str, int]) -> None:
        self.num_computed += len(part.token_ids)
        if part.sample:
            self.tokens.append(sampled[part.sequence_id])


def _generate(runner: Runner, prompts: list[list[int]], chunk_tokens: int) -> list[list[int]]:
    """Runs all prompts in the same steps; blocks are dealt out in a random order and hold what others left."""
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(len(prompts))).tolist()
    sequences = []
    for prompt in prompts:
        count = -(-(len(prompt) + NUM_NEW) // BLOCK_SIZE)
        sequences.append(Generation(prompt, blocks[:count], chunk_tokens))
        blocks = blocks[count:]
    while active := [s for s in sequences if not s.is_done]:
        parts = [s.next_part(str(i)) for i, s in enumerate(active)]
        result = runner.run(StepPlan(tuple(parts)), lambda _: None)
        assert set(result.sampled) == {part.sequence_id for part in parts if part.sample}
        for sequence, part in zip(active, parts, strict=True):
            sequence.take(part, result.sampled)
    return [s.tokens[s.num_prompt :] for s in sequences]


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_in_chunks(runner: Runner, text_ids: list[int], expected: dict[int, list[int]], length: int) -> None:
    for chunk in CHUNKS if length > min(CHUNKS) else CHUNKS[:1]:
        assert _generate(runner, [text_ids[:length]], chunk) == [expected[length]], f"chunks of {chunk}"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_all_in_one_batch(runner: Runner, text_ids: list[int], expected: dict[int, list[int]], chunk: int) -> None:
    """Some still prefill while others decode already."""
    answers = _generate(runner, [text_ids[:length] for length in LENGTHS], chunk)
    assert answers == [expected[length] for length in LENGTHS]


def test_without_native_kernels(
    loaded_model: tuple[LoadedModel, NativeKernels | None], text_ids: list[int], expected: dict[int, list[int]]
) -> None:
    runner = Runner(loaded_model[0], NUM_BLOCKS, CPU, None)
    assert _generate(runner, [text_ids[:17], text_ids[:33]], 24) == [expected[17], expected[33]]


def test_a_cached_prefix_in_shared_blocks(runner: Runner, text_ids: list[int], expected: dict[int, list[int]]) -> None:
    """The second sequence starts behind two blocks of the first."""
    first = Generation(text_ids[:64], list(range(10, 15)), 64)
    runner.run(StepPlan((first.next_part("first"),)), lambda _: None)
    second = Generation(text_ids[:33], [10, 11, 50], 64)
    second.num_computed = 32
    while not second.is_done:
        part = second.next_part("second")
        second.take(part, runner.run(StepPlan((part,)), lambda _: None).sampled)
    assert second.tokens[33:] == expected[33]


@pytest.mark.parametrize("rows", [1, 20], ids=["one token", "a chunk"])
def test_layers_are_reported_in_order_once_their_kv_is_there(runner: Runner, text_ids: list[int], rows: int) -> None:
    runner.kv.fill_(torch.nan)
    num_layers = runner.kv_shape.num_layers
    parts = (
        ScheduledSequence("a", 0, tuple(text_ids[:rows]), (5, 9)[: -(-rows // BLOCK_SIZE)], True, GREEDY),
        ScheduledSequence("b", 0, tuple(text_ids[7:12]), (2,), False, GREEDY),
    )
    seen: list[int] = []
    at_report = torch.empty(0)

    def written(layer: int) -> torch.Tensor:
        """[2, kv_heads, tokens of both, head_dim]"""
        a = runner.kv[list(parts[0].block_ids), layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :rows]
        return torch.cat([a, runner.kv[2, layer, :, :, :5]], dim=2)

    def on_layer(layer: int) -> None:
        nonlocal at_report
        seen.append(layer)
        at_report = torch.cat([at_report, written(layer)[None]])
        assert runner.kv[:, layer + 1 :].isnan().all(), "a later layer was written before"

    runner.run(StepPlan(parts), on_layer)
    assert seen == list(range(num_layers))
    assert not at_report.isnan().any()
    assert torch.equal(at_report, torch.stack([written(layer) for layer in range(num_layers)]))
    num_written = (rows + 5) * num_layers * 2 * runner.kv_shape.num_kv_heads * runner.kv_shape.head_dim
    assert int((~runner.kv.isnan()).sum()) == num_written, "and nothing beside"


def test_nothing_sampled_is_an_empty_result(runner: Runner, text_ids: list[int]) -> None:
    part = ScheduledSequence("a", 0, tuple(text_ids[:8]), (3,), False, GREEDY)
    assert runner.run(StepPlan((part,)), lambda _: None).sampled == {}


def test_seeded_sampling_is_the_same_in_any_company(runner: Runner, text_ids: list[int]) -> None:
    def part(name: str, length: int, block: int, seed: int) -> ScheduledSequence:
        return ScheduledSequence(name, 0, tuple(text_ids[:length]), (block,), True, SamplingParams(seed=seed))

    parts = [part(str(seed), 16, seed, seed) for seed in range(8)]
    together = runner.run(StepPlan((part("other", 9, 20, 1), *parts)), lambda _: None).sampled
    for alone in parts[:3]:
        assert runner.run(StepPlan((alone,)), lambda _: None).sampled.items() <= together.items()
    assert len({together[p.sequence_id] for p in parts}) > 3
