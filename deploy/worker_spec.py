"""What one worker process is to be, and where it can be reached once it runs. Pure and light."""

import hashlib
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: `role` is prefill, decode or mixed; `kv_memory_bytes` 0 leaves the amount to the worker.

    `cores` are the CPU cores it is pinned to; none: not pinned. `block_size` is in tokens. With `allow_faults` whoever
    reaches the worker may break it, for drills. `metrics_port` 0 is any free one.
    """

    name: str
    role: str
    model_dir: str
    model_name: str
    dtype: str = "bfloat16"
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    kv_memory_bytes: int = 0
    block_size: int = 16
    max_step_tokens: int = 512
    max_batch_sequences: int = 32
    allow_faults: bool = False
    metrics_port: int = 0

    @property
    def digest(self) -> str:
        """Differs when a worker must be replaced to become this one. On which cores it runs does not matter."""
        described = sorted((key, value) for key, value in asdict(self).items() if key != "cores")
        return hashlib.sha256(repr(described).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """One life of a worker: `address` and `metrics_address` are host:port, `epoch` is new in each life."""

    name: str
    role: str
    address: str
    epoch: str
    pid: int
    metrics_address: str = ""
