"""Strikes at real processes that sleep, in a cluster whose controller is a script."""

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from baton.channel import bind, server
from baton.v1 import fault_pb2, fault_pb2_grpc
from bench.drill import striker as striker_module
from bench.drill.cluster import DrillCluster
from bench.drill.errors import DrillFailed
from bench.drill.striker import Striker
from bench.drill.strikes import Phase, Strike
from deploy.cluster_record import ClusterRecord
from deploy.cluster_status import ClusterStatus, MemberReport, MemberState, MemberStatus

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


class Faults(fault_pb2_grpc.FaultServiceServicer):
    """Hits at once, with what a test has set as `hit`, when a hold is placed; keeps the holds."""

    def __init__(self):
        self.hit = None
        self.holds = []

    async def Inject(self, request, context):  # noqa: N802 - the name in the .proto
        self.holds.append(request.hold)
        yield fault_pb2.InjectResponse(in_place=fault_pb2.InPlace())
        if self.hit is not None:
            yield fault_pb2.InjectResponse(hit=self.hit)
        await asyncio.Event().wait()


class Cluster:
    """Four workers: a sleeping process and a fault service each."""

    def __init__(self):
        self.processes = {n: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for n in NAMES}
        self.faults = {name: Faults() for name in NAMES}
        self.states = dict.fromkeys(NAMES, MemberState.READY)
        self.addresses = {}

    @asynccontextmanager
    async def running(self):
        servers = []
        for name, faults in self.faults.items():
            started = server()
            fault_pb2_grpc.add_FaultServiceServicer_to_server(faults, started)
            self.addresses[name] = f"127.0.0.1:{bind(started, 0)}"
            await started.start()
            servers.append(started)
        drilled = DrillCluster(None, ClusterRecord("drill"), self.status)
        try:
            async with drilled.watched():
                await drilled.wait_for_full_strength(20.0)
                yield drilled
        finally:
            await asyncio.gather(*(started.stop(grace=0) for started in servers))
            for process in self.processes.values():
                process.kill()
                process.wait()

    def status(self):
        members = [self._member(name) for name in NAMES]
        router = MemberStatus("router", "router", MemberReport(MemberState.READY), 0, 0)
        return ClusterStatus("drill", "tiny", router, tuple(members))

    def _member(self, name):
        report = MemberReport(self.states[name], "", self.addresses[name], "e1", self.processes[name].pid)
        return MemberStatus(name, name.split("-")[0], report, 0, 0)

    def is_stopped(self, name):
        return psutil.Process(self.processes[name].pid).status() == psutil.STATUS_STOPPED


@pytest.fixture
async def cluster(monkeypatch):
    monkeypatch.setattr(striker_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(striker_module, "_HIT_TIMEOUT_S", 0.5)
    cluster = Cluster()
    async with cluster.running() as drilled:
        cluster.drilled = drilled
        yield cluster


def _hit(**fields):
    return fault_pb2.Hit(**{"request_id": "r-1", **fields})


async def test_the_worker_that_reports_is_killed(cluster):
    cluster.faults["prefill-1"].hit = _hit(peer="decode-1")
    strike = Strike(Phase.QUEUED, "prefill", 2)
    struck = await Striker(cluster.drilled, signal.SIGKILL).strike(strike)
    assert (struck.victim, struck.request_id, struck.strike) == ("prefill-1", "r-1", strike)
    assert struck.pid == cluster.processes["prefill-1"].pid
    assert cluster.processes["prefill-1"].wait(20) == -signal.SIGKILL
    assert all(cluster.processes[name].poll() is None for name in NAMES if name != "prefill-1")
    (hold,) = cluster.faults["prefill-1"].holds
    assert (hold.point, hold.num_skipped, hold.max_hits) == (fault_pb2.FAULT_POINT_QUEUED, 2, 1)
    assert hold.max_hold_s > 0
    assert cluster.faults["decode-0"].holds == []
    assert "prefill-1" not in {life.name for life in cluster.drilled.roster.workers_up}


async def test_its_peer_is_killed_if_that_has_the_role(cluster):
    cluster.faults["prefill-1"].hit = _hit(peer="decode-1")
    struck = await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.PUSHED, "decode", 0))
    assert struck.victim == "decode-1"
    assert cluster.processes["decode-1"].wait(20) == -signal.SIGKILL


async def test_prefilling_is_only_noticed(cluster):
    cluster.faults["prefill-0"].hit = _hit()
    await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.PREFILLING, "prefill", 0))
    assert cluster.faults["prefill-0"].holds[0].max_hold_s == 0


async def test_a_phase_that_no_request_reaches_is_given_up(cluster):
    assert await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.DECODING, "decode", 0)) is None
    assert all(process.poll() is None for process in cluster.processes.values())


async def test_a_frozen_worker_stays_so(cluster, eventually):
    cluster.faults["decode-0"].hit = _hit()
    striker = Striker(cluster.drilled, signal.SIGSTOP)
    await striker.strike(Strike(Phase.RESERVING, "decode", 0))
    await eventually(lambda: cluster.is_stopped("decode-0"))
    await striker.close()
    assert cluster.is_stopped("decode-0")


async def test_or_goes_on_after_a_while(cluster, eventually):
    cluster.faults["decode-0"].hit = _hit()
    striker = Striker(cluster.drilled, signal.SIGSTOP, resume_after_s=0.2)
    await striker.strike(Strike(Phase.RESERVING, "decode", 0))
    await eventually(lambda: not cluster.is_stopped("decode-0"))
    assert await cluster.drilled.holds_within(lambda: len(cluster.drilled.roster.workers_up) == 4, 20.0)
    await striker.close()


async def test_and_at_once_when_the_drill_ends(cluster, eventually):
    cluster.faults["decode-0"].hit = _hit()
    striker = Striker(cluster.drilled, signal.SIGSTOP, resume_after_s=600.0)
    await striker.strike(Strike(Phase.RESERVING, "decode", 0))
    await striker.close()
    await eventually(lambda: not cluster.is_stopped("decode-0"))


async def test_it_waits_until_the_cluster_can_lose_a_worker(cluster):
    cluster.states["prefill-1"] = MemberState.STARTING
    assert await cluster.drilled.holds_within(lambda: len(cluster.drilled.roster.workers_up) == 3, 20.0)
    for faults in cluster.faults.values():
        faults.hit = _hit()
    strike = asyncio.create_task(Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.QUEUED, "prefill", 0)))
    await asyncio.sleep(0.1)
    assert not cluster.faults["prefill-0"].holds
    cluster.states["prefill-1"] = MemberState.READY
    assert (await asyncio.wait_for(strike, 20)).victim in ("prefill-0", "prefill-1")


async def test_a_cluster_that_does_not_come_back_ends_the_drill(cluster, monkeypatch):
    monkeypatch.setattr(striker_module, "RESTART_TIMEOUT_S", 0.1)
    cluster.states["prefill-1"] = MemberState.RESTARTING
    assert await cluster.drilled.holds_within(lambda: len(cluster.drilled.roster.workers_up) == 3, 20.0)
    began_at_s = time.monotonic()
    with pytest.raises(DrillFailed, match="prefill-1 down"):
        await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.QUEUED, "prefill", 0))
    assert time.monotonic() - began_at_s < 20
