"""What a cluster is to be: the desired state that the controller keeps up. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.core_assignment import assign_cores
from deploy.errors import ClusterError
from deploy.process_logging import LOG_FORMATS
from deploy.worker_spec import WorkerSpec

DEFAULT_CLUSTER_NAME = "baton"
DTYPES = ("bfloat16", "float32")
DEVICES = ("cpu", "cuda")
NODE_HOST = "node"  # stands for the address that Ray's node has where a member runs
MAX_WORKERS = 64
_SETTINGS = {"port": "router_port"}  # of the router, by other names here
_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


class ClusterSpecError(ClusterError):
    """A cluster of this description cannot exist."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """One cluster. `router_port` 0 is any free port; `kv_memory_bytes` is per worker, 0 for auto.

    With `pin_cores` each worker is pinned to cores of its own; without, Ray counts `cores_per_worker` CPUs
    for it, and in any case a GPU if `device` is cuda. `host` is what servers bind, NODE_HOST for members on several
    machines. With a `role_label` a member runs only on Ray nodes that have this label with its role (router, prefill,
    decode or mixed) as the value. `metrics_port` is the router's, 0 any free one; workers take free ones. Answers are
    counted against the targets `slo_ttft_s` and `slo_tpot_s`, 0 is none. `max_waiting` requests may wait in the router,
    and one that lost its workers waits `recovery_patience_s` for others. `log_format` is text or json. Raises
    ClusterSpecError.
    """

    model_dir: str
    model_name: str
    name: str = DEFAULT_CLUSTER_NAME
    num_prefill: int = 1
    num_decode: int = 1
    num_mixed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    host: str = "127.0.0.1"
    role_label: str = ""
    router_port: int = 0
    cores_per_worker: int = 1
    kv_memory_bytes: int = 0
    pin_cores: bool = True
    allow_faults: bool = False
    max_waiting: int = 1024
    recovery_patience_s: float = 30.0
    metrics_port: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    log_format: str = "text"

    def __post_init__(self) -> None:
        if problem := self._name_problem() or self._size_problem() or self._option_problem():
            raise ClusterSpecError(problem)

    @property
    def num_workers(self) -> int:
        """Workers of all roles."""
        return self.num_prefill + self.num_decode + self.num_mixed

    def worker_specs(self, available_cores: Sequence[int]) -> tuple[WorkerSpec, ...]:
        """One spec for each worker, named after its role: prefill-0, prefill-1, decode-0..."""
        counts = {"prefill": self.num_prefill, "decode": self.num_decode, "mixed": self.num_mixed}
        places = [(role, index) for role, count in counts.items() for index in range(count)]
        cores: Sequence[tuple[int, ...]] = [()] * len(places)
        if self.pin_cores:
            cores = assign_cores(len(places), self.cores_per_worker, available_cores).cores
        return tuple(
            WorkerSpec(
                name=f"{role}-{index}",
                role=role,
                model_dir=self.model_dir,
                model_name=self.model_name,
                dtype=self.dtype,
                device=self.device,
                cores=worker_cores,
                host=self.host,
                kv_memory_bytes=self.kv_memory_bytes,
                allow_faults=self.allow_faults,
            )
            for (role, index), worker_cores in zip(places, cores, strict=True)
        )

    def router_settings(self) -> dict[str, str | int | float]:
        """Settings of the router, those of `router.server.RouterSpec`, which is not loaded here."""
        return {
            "model_dir": self.model_dir,
            "model_name": self.model_name,
            "host": self.host,
            "port": self.router_port,
            "max_waiting": self.max_waiting,
            "recovery_patience_s": self.recovery_patience_s,
            "metrics_port": self.metrics_port,
            "slo_ttft_s": self.slo_ttft_s,
            "slo_tpot_s": self.slo_tpot_s,
        }

    def change_problem(self, running: "ClusterSpec") -> str:
        """Why a running cluster cannot become this one while it serves; empty if it can.

        Workers of another model or data type do not understand each other's KV, and the router is not replaced.
        """
        for name in ("name", "model_dir", "dtype", *sorted(self.router_settings())):
            old, new = getattr(running, _SETTINGS.get(name, name)), getattr(self, _SETTINGS.get(name, name))
            if old != new:
                return f"{name} cannot change from {old!r} to {new!r} in a running cluster: start another one"
        return ""

    def _name_problem(self) -> str:
        if _NAME_PATTERN.fullmatch(self.name):
            return ""
        return f"cluster name {self.name!r}: use 1 to 40 of a-z, 0-9 and '-', not beginning with '-'"

    def _size_problem(self) -> str:
        counts = (self.num_prefill, self.num_decode, self.num_mixed)
        if min(counts) < 0 or self.num_workers > MAX_WORKERS:
            return f"{counts} prefill, decode and mixed workers: use 0 or more of each, {MAX_WORKERS} in all"
        if self.num_prefill + self.num_mixed == 0:
            return "no worker can prefill: add --prefill 1 or --mixed 1"
        if self.num_decode + self.num_mixed == 0:
            return "no worker can decode: add --decode 1 or --mixed 1"
        return ""

    def _option_problem(self) -> str:
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r}: use {' or '.join(DTYPES)}"
        if self.device not in DEVICES:
            return f"device {self.device!r}: use {' or '.join(DEVICES)}"
        if self.pin_cores and (self.host == NODE_HOST or self.role_label):
            return "workers on several nodes cannot be pinned to cores of this machine: join a Ray with --ray-address"
        if bad := [port for port in (self.router_port, self.metrics_port) if not 0 <= port <= 65535]:
            return f"port {bad[0]}: use 0 for any free one, or 1 to 65535"
        if self.cores_per_worker < 1:
            return f"{self.cores_per_worker} cores per worker: use 1 or more"
        if self.kv_memory_bytes < 0:
            return f"{self.kv_memory_bytes} bytes of KV memory: use 0 for automatic, or more"
        if self.log_format not in LOG_FORMATS:
            return f"log format {self.log_format!r}: use {' or '.join(LOG_FORMATS)}"
        return self._limit_problem()

    def _limit_problem(self) -> str:
        if self.max_waiting < 0 or self.recovery_patience_s < 0:
            return f"{self.max_waiting} waiting requests, {self.recovery_patience_s} s of patience: use 0 or more"
        if min(self.slo_ttft_s, self.slo_tpot_s) < 0:
            return f"targets of {self.slo_ttft_s} s and {self.slo_tpot_s} s: use 0 for none, or more"
        return ""
