"""Workers of the router's tests: real gRPC servers that answer by script, and a router in front of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton import channel
from baton.aio_client import AsyncClient
from baton.error_interceptor import ErrorInterceptor
from baton.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from router.membership import Membership
from router.server import RouterServer, RouterSpec

FINGERPRINT = {
    "protocol_version": 1,
    "model": "m",
    "kv_dtype": "float32",
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE, "mixed": worker_pb2.ROLE_MIXED}


@dataclass(frozen=True)
class Address:
    name: str
    address: str


class ScriptedWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    worker_pb2_grpc.PrefillServiceServicer,
    worker_pb2_grpc.DecodeServiceServicer,
):
    """Token 0 is 100, those after it 101 and so on. `prefill` and `decode` are scripts a test may replace;
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
            await self._news.wait()

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
        yield first_token(100)
        yield worker_pb2.PrefillResponse(pushed=worker_pb2.PrefillPushed(kv_bytes=5, transport="grpc"))

    async def decode_at_once(self, request):
        if request.prefill_locally:
            yield worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved())
            yield tokens(*range(100, 100 + request.stopping.max_tokens))
        else:
            yield reserved()
            yield committed()
            yield tokens(*range(101, 100 + request.stopping.max_tokens))
        yield finished()


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
def follow(membership, eventually):
    """Tells the membership of these workers and waits until all of them are known."""

    async def follow(*workers):
        await membership.set_workers([worker.address for worker in workers])
        await eventually(lambda: len(membership.views()) == len(workers))

    return follow


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
