"""Models of several families load and compute what transformers computes; other kinds of attention are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from engine.kv_cache import KvShape
from engine.model import LoadedModel, UnsupportedModel, check_supported, load_model
from engine.native_kernels import NativeKernels
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.step_plan import ScheduledSequence, StepPlan

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPT = [(7 * i) % 90 + 3 for i in range(37)]
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2, with biases": Qwen2Config(**SMALL),
    "qwen3, with normed heads of another size": Qwen3Config(**SMALL, head_dim=32),
    "phi, rotating parts of heads": PhiConfig(**SMALL, partial_rotary_factor=0.5),
    "one KV head": LlamaConfig(**SMALL | {"num_key_value_heads": 1}, head_dim=32),
}


def _saved(config: Any, path: Path) -> Any:
    """Saves a model of random weights and returns it: the reference."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases too, and logits far apart
    model.eval().save_pretrained(path)
    return model


def _prefill(runner: Runner, block_ids: tuple[int, ...], first: int) -> int:
    """Runs PROMPT in two chunks, the second from token `first` on; returns the greedy next token."""
    token = -1
    for start, end in ((0, first), (first, len(PROMPT))):
        ids, sampling = tuple(PROMPT[start:end]), SamplingParams(temperature=0)
        sequence = ScheduledSequence("a", start, ids, block_ids, end == len(PROMPT), sampling)
        token = runner.run(StepPlan((sequence,)), lambda _: None).sampled.get("a", -1)
    return token


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch alone"])
@torch.inference_mode()
def test_families_compute_what_transformers_does(
    tmp_path: Path, request: pytest.FixtureRequest, family: str, native: bool
) -> None:
    reference = _saved(FAMILIES[family], tmp_path)(torch.tensor([PROMPT]), use_cache=True)
    kernels = request.getfixturevalue("kernels") if native else None
    loaded = load_model(tmp_path, torch.float32, CPU, 8, kernels)
    runner = Runner(loaded, 9, CPU, kernels)
    blocks = (3, 7, 1, 8, 0)
    assert _prefill(runner, blocks, len(PROMPT) - 1) == int(reference.logits[0, -1].argmax())
    for layer in range(loaded.kv_shape.num_layers):
        cached = reference.past_key_values.layers[layer]
        for kind, expected in enumerate((cached.keys, cached.values)):
            ours = runner.kv[list(blocks), layer, kind].transpose(0, 1).flatten(1, 2)[:, : len(PROMPT)]
            torch.testing.assert_close(ours, expected[0], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_bfloat16_stays_near_float32(tmp_path: Path, kernels: NativeKernels) -> None:
    reference = _saved(FAMILIES["llama"], tmp_path)(torch.tensor([PROMPT]), use_cache=True).past_key_values.layers[1]
    runner = Runner(load_model(tmp_path, torch.bfloat16, CPU, 64, kernels), 2, CPU, kernels)
    _prefill(runner, (1,), 20)
    for kind, expected in enumerate((reference.keys[0], reference.values[0])):
        ours = runner.kv[1, 1, kind, :, : len(PROMPT)].float()
        assert (ours - expected).norm() < 0.03 * expected.norm()


def test_shape_and_limits_are_the_models_own(tmp_path: Path, kernels: NativeKernels) -> None:
    _saved(FAMILIES["qwen3, with normed heads of another size"], tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16, CPU, 8, kernels)
    assert loaded.kv_shape == KvShape(2, 2, 32, 8, torch.bfloat16)
    assert (loaded.context_window_tokens, loaded.vocab_size) == (256, 100)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_default_model(loaded_model: tuple[LoadedModel, NativeKernels | None]) -> None:
    """As its model card says: 30 layers, 9 heads on 3 KV heads, 576 wide, 8,192 tokens, 49,152 words."""
    loaded, _ = loaded_model
    assert loaded.kv_shape == KvShape(30, 3, 64, 16, torch.float32)
    assert (loaded.context_window_tokens, loaded.vocab_size) == (8192, 49152)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "t5 is an encoder-decoder"),
        (MistralConfig(sliding_window=4096), "window of 4096 tokens"),
        (GptOssConfig(num_hidden_layers=2), "layers of kind.*sliding_attention"),
        (Gemma2Config(num_hidden_layers=2), "layers of kind.*sliding_attention"),
        (Gemma2Config(num_hidden_layers=2, layer_types=["full_attention"] * 2), "caps its attention logits"),
        (DeepseekV3Config(num_hidden_layers=2), "compresses its keys and values"),
        (LlavaConfig(), "made of several models"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_kinds_of_attention_are_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(config)


@pytest.mark.parametrize(
    "config", [LlamaConfig(), MistralConfig(sliding_window=None), Qwen2Config()], ids=lambda c: c.model_type
)
def test_causal_attention_over_the_whole_context_is_served(config: Any) -> None:
    check_supported(config)


def test_a_refused_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    MistralConfig(sliding_window=4096).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        load_model(tmp_path, torch.float32, CPU, 16, None)
