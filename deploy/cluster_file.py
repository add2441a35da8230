"""The cluster file: a whole cluster in one YAML document, checked key by key."""

from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.errors import ClusterError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ModelSection(_Section):
    """What is served; without a path the default model."""

    path: str = ""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"


class WorkersSection(_Section):
    """How many workers of each role, and what each of them gets. `kv_memory_mb` 0 is automatic."""

    prefill: int = Field(default=1, ge=0)
    decode: int = Field(default=1, ge=0)
    mixed: int = Field(default=0, ge=0)
    cores: int = Field(default=1, ge=1)
    kv_memory_mb: int = Field(default=0, ge=0)


class RouterSection(_Section):
    """The router. Ports of 0 are any free ones; at `metrics_port` Prometheus finds all processes too."""

    port: int = Field(default=0, ge=0, le=65535)
    metrics_port: int = Field(default=0, ge=0, le=65535)
    max_waiting: int = Field(default=1024, ge=0)
    recovery_patience_s: float = Field(default=30.0, ge=0)


class SloSection(_Section):
    """What answers should stay below, in seconds, for metrics; 0 is no target."""

    ttft_s: float = Field(default=0.0, ge=0)
    tpot_s: float = Field(default=0.0, ge=0)


class RaySection(_Section):
    """Where it runs: in a Ray of its own on this machine, or in the Ray at `address` (host:port).

    `host` is what servers bind, "node" for each node's own address. With a `role_label` members run only on nodes that
    have this label with their role as the value.
    """

    address: str = ""
    host: str = "127.0.0.1"
    role_label: str = ""


class ClusterFile(_Section):
    """A cluster file."""

    name: str = "baton"
    log_format: Literal["text", "json"] = "text"
    model: ModelSection = ModelSection()
    workers: WorkersSection = WorkersSection()
    router: RouterSection = RouterSection()
    slo: SloSection = SloSection()
    ray: RaySection = RaySection()

    def options(self) -> dict[str, Any]:
        """What it says, by option of `baton up`."""
        return {
            "name": self.name,
            "log_format": self.log_format,
            **self.workers.model_dump(),
            **self.router.model_dump(),
            "slo_ttft_s": self.slo.ttft_s,
            "slo_tpot_s": self.slo.tpot_s,
            "model": self.model.path or None,
            "dtype": self.model.dtype,
            "device": self.model.device,
            "ray_address": self.ray.address,
            "host": self.ray.host,
            "role_label": self.ray.role_label,
        }


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises ClusterError naming the file and each key that is wrong, with what would be right."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict | None):
        raise ClusterError(f"{path}: keys such as 'workers:' are expected, not {type(content).__name__}")
    try:
        return ClusterFile.model_validate(content or {})
    except ValidationError as error:
        raise ClusterError(f"{path}: " + "; ".join(map(_problem, error.errors()))) from error


def _problem(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{where} is not known; {_known(detail['loc'])}"
    return f"{where} is {detail['input']!r}: {detail['msg']}"


def _known(place: tuple[str, ...]) -> str:
    section: type[BaseModel] = ClusterFile
    for part in place[:-1]:
        section = cast(type[BaseModel], section.model_fields[part].annotation)
    return f"there are {', '.join(section.model_fields)}"
