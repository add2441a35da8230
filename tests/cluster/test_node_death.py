"""A Ray node that dies takes its workers with it, and nothing else: they come back on another node."""

from pathlib import Path

import pytest
from ray_nodes import Node, ray_head, wait_for

from baton.client import Client
from deploy.cluster_record import RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.lifecycle import cluster_status, start_cluster, stop_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = "Here is a long story about the sea and those who live by it:"


@pytest.fixture
def head():
    with ray_head() as address:
        yield address


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
