"""What one worker process has once: the model, its engine, its KV pool, its epoch."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import native_kernels
from engine.block_pool import BlockPool
from engine.engine import Engine, StepRunner
from engine.kv_cache import KvShape
from engine.model import load_model
from engine.model_store import model_fingerprint
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from kv_transfer.fingerprint import PROTOCOL_VERSION, Fingerprint
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool
from worker.state_feed import StateFeed

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROLES = ("prefill", "decode", "mixed")
DEFAULT_CPU_KV_BYTES = 512 << 20
CUDA_KV_SHARE = 0.8  # of the memory that is free once the weights are loaded
MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker. `kv_memory_bytes` 0: 512 MiB on the CPU, four fifths of the free memory on CUDA.

    `role` is prefill, decode or mixed; `dtype` float32, bfloat16 or float16 (CUDA only).
    """

    name: str
    role: str
    model_dir: Path
    kernel_cache_dir: Path
    dtype: str = "bfloat16"
    device: str = "cpu"
    kv_memory_bytes: int = 0
    block_size: int = 16
    max_step_tokens: int = 512
    max_batch_sequences: int = 32

    def __post_init__(self) -> None:
        """Refuses, by name, what cannot run."""
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}; it must be one of {', '.join(ROLES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.dtype == "float16" and not self.device.startswith("cuda"):
            raise ValueError("dtype float16 needs a CUDA device; use bfloat16 or float32 on the CPU")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size} tokens; it must be at least 1")
        if not 1 <= self.max_batch_sequences <= self.max_step_tokens:
            raise ValueError(
                f"max_batch_sequences is {self.max_batch_sequences} and max_step_tokens {self.max_step_tokens}: "
                "a full batch needs one token of a step for each sequence"
            )


@dataclass(frozen=True, slots=True)
class WorkerHost:
    """A loaded worker, ready to serve its roles. The engine's thread runs once `engine.start()` was called."""

    config: WorkerConfig
    epoch: str
    engine: Engine
    kv_pool: KvPool
    fingerprint: Fingerprint
    num_blocks: int
    context_window_tokens: int
    vocab_size: int
    state: StateFeed


def load_worker(
    config: WorkerConfig,
    state: StateFeed,
    on_progress: Callable[[str], None],
    metered: Callable[[StepRunner], StepRunner] = lambda runner: runner,
) -> WorkerHost:
    """Loads the model and allocates the KV blocks. Blocking: seconds. `on_progress` gets a phrase a phase.

    `metered` may wrap what runs the steps.
    """
    device = torch.device(config.device)
    on_progress("preparing kernels")
    kernels = native_kernels.load(config.kernel_cache_dir) if device.type == "cpu" else None
    on_progress("loading weights")
    loaded = load_model(config.model_dir, DTYPES[config.dtype], device, config.block_size, kernels)
    num_blocks = _num_blocks(config, loaded.kv_shape, device)
    on_progress(f"allocating {num_blocks} KV blocks")
    runner = Runner(loaded, num_blocks, device, kernels)
    on_progress("hashing weights")
    fingerprint = _fingerprint(model_fingerprint(config.model_dir), config.dtype, loaded.kv_shape)
    limits = SchedulerConfig(
        max_step_tokens=config.max_step_tokens,
        max_batch_sequences=config.max_batch_sequences,
        context_window_tokens=loaded.context_window_tokens,
        max_waiting=MAX_WAITING,
    )
    # Blocks may be shared only between equal numbers: the hash chain starts from model and dtype.
    scheduler = Scheduler(limits, BlockPool(num_blocks, config.block_size), f"{fingerprint.model}/{config.dtype}")
    layout = KvLayout(
        fingerprint.num_layers, fingerprint.num_kv_heads, fingerprint.head_dim, config.block_size, config.dtype
    )
    return WorkerHost(
        config=config,
        epoch=secrets.token_hex(8),
        engine=Engine(metered(runner), scheduler, state.notify),
        kv_pool=KvPool(runner.kv, layout),
        fingerprint=fingerprint,
        num_blocks=num_blocks,
        context_window_tokens=loaded.context_window_tokens,
        vocab_size=loaded.vocab_size,
        state=state,
    )


def _num_blocks(config: WorkerConfig, shape: KvShape, device: torch.device) -> int:
    kv_bytes = config.kv_memory_bytes
    if kv_bytes == 0 and device.type == "cuda":
        kv_bytes = int(torch.cuda.mem_get_info(device)[0] * CUDA_KV_SHARE)
    kv_bytes = kv_bytes or DEFAULT_CPU_KV_BYTES
    if kv_bytes < shape.block_bytes:
        raise ValueError(
            f"kv_memory_bytes is {kv_bytes}, one KV block of this model is {shape.block_bytes}: give more memory"
        )
    return kv_bytes // shape.block_bytes


def _fingerprint(model: str, dtype: str, shape: KvShape) -> Fingerprint:
    return Fingerprint(
        protocol_version=PROTOCOL_VERSION,
        model=model,
        kv_dtype=dtype,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
