"""Keeps one actor alive: creates it, listens to its heartbeat, and replaces it when it is lost."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from deploy.cluster_status import MemberReport, MemberState, MemberStatus
from deploy.restart_policy import HeartbeatPolicy, RestartPolicy

STOP_MARGIN_S = 5.0  # for what follows the requests: handing back, closing
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Replacement:
    grace_s: float
    has_left: asyncio.Future[None]


class _LostError(Exception):
    """The actor must be given up; the message says why."""


class Supervisor:
    """One member of the cluster through all its lives.

    `create` makes a new actor that has `report` and `stop`, and returns it together with the reference of its
    first call, `begin`. `on_change` is called when `status`, which is `first` to begin with, is no longer what it was.
    """

    def __init__(
        self,
        first: MemberStatus,
        create: Callable[[], tuple[Any, Any]],
        on_change: Callable[[], None],
        *,
        restart: RestartPolicy | None = None,
        heartbeat: HeartbeatPolicy | None = None,
    ) -> None:
        self.status = first
        self.actor: Any = None
        self._create = create
        self._adopted: Any = None
        self._replacing: _Replacement | None = None
        self._on_change = on_change
        self._restart = restart or RestartPolicy()
        self._heartbeat = heartbeat or HeartbeatPolicy()
        self._up_since_s: float | None = None

    @property
    def is_adopting(self) -> bool:
        """Whether it has taken over an actor that has not reported yet."""
        return self._adopted is not None

    async def run(self, adopted: Any = None) -> None:
        """Runs until cancelled. The actor, if there is one then, is left to `end`.

        `adopted` is an actor that runs already, made by a supervisor before this one.
        """
        self._adopted = adopted
        while True:
            self._up_since_s = None
            if self._adopted is not None:
                self.actor = self._adopted
                begun = self.actor.report.remote()
            else:
                self.actor, begun = self._create()
            reason = await self._watch(begun)
            self._adopted = None
            if self._replacing is None:
                self._note_failure(reason)
                self._kill()
                await asyncio.sleep(self._restart.delay_s(self.status.failures_in_a_row))
            else:
                await self._retire(self._replacing)
            self._set(replace(self.status, num_restarts=self.status.num_restarts + 1))

    async def replace(self, grace_s: float) -> None:
        """Lets the actor leave, with `grace_s` seconds for its requests, and starts another; returns when it has left.

        Raises ValueError if there is none that runs.
        """
        if self.actor is None or not self.status.is_ready or self._replacing is not None:
            raise ValueError(
                f"{self.status.name} is {self.status.report.state.value}: it can be replaced when it is ready"
            )
        self._replacing = _Replacement(grace_s, asyncio.get_running_loop().create_future())
        await asyncio.shield(self._replacing.has_left)

    async def end(self, grace_s: float) -> None:
        """Stops the actor, giving its requests `grace_s` seconds, and kills what is left of it."""
        if self.actor is not None:
            await end_actor(self.actor, self.status.name, grace_s)
            self.actor = None

    async def _retire(self, replacement: "_Replacement") -> None:
        report = replace(self.status.report, state=MemberState.RESTARTING, detail="leaving: its requests end or move")
        self._set(replace(self.status, report=report))
        await self.end(replacement.grace_s)
        self._set(replace(self.status, report=MemberReport(MemberState.RESTARTING, "replaced on request")))
        self._replacing = None
        replacement.has_left.set_result(None)

    async def _watch(self, begun: Any) -> str:
        """Returns why the actor must be given up."""
        start_deadline_s = time.monotonic() + self._heartbeat.start_timeout_s
        num_missed = 0
        try:
            await self._answer(begun, self._heartbeat.start_timeout_s)
            while not self._heartbeat.is_lost(num_missed) and self._replacing is None:
                report = await self._ask(start_deadline_s)
                self._note(report)
                num_missed = num_missed + 1 if report.state is MemberState.UNHEALTHY else 0
                await asyncio.sleep(self._interval_s)
        except _LostError as lost:
            return str(lost)
        except TimeoutError:
            return f"not ready within {self._heartbeat.start_timeout_s:.0f} s"
        return self.status.report.detail

    async def _ask(self, start_deadline_s: float) -> MemberReport:
        is_starting = self._up_since_s is None
        timeout_s = start_deadline_s - time.monotonic() if is_starting else self._heartbeat.timeout_s
        try:
            report: MemberReport = await self._answer(self.actor.report.remote(), timeout_s)
        except TimeoutError:
            if is_starting:
                raise
            # The rest of the last report stays: one lost heartbeat does not take a worker from the router.
            detail = f"no heartbeat within {timeout_s:.0f} s"
            return replace(self.status.report, state=MemberState.UNHEALTHY, detail=detail)
        if report.state is MemberState.FAILED:
            raise _LostError(report.detail)
        return report

    async def _answer(self, call: Any, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except RayError as error:
            raise _LostError(_in_one_line(error)) from error

    @property
    def _interval_s(self) -> float:
        return self._heartbeat.start_interval_s if self._up_since_s is None else self._heartbeat.interval_s

    def _note(self, report: MemberReport) -> None:
        self._adopted = None
        if report.state.is_up and self._up_since_s is None:
            self._up_since_s = time.monotonic()
        self._set(replace(self.status, report=report))

    def _note_failure(self, reason: str) -> None:
        uptime_s = 0.0 if self._up_since_s is None else time.monotonic() - self._up_since_s
        failures = self._restart.failures_in_a_row(self.status.failures_in_a_row, uptime_s)
        _logger.warning("%s is lost: %s", self.status.name, reason)
        report = MemberReport(MemberState.RESTARTING, reason)
        self._set(replace(self.status, report=report, failures_in_a_row=failures))

    def _set(self, status: MemberStatus) -> None:
        if status != self.status:
            self.status = status
            self._on_change()

    def _kill(self) -> None:
        ray.kill(self.actor, no_restart=True)
        self.actor = None


async def end_actor(actor: Any, name: str, grace_s: float) -> None:
    """Stops an actor, giving its requests `grace_s` seconds, and kills what is left of it."""
    try:
        await asyncio.wait_for(actor.stop.remote(grace_s), grace_s + STOP_MARGIN_S)
    except (RayError, TimeoutError) as error:
        _logger.warning("%s did not stop by itself: %s", name, _in_one_line(error))
    ray.kill(actor, no_restart=True)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if isinstance(error, RayTaskError) else lines[0]  # a task error holds a whole traceback
