"""Decode workers that answer pushes by script."""

import asyncio

import pytest_asyncio

from baton import channel
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, worker_pb2
from worker.conversion import fingerprint_message


class ScriptedPushes(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """A decode worker's control service that answers by script; a silent one by default."""

    def __init__(self):
        self.script = self.say_nothing
        self.num_open = 0

    async def Push(self, requests, context):  # noqa: N802 - the proto's name
        self.num_open += 1
        try:
            async for response in self.script(requests):
                yield response
        finally:
            self.num_open -= 1

    async def say_nothing(self, requests):
        await asyncio.Event().wait()
        yield

    async def open_only(self, requests):
        await anext(requests)
        yield kv_transfer_pb2.PushResponse(opened=kv_transfer_pb2.PushOpened(credit_bytes=1 << 20))
        await asyncio.Event().wait()

    async def open_without_credit(self, requests):
        await anext(requests)
        yield kv_transfer_pb2.PushResponse(opened=kv_transfer_pb2.PushOpened(credit_bytes=1))
        await asyncio.Event().wait()

    async def open_and_leave(self, requests):
        await anext(requests)
        yield kv_transfer_pb2.PushResponse(opened=kv_transfer_pb2.PushOpened(credit_bytes=1 << 20))

    async def open_and_commit(self, requests):
        await anext(requests)
        yield kv_transfer_pb2.PushResponse(opened=kv_transfer_pb2.PushOpened(credit_bytes=1 << 20))
        yield kv_transfer_pb2.PushResponse(committed=kv_transfer_pb2.PushCommitted())

    async def commit_at_once(self, requests):
        await anext(requests)
        yield kv_transfer_pb2.PushResponse(committed=kv_transfer_pb2.PushCommitted())


@pytest_asyncio.fixture(loop_scope="session")
async def scripted(workers):
    """A scripted decode worker, and a ticket of it that lacks nothing, so that no KV has to be sent."""
    servicer, server = ScriptedPushes(), channel.server()
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{channel.bind(server, 0)}"
    await server.start()
    ticket = worker_pb2.Ticket(
        id="ab" * 16,
        epoch="cd" * 8,
        worker="decode-9",
        num_cached_tokens=16,
        num_prompt_tokens=16,
        endpoints=[worker_pb2.Endpoint(transport="grpc", address=address)],
        fingerprint=fingerprint_message(workers[0].host.fingerprint),
    )
    yield servicer, ticket
    await server.stop(grace=0)
