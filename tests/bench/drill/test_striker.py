"""Strikes at real processes that sleep, in a cluster whose controller is a script."""

import asyncio
import signal
import time

import pytest

from baton.v1 import fault_pb2
from bench.drill import striker as striker_module
from bench.drill.errors import DrillFailed
from bench.drill.striker import Striker
from bench.drill.strikes import Phase, Strike
from deploy.cluster_status import MemberState

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture
async def cluster(cluster, monkeypatch):
    monkeypatch.setattr(striker_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(striker_module, "_HIT_TIMEOUT_S", 0.5)
    async with cluster.drilled.watched():
        await cluster.drilled.wait_for_full_strength(20.0)
        yield cluster


def _hit(**fields):
    return fault_pb2.Hit(**{"request_id": "r-1", **fields})


async def test_the_worker_that_reports_is_killed(cluster):
    cluster.workers["prefill-1"].hits = [_hit(peer="decode-1")]
    strike = Strike(Phase.QUEUED, "prefill", 2)
    struck = await Striker(cluster.drilled, signal.SIGKILL).strike(strike)
    assert (struck.victim, struck.request_id, struck.strike) == ("prefill-1", "r-1", strike)
    assert struck.pid == cluster.processes["prefill-1"].pid
    assert cluster.processes["prefill-1"].wait(20) == -signal.SIGKILL
    assert all(cluster.processes[name].poll() is None for name in NAMES if name != "prefill-1")
    (fault,) = cluster.workers["prefill-1"].faults
    hold = fault.hold
    assert (hold.point, hold.num_skipped, hold.max_hits) == (fault_pb2.FAULT_POINT_QUEUED, 2, 1)
    assert hold.max_hold_s > 0
    assert cluster.workers["decode-0"].faults == []
    assert "prefill-1" not in {life.name for life in cluster.drilled.roster.workers_up}


async def test_its_peer_is_killed_if_that_has_the_role(cluster):
    cluster.workers["prefill-1"].hits = [_hit(peer="decode-1")]
    struck = await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.PUSHED, "decode", 0))
    assert struck.victim == "decode-1"
    assert cluster.processes["decode-1"].wait(20) == -signal.SIGKILL


async def test_prefilling_is_only_noticed(cluster):
    cluster.workers["prefill-0"].hits = [_hit()]
    await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.PREFILLING, "prefill", 0))
    assert cluster.workers["prefill-0"].faults[0].hold.max_hold_s == 0


async def test_a_phase_that_no_request_reaches_is_given_up(cluster):
    assert await Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.DECODING, "decode", 0)) is None
    assert all(process.poll() is None for process in cluster.processes.values())


async def test_a_frozen_worker_stays_so(cluster, eventually):
    cluster.workers["decode-0"].hits = [_hit()]
    striker = Striker(cluster.drilled, signal.SIGSTOP)
    await striker.strike(Strike(Phase.RESERVING, "decode", 0))
    await eventually(lambda: cluster.is_stopped("decode-0"))
    await striker.close()
    assert cluster.is_stopped("decode-0")


async def test_or_goes_on_after_a_while(cluster, eventually):
    cluster.workers["decode-0"].hits = [_hit()]
    striker = Striker(cluster.drilled, signal.SIGSTOP, resume_after_s=0.2)
    await striker.strike(Strike(Phase.RESERVING, "decode", 0))
    await eventually(lambda: not cluster.is_stopped("decode-0"))
    assert await cluster.drilled.holds_within(lambda: len(cluster.drilled.roster.workers_up) == 4, 20.0)
    await striker.close()


async def test_and_at_once_when_the_drill_ends(cluster, eventually):
    cluster.workers["decode-0"].hits = [_hit()]
    striker = Striker(cluster.drilled, signal.SIGSTOP, resume_after_s=600.0)
    await striker.strike(Strike(Phase.RESERVING, "decode", 0))
    await striker.close()
    await eventually(lambda: not cluster.is_stopped("decode-0"))


async def test_it_waits_until_the_cluster_can_lose_a_worker(cluster):
    cluster.states["prefill-1"] = MemberState.STARTING
    assert await cluster.drilled.holds_within(lambda: len(cluster.drilled.roster.workers_up) == 3, 20.0)
    cluster.hit_in_all(_hit())
    strike = asyncio.create_task(Striker(cluster.drilled, signal.SIGKILL).strike(Strike(Phase.QUEUED, "prefill", 0)))
    await asyncio.sleep(0.1)
    assert not cluster.workers["prefill-0"].faults
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
