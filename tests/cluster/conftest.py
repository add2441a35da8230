"""Real clusters for whole-system tests: Ray, a router and worker processes, on the default model."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.client import Client
from baton.v1 import worker_pb2, worker_pb2_grpc
from deploy.cluster_record import RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus
from deploy.lifecycle import cluster_status, start_cluster, stop_cluster
from engine.text_codec import TextCodec

SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LiveCluster:
    """A running cluster: `address` of its router, `status` when it had become ready."""

    address: str
    status: ClusterStatus

    def client(self) -> Client:
        return Client(self.address)

    def ledgers(self, *, drop_prefix_cache: bool = False) -> list[worker_pb2.GetLedgerResponse]:
        return [_ledger(w.report.address, drop_prefix_cache=drop_prefix_cache) for w in self.status.workers]

    def drop_prefix_caches(self) -> None:
        self.ledgers(drop_prefix_cache=True)

    def wait_until_clean(self) -> None:
        """Fails unless within seconds no worker has a block in use, once its prefix cache is dropped."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not all(map(_is_clean, ledgers := self.ledgers(drop_prefix_cache=True))):
            assert time.monotonic() < deadline, f"blocks or sequences are left: {ledgers}"
            time.sleep(0.05)


def _is_clean(ledger: worker_pb2.GetLedgerResponse) -> bool:
    in_use = (ledger.owned_blocks, ledger.in_flight_blocks, ledger.num_sequences, ledger.num_open_tickets)
    return in_use == (0, 0, 0, 0) and ledger.free_blocks == ledger.total_blocks


def _ledger(address: str, *, drop_prefix_cache: bool) -> worker_pb2.GetLedgerResponse:
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return stub.GetLedger(worker_pb2.GetLedgerRequest(drop_prefix_cache=drop_prefix_cache), timeout=10)


@contextmanager
def _running(directory: Path, **settings: Any) -> Iterator[LiveCluster]:
    store = RecordStore(directory)
    record = start_cluster(ClusterSpec(model_name="smollm2", **settings), store)
    try:
        yield LiveCluster(record.router_address, cluster_status(record))
    finally:
        stop_cluster(record, store, grace_s=1.0)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LiveCluster]:
    """One prefill and one decode worker in float32."""
    directory = tmp_path_factory.mktemp("state")
    with _running(directory, model_dir=str(model_dir), name="test-float32", dtype="float32") as running:
        yield running


@pytest.fixture(scope="session")
def bf16_cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LiveCluster]:
    """One prefill and one decode worker in bfloat16."""
    directory = tmp_path_factory.mktemp("state")
    with _running(directory, model_dir=str(model_dir), name="test-bfloat16", dtype="bfloat16") as running:
        yield running


@pytest.fixture(scope="session")
def short_queue_cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LiveCluster]:
    """One prefill and one decode worker in float32, and a router where 20 may wait."""
    directory = tmp_path_factory.mktemp("state")
    settings = {"model_dir": str(model_dir), "name": "test-short-queue", "dtype": "float32", "max_waiting": 20}
    with _running(directory, **settings) as running:
        yield running


@pytest.fixture(scope="session")
def prompt_of(model_dir: Path):
    """Real words, as token ids: prompt_of(number, length) begins differently for each number."""
    codec = TextCodec.from_directory(model_dir)
    weather = ("mild and grey", "clear with a light wind", "wet until noon", "cold but bright", "stormy near the coast")

    def prompt(number: int, num_tokens: int) -> list[int]:
        days = (
            f"Day {day * 37 + number}: the weather was {weather[day % 5]}, {day * 3 + number} ships came in and "
            f"{day + 2} left for the islands.\n"
            for day in range(1 + num_tokens // 12)
        )
        return codec.encode(f"Harbour book number {number}. " + "".join(days))[:num_tokens]

    return prompt
