"""A supervised actor is replaced when its process dies, when it is frozen, and when its start fails."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.cluster_status import MemberReport, MemberState, MemberStatus
from deploy.restart_policy import HeartbeatPolicy, RestartPolicy
from deploy.supervisor import Supervisor

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    ray.init(num_cpus=0, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def actor_class() -> Any:
    # Made in a function, so that Ray sends it by value: its processes cannot import test modules.
    report_class, ready, failed = MemberReport, MemberState.READY, MemberState.FAILED

    class Member:
        """Ready at once, unless the file that it is told exists; leaves a mark when it is stopped."""

        async def begin(self, broken: Path) -> None:
            self.broken = broken

        async def report(self) -> MemberReport:
            if self.broken.exists():
                return report_class(failed, "broken weights")
            return report_class(ready, "", "127.0.0.1:1", "epoch", os.getpid())

        async def stop(self, grace_s: float) -> None:
            self.broken.with_name("stopped").touch()

    return ray.remote(Member)


class Watched:
    """A running supervisor, and a way to wait for what it says."""

    def __init__(self, broken: Path) -> None:
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(
            MemberStatus("decode-0", "decode", MemberReport(MemberState.STARTING)),
            lambda: self._create(broken),
            self._changed.set,
            restart=RestartPolicy(initial_delay_s=0.1),
            heartbeat=HeartbeatPolicy(interval_s=0.1, start_interval_s=0.1, timeout_s=0.5, max_missed=2),
        )

    def _create(self, broken: Path) -> tuple[Any, Any]:
        actor = actor_class().options(num_cpus=0, max_concurrency=10).remote()
        return actor, actor.begin.remote(broken)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                await self._changed.wait()
                self._changed.clear()

    def is_ready_again(self, old_pid: int) -> bool:
        return self.supervisor.status.is_ready and self.supervisor.status.report.pid != old_pid


@pytest.fixture
async def watched(tmp_path: Path):  # type: ignore[no-untyped-def]
    watched = Watched(tmp_path / "broken")
    running = asyncio.create_task(watched.supervisor.run())
    yield watched
    running.cancel()
    await asyncio.wait([running])
    await watched.supervisor.end(grace_s=1)


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_process_is_replaced(watched: Watched, loss: signal.Signals) -> None:
    await watched.until(lambda: watched.supervisor.status.is_ready)
    pid = watched.supervisor.status.report.pid
    os.kill(pid, loss)
    await watched.until(lambda: watched.supervisor.status.report.state is MemberState.RESTARTING)
    assert watched.supervisor.status.report.address == "", "the router must forget it"
    await watched.until(lambda: watched.is_ready_again(pid))
    assert watched.supervisor.status.num_restarts == 1
    assert watched.supervisor.status.failures_in_a_row == 1


async def test_failed_start_is_told_and_tried_again(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    await watched.until(lambda: watched.supervisor.status.failures_in_a_row >= 2)
    assert watched.supervisor.status.report.detail == "broken weights"
    (tmp_path / "broken").unlink()
    await watched.until(lambda: watched.supervisor.status.is_ready)


async def test_end_stops_the_actor(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "broken")
    running = asyncio.create_task(watched.supervisor.run())
    await watched.until(lambda: watched.supervisor.status.is_ready)
    running.cancel()
    await asyncio.wait([running])
    await watched.supervisor.end(grace_s=5)
    assert (tmp_path / "stopped").exists()
    assert watched.supervisor.actor is None
