"""Ray nodes of their own on this machine: a head, and others that come, go and die."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from deploy import local_ray


class Node:
    """A Ray node of its own on this machine, with two CPUs, in a process session of its own."""

    def __init__(self, head_address: str, ip_address: str, log: Path, labels: str = "") -> None:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head_address}", "--block"),
            *(f"--node-ip-address={ip_address}", "--num-cpus=2", "--num-gpus=0", "--disable-usage-stats"),
            *(f"--object-store-memory={80 << 20}", "--dashboard-agent-listen-port=0"),
            *([f"--labels={labels}"] if labels else []),
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


@contextlib.contextmanager
def ray_head() -> Iterator[str]:
    """The address of a Ray that has no CPUs for workers."""
    os.environ.update(local_ray.environment())  # as for every other cluster of this process: Ray reads it once
    directory = local_ray.new_directory()
    starter = local_ray.begin_start(directory)
    try:
        yield local_ray.finish_start(directory, starter)
    finally:
        local_ray.stop(directory, starter.pid)


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    """Fails if it does not hold in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not so within {timeout_s} s"
        time.sleep(0.2)
