"""The actors of a cluster in Ray: how they are named, made, found again and swept away.

Their names are cluster/incarnation/member/digest/number. An incarnation is one `baton up`; the digest tells of what
spec a member was made; the number is new in each life of it, so that a new life never waits for the name of one that is
still dying.
"""

import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

import ray

NAMESPACE = "baton"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """What a member needs of the node it runs on. Nodes have all of `labels`."""

    num_threads: int
    num_cpus: int = 0
    num_gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        needs = [f"{count} {name}" for count, name in ((self.num_cpus, "CPU"), (self.num_gpus, "GPU")) if count]
        needs += [f"{key}={value}" for key, value in self.labels.items()]
        return f"a Ray node with {', '.join(needs)}" if needs else "a Ray node"


@dataclass(frozen=True, slots=True)
class Found:
    """A living actor of an earlier controller, and of what spec it was made."""

    actor: Any
    digest: str


def make(actor_class: type, prefix: str, digest: str, place: Place) -> Any:
    """Starts an actor that outlives whoever makes it, as soon as there is a place for it.

    `prefix` is cluster/incarnation/member.
    """
    # Read by the numerical libraries when they are loaded, so they must be there before the process starts.
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    threads = {name: str(place.num_threads) for name in names}
    options = {
        "name": f"{prefix}/{digest or '-'}/{uuid.uuid4().hex[:8]}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "label_selector": place.labels,
        "max_restarts": 0,  # the controller creates a new actor instead, with back-off
        "max_concurrency": 100,
        "runtime_env": {"env_vars": threads},
    }
    return ray.remote(actor_class).options(**options).remote()


def find_all(cluster: str, incarnation: str) -> dict[str, Found]:
    """The living actors by member; if there are several of one, which a dying controller may have left, one of them."""
    found = {}
    for name in _names(f"{cluster}/{incarnation}/"):
        _, _, member, digest, _ = name.split("/")
        actor = _handle(name)
        if actor is not None:
            found[member] = Found(actor, digest)
    return found


def sweep(cluster: str, *, keep_incarnation: str = "") -> None:
    """Kills the actors of a cluster that no controller owns any more, but those of one incarnation."""
    for name in _names(f"{cluster}/"):
        if not keep_incarnation or not name.startswith(f"{cluster}/{keep_incarnation}/"):
            actor = _handle(name)
            if actor is not None:
                _logger.warning("%s was left over and is ended", name)
                ray.kill(actor, no_restart=True)


def _names(prefix: str) -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in found if a["namespace"] == NAMESPACE and a["name"].startswith(prefix))


def _handle(name: str) -> Any | None:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:  # it has just died
        return None
