"""Keeps one actor alive: creates it, listens to its heartbeat, and replaces it when it is lost."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from deploy.cluster_status import MemberReport, MemberState, MemberStatus
from deploy.restart_policy import HeartbeatPolicy, RestartPolicy

_logger = logging.getLogger(__name__)


class _LostError(Exception):
    """The actor must be given up; the message says why."""


class Supervisor:
    """One member of the cluster through all its lives.

    `create` makes a new actor that has `report` and `stop`, and returns it together with the reference of its
    first call, `begin`. `on_change` is called when `status` is no longer what it was.
    """

    def __init__(
        self,
        name: str,
        role: str,
        create: Callable[[], tuple[Any, Any]],
        on_change: Callable[[], None],
        *,
        restart: RestartPolicy | None = None,
        heartbeat: HeartbeatPolicy | None = None,
    ) -> None:
        self.status = MemberStatus(name, role, MemberReport(MemberState.STARTING), 0, 0)
        self.actor: Any = None
        self._create = create
        self._on_change = on_change
        self._restart = restart or RestartPolicy()
        self._heartbeat = heartbeat or HeartbeatPolicy()
        self._up_since_s: float | None = None

    async def run(self) -> None:
        """Runs until cancelled. The actor, if there is one then, is left to `end`."""
        while True:
            self._up_since_s = None
            self.actor, begun = self._create()
            reason = await self._watch(begun)
            self._note_failure(reason)
            self._kill()
            await asyncio.sleep(self._restart.delay_s(self.status.failures_in_a_row))
            self._set(replace(self.status, num_restarts=self.status.num_restarts + 1))

    async def end(self, grace_s: float) -> None:
        """Stops the actor, giving its requests `grace_s` seconds, and kills what is left of it."""
        if self.actor is None:
            return
        try:
            await asyncio.wait_for(self.actor.stop.remote(grace_s), grace_s + self._heartbeat.timeout_s)
        except (RayError, TimeoutError) as error:
            _logger.warning("%s did not stop by itself: %s", self.status.name, _in_one_line(error))
        self._kill()

    async def _watch(self, begun: Any) -> str:
        """Returns why the actor must be given up."""
        start_deadline_s = time.monotonic() + self._heartbeat.start_timeout_s
        num_missed = 0
        try:
            await self._answer(begun, self._heartbeat.start_timeout_s)
            while not self._heartbeat.is_lost(num_missed):
                report = await self._ask(start_deadline_s)
                self._note(report)
                num_missed = num_missed + 1 if report.state is MemberState.UNHEALTHY else 0
                await asyncio.sleep(self._interval_s)
        except _LostError as lost:
            return str(lost)
        except TimeoutError:
            return f"not ready within {self._heartbeat.start_timeout_s:.0f} s"
        return report.detail

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


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if isinstance(error, RayTaskError) else lines[0]  # a task error holds a whole traceback
