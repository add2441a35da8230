"""Loads a decoder-only transformers model for paged attention."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import paged_attention
from engine.kv_cache import KvShape
from engine.native_kernels import NativeKernels
from engine.packed_linear import pack_linears

logger = logging.getLogger(__name__)


class UnsupportedModel(ValueError):
    """The model's attention is of a kind the engine does not compute."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what it needs of the KV cache."""

    model: Any
    kv_shape: KvShape
    context_window_tokens: int
    vocab_size: int


def load_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, block_size: int, kernels: NativeKernels | None
) -> LoadedModel:
    """Loads weights from `model_dir` (config.json and safetensors) onto `device` in `dtype`.

    Raises `UnsupportedModel` for encoder-decoders, sliding windows and other attention that is not causal over
    the whole context; naming what was found.
    """
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    check_supported(config)
    paged_attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, local_files_only=True, attn_implementation=paged_attention.NAME
    )
    model.eval().requires_grad_(requires_grad=False).to(device)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        pack_linears(model, kernels)
    heads = config.num_attention_heads
    shape = KvShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        block_size=block_size,
        dtype=dtype,
    )
    return LoadedModel(model, shape, config.max_position_embeddings, config.vocab_size)


def check_supported(config: Any) -> None:
    """Raises `UnsupportedModel` unless every layer attends causally over the whole context."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder; only decoder-only models are served")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{config.model_type} is made of several models; only text models are served")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(f"{config.model_type} compresses its keys and values (MLA), which is not served")
    layer_types = getattr(config, "layer_types", None) or []
    other = sorted({kind for kind in layer_types if kind != "full_attention"})
    if other:
        raise UnsupportedModel(f"{config.model_type} has layers of kind {other}; only full_attention is served")
    if not layer_types and getattr(config, "sliding_window", None):
        raise UnsupportedModel(f"{config.model_type} attends a window of {config.sliding_window} tokens only")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel(f"{config.model_type} caps its attention logits, which is not served")
