"""Workers are added, leave and are replaced while streams run: no stream fails or changes."""

import threading
from dataclasses import replace

import pytest
from ray_nodes import wait_for

from baton.client import Client
from baton.errors import BatonError
from deploy.cluster_record import RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.errors import ClusterError
from deploy.lifecycle import change_cluster, cluster_spec_of, cluster_status, start_cluster, stop_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PROMPTS = [f"Here is story number {number} about the sea and those who live by it:" for number in range(3)]
OPTIONS = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "timeout_s": 120}


class SteadyLoad:
    """Asks one prompt after the other until it is told to stop; keeps what is not as it was at first."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopped = threading.Event()
        self.num_answers = 0
        self.wrong: list[object] = []
        with Client(address) as client:
            self._expected = [client.generate(prompt, **OPTIONS).read() for prompt in PROMPTS]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(PROMPTS))]

    def __enter__(self) -> "SteadyLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with Client(self._address) as client:
            while not self._stopped.is_set():
                try:
                    text = client.generate(PROMPTS[number], **OPTIONS).read()
                except BatonError as error:
                    self.wrong.append(error)
                    continue
                self.num_answers += 1
                if text != self._expected[number]:
                    self.wrong.append(text)


@pytest.fixture(scope="module")
def record(tmp_path_factory, model_dir):
    store = RecordStore(tmp_path_factory.mktemp("state"))
    spec = ClusterSpec(str(model_dir), "smollm2", name="test-scaling", dtype="float32", kv_memory_bytes=128 << 20)
    started = start_cluster(spec, store)
    yield started
    stop_cluster(started, store, grace_s=1.0)


def change(record, grace_s: float = 5.0, **settings):
    change_cluster(record, replace(cluster_spec_of(record), **settings), grace_s)
    wait_for(lambda: cluster_status(record).is_settled, 120)
    return cluster_status(record)


def test_pools_grow_and_shrink_and_are_replaced_under_load(record):
    before = cluster_status(record)
    with SteadyLoad(record.router_address) as load:
        grown = change(record, num_prefill=2, num_decode=2)
        assert [worker.name for worker in grown.workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        assert {w.report.pid for w in before.workers} < {w.report.pid for w in grown.workers}
        replaced = change(record, kv_memory_bytes=160 << 20)
        assert {w.report.pid for w in replaced.workers}.isdisjoint(w.report.pid for w in grown.workers)
        shrunk = change(record, num_prefill=1, num_decode=1)
        assert [worker.name for worker in shrunk.workers] == ["prefill-0", "decode-0"]
        # Nobody had to go but those that were too many.
        assert {w.report.pid for w in shrunk.workers} < {w.report.pid for w in replaced.workers}
        assert shrunk.router.report.pid == before.router.report.pid
    assert load.wrong == []
    assert load.num_answers >= len(PROMPTS)


def test_what_needs_another_cluster_changes_nothing(record):
    before = cluster_status(record)
    with pytest.raises(ClusterError, match="dtype cannot change"):
        change_cluster(record, replace(cluster_spec_of(record), dtype="bfloat16"), 0.0)
    assert cluster_status(record) == before
