"""The controller: one detached actor that owns the desired state of a cluster and keeps it up."""

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.actors import RouterActor, WorkerActor
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus
from deploy.supervisor import Supervisor
from deploy.worker_spec import WorkerAddress, WorkerSpec

NAMESPACE = "baton"
_PUSH_TIMEOUT_S = 5.0
_PUSH_RETRY_S = 1.0
_logger = logging.getLogger(__name__)


def controller_name(cluster: str) -> str:
    """The controller's name in Ray, in the namespace NAMESPACE."""
    return f"{cluster}-controller"


class Controller:
    """Creates the router and the workers, restarts the dead, and tells the router which workers live.

    The actors that it creates die with it; if its process dies, Ray starts another, which begins anew.
    """

    # Ray awaits it, and so a controller that Ray has restarted supervises again at once.
    async def __init__(self, spec: ClusterSpec, available_cores: Sequence[int]) -> None:  # type: ignore[misc]
        self._spec = spec
        self._membership_changed = asyncio.Event()
        self._router = Supervisor("router", "router", self._create_router, self._membership_changed.set)
        self._workers = tuple(
            Supervisor(
                worker.name,
                worker.role,
                functools.partial(self._create_worker, worker),
                self._membership_changed.set,
            )
            for worker in spec.worker_specs(available_cores)
        )
        self._tasks = [
            asyncio.create_task(self._push_membership()),
            *(asyncio.create_task(member.run()) for member in self._members),
        ]

    async def status(self) -> ClusterStatus:
        """The state of every actor now."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # supervision itself has failed: whoever asks must hear of it
        return ClusterStatus(
            self._spec.name,
            self._spec.model_name,
            self._router.status,
            tuple(worker.status for worker in self._workers),
        )

    async def shutdown(self, grace_s: float) -> None:
        """Stops the router, then the workers, each with `grace_s` seconds for running requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._router.end(grace_s)
        await asyncio.gather(*(worker.end(grace_s) for worker in self._workers))

    @property
    def _members(self) -> tuple[Supervisor, ...]:
        return (self._router, *self._workers)

    async def _push_membership(self) -> None:
        while True:
            await self._membership_changed.wait()
            self._membership_changed.clear()
            router = self._router.actor
            if router is None or not self._router.status.report.state.is_up:
                continue  # it gets the list once it is up, which is a change
            try:
                await asyncio.wait_for(router.set_workers.remote(self._addresses()), _PUSH_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                _logger.warning("the router did not take the list of workers: %s", error)
                await asyncio.sleep(_PUSH_RETRY_S)
                self._membership_changed.set()

    def _addresses(self) -> list[WorkerAddress]:
        return [
            WorkerAddress(status.name, status.role, report.address, report.epoch, report.pid)
            for status in (worker.status for worker in self._workers)
            if (report := status.report).address
        ]

    def _create_router(self) -> tuple[Any, Any]:
        actor = _remote(RouterActor, num_cpus=0, num_threads=1)
        return actor, actor.begin.remote(self._spec.router_settings())

    def _create_worker(self, spec: WorkerSpec) -> tuple[Any, Any]:
        num_cpus = 0 if self._spec.pin_cores else self._spec.cores_per_worker
        actor = _remote(WorkerActor, num_cpus=num_cpus, num_threads=self._spec.cores_per_worker)
        return actor, actor.begin.remote(spec)


def _remote(actor_class: type, *, num_cpus: int, num_threads: int) -> Any:
    # Read by the numerical libraries when they are loaded, so they must be there before the process starts.
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    options = {
        "num_cpus": num_cpus,
        "max_restarts": 0,  # the controller creates a new actor instead, with back-off
        "max_concurrency": 100,
        "runtime_env": {"env_vars": threads},
    }
    return ray.remote(actor_class).options(**options).remote()
