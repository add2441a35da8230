"""The cluster under drill: started for it, watched through its controller, and ended without a trace."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console

from bench.drill.errors import DrillFailed
from bench.drill.processes import Processes
from bench.drill.roster import Roster
from deploy import local_ray
from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus
from deploy.lifecycle import start_cluster, stop_cluster
from deploy.startup_view import StartupView

_POLL_INTERVAL_S = 0.25
_SILENCE_LIMIT_S = 60.0
_STOP_GRACE_S = 1.0

_AskStatus = Callable[[], ClusterStatus]


class DrillCluster:
    """A running cluster: `roster` and `processes` follow it while `watched`."""

    def __init__(self, spec: ClusterSpec, record: ClusterRecord, ask_status: _AskStatus) -> None:
        self.spec = spec
        self.record = record
        self.roster = Roster()  # of the current watch
        self.processes = Processes()
        self._ask_status = ask_status
        self._news = asyncio.Condition()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follows the cluster for the time of the block, with a new roster."""
        self.roster = Roster()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(), name="watch the cluster")
            try:
                yield
            finally:
                watch.cancel()

    async def holds_within(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until a condition on roster, processes or clock holds, but not longer than this."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until a condition holds. Raises DrillFailed, naming `what`."""
        if not await self.holds_within(condition, timeout_s):
            lives = self.roster.current.values()
            state = ", ".join(f"{life.name} {'up' if life.is_up else 'down'}" for life in lives)
            raise DrillFailed(f"{what} did not happen within {timeout_s:.0f} s: {state or 'no member known'}")

    async def wait_for_full_strength(self, timeout_s: float) -> None:
        """Waits until every worker serves. Raises DrillFailed."""
        await self.wait_for(lambda: self.roster.is_at_full_strength, timeout_s, "a return to full strength")

    async def _watch(self) -> None:
        heard_at_s = time.monotonic()
        while True:
            try:
                status = await asyncio.to_thread(self._ask_status)
            except TimeoutError:  # Ray's, too: the controller is slow on a machine that is busy
                if time.monotonic() - heard_at_s > _SILENCE_LIMIT_S:
                    raise DrillFailed(f"the controller has been silent for {_SILENCE_LIMIT_S:.0f} s") from None
                continue
            heard_at_s = time.monotonic()
            async with self._news:
                self.roster.update(status, heard_at_s)
                self.processes.note(self.roster.current.values())
                self._news.notify_all()
            await asyncio.sleep(_POLL_INTERVAL_S)


@contextmanager
def drill_cluster(spec: ClusterSpec) -> Iterator[DrillCluster]:
    """Starts a cluster of this spec in a Ray of its own, showing how it comes up on standard error.

    Nothing of it is left when the block ends, however it ends. Raises ClusterError.
    """
    with tempfile.TemporaryDirectory(prefix="baton-drill-") as directory:
        store = RecordStore(Path(directory))
        with StartupView(Console(stderr=True)) as view:
            view.show_step("Starting a cluster for the drill")
            record = start_cluster(spec, store, on_status=view.show_status)
        try:
            with _controller_session(record) as ask_status:
                yield DrillCluster(spec, record, ask_status)
        finally:
            with _interrupts_ignored():
                stop_cluster(record, store, grace_s=_STOP_GRACE_S)


@contextmanager
def _controller_session(record: ClusterRecord) -> Iterator[_AskStatus]:
    """One connection to Ray for the whole drill; one for each question would take a second."""
    os.environ.update(local_ray.environment())
    from deploy import ray_session  # noqa: PLC0415 - Ray reads its environment when it is imported

    with ray_session.ray_session(record.ray_address):
        yield lambda: ray_session.controller_status(record.name)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C is not to leave half a cluster behind: ending it takes some seconds at most."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        with contextlib.suppress(TypeError):  # a handler that was not set from Python
            signal.signal(signal.SIGINT, handler)
