"""Router and workers on Ray nodes with addresses of their own, chosen by label: KV crosses from one to the other."""

from pathlib import Path

import pytest
from ray_nodes import Node, ray_head, wait_for

from baton.client import Client
from baton.v1 import request_pb2
from deploy.cluster_record import RecordStore
from deploy.cluster_spec import NODE_HOST, ClusterSpec
from deploy.cluster_status import MemberState
from deploy.lifecycle import attach_cluster, cluster_status, start_cluster, stop_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

ADDRESSES = {"router": "127.0.0.3", "prefill": "127.0.0.4", "decode": "127.0.0.5"}
ALPHABET, ALPHABET_ANSWER = "Here is the English alphabet: ABC", "DEFGHIJKLMNOPQRSTUVW"


def test_each_member_runs_and_listens_on_a_node_of_its_role(tmp_path: Path, model_dir: Path):
    store = RecordStore(tmp_path)
    spec = ClusterSpec(
        model_dir=str(model_dir),
        model_name="smollm2",
        name="test-hosts",
        dtype="float32",
        pin_cores=False,
        host=NODE_HOST,
        role_label="baton-role",
    )
    nodes = []
    with ray_head() as head:
        try:
            for role, address in ADDRESSES.items():
                nodes.append(Node(head, address, tmp_path / f"{role}.log", labels=f"baton-role={role}"))
            record = start_cluster(spec, store, ray_address=head)
            try:
                status = cluster_status(record)
                where = {member.role: member.report.address.split(":")[0] for member in status.members}
                assert where == ADDRESSES
                with Client(record.router_address) as client:
                    stream = client.generate(ALPHABET, max_tokens=12, temperature=0.0)
                    assert stream.read() == ALPHABET_ANSWER
                assert stream.timeline.path == request_pb2.PATH_DISAGGREGATED
                elsewhere = RecordStore(tmp_path / "another machine")
                attached = attach_cluster(spec.name, head, elsewhere)
                assert attached == elsewhere.load(spec.name) == record
                assert attach_cluster("no-such-cluster", head, elsewhere) is None
                nodes[2].die()
                wait_for(lambda: cluster_status(record).workers[1].report.state is MemberState.RESTARTING, 60)
                nodes.append(Node(head, ADDRESSES["decode"], tmp_path / "again.log", labels="baton-role=decode"))
                wait_for(lambda: cluster_status(record).is_ready, 120)
                with Client(record.router_address) as client:
                    assert client.generate(ALPHABET, max_tokens=12, temperature=0.0).read() == ALPHABET_ANSWER
            finally:
                stop_cluster(record, store, grace_s=1.0)
        finally:
            for node in nodes:
                node.die()
