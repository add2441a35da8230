"""Places faults in workers over gRPC and hears what they strike."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from baton.channel import channel
from baton.v1 import fault_pb2, fault_pb2_grpc
from bench.drill.roster import Life

_PLACING_TIMEOUT_S = 5.0

WorkerHit = tuple[str, fault_pb2.Hit]


class Injection:
    """Faults that are in place. `placed_in` names the workers; `hits` grows as (worker, hit)."""

    def __init__(self) -> None:
        self.placed_in: list[str] = []
        self.hits: list[WorkerHit] = []
        self._first = asyncio.Event()

    async def first_hit(self, timeout_s: float) -> WorkerHit | None:
        """The first hit in any of the workers, None if there is none in this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._first.wait()
        except TimeoutError:
            return None
        return self.hits[0]

    def note(self, worker: str, hit: fault_pb2.Hit) -> None:
        """One more hit."""
        self.hits.append((worker, hit))
        self._first.set()


@asynccontextmanager
async def injected(workers: Sequence[Life], request: fault_pb2.InjectRequest) -> AsyncIterator[Injection]:
    """The same fault in all of these workers for the time of the block; those that do not answer are left out."""
    injection = Injection()
    async with AsyncExitStack() as stack:
        calls = await asyncio.gather(*(_place(stack, worker, request) for worker in workers))
        readers = []
        for worker, call in zip(workers, calls, strict=True):
            if call is not None:
                injection.placed_in.append(worker.name)
                readers.append(asyncio.create_task(_read(injection, worker.name, call), name=f"hits of {worker.name}"))
        try:
            yield injection
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _place(stack: AsyncExitStack, worker: Life, request: fault_pb2.InjectRequest) -> Any:
    """The open call, None if the worker does not take it."""
    connection = await stack.enter_async_context(channel(worker.address))
    stub: Any = fault_pb2_grpc.FaultServiceStub(connection)  # type: ignore[no-untyped-call]
    call = stub.Inject(request)
    stack.callback(call.cancel)
    try:
        async with asyncio.timeout(_PLACING_TIMEOUT_S):
            response = await call.read()
    except (grpc.RpcError, TimeoutError) as error:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in _MISUSES:
            raise
        return None
    return None if response is grpc.aio.EOF else call


# These say that the drill asks for what cannot be, not that the worker is away.
_MISUSES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


async def _read(injection: Injection, worker: str, call: Any) -> None:
    """Until the call ends: with the block, or with the worker."""
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            injection.note(worker, response.hit)
    except grpc.RpcError:
        return
