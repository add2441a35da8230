"""Worker services on loopback with the real engine and model, and requests to them as a router sends them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton import channel
from baton.error_interceptor import ErrorInterceptor
from baton.v1 import kv_transfer_pb2_grpc, request_pb2, worker_pb2, worker_pb2_grpc
from decode_worker.handoffs import Handoffs
from decode_worker.push_service import PushServicer
from decode_worker.service import DecodeServicer
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kv_transfer.grpc_transport import write_handler
from kv_transfer.pool import KvPool
from kv_transfer.receiver import LandingSink
from prefill_worker.peers import Peers
from prefill_worker.service import PrefillServicer
from worker.draining import Draining
from worker.fault_injection import InjectedFaults
from worker.host import WorkerConfig, WorkerHost, load_worker
from worker.sequence_feed import SequenceFeed
from worker.state_feed import StateFeed
from worker.worker_service import LandingCounts, WorkerServicer

BLOCK_BYTES = 16 * 46_080  # of SmolLM2-135M in float32
NUM_BLOCKS = {"prefill": 64, "decode": 32}
HELLO = 38699  # " Hello", which begins no block like another prompt does
# Greedy continuations by transformers, in float32. HELLO_ANSWER follows 16, 32 or 33 times HELLO.
HELLO_ANSWER = [29, 292, 29, 8320, 29]
ALPHABET, ALPHABET_ANSWER = "Here is the English alphabet: ABC", [33203, 23960, 57, 58, 59]
COUNT, COUNT_ANSWER = "1, 2, 3, 4, 5,", [216, 38, 28, 216, 39]
CALL_TIMEOUT_S = 30.0


async def load_host(role: str, model_dir: Path, kernel_cache_dir: Path, max_step_tokens: int = 128) -> WorkerHost:
    """A host with its engine running, to be stopped by the caller."""
    config = WorkerConfig(
        name=f"{role}-0",
        role=role,
        model_dir=model_dir,
        kernel_cache_dir=kernel_cache_dir,
        dtype="float32",
        kv_memory_bytes=NUM_BLOCKS[role] * BLOCK_BYTES,
        max_step_tokens=max_step_tokens,
    )
    host = await asyncio.to_thread(load_worker, config, StateFeed(), lambda _: None)
    host.engine.start()
    return host


async def stop_host(host: WorkerHost) -> None:
    host.state.close()
    await asyncio.to_thread(host.engine.stop, 10.0)


class Gate:
    """Stands before a sink and holds frames back while it is shut."""

    def __init__(self, sink: LandingSink) -> None:
        self._sink = sink
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.frames: list[bytes] = []  # all that have come

    async def write(self, frame) -> None:
        self.frames.append(bytes(frame))
        await self._is_open.wait()
        await self._sink.write(frame)

    def shut(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


class SlowPool(KvPool):
    """The same memory as a host's pool, whose copies wait for the test, as those on a device wait for the device."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool._tensor, pool.layout)
        self.copies_wait = True
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def read(self, block_ids, layers, tokens):
        self._wait()
        return super().read(block_ids, layers, tokens)

    def write(self, block_ids, layers, tokens, payload):
        self._wait()
        super().write(block_ids, layers, tokens, payload)

    def _wait(self) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(CALL_TIMEOUT_S)


@dataclass(frozen=True)
class Address:
    name: str
    address: str
    role: str = "decode"
    metrics_address: str = ""


class Worker:
    """One host's services, wired as a worker process wires them, but for the gate."""

    def __init__(self, host: WorkerHost) -> None:
        self.host = host
        self.sink = LandingSink(host.epoch, host.kv_pool)
        self.gate = Gate(self.sink)
        self.handoffs = Handoffs(host, self.sink)
        self.peers = Peers()
        self.draining = Draining()
        self.faults = InjectedFaults()  # none in place

    async def start(self) -> None:
        self.host.engine.drop_prefix_cache()
        server = self.server = channel.server([ErrorInterceptor()])
        landing = lambda: LandingCounts(  # noqa: E731
            self.sink.num_open, self.sink.stale_writes, self.handoffs.num_quarantined_blocks
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self.host, landing, lambda: True), server)
        if self.host.config.role == "prefill":
            self.prefill_servicer = PrefillServicer(self.host, self.peers, self.draining, self.faults)
            worker_pb2_grpc.add_PrefillServiceServicer_to_server(self.prefill_servicer, server)
        else:
            self.decode_servicer = DecodeServicer(self.host, self.handoffs, self.draining, self.faults)
            worker_pb2_grpc.add_DecodeServiceServicer_to_server(self.decode_servicer, server)
            push = PushServicer(self.host, self.handoffs)
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(push, server)
            server.add_generic_rpc_handlers((write_handler(self.gate),))
        self.handoffs.address = f"127.0.0.1:{channel.bind(server, 0)}"
        self.address = Address(self.host.config.name, self.handoffs.address)
        await server.start()
        self.channel = channel.channel(self.handoffs.address, internal=True)

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(grace=0)
        await self.peers.close()
        await self.handoffs.close_all()

    def prefill(self, request: worker_pb2.PrefillRequest):
        return worker_pb2_grpc.PrefillServiceStub(self.channel).Prefill(request, timeout=CALL_TIMEOUT_S)

    def decode(self, request: worker_pb2.DecodeRequest, timeout_s: float = CALL_TIMEOUT_S):
        return worker_pb2_grpc.DecodeServiceStub(self.channel).Decode(request, timeout=timeout_s)

    def push(self):
        return kv_transfer_pb2_grpc.KvTransferServiceStub(self.channel).Push(timeout=CALL_TIMEOUT_S)

    @property
    def num_owned_blocks(self) -> int:
        """Those in flight included."""
        ledger = self.host.engine.load().ledger
        return ledger.owned + ledger.in_flight

    @property
    def num_cached_blocks(self) -> int:
        return self.host.engine.load().ledger.cached

    @property
    def is_clean(self) -> bool:
        """Nothing is held for anybody, in no table."""
        load = self.host.engine.load()
        load.ledger.check()
        held = (load.ledger.owned, load.ledger.in_flight, load.num_sequences, self.sink.num_open)
        tables = (self.host.engine._sinks, self.host.engine._started, self.handoffs._open)
        return held == (0, 0, 0, 0) and not any(tables)


def greedy(seed: int = 0) -> request_pb2.SamplingParams:
    return request_pb2.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=seed)


def prefill_request(token_ids, ticket=None, **fields) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(token_ids=token_ids, ticket=ticket, sampling=greedy(), **fields)


def decode_request(token_ids, max_tokens=5, stop_token_ids=(), **fields) -> worker_pb2.DecodeRequest:
    stopping = request_pb2.StoppingCriteria(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    return worker_pb2.DecodeRequest(token_ids=token_ids, stopping=stopping, sampling=greedy(), **fields)


async def read(call, event: str):
    """The call's next message, which must be of this kind."""
    response = await call.read()
    assert response is not grpc.aio.EOF, f"the stream ended before {event}"
    assert response.WhichOneof("event") == event, response
    return getattr(response, event)


async def read_tokens(call) -> tuple[list[int], worker_pb2.DecodeFinished]:
    """A decode stream's tokens and its end."""
    token_ids = []
    while True:
        response = await call.read()
        assert response is not grpc.aio.EOF, "the stream ended before its end"
        if response.HasField("finished"):
            assert await call.read() is grpc.aio.EOF
            return token_ids, response.finished
        token_ids += response.tokens.token_ids


@dataclass(frozen=True)
class Handed:
    """A request that went from a prefill worker to a decode worker."""

    token_ids: list[int]
    finished: worker_pb2.DecodeFinished
    ticket: worker_pb2.Ticket
    first_token: worker_pb2.PrefillFirstToken
    pushed: worker_pb2.PrefillPushed
    committed: worker_pb2.DecodeCommitted


async def hand_over(prefill: Worker, decode: Worker, request: worker_pb2.DecodeRequest) -> Handed:
    """What a router does for one request, without its checks."""
    decode_call = decode.decode(request)
    ticket = (await read(decode_call, "reserved")).ticket
    fields = {"request_id": request.request_id, "cache_salt": request.cache_salt}
    prefill_call = prefill.prefill(prefill_request(request.token_ids, ticket, **fields))
    first = await read(prefill_call, "first_token")
    pushed = await read(prefill_call, "pushed")
    committed = await read(decode_call, "committed")
    token_ids, finished = await read_tokens(decode_call)
    return Handed([first.token_id, *token_ids], finished, ticket, first, pushed, committed)


@asynccontextmanager
async def prefilled(host: WorkerHost, token_ids: list[int]) -> AsyncIterator[tuple[Sequence, int]]:
    """A sequence with its KV in the host's blocks, for tests that push it by hand, and its next token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    sequence = Sequence("by-hand", list(token_ids), len(token_ids), sampling, hold_after_prefill=True)
    feed = SequenceFeed()
    host.engine.add(sequence, feed)
    try:
        yield sequence, (await feed.next()).token_ids[0]
    finally:
        host.engine.abort(sequence.sequence_id)
