"""Workers of the router's tests: real gRPC servers that answer by script, and a router in front of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest

from baton import channel
from baton.aio_client import AsyncClient
from baton.error_interceptor import ErrorInterceptor
from baton.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from engine.sampling_params import SamplingParams
from router.admission import AdmissionQueue
from router.dispatch import DispatchConfig, Dispatcher
from router.forecast import Forecast
from router.membership import Membership
from router.outcome import Outcome
from router.server import RouterServer, RouterSpec
from router.validation import PromptRequest

FINGERPRINT = {
    "protocol_version": 1,
    "model": "m",
    "kv_dtype": "float32",
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
HEARTBEAT_S = 0.5
ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE, "mixed": worker_pb2.ROLE_MIXED}


@dataclass(frozen=True)
class Address:
    name: str
    address: str
    role: str = "decode"
    metrics_address: str = ""


class ScriptedWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    worker_pb2_grpc.PrefillServiceServicer,
    worker_pb2_grpc.DecodeServiceServicer,
):
    """The answer is 100, 101 and so on; a prompt that ends with the beginning of it is continued.

    `prefill` and `decode` are scripts a test may replace;
    `before_prefill` and `before_decode` are raised first, one a call. `open_calls` holds the calls under way.
    """

    def __init__(self, name, role, **info):
        self.info = worker_pb2.GetWorkerInfoResponse(
            worker=name,
            role=ROLES[role],
            epoch=info.pop("epoch", "e1"),
            fingerprint=worker_pb2.Fingerprint(**(FINGERPRINT | info.pop("fingerprint", {}))),
            **{
                "block_size_tokens": 16,
                "num_blocks": 64,
                "context_window_tokens": 1024,
                "vocab_size": 49152,
                "max_batch_sequences": 32,
                "max_step_tokens": 512,
                **info,
            },
        )
        self.state = worker_pb2.WatchStateResponse(
            epoch=self.info.epoch, num_free_blocks=self.info.num_blocks, is_ready=True
        )
        self.is_silent = False
        self.prefill = self.prefill_at_once
        self.decode = self.decode_at_once
        self.before_prefill = []
        self.before_decode = []
        self.prefill_requests = []
        self.decode_requests = []
        self.open_calls = []
        self.num_subscriptions = 0
        self._news = asyncio.Event()

    async def start(self, port=0):
        self.server = channel.server([ErrorInterceptor()])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self.server)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.server)
        self.port = channel.bind(self.server, port)
        await self.server.start()
        self.address = Address(self.info.worker, f"127.0.0.1:{self.port}")
        return self

    def report(self, **state):
        for name, value in state.items():
            setattr(self.state, name, value)
        self._news.set()

    async def GetWorkerInfo(self, request, context):  # noqa: N802 - the proto's name
        return self.info

    async def WatchState(self, request, context):  # noqa: N802 - the proto's name
        self.num_subscriptions += 1
        while True:
            if not self.is_silent:
                yield self.state
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_S)

    async def Prefill(self, request, context):  # noqa: N802 - the proto's name
        self.prefill_requests.append(request)
        async with self._open("prefill"):
            if self.before_prefill:
                raise self.before_prefill.pop(0)
            async for response in self.prefill(request):
                yield response

    async def Decode(self, request, context):  # noqa: N802 - the proto's name
        self.decode_requests.append(request)
        async with self._open("decode"):
            if self.before_decode:
                raise self.before_decode.pop(0)
            async for response in self.decode(request):
                yield response

    @asynccontextmanager
    async def _open(self, call):
        self.open_calls.append(call)
        try:
            yield
        finally:
            self.open_calls.remove(call)

    async def prefill_at_once(self, request):
        yield first_token(next_token(request))
        yield worker_pb2.PrefillResponse(pushed=worker_pb2.PrefillPushed(kv_bytes=5, transport="grpc"))

    async def decode_at_once(self, request):
        first = next_token(request)
        if request.prefill_locally:
            yield worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved())
            yield tokens(*range(first, first + request.stopping.max_tokens))
        else:
            yield reserved()
            yield committed()
            yield tokens(*range(first + 1, first + request.stopping.max_tokens))
        yield finished()


def next_token(request):
    """What continues the prompt: 100, or what follows the tokens of the answer that it ends with."""
    token_ids = list(request.token_ids)
    num_there = max(k for k in range(len(token_ids) + 1) if token_ids[len(token_ids) - k :] == [*range(100, 100 + k)])
    return 100 + num_there


def first_token(token_id):
    return worker_pb2.PrefillResponse(first_token=worker_pb2.PrefillFirstToken(token_id=token_id))


def reserved():
    ticket = worker_pb2.Ticket(id="t1", epoch="e1", num_prompt_tokens=3)
    return worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved(ticket=ticket))


def committed():
    return worker_pb2.DecodeResponse(committed=worker_pb2.DecodeCommitted())


def tokens(*token_ids):
    return worker_pb2.DecodeResponse(tokens=worker_pb2.DecodeTokens(token_ids=token_ids))


def finished():
    return worker_pb2.DecodeResponse(finished=worker_pb2.DecodeFinished(reason=request_pb2.FINISH_REASON_LENGTH))


@dataclass
class Messages:
    """The messages of scripts, for tests that write their own."""

    first_token = staticmethod(first_token)
    reserved = staticmethod(reserved)
    committed = staticmethod(committed)
    tokens = staticmethod(tokens)
    finished = staticmethod(finished)


@pytest.fixture
def messages():
    return Messages


StartWorker = Callable[..., Awaitable[ScriptedWorker]]


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Starts a scripted worker: name, role, what differs in its info, and `port`."""
    started: list[ScriptedWorker] = []

    async def start(name, role, *, port=0, **info):
        worker = await ScriptedWorker(name, role, **info).start(port)
        started.append(worker)
        return worker

    yield start
    await asyncio.gather(*(worker.server.stop(grace=0) for worker in started))


@pytest.fixture
async def pair(start_worker):
    """A prefill and a decode worker."""
    return await start_worker("prefill-0", "prefill"), await start_worker("decode-0", "decode")


@pytest.fixture
async def membership() -> AsyncIterator[Membership]:
    opened = Membership()
    yield opened
    await opened.close()


@pytest.fixture
def assigned(membership):
    """Counts an assignment on a worker while the context lasts."""

    @asynccontextmanager
    async def assigned(member, assignment):
        membership.take(member, assignment)
        try:
            yield assignment
        finally:
            membership.give_back(member, assignment)

    return assigned


@pytest.fixture
def follow(membership, eventually):
    """Tells the membership of these workers and waits until all of them are known."""

    async def follow(*workers):
        await membership.set_workers([worker.address for worker in workers])
        await eventually(lambda: len(membership.views()) == len(workers))

    return follow


@pytest.fixture
def prompt_request():
    """A tokenized request of three tokens for four more."""

    def make(max_tokens=4, stop_token_ids=(), priority=0, **sampling):
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids), **({"temperature": 0.0} | sampling)
        )
        return PromptRequest("r1", (1, 2, 3), params, "", priority)

    return make


@pytest.fixture
def make_dispatcher(membership):
    """A dispatcher over the membership; settings of `DispatchConfig`."""

    def make(**config):
        forecast = Forecast()
        queue = AdmissionQueue(membership, 100, forecast)
        return Dispatcher(membership, queue, forecast, DispatchConfig(**({"recovery_patience_s": 5.0} | config)))

    return make


@pytest.fixture
def dispatch(make_dispatcher, prompt_request):
    """Runs one request to its end; returns its tokens and outcome."""

    async def run(request=None, outcome=None, dispatcher=None, timeout_s=10.0):
        outcome = outcome or Outcome(time.monotonic())
        token_ids = []
        dispatcher = dispatcher or make_dispatcher()
        deltas = dispatcher.run(request or prompt_request(), outcome, time.monotonic() + timeout_s)
        async with asyncio.timeout(timeout_s + 5.0), aclosing(deltas):
            async for delta in deltas:
                token_ids += delta
        return token_ids, outcome

    return run


@pytest.fixture
def is_idle(membership):
    """Whether the router counts nothing on any worker."""

    def check():
        return all(
            (v.sent_sequences, v.sent_prompt_tokens, v.sent_blocks) == (0, 0, 0) for v in membership.views()
        ) and bool(membership.views())

    return check


@pytest.fixture
async def start_router(model_dir, eventually):
    """Starts a router over these workers and waits until it knows them; returns it and a client.

    The router gets its `address` as an attribute, for those who want another channel to it.
    """
    opened = []

    async def start(*workers, **spec):
        router = RouterServer()
        router.address = await router.start(RouterSpec(str(model_dir), "tiny", **spec))
        client = AsyncClient(router.address, timeout_s=10.0)
        opened.append((router, client))
        await router.set_workers([worker.address for worker in workers])
        await eventually(lambda: len(router._membership.views()) == len(workers))
        return router, client

    yield start
    for router, client in opened:
        await client.close()
        await router.stop(grace_s=0)


@pytest.fixture
def outcome_of_an_answer():
    """Of a whole answer of 5 tokens."""
    outcome = Outcome(time.monotonic(), reason=request_pb2.FINISH_REASON_STOP, num_prompt_tokens=7, num_tokens=5)
    outcome.timeline.path = request_pb2.PATH_DISAGGREGATED
    outcome.timeline.ttft_s, outcome.timeline.e2e_s = 0.5, 0.9
    return outcome
