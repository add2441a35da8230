"""A Ray node that dies takes its workers with it, and nothing else: they come back on another node."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from baton.client import Client
from deploy import local_ray
from deploy.cluster_record import RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.lifecycle import cluster_status, start_cluster, stop_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = "Here is a long story about the sea and those who live by it:"


class Node:
    """A Ray node of its own on this machine, with two CPUs, in a process session of its own."""

    def __init__(self, head_address: str, ip_address: str, log: Path) -> None:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head_address}", "--block"),
            *(f"--node-ip-address={ip_address}", "--num-cpus=2", "--num-gpus=0", "--disable-usage-stats"),
            *(f"--object-store-memory={80 << 20}", "--dashboard-agent-listen-port=0"),
        ]
        with log.open("wb") as output:
            self._starter = subprocess.Popen(
                command,
                env={**os.environ, **local_ray.environment(), "RAY_worker_niceness": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def die(self) -> None:
        """All its processes at once."""
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == self._starter.pid:
                    os.kill(process.pid, signal.SIGKILL)
        self._starter.wait(10)

    def has(self, pid: int) -> bool:
        return os.getsid(pid) == self._starter.pid


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    os.environ.update(local_ray.environment())  # as for every other cluster of this process: Ray reads it once
    directory = local_ray.new_directory()
    starter = local_ray.begin_start(directory)
    try:
        yield local_ray.finish_start(directory, starter)
    finally:
        local_ray.stop(directory, starter.pid)


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not so within {timeout_s} s"
        time.sleep(0.2)


def test_workers_of_a_dead_node_come_back_on_another_and_streams_go_on(head: str, tmp_path: Path, model_dir: Path):
    store = RecordStore(tmp_path)
    spec = ClusterSpec(
        model_dir=str(model_dir),
        model_name="smollm2",
        name="test-nodes",
        dtype="float32",
        pin_cores=False,
        recovery_patience_s=150.0,
    )
    nodes = [Node(head, "127.0.0.3", tmp_path / "first.log")]
    try:
        record = start_cluster(spec, store, ray_address=head)
        try:
            before = cluster_status(record)
            assert all(nodes[0].has(worker.report.pid) for worker in before.workers)
            with Client(record.router_address) as client:
                options = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, "timeout_s": 300}
                undisturbed = client.generate(PROMPT, **options)
                undisturbed.read()
                with client.generate(PROMPT, **options) as stream:
                    token_ids = list(next(iter(stream)).token_ids)
                    nodes.append(Node(head, "127.0.0.4", tmp_path / "second.log"))
                    nodes[0].die()
                    for chunk in stream:
                        token_ids += chunk.token_ids
            assert token_ids == undisturbed.token_ids
            assert stream.timeline.num_recoveries >= 1
            wait_for(lambda: cluster_status(record).is_ready, 120)
            after = cluster_status(record)
            assert after.router.report.pid == before.router.report.pid
            assert all(nodes[1].has(worker.report.pid) for worker in after.workers)
        finally:
            stop_cluster(record, store, grace_s=1.0)
    finally:
        for node in nodes:
            node.die()
