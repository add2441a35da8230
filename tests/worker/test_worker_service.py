"""WorkerService through a real server, over an engine that computes nothing but tokens."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import torch

from baton import channel
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence
from engine.step_plan import StepPlan, StepResult
from kv_transfer.fingerprint import Fingerprint
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool
from worker import worker_service
from worker.conversion import fingerprint_from
from worker.host import WorkerConfig, WorkerHost
from worker.sequence_feed import SequenceFeed
from worker.state_feed import StateFeed
from worker.worker_service import LandingCounts, WorkerServicer

TIMEOUT_S = 20.0
NUM_BLOCKS, BLOCK_SIZE = 32, 4
FINGERPRINT = Fingerprint(1, "model", "float32", 1, 1, 4)


class CountingRunner:
    """Samples the position of each token; a step waits while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> StepResult:
        assert self.gate.wait(TIMEOUT_S)
        return StepResult({s.sequence_id: s.start + len(s.token_ids) for s in plan.sequences})


class Worker:
    """A host with a started engine, and what its service is told of the rest of the worker."""

    def __init__(self, role: str) -> None:
        self.runner, self.state = CountingRunner(), StateFeed()
        limits = SchedulerConfig(max_step_tokens=64, max_batch_sequences=8, context_window_tokens=100)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        scheduler = Scheduler(limits, self.pool, "model")
        layout = KvLayout(1, 1, 4, BLOCK_SIZE, "float32")
        self.engine = Engine(self.runner, scheduler, self.state.notify)
        self.host = WorkerHost(
            config=WorkerConfig("w-0", role, Path(), Path(), block_size=BLOCK_SIZE, max_batch_sequences=8),
            epoch="e1",
            engine=self.engine,
            kv_pool=KvPool(torch.zeros(NUM_BLOCKS, *layout.block_shape), layout),
            fingerprint=FINGERPRINT,
            num_blocks=NUM_BLOCKS,
            context_window_tokens=100,
            vocab_size=50,
            state=self.state,
        )
        self.landing, self.is_ready = LandingCounts(0, 0, 0), True
        self.servicer = WorkerServicer(self.host, lambda: self.landing, lambda: self.is_ready)

    async def run_to_end(self, name: str, prompt: list[int], max_tokens: int) -> None:
        feed = SequenceFeed()
        self.engine.add(_seq(name, prompt, max_tokens), feed)
        while (await asyncio.wait_for(feed.next(), TIMEOUT_S)).finish_reason is None:
            pass


def _seq(name: str, prompt: list[int], max_tokens: int) -> Sequence:
    return Sequence(name, list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens))


@pytest.fixture(params=["mixed"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    made = Worker(request.param)
    made.engine.start()
    yield made
    made.state.close()
    made.runner.gate.set()
    await asyncio.to_thread(made.engine.stop, TIMEOUT_S)


@pytest.fixture
async def stub(worker: Worker) -> AsyncIterator[worker_pb2_grpc.WorkerServiceStub]:
    server = channel.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker.servicer, server)
    port = channel.bind(server, 0)
    await server.start()
    async with channel.channel(f"127.0.0.1:{port}") as opened:
        yield worker_pb2_grpc.WorkerServiceStub(opened)
    await server.stop(grace=0)


def _ledger_request(*, drop: bool = False) -> worker_pb2.GetLedgerRequest:
    return worker_pb2.GetLedgerRequest(drop_prefix_cache=drop)


class TestInfo:
    @pytest.mark.parametrize(
        ("worker", "role"),
        [
            ("prefill", worker_pb2.ROLE_PREFILL),
            ("decode", worker_pb2.ROLE_DECODE),
            ("mixed", worker_pb2.ROLE_MIXED),
        ],
        indirect=["worker"],
    )
    async def test_who_it_is(self, stub: worker_pb2_grpc.WorkerServiceStub, role: int) -> None:
        info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=TIMEOUT_S)
        assert (info.worker, info.epoch, info.role, info.pid) == ("w-0", "e1", role, os.getpid())
        assert fingerprint_from(info.fingerprint) == FINGERPRINT
        assert (info.block_size_tokens, info.num_blocks) == (4, 32)
        assert (info.context_window_tokens, info.vocab_size) == (100, 50)
        assert (info.max_batch_sequences, info.max_step_tokens) == (8, 512)


class TestWatchState:
    @pytest.fixture(autouse=True)
    def only_changes_wake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A message that waits for the regular interval comes too late for any test."""
        monkeypatch.setattr(worker_service, "MAX_INTERVAL_S", 10 * TIMEOUT_S)

    async def test_the_load_comes_at_once_and_after_every_change(
        self, worker: Worker, stub: worker_pb2_grpc.WorkerServiceStub
    ) -> None:
        call = stub.WatchState(worker_pb2.WatchStateRequest(), timeout=TIMEOUT_S)
        assert await call.read() == worker_pb2.WatchStateResponse(epoch="e1", num_free_blocks=32, is_ready=True)
        worker.engine.reserve(_seq("r", [1] * 8, 4), SequenceFeed())
        state = await call.read()
        assert (state.num_reserved, state.num_free_blocks) == (1, 29)
        worker.runner.gate.clear()
        worker.engine.add(_seq("a", [2] * 8, 4), SequenceFeed())
        while (state := await call.read()).num_waiting + state.num_running == 0:
            pass
        assert state.num_queued_tokens == 8
        worker.engine.abort("r")
        worker.runner.gate.set()
        while (state := await call.read()).num_running > 0 or state.num_reserved > 0:
            pass
        assert state.num_free_blocks == 32, "cached blocks are free for others"
        worker.is_ready = False
        worker.state.notify()
        assert not (await call.read()).is_ready
        call.cancel()

    async def test_a_change_while_a_message_is_being_sent_is_not_missed(self, worker: Worker) -> None:
        messages = worker.servicer.WatchState(worker_pb2.WatchStateRequest(), None)  # type: ignore[arg-type]
        await anext(messages)
        worker.engine.reserve(_seq("r", [1], 1), SequenceFeed())
        await asyncio.sleep(0)  # the change is announced before the subscriber asks for more
        assert (await asyncio.wait_for(anext(messages), TIMEOUT_S)).num_reserved == 1
        worker.engine.abort("r")

    async def test_every_subscriber_hears(self, worker: Worker, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        calls = [stub.WatchState(worker_pb2.WatchStateRequest(), timeout=TIMEOUT_S) for _ in range(3)]
        for call in calls:
            await call.read()
        worker.is_ready = False
        worker.state.notify()
        for call in calls:
            assert not (await call.read()).is_ready
            call.cancel()

    async def test_without_changes_it_comes_regularly(
        self, monkeypatch: pytest.MonkeyPatch, stub: worker_pb2_grpc.WorkerServiceStub
    ) -> None:
        monkeypatch.setattr(worker_service, "MAX_INTERVAL_S", 0.01)
        call = stub.WatchState(worker_pb2.WatchStateRequest(), timeout=TIMEOUT_S)
        states = [await call.read() for _ in range(3)]
        assert states[0] == states[1] == states[2]
        call.cancel()

    async def test_ends_with_its_deadline(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        call = stub.WatchState(worker_pb2.WatchStateRequest(), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class TestLedger:
    async def test_counts_blocks_tickets_and_stale_writes(
        self,
        worker: Worker,
        stub: worker_pb2_grpc.WorkerServiceStub,
        eventually: Callable[..., Awaitable[None]],
    ) -> None:
        await worker.run_to_end("done", [1] * 9, 2)
        held, feed = Sequence("held", [3, 4], 2, SamplingParams(), hold_after_prefill=True), SequenceFeed()
        worker.engine.add(held, feed)
        await asyncio.wait_for(feed.next(), TIMEOUT_S)
        worker.engine.reserve(_seq("r", [2] * 8, 4), SequenceFeed())
        with worker.engine._work:
            worker.pool.allocate(4)
        worker.engine.abort("nobody")  # something may have changed: the idle engine looks at its books
        await eventually(lambda: worker.engine.load().num_repaired_blocks)
        worker.landing = LandingCounts(1, 7, 2)
        assert await stub.GetLedger(_ledger_request(), timeout=TIMEOUT_S) == worker_pb2.GetLedgerResponse(
            total_blocks=32,
            free_blocks=26,
            cached_blocks=2,
            owned_blocks=1,
            in_flight_blocks=3,
            num_sequences=2,
            num_open_tickets=1,
            stale_writes=7,
            repaired_blocks=4,
            quarantined_blocks=2,
            num_prefilled_tokens=11,
        )
        worker.engine.abort("r")

    async def test_drops_the_prefix_cache_only_when_asked(
        self, worker: Worker, stub: worker_pb2_grpc.WorkerServiceStub
    ) -> None:
        await worker.run_to_end("done", [1] * 9, 2)
        cached = [
            (await stub.GetLedger(_ledger_request(drop=drop), timeout=TIMEOUT_S)).cached_blocks
            for drop in (False, False, True, False)
        ]
        assert cached == [2, 2, 0, 0]
        feed = SequenceFeed()
        worker.engine.add(_seq("again", [1] * 9, 1), feed)
        await asyncio.wait_for(feed.next(), TIMEOUT_S)
        assert feed.num_cached_tokens == 0
