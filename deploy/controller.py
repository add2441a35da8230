"""The controller: one detached actor that owns the desired state of a cluster and keeps it up."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from deploy import member_actors
from deploy.actors import RouterActor, WorkerActor
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus, MemberReport, MemberState, MemberStatus
from deploy.member_actors import Found, Place
from deploy.process_logging import log_to_stderr
from deploy.supervisor import Supervisor, end_actor
from deploy.worker_spec import WorkerAddress, WorkerSpec

_PUSH_TIMEOUT_S = 5.0
_PUSH_RETRY_S = 1.0
_logger = logging.getLogger(__name__)


def controller_name(cluster: str) -> str:
    """The controller's name in Ray, in the namespace `member_actors.NAMESPACE`."""
    return f"{cluster}-controller"


class Controller:
    """Creates the router and the workers, restarts the dead, and tells the router which workers live.

    The actors that it creates outlive it. Another controller takes over what runs: the one that Ray starts if its
    process dies, or one for another spec of the same cluster. That lets workers leave that are not in its spec,
    and replaces those that were made of another one, one after the other.
    """

    # Ray awaits it, and so a controller that Ray has restarted supervises again at once.
    async def __init__(  # type: ignore[misc]
        self, spec: ClusterSpec, available_cores: Sequence[int], incarnation: str, grace_s: float
    ) -> None:
        """`incarnation` tells this cluster from an earlier one of its name, of which nothing may be left.

        Workers that must leave give their requests `grace_s` seconds.
        """
        log_to_stderr("controller", spec.log_format)
        self._spec = spec
        self._incarnation = incarnation
        self._grace_s = grace_s
        self._membership_changed = asyncio.Event()
        self._news = asyncio.Event()
        member_actors.sweep(spec.name, keep_incarnation=incarnation)
        found = member_actors.find_all(spec.name, incarnation)
        worker_specs = spec.worker_specs(available_cores)
        self._router = self._supervisor("router", "router", self._create_router)
        self._workers = tuple(
            self._supervisor(worker.name, worker.role, functools.partial(self._create_worker, worker))
            for worker in worker_specs
        )
        self._pending = [w.name for w in worker_specs if w.name in found and found[w.name].digest != w.digest]
        self._tasks = [
            asyncio.create_task(self._push_membership()),
            *(asyncio.create_task(member.run(_actor(found.pop(member.status.name, None)))) for member in self._members),
            *(asyncio.create_task(self._let_go(name, left.actor)) for name, left in found.items()),
        ]
        if self._pending:
            self._tasks.append(asyncio.create_task(self._replace_one_by_one(tuple(self._pending))))
        self._pending += found

    async def status(self) -> ClusterStatus:
        """The state of every actor now."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # supervision itself has failed: whoever asks must hear of it
        workers = tuple(worker.status for worker in self._workers)
        return ClusterStatus(self._spec.name, self._spec.model_name, self._router.status, workers, tuple(self._pending))

    async def description(self) -> tuple[ClusterSpec, str]:
        """What the cluster is to be, and its incarnation."""
        return self._spec, self._incarnation

    async def shutdown(self, grace_s: float) -> None:
        """Stops the router, then the workers, each with `grace_s` seconds for running requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._router.end(grace_s)
        await asyncio.gather(*(worker.end(grace_s) for worker in self._workers))

    async def replace_worker(self, name: str, grace_s: float) -> None:
        """Lets a worker leave, with `grace_s` seconds for its requests, and starts another in its place.

        Returns when it has left. Raises ValueError for a name that is not known, or a worker that is not ready.
        """
        await self._worker(name).replace(grace_s)

    def _worker(self, name: str) -> Supervisor:
        worker = next((worker for worker in self._workers if worker.status.name == name), None)
        if worker is None:
            known = ", ".join(worker.status.name for worker in self._workers)
            raise ValueError(f"there is no worker {name!r}; there are {known}")
        return worker

    @property
    def _members(self) -> tuple[Supervisor, ...]:
        return (self._router, *self._workers)

    async def _let_go(self, name: str, actor: Any) -> None:
        await end_actor(actor, name, self._grace_s)
        self._pending.remove(name)

    async def _replace_one_by_one(self, names: Sequence[str]) -> None:
        """The next one leaves when all others serve."""
        for name in names:
            await self._until_all_serve()
            worker = self._worker(name)
            if worker.status.num_restarts == 0:  # or it was lost meanwhile, and made anew of this spec
                await worker.replace(self._grace_s)
                await self._until_all_serve()
            self._pending.remove(name)

    async def _until_all_serve(self) -> None:
        while not all(member.status.is_ready for member in self._members):
            self._news.clear()
            await self._news.wait()

    async def _push_membership(self) -> None:
        while True:
            await self._membership_changed.wait()
            self._membership_changed.clear()
            router = self._router.actor
            if router is None or not self._router.status.report.state.is_up:
                continue  # it gets the list once it is up, which is a change
            if any(worker.is_adopting for worker in self._workers):
                continue  # it knows them all; a list without these would take them from it
            try:
                await asyncio.wait_for(router.set_workers.remote(self._addresses()), _PUSH_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                _logger.warning("the router did not take the list of workers: %s", error)
                await asyncio.sleep(_PUSH_RETRY_S)
                self._membership_changed.set()

    def _addresses(self) -> list[WorkerAddress]:
        return [
            WorkerAddress(status.name, status.role, report.address, report.epoch, report.pid, report.metrics_address)
            for status in (worker.status for worker in self._workers)
            if (report := status.report).address
        ]

    def _supervisor(self, name: str, role: str, create: Callable[[], tuple[Any, Any]]) -> Supervisor:
        waiting = MemberReport(MemberState.STARTING, f"waiting for {self._place(role)}")
        return Supervisor(MemberStatus(name, role, waiting), create, self._note_change)

    def _note_change(self) -> None:
        self._membership_changed.set()
        self._news.set()

    def _create_router(self) -> tuple[Any, Any]:
        actor = member_actors.make(RouterActor, self._prefix("router"), "", self._place("router"))
        return actor, actor.begin.remote(self._spec.router_settings(), self._spec.log_format)

    def _create_worker(self, spec: WorkerSpec) -> tuple[Any, Any]:
        actor = member_actors.make(WorkerActor, self._prefix(spec.name), spec.digest, self._place(spec.role))
        return actor, actor.begin.remote(spec, self._spec.log_format)

    def _prefix(self, member: str) -> str:
        return f"{self._spec.name}/{self._incarnation}/{member}"

    def _place(self, role: str) -> Place:
        spec = self._spec
        labels = {spec.role_label: role} if spec.role_label else {}
        if role == "router":
            return Place(num_threads=1, labels=labels)
        num_cpus = 0 if spec.pin_cores else spec.cores_per_worker
        return Place(spec.cores_per_worker, num_cpus, int(spec.device == "cuda"), labels)


def _actor(found: Found | None) -> Any | None:
    return None if found is None else found.actor
