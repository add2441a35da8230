"""What is left running when a part of the cluster dies or leaves: streams go on, nothing is orphaned."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from baton.client import Client
from baton.errors import BatonError
from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus
from deploy.errors import ClusterError
from deploy.lifecycle import cluster_status, replace_worker, start_cluster, stop_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PROMPT = "Here is a long story about the sea and those who live by it:"
NUM_TOKENS = 120
CONTROLLER_PROCESS = "ray::Controller"


@pytest.fixture(scope="module")
def record(tmp_path_factory, model_dir) -> Iterator[ClusterRecord]:
    """One prefill and two decode workers in float32."""
    store = RecordStore(tmp_path_factory.mktemp("state"))
    spec = ClusterSpec(
        model_dir=str(model_dir), model_name="smollm2", name="test-restarts", dtype="float32", num_decode=2
    )
    started = start_cluster(spec, store)
    yield started
    stop_cluster(started, store, grace_s=1.0)


@pytest.fixture(autouse=True)
def _whole(record) -> None:
    """Each test begins with all of it up."""
    wait_for(lambda: cluster_status(record).is_ready)


def wait_for(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not so within {timeout_s} s"
        time.sleep(0.1)


def pids(status: ClusterStatus) -> dict[str, int]:
    return {member.name: member.report.pid for member in status.members}


class Stream(threading.Thread):
    """A greedy answer on its way."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.token_ids: list[int] = []
        self.error: Exception | None = None
        self.decode_worker = ""
        self.num_recoveries = 0
        self.start()

    def run(self) -> None:
        with Client(self._address) as client:
            stream = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=90)
            try:
                with stream:
                    for chunk in stream:
                        self.token_ids += chunk.token_ids
            except BatonError as error:
                self.error = error
                return
        self.decode_worker, self.num_recoveries = stream.timeline.decode_worker, stream.timeline.num_recoveries

    def whole(self) -> list[int]:
        """Its tokens, when it has ended well."""
        self.join(100)
        assert not self.is_alive()
        assert self.error is None
        return self.token_ids


@pytest.fixture(scope="module")
def undisturbed(record) -> list[int]:
    """The answer when nothing happens."""
    return Stream(record.router_address).whole()


def controller_pid(record: ClusterRecord) -> int:
    """The controller's process: a sibling of the router's."""
    router = psutil.Process(pids(cluster_status(record))["router"])
    [found] = [p.pid for p in router.parent().children() if p.cmdline()[:1] == [CONTROLLER_PROCESS]]
    return found


def test_streams_and_workers_outlive_the_controller(record, undisturbed):
    before = cluster_status(record)
    stream = Stream(record.router_address)
    wait_for(lambda: stream.token_ids)
    old_pid = controller_pid(record)
    os.kill(old_pid, signal.SIGKILL)
    assert stream.whole() == undisturbed
    assert stream.num_recoveries == 0
    wait_for(lambda: not psutil.pid_exists(old_pid))
    wait_for(lambda: status_or_none(record) is not None and cluster_status(record).is_ready)
    after = cluster_status(record)
    assert pids(after) == pids(before)
    assert [w.report.epoch for w in after.workers] == [w.report.epoch for w in before.workers]


def status_or_none(record: ClusterRecord) -> ClusterStatus | None:
    try:
        return cluster_status(record)
    except ClusterError:
        return None


def test_a_controller_of_a_second_life_still_replaces_what_dies(record, undisturbed):
    old = pids(cluster_status(record))
    os.kill(old["decode-0"], signal.SIGKILL)
    wait_for(lambda: pids(cluster_status(record))["decode-0"] not in (old["decode-0"], 0))
    wait_for(lambda: cluster_status(record).is_ready)
    now = pids(cluster_status(record))
    assert {name: pid for name, pid in now.items() if name != "decode-0"} == {
        name: pid for name, pid in old.items() if name != "decode-0"
    }


def test_a_dead_router_comes_back_at_its_address_and_knows_the_workers(record, undisturbed):
    old = pids(cluster_status(record))
    os.kill(old["router"], signal.SIGKILL)
    wait_for(lambda: pids(cluster_status(record))["router"] not in (old["router"], 0))
    wait_for(lambda: cluster_status(record).is_ready)
    assert Stream(record.router_address).whole() == undisturbed
    now = pids(cluster_status(record))
    assert {name: now[name] for name in now if name != "router"} == {
        name: old[name] for name in old if name != "router"
    }


def test_a_frozen_worker_is_replaced_and_leaves_no_process(record, undisturbed):
    old_pid = pids(cluster_status(record))["prefill-0"]
    os.kill(old_pid, signal.SIGSTOP)
    wait_for(lambda: pids(cluster_status(record))["prefill-0"] not in (old_pid, 0))
    wait_for(lambda: not psutil.pid_exists(old_pid), timeout_s=10)
    wait_for(lambda: cluster_status(record).is_ready)
    assert Stream(record.router_address).whole() == undisturbed


def test_a_worker_that_wakes_up_in_time_is_kept(record):
    old = pids(cluster_status(record))
    os.kill(old["decode-1"], signal.SIGSTOP)
    time.sleep(1.5)  # less than one missed heartbeat
    os.kill(old["decode-1"], signal.SIGCONT)
    time.sleep(3.0)  # whoever was to be replaced would be by now
    assert pids(cluster_status(record)) == old


@pytest.mark.parametrize("grace_s", [60.0, 0.0])
def test_a_worker_that_leaves_lets_its_streams_end_or_move(record, undisturbed, grace_s):
    streams = [Stream(record.router_address) for _ in range(4)]
    wait_for(lambda: all(stream.token_ids for stream in streams))
    old_pid = pids(cluster_status(record))["decode-0"]
    replace_worker(record, "decode-0", grace_s)
    assert not psutil.pid_exists(old_pid) or psutil.Process(old_pid).status() == psutil.STATUS_ZOMBIE
    assert [stream.whole() for stream in streams] == [undisturbed] * 4
    num_moved = sum(stream.num_recoveries for stream in streams)
    if grace_s:
        assert num_moved == 0
    else:
        assert num_moved == 2
        assert {stream.decode_worker for stream in streams} == {"decode-1"}


def test_a_worker_nobody_knows_cannot_be_replaced(record):
    with pytest.raises(ClusterError, match=r"decode-7.*prefill-0, decode-0, decode-1"):
        replace_worker(record, "decode-7", 1.0)
