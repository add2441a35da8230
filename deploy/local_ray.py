"""An embedded Ray on this machine that outlives the process that starts it, and ends without a trace."""

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import platformdirs
import psutil

from deploy.errors import ClusterError

# Nothing of the data path goes through Ray's object store, only small messages between actors.
_OBJECT_STORE_BYTES = 80 << 20
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_TERMINATE_GRACE_S = 1.0
# Below the range that Linux takes ports from when a program leaves the choice to it.
_UNASSIGNED_PORTS = range(20_000, 32_000)
_MAX_PORT_TRIES = 50
# Ray takes 127.0.0.1 as a wish for the machine's outside address; this one is loopback as well.
_NODE_ADDRESS = "127.0.0.2"


def new_directory() -> Path:
    """A directory for one Ray; its path is short, because Unix sockets in it allow 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="baton-"))


def environment() -> Mapping[str, str]:
    """Environment of every process that talks to an embedded Ray.

    Ray listens on all interfaces whatever address it is given, and who can talk to it can run code. So it
    wants a token, which only this user can read. One for all clusters: a process reads it only once.
    """
    token_file = Path(platformdirs.user_state_dir("baton")) / "ray_token"
    if not token_file.exists():
        token_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=token_file.parent) as file:  # readable by its owner only
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(file.name, token_file)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def begin_start(directory: Path) -> subprocess.Popen[bytes]:
    """Begins to start Ray. The process id is the session id of all its processes."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"),
        *(f"--node-ip-address={_NODE_ADDRESS}", f"--temp-dir={_ray_directory(directory)}"),
        *(f"--object-store-memory={_OBJECT_STORE_BYTES}", "--num-cpus=0", "--num-gpus=0"),
        *("--disable-usage-stats", "--include-dashboard=false", "--dashboard-port=0"),
        *("--dashboard-agent-listen-port=0", "--include-log-monitor=false", "--no-monitor"),
        f"--ray-client-server-port={free_port()}",
    ]
    with (directory / "start.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=directory,
            # Ray would run its actors at low priority, behind everything else on the machine.
            env={**os.environ, **environment(), "RAY_worker_niceness": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is not for Ray
        )


def finish_start(directory: Path, starter: subprocess.Popen[bytes]) -> str:
    """Waits until Ray runs and returns its address. Raises ClusterError."""
    log = directory / "start.log"
    try:
        exit_code = starter.wait(_START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Ray did not start within {_START_TIMEOUT_S:.0f} s: {_tail(log)}") from None
    if exit_code != 0:
        raise ClusterError(f"Ray did not start (exit code {exit_code}): {_tail(log)}")
    return (_ray_directory(directory) / "ray_current_cluster").read_text().strip()


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any port."""
    for port in random.sample(_UNASSIGNED_PORTS, _MAX_PORT_TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
    raise ClusterError(f"{_MAX_PORT_TRIES} ports from {_UNASSIGNED_PORTS} are all taken: choose one with --port")


def processes(directory: Path, session_id: int) -> list[psutil.Process]:
    """All living processes of the Ray of `directory`: those of its session.

    The number alone is no proof, since the system uses numbers again. But no number is used again while its
    session lives, and Ray's servers have the directory on their command line.
    """
    if session_id == 0:
        return []
    members: list[psutil.Process] = []
    is_proven = False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _session_of(process.pid) == session_id and not _is_zombie(process):
                members.append(process)
                is_proven |= any(str(directory) in argument for argument in process.cmdline())
    return members if is_proven else []


def stop(directory: Path, session_id: int) -> None:
    """Ends exactly the processes of this Ray and removes its files. Raises ClusterError if some survive."""
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    seen: dict[int, psutil.Process] = {}
    while True:
        # Asked again, as Ray may start a process while others end. Those of an earlier round count until they
        # are gone, even if nothing proves any longer that they are Ray's.
        seen.update({process.pid: process for process in processes(directory, session_id)})
        seen = {pid: process for pid, process in seen.items() if process.is_running() and not _is_zombie(process)}
        if not seen:
            break
        if time.monotonic() > deadline_s:
            raise ClusterError(f"processes {sorted(seen)} of Ray in {directory} cannot be ended: end them by hand")
        _end(list(seen.values()))
    shutil.rmtree(directory, ignore_errors=True)


def _end(victims: Sequence[psutil.Process]) -> None:
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, survivors = psutil.wait_procs(victims, timeout=_TERMINATE_GRACE_S)
    for process in survivors:  # Ray's servers ignore SIGTERM while others of them are already gone
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(survivors, timeout=_TERMINATE_GRACE_S)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _ray_directory(directory: Path) -> Path:
    return directory / "ray"


def _tail(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
