"""FaultService through a real server, over an engine whose blocks are counted."""

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
import torch

from baton import channel
from baton.error_interceptor import ErrorInterceptor
from baton.v1 import fault_pb2, fault_pb2_grpc
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence
from engine.step_plan import StepResult
from kv_transfer.fingerprint import Fingerprint
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool
from worker.fault_injection import InjectedFaults
from worker.fault_points import FaultPoint
from worker.fault_service import FaultServicer
from worker.host import WorkerConfig, WorkerHost
from worker.sequence_feed import SequenceFeed
from worker.state_feed import StateFeed

TIMEOUT_S = 20.0
NUM_BLOCKS, BLOCK_SIZE, WINDOW_TOKENS = 40, 4, 50


class Runner:
    def run(self, plan, on_layer):
        return StepResult({s.sequence_id: 1 for s in plan.sequences})


class Worker:
    """A host without a model, its faults, and a server."""

    def __init__(self):
        state = StateFeed()
        limits = SchedulerConfig(max_step_tokens=64, max_batch_sequences=8, context_window_tokens=WINDOW_TOKENS)
        scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE), "model")
        layout = KvLayout(1, 1, 4, BLOCK_SIZE, "float32")
        self.engine = Engine(Runner(), scheduler, state.notify)
        self.host = WorkerHost(
            config=WorkerConfig("w-0", "mixed", Path(), Path(), block_size=BLOCK_SIZE, max_batch_sequences=8),
            epoch="e1",
            engine=self.engine,
            kv_pool=KvPool(torch.zeros(NUM_BLOCKS, *layout.block_shape), layout),
            fingerprint=Fingerprint(1, "model", "float32", 1, 1, 4),
            num_blocks=NUM_BLOCKS,
            context_window_tokens=WINDOW_TOKENS,
            vocab_size=50,
            state=state,
        )
        self.faults = InjectedFaults()
        self.servicer = FaultServicer(self.host, self.faults)

    @property
    def num_available(self):
        ledger = self.engine.load().ledger
        ledger.check()
        return ledger.free + ledger.cached

    def reserve(self, num_blocks):
        num_tokens = num_blocks * BLOCK_SIZE
        sequence = Sequence("r", [2] * num_tokens, num_tokens, SamplingParams(max_tokens=1))
        self.engine.reserve(sequence, SequenceFeed())


@pytest.fixture
async def worker():
    worker = Worker()
    server = channel.server([ErrorInterceptor()])
    fault_pb2_grpc.add_FaultServiceServicer_to_server(worker.servicer, server)
    port = channel.bind(server, 0)
    await server.start()
    async with channel.channel(f"127.0.0.1:{port}") as connection:
        worker.stub = fault_pb2_grpc.FaultServiceStub(connection)
        yield worker
    await server.stop(grace=0)


async def _inject(worker, **fault):
    """Opens the call and waits until the fault is in place."""
    call = worker.stub.Inject(fault_pb2.InjectRequest(**fault), timeout=TIMEOUT_S)
    response = await call.read()
    assert response.HasField("in_place")
    return call, response.in_place


async def _refusal(worker, **fault):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await worker.stub.Inject(fault_pb2.InjectRequest(**fault), timeout=TIMEOUT_S).read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return raised.value.details()


def _hold(point, **fields):
    return fault_pb2.HoldFault(point=point, **fields)


async def test_a_hold_is_told_and_ends_with_the_call(worker):
    call, _ = await _inject(worker, hold=_hold(fault_pb2.FAULT_POINT_QUEUED, max_hold_s=60.0))
    held = asyncio.create_task(worker.faults.reach(FaultPoint.QUEUED, "r-1", "decode-0"))
    hit = (await call.read()).hit
    assert (hit.point, hit.request_id, hit.peer) == (fault_pb2.FAULT_POINT_QUEUED, "r-1", "decode-0")
    assert not held.done()
    call.cancel()
    await asyncio.wait_for(held, TIMEOUT_S)


@pytest.mark.parametrize("point", [p for p in FaultPoint if p is not FaultPoint.PREFILLING])
async def test_every_point_can_be_held(worker, point):
    number = fault_pb2.FaultPoint.Value(f"FAULT_POINT_{point.name}")
    call, _ = await _inject(worker, hold=_hold(number, max_hold_s=60.0, max_hits=1))
    held = asyncio.create_task(worker.faults.reach(point, "r"))
    assert (await call.read()).hit.point == number
    call.cancel()
    await asyncio.wait_for(held, TIMEOUT_S)


async def test_message_faults_strike_with_the_name_of_what_they_did(worker):
    class Nowhere:
        async def send(self, header, payload, timeout_s):
            raise AssertionError("it should have been dropped")

    call, _ = await _inject(worker, kv_messages=fault_pb2.KvMessageFault(drop=1.0))
    await worker.faults.link(Nowhere(), "r-2", "decode-1").send(b"h", b"kv", TIMEOUT_S)
    hit = (await call.read()).hit
    assert (hit.what, hit.request_id, hit.peer) == ("drop", "r-2", "decode-1")
    assert hit.point == fault_pb2.FAULT_POINT_UNSPECIFIED
    call.cancel()


class TestMemory:
    async def test_blocks_are_gone_while_the_call_is_open(self, worker, eventually):
        call, in_place = await _inject(worker, memory=fault_pb2.MemoryFault(num_blocks=10))
        assert in_place.num_blocks == 10
        assert worker.num_available == NUM_BLOCKS - 10
        call.cancel()
        await eventually(lambda: worker.num_available == NUM_BLOCKS)
        assert worker.engine.load().num_sequences == 0

    async def test_more_than_one_sequence_could_hold_can_be_taken(self, worker):
        num_blocks = WINDOW_TOKENS // BLOCK_SIZE * 2 + 3
        call, in_place = await _inject(worker, memory=fault_pb2.MemoryFault(num_blocks=num_blocks))
        assert in_place.num_blocks == num_blocks
        assert worker.num_available == NUM_BLOCKS - num_blocks
        call.cancel()

    async def test_fewer_are_taken_if_fewer_are_free(self, worker, eventually):
        worker.reserve(7)
        call, in_place = await _inject(worker, memory=fault_pb2.MemoryFault(num_blocks=1000))
        assert in_place.num_blocks == NUM_BLOCKS - 7
        assert worker.num_available == 0
        call.cancel()
        await eventually(lambda: worker.num_available == NUM_BLOCKS - 7)
        worker.engine.abort("r")

    async def test_two_at_once_take_what_both_ask_for(self, worker, eventually):
        first, _ = await _inject(worker, memory=fault_pb2.MemoryFault(num_blocks=5))
        second, _ = await _inject(worker, memory=fault_pb2.MemoryFault(num_blocks=6))
        assert worker.num_available == NUM_BLOCKS - 11
        first.cancel()
        await eventually(lambda: worker.num_available == NUM_BLOCKS - 6)
        second.cancel()


async def test_each_fault_is_logged_when_it_comes_and_when_it_goes(worker, caplog, eventually):
    with caplog.at_level(logging.WARNING):
        call, _ = await _inject(worker, memory=fault_pb2.MemoryFault(num_blocks=3))
        call.cancel()
        await eventually(lambda: len(caplog.messages) == 2)
    assert caplog.messages == [
        "w-0: fault in place: memory num_blocks: 3",
        "w-0: fault lifted: memory num_blocks: 3",
    ]


async def test_a_deadline_lifts_it_too(worker, eventually):
    call = worker.stub.Inject(
        fault_pb2.InjectRequest(memory=fault_pb2.MemoryFault(num_blocks=3)),
        timeout=1.0,
    )
    assert (await call.read()).in_place.num_blocks == 3
    await eventually(lambda: worker.num_available == NUM_BLOCKS)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({}, "fault is missing"),
        ({"hold": _hold(fault_pb2.FAULT_POINT_UNSPECIFIED)}, "hold.point"),
        ({"hold": _hold(99)}, "hold.point is 99"),
        ({"hold": _hold(fault_pb2.FAULT_POINT_QUEUED, max_hold_s=-1.0)}, "max_hold_s is -1.0"),
        ({"hold": _hold(fault_pb2.FAULT_POINT_QUEUED, max_hold_s=float("nan"))}, "max_hold_s is nan"),
        ({"hold": _hold(fault_pb2.FAULT_POINT_PREFILLING, max_hold_s=1.0)}, "only noticed"),
        ({"kv_messages": fault_pb2.KvMessageFault(drop=2.0)}, "kv_messages.drop is 2.0"),
    ],
)
async def test_impossible_faults_are_refused_by_name(worker, fault, told):
    assert told in await _refusal(worker, **fault)
