"""Builders of what drills collect, and a cluster without Ray and model: sleeping processes, scripted services."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from baton.channel import bind, server
from baton.v1 import fault_pb2, fault_pb2_grpc, worker_pb2, worker_pb2_grpc
from bench.drill.answers import Asked
from bench.drill.cluster import DrillCluster
from deploy.cluster_record import ClusterRecord
from deploy.cluster_status import ClusterStatus, MemberReport, MemberState, MemberStatus

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture
def asked():
    """One request of question 0 from second 0 to 10, with three right tokens at 1, 2 and 9 s unless told otherwise."""

    def make(**fields):
        known = {
            "request_id": "r-1",
            "question": 0,
            "started_at_s": 0.0,
            "ended_at_s": 10.0,
            "token_ids": (5, 6, 7),
            "token_times_s": (1.0, 2.0, 9.0),
        }
        return Asked(**{**known, **fields})

    return make


class ScriptedWorker(fault_pb2_grpc.FaultServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Hits with each of `hits` when a fault is placed, and keeps the faults; `ledger` is a clean one."""

    def __init__(self):
        self.hits = []
        self.faults = []
        self.ledger = worker_pb2.GetLedgerResponse(total_blocks=8, free_blocks=8)

    async def Inject(self, request, context):  # noqa: N802 - the name in the .proto
        self.faults.append(request)
        yield fault_pb2.InjectResponse(in_place=fault_pb2.InPlace())
        for hit in self.hits:
            yield fault_pb2.InjectResponse(hit=hit)
        await asyncio.Event().wait()

    async def GetLedger(self, request, context):  # noqa: N802 - the name in the .proto
        return self.ledger

    async def GetWorkerInfo(self, request, context):  # noqa: N802 - the name in the .proto
        return worker_pb2.GetWorkerInfoResponse(max_step_tokens=512)


class ScriptedCluster:
    """Two workers of each role. One whose process is gone gets a new one, if `restarts`."""

    def __init__(self):
        self.processes = {name: _sleeper() for name in NAMES}
        self.workers = {name: ScriptedWorker() for name in NAMES}
        self.states = dict.fromkeys(NAMES, MemberState.READY)
        self.restarts = False
        self.addresses = {}
        self.drilled = DrillCluster(None, ClusterRecord("drill"), self.status)

    @asynccontextmanager
    async def running(self):
        servers = []
        for name, worker in self.workers.items():
            started = server()
            fault_pb2_grpc.add_FaultServiceServicer_to_server(worker, started)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, started)
            self.addresses[name] = f"127.0.0.1:{bind(started, 0)}"
            await started.start()
            servers.append(started)
        try:
            yield self
        finally:
            await asyncio.gather(*(started.stop(grace=0) for started in servers))
            for process in self.processes.values():
                process.kill()
                process.wait()

    def hit_in_all(self, hit: fault_pb2.Hit) -> None:
        for worker in self.workers.values():
            worker.hits = [hit]

    def status(self):
        router = MemberStatus("router", "router", MemberReport(MemberState.READY), 0, 0)
        return ClusterStatus("drill", "tiny", router, tuple(map(self._member, NAMES)))

    def is_stopped(self, name):
        return psutil.Process(self.processes[name].pid).status() == psutil.STATUS_STOPPED

    def _member(self, name):
        if self.restarts and self.processes[name].poll() is not None:
            self.processes[name] = _sleeper()
        report = MemberReport(self.states[name], "", self.addresses[name], "e1", self.processes[name].pid)
        return MemberStatus(name, name.split("-")[0], report, 0, 0)


def _sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=Path.cwd())


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with ScriptedCluster().running() as running:
        yield running
