"""The actors of a cluster: each hosts one server in a process of its own. The controller makes them remote."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from deploy.cluster_spec import NODE_HOST
from deploy.cluster_status import MemberReport, MemberState
from deploy.process_logging import log_to_stderr
from deploy.worker_spec import WorkerAddress, WorkerSpec


class WorkerActor:
    """Hosts one worker. The start runs in the background, so that heartbeats are answered meanwhile."""

    async def begin(self, spec: WorkerSpec, log_format: str) -> None:
        """Begins to start the worker; to be called once, before anything else."""
        log_to_stderr(spec.name, log_format)
        self._detail = "starting"
        self._start = asyncio.create_task(self._run(spec))

    async def report(self) -> MemberReport:
        """The heartbeat."""
        if not self._start.done():
            return MemberReport(MemberState.STARTING, self._detail, pid=os.getpid())
        if (error := self._start.exception()) is not None:
            return MemberReport(MemberState.FAILED, _describe(error), pid=os.getpid())
        worker = self._start.result()
        if self._process.is_healthy():
            return _report(MemberState.READY, "", worker)
        return _report(MemberState.UNHEALTHY, "its engine cannot serve", worker)

    async def stop(self, grace_s: float) -> None:
        """Ends the worker, giving running requests `grace_s` seconds."""
        if await _is_started(self._start):
            await self._process.stop(grace_s)

    async def _run(self, spec: WorkerSpec) -> WorkerAddress:
        # Imported by its own process only: the controller creates workers without loading torch.
        from deploy.worker_process import WorkerProcess  # noqa: PLC0415

        self._process = WorkerProcess()
        return await self._process.start(replace(spec, host=_address(spec.host)), self._set_detail)

    def _set_detail(self, detail: str) -> None:
        self._detail = detail


class RouterActor:
    """Hosts one router."""

    async def begin(self, settings: Mapping[str, Any], log_format: str) -> None:
        """Begins to start the router; to be called once, before anything else. `settings` are those of RouterSpec."""
        log_to_stderr("router", log_format)
        self._start = asyncio.create_task(self._run(settings))

    async def report(self) -> MemberReport:
        """The heartbeat. Ready means that it knows workers to send requests to."""
        if not self._start.done():
            return MemberReport(MemberState.STARTING, "starting", pid=os.getpid())
        if (error := self._start.exception()) is not None:
            return MemberReport(MemberState.FAILED, _describe(error), pid=os.getpid())
        state = MemberState.READY if self._server.ready else MemberState.WAITING
        return MemberReport(
            state, "", self._start.result(), pid=os.getpid(), metrics_address=self._server.metrics_address
        )

    async def set_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """Tells it all workers there are now."""
        await self._server.set_workers(workers)

    async def stop(self, grace_s: float) -> None:
        """Ends the router, giving running requests `grace_s` seconds."""
        if await _is_started(self._start):
            await self._server.stop(grace_s)

    async def _run(self, settings: Mapping[str, Any]) -> str:
        # Imported by its own process only, like the worker.
        from router.server import RouterServer, RouterSpec  # noqa: PLC0415

        self._server = RouterServer()
        return await self._server.start(RouterSpec(**{**settings, "host": _address(settings["host"])}))


def _report(state: MemberState, detail: str, worker: WorkerAddress) -> MemberReport:
    return MemberReport(state, detail, worker.address, worker.epoch, worker.pid, worker.metrics_address)


def _address(host: str) -> str:
    return str(ray.util.get_node_ip_address()) if host == NODE_HOST else host


async def _is_started(start: asyncio.Task[Any]) -> bool:
    """Whether a start has succeeded; one that is under way is given up."""
    start.cancel()
    await asyncio.wait([start])
    return not start.cancelled() and start.exception() is None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
