"""An embedded Ray outlives who starts it, and ends without a trace and without harm to others."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from deploy import local_ray

pytestmark = pytest.mark.cluster

# Connects, leaves a detached actor behind, and prints its process id.
DRIVER = """
import os, sys, ray
ray.init(address=sys.argv[1], namespace="test", log_to_driver=False, logging_level="ERROR")
class Echo:
    def pid(self):
        return os.getpid()
actor = ray.remote(Echo).options(name="echo", lifetime="detached", num_cpus=0).remote()
print(ray.get(actor.pid.remote(), timeout=30))
"""


def members_of(session_id: int) -> list[int]:
    def is_member(process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    return [process.pid for process in psutil.process_iter() if is_member(process)]


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[Path, int, str]]:
    """Directory, session id and address of a running Ray."""
    directory = local_ray.new_directory()
    starter = local_ray.begin_start(directory)
    try:
        yield directory, starter.pid, local_ray.finish_start(directory, starter)
    finally:
        local_ray.stop(directory, starter.pid)


def drive(address: str, environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DRIVER, address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)


def test_a_stranger_without_the_token_is_refused(embedded: tuple[Path, int, str]) -> None:
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    with pytest.raises(subprocess.TimeoutExpired) as refusal:  # Ray's client would try for 40 s
        drive(embedded[2], {**known, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, timeout_s=5)
    assert b"InvalidAuthToken" in (refusal.value.stderr or b"")


def test_actors_outlive_their_driver_and_nothing_outlives_stop(embedded: tuple[Path, int, str]) -> None:
    directory, session_id, address = embedded
    driver = drive(address, {**os.environ, **local_ray.environment()}, timeout_s=60)
    assert driver.returncode == 0, driver.stderr
    found = {process.pid for process in local_ray.processes(directory, session_id)}
    assert int(driver.stdout) in found
    assert found == set(members_of(session_id))

    pager = [sys.executable, "-c", "input()", str(directory)]  # of the user, looking into a log
    with subprocess.Popen(pager, stdin=subprocess.PIPE) as bystander:
        local_ray.stop(directory, session_id)
        assert bystander.poll() is None
        bystander.kill()
    assert members_of(session_id) == []
    assert not directory.exists()


def test_the_session_of_others_is_never_ours(tmp_path: Path) -> None:
    assert local_ray.processes(tmp_path, os.getsid(0)) == []
    assert local_ray.processes(tmp_path, 0) == []
