"""The processes of a cluster: signals to them, their memory, and those that should be gone."""

import contextlib
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

from bench.drill.roster import Life
from deploy import local_ray
from deploy.cluster_record import ClusterRecord

_CONTROLLER_TITLE = "ray::Controller"


class Processes:
    """Remembers the process of every life, so that another one with its number is not taken for it."""

    def __init__(self) -> None:
        self._by_life: dict[tuple[str, int], psutil.Process] = {}

    def note(self, lives: Iterable[Life]) -> None:
        """Takes up new lives."""
        for life in lives:
            if (key := (life.name, life.pid)) not in self._by_life:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._by_life[key] = psutil.Process(life.pid)

    def send(self, life: Life, number: signal.Signals) -> bool:
        """Sends a signal; False if the process is gone."""
        process = self._by_life.get((life.name, life.pid))
        try:
            if process is None or not process.is_running():
                return False
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def alive(self, but: Iterable[Life] = ()) -> list[str]:
        """Lives, as name and process id, that still have their process, without those given."""
        allowed = {(life.name, life.pid) for life in but}
        return [
            f"{name} (pid {pid})"
            for (name, pid), process in self._by_life.items()
            if (name, pid) not in allowed and _is_alive(process)
        ]

    def memory(self, lives: Iterable[Life]) -> list[tuple[str, int, int]]:
        """Memory of their own that they have now: name, process id, bytes.

        Without pages of files, which only mirror the disk: the weights' come bit by bit, as tokens are first used.
        """
        found = []
        for life in lives:
            process = self._by_life.get((life.name, life.pid))
            if process is not None and process.is_running():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found.append((life.name, life.pid, _own_bytes(life.pid)))
        return found


def controller_lives(record: ClusterRecord) -> list[Life]:
    """The controller, which does not report itself: found among the processes of the cluster's Ray."""
    return [
        Life("controller", "controller", process.pid)
        for process in local_ray.processes(Path(record.directory), record.session_id)
        if _title(process).startswith(_CONTROLLER_TITLE)
    ]


def left_of(record: ClusterRecord) -> list[str]:
    """Processes that are left of a cluster that has ended."""
    return [f"{_title(p)} (pid {p.pid})" for p in local_ray.processes(Path(record.directory), record.session_id)]


def _own_bytes(pid: int) -> int:
    """See proc_pid_status(5). Raises FileNotFoundError or ProcessLookupError if there is no such process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:60]
    except psutil.NoSuchProcess:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
