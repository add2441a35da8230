"""Pools of random bits, and links of every kind to a sink."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio
import pytest
import torch

from kv_transfer.grpc_transport import GrpcTransport, write_handler
from kv_transfer.layout import KvLayout
from kv_transfer.local import LocalTransport
from kv_transfer.pool import KvPool
from kv_transfer.transport import Link, Sink

Connect = Callable[[Sink], Awaitable[Link]]


@pytest.fixture
def new_pool() -> Callable[[KvLayout, int, int], KvPool]:
    """Makes a pool of (layout, num_blocks) with random bits of a seed: NaNs and all."""

    def make(layout: KvLayout, num_blocks: int, seed: int) -> KvPool:
        generator = torch.Generator().manual_seed(seed)
        num_bytes = num_blocks * layout.num_layers * layout.block_size * layout.token_bytes
        bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        return KvPool(bits.view(getattr(torch, layout.dtype)).view(num_blocks, *layout.block_shape), layout)

    return make


@pytest.fixture
def kv_of() -> Callable[[KvPool, list[int], range], torch.Tensor]:
    """Reads the bits of tokens one by one, [token, layer, k/v, head, byte]: an independent reference."""

    def read(pool: KvPool, block_ids: list[int], tokens: range) -> torch.Tensor:
        size = pool.layout.block_size
        bits = pool._tensor.view(torch.uint8)
        return torch.stack([bits[block_ids[t // size]][:, :, :, t % size] for t in tokens])

    return read


@pytest.fixture
def snapshot() -> Callable[[KvPool], torch.Tensor]:
    """Copies all bits of a pool."""
    return lambda pool: pool._tensor.view(torch.uint8).clone()


@pytest.fixture(params=["local", "grpc"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Connects to a sink over each transport; for grpc through a real server on loopback."""
    servers: list[grpc.aio.Server] = []
    channels: list[grpc.aio.Channel] = []

    async def connect_locally(sink: Sink) -> Link:
        transport = LocalTransport()
        transport.register("decode-0", sink)
        return transport.connect("decode-0")

    async def connect_by_grpc(sink: Sink) -> Link:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((write_handler(sink),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)

        def open_channel(address: str) -> grpc.aio.Channel:
            channels.append(grpc.aio.insecure_channel(address))
            return channels[-1]

        return GrpcTransport(open_channel).connect(f"127.0.0.1:{port}")

    yield connect_locally if request.param == "local" else connect_by_grpc
    await asyncio.gather(*(channel.close() for channel in channels))
    await asyncio.gather(*(server.stop(grace=None) for server in servers))
