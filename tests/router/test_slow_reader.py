"""Clients that read slowly, or not at all, in front of the real gRPC stack: their windows are a few messages wide.

A client without anybody who reads it takes what fits into its HTTP/2 window and no more.
"""

import asyncio

import grpc
import pytest
from tokenizers import Tokenizer

from baton import channel
from baton.aio_client import AsyncClient
from baton.error_interceptor import ErrorInterceptor
from baton.errors import InvalidRequest, from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from engine.text_codec import TextCodec
from router.reply import MAX_JOINED_TOKENS
from router.router_metrics import RouterMetrics
from router.service import InferenceServicer

WINDOW_BYTES = 64
# A message with a token is 10 bytes or more, so that many fit; one more is on its way.
MAX_UNREAD_MESSAGES = WINDOW_BYTES // 10 + 1
NUM_TOKENS = 2000
ANSWER = list(range(100, 100 + NUM_TOKENS))
MANY_TOKENS = {"context_window_tokens": 4096, "num_blocks": 256}


@pytest.fixture
async def workers(start_worker):
    return await start_worker("prefill-0", "prefill", **MANY_TOKENS), await start_worker(
        "decode-0", "decode", **MANY_TOKENS
    )


@pytest.fixture
async def start(membership, make_dispatcher, follow, workers, model_dir):
    """Starts a router over the workers, with a limit for clients that take nothing; returns its address."""
    servers = []

    async def start(client_stall_limit_s=60.0):
        await follow(*workers)
        codec = TextCodec.from_directory(model_dir)
        servicer = InferenceServicer(
            "tiny", codec, membership, make_dispatcher(), RouterMetrics(), client_stall_limit_s
        )
        server = channel.server([ErrorInterceptor()])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        port = channel.bind(server, 0)
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(grace=0)


class RawClient:
    """Reads nothing by itself; keeps the messages that it was told to read."""

    def __init__(self, address):
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
        self.channel = grpc.aio.insecure_channel(address, options=window)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def generate(self, max_tokens=NUM_TOKENS, **fields):
        stopping = request_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True)
        token_ids = inference_pb2.TokenIds(ids=[1, 2, 3])
        return self.stub.Generate(inference_pb2.GenerateRequest(token_ids=token_ids, stopping=stopping, **fields))


@pytest.fixture
async def connect():
    """Raw clients, without a deadline of their own."""
    clients = []

    def connect(address):
        clients.append(RawClient(address))
        return clients[-1]

    yield connect
    for client in clients:
        await client.channel.close()


async def read_all(call):
    """All messages to the end, and the error they end with, if any."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, from_rpc_error(error)
    return messages, None


def tokens_of(messages):
    return [token_id for message in messages for token_id in message.token_ids]


def one_by_one(messages, then):
    """A decode script: one message a token, and then what `then` says."""

    async def decode(request):
        yield messages.reserved()
        yield messages.committed()
        for token_id in ANSWER[1 : request.stopping.max_tokens]:
            yield messages.tokens(token_id)
        async for response in then(messages):
            yield response

    return decode


async def end(messages):
    yield messages.finished()


async def hold(messages):
    await asyncio.Event().wait()
    yield


async def fail(messages):
    raise InvalidRequest("the step failed")
    yield


def is_idle(workers, membership):
    return not any(worker.open_calls for worker in workers) and not any(v.sent_sequences for v in membership.views())


def rpc_tasks():
    """Tasks that the router has for its requests."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name == "reply" or "InferenceService/Generate" in name]


@pytest.mark.parametrize("num_read_first", [0, 1])
async def test_a_slow_client_holds_up_no_worker_and_gets_all_in_the_end(
    start, connect, workers, membership, messages, model_dir, eventually, num_read_first
):
    """What it does not take is joined, while the workers go on to their end."""
    workers[1].decode = one_by_one(messages, end)
    call = connect(await start()).generate()
    received = [await call.read() for _ in range(num_read_first)]
    await eventually(lambda: workers[1].decode_requests and is_idle(workers, membership), timeout_s=60)
    assert rpc_tasks()
    rest, error = await read_all(call)
    received += rest
    assert error is None
    assert tokens_of(received) == ANSWER
    assert "".join(message.text for message in received) == text_of(model_dir, ANSWER)
    assert received[-1].finish.usage.completion_tokens == NUM_TOKENS
    assert [message.HasField("finish") for message in received].count(True) == 1
    assert len(received) <= num_read_first + MAX_UNREAD_MESSAGES + NUM_TOKENS // MAX_JOINED_TOKENS + 1
    await eventually(lambda: not rpc_tasks())


def text_of(model_dir, token_ids):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(token_ids, skip_special_tokens=True)


async def test_others_go_on_beside_a_client_that_does_not_read(start, connect, workers, messages, eventually):
    """On its own connection and on others."""
    workers[1].decode = one_by_one(messages, end)
    address = await start()
    client = connect(address)
    slow = client.generate()
    await eventually(lambda: workers[1].decode_requests)
    beside = [client.generate(max_tokens=200) for _ in range(2)]
    apart = [connect(address).generate(max_tokens=200) for _ in range(2)]
    for messages_read, error in await asyncio.gather(*(read_all(call) for call in (*beside, *apart))):
        assert (tokens_of(messages_read), error) == (ANSWER[:200], None)
    assert not slow.done()
    assert tokens_of((await read_all(slow))[0]) == ANSWER


async def test_a_client_that_never_reads_is_ended_and_the_workers_released(
    start, connect, workers, membership, messages, eventually
):
    """Should it read after all, it learns what it has, and why there is no more."""
    workers[1].decode = one_by_one(messages, hold)
    call = connect(await start(client_stall_limit_s=0.5)).generate()
    await eventually(lambda: workers[1].open_calls)
    await eventually(lambda: is_idle(workers, membership), timeout_s=60)
    received, error = await read_all(call)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "CLIENT_STALLED")
    token_ids = tokens_of(received)
    assert token_ids == ANSWER[: len(token_ids)]
    assert error.metadata["tokens_sent"] == str(len(token_ids))
    assert len(received) <= MAX_UNREAD_MESSAGES
    assert not any(message.HasField("finish") for message in received)
    await eventually(lambda: not rpc_tasks())


@pytest.mark.parametrize("leave", ["cancel", "close"])
@pytest.mark.parametrize("limit_s", [0.2, 60.0])
async def test_a_client_that_stops_reading_and_leaves_leaves_nothing_behind(
    start, connect, workers, membership, messages, eventually, leave, limit_s
):
    """Before it is ended and after, when its error still waits to be read."""
    workers[1].decode = one_by_one(messages, hold)
    client = connect(await start(limit_s))
    call = client.generate()
    await call.read()
    await eventually(lambda: workers[1].open_calls or limit_s < 1)
    if limit_s < 1:
        await eventually(lambda: is_idle(workers, membership), timeout_s=60)
    assert rpc_tasks()
    if leave == "cancel":
        call.cancel()
    else:
        await client.channel.close()
    await eventually(lambda: is_idle(workers, membership) and not rpc_tasks())


async def test_a_client_that_is_late_for_the_last_message_gets_it_and_no_error(
    start, connect, workers, membership, eventually
):
    """The limit has long passed, but the answer is whole and costs nobody anything."""
    call = connect(await start(client_stall_limit_s=0.2)).generate(max_tokens=1)
    await eventually(lambda: workers[0].prefill_requests and is_idle(workers, membership))
    await eventually(lambda: "reply" not in rpc_tasks())
    assert rpc_tasks()  # the last message, with its timeline, is wider than the window
    received, error = await read_all(call)
    assert error is None
    assert tokens_of(received) == ANSWER[:1]
    assert received[-1].HasField("finish")


async def test_a_slow_client_that_is_aborted_releases_the_workers_without_reading(
    start, connect, workers, membership, messages, eventually
):
    workers[1].decode = one_by_one(messages, hold)
    address = await start()
    call = connect(address).generate(request_id="slow")
    await eventually(lambda: workers[1].open_calls)
    async with AsyncClient(address) as other:
        assert await other.abort("slow") == 1
        await eventually(lambda: is_idle(workers, membership))
        assert await other.abort("slow") == 0
    received, error = await read_all(call)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_ID")
    token_ids = tokens_of(received)
    assert token_ids == ANSWER[: len(token_ids)]
    assert error.metadata["tokens_sent"] == str(len(token_ids))


async def test_what_was_generated_comes_before_the_error_also_to_a_slow_client(
    start, connect, workers, membership, messages, eventually
):
    workers[1].decode = one_by_one(messages, fail)
    call = connect(await start()).generate(max_tokens=NUM_TOKENS + 1)
    await eventually(lambda: workers[1].decode_requests and is_idle(workers, membership), timeout_s=60)
    received, error = await read_all(call)
    assert (error.code, error.metadata["tokens_sent"]) == (grpc.StatusCode.INVALID_ARGUMENT, str(NUM_TOKENS))
    assert tokens_of(received) == ANSWER
