import asyncio
import time
from contextlib import asynccontextmanager, suppress

import pytest

from baton.channel import channel
from baton.errors import DeadlineExceeded, InvalidRequest, Unavailable
from baton.v1 import worker_pb2
from engine.sampling_params import SamplingParams
from router.membership import Member
from router.validation import PromptRequest
from router.worker_calls import WorkerCalls

SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=0.5, seed=0, max_tokens=3, stop_token_ids=frozenset({7, 2}))
PROMPT = PromptRequest("r1", (1, 2, 3), SAMPLING, "salt")


@pytest.fixture
async def worker(start_worker):
    return await start_worker("decode-0", "mixed")


@pytest.fixture
async def member(worker):
    opened = channel(worker.address.address)
    yield Member("decode-0", worker.address.address, opened)
    await opened.close()


def calls(timeout_s=10.0):
    return WorkerCalls(PROMPT, time.monotonic() + timeout_s)


async def test_a_decode_request_says_all_and_leaves_nothing_unset(worker, member):
    """Zero is not unset on the inner hops either."""
    async with calls() as opened:
        await opened.decode(member, 16).read("reserved")
    (request,) = worker.decode_requests
    assert (request.request_id, list(request.token_ids), request.cache_salt) == ("r1", [1, 2, 3], "salt")
    assert all(request.sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "seed"))
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.0, 0.5, 0)
    assert (request.stopping.max_tokens, list(request.stopping.stop_token_ids)) == (3, [2, 7])
    assert (request.local_prefill_max_tokens, request.prefill_locally) == (16, False)


async def test_a_worker_alone_prefills_in_any_case(worker, member):
    async with calls() as opened:
        await opened.decode(member, None).read("reserved")
    assert worker.decode_requests[0].prefill_locally


async def test_a_prefill_request_carries_the_ticket_if_there_is_one(worker, member):
    ticket = worker_pb2.Ticket(id="t1", epoch="e1")
    async with calls() as opened:
        await opened.prefill(member, ticket).read("first_token")
        await opened.prefill(member, None).read("first_token")
    with_ticket, without = worker.prefill_requests
    assert with_ticket.ticket == ticket
    assert not without.HasField("ticket")
    assert (list(with_ticket.token_ids), with_ticket.cache_salt) == ([1, 2, 3], "salt")


async def test_an_unexpected_event_is_refused(member):
    async with calls() as opened:
        with pytest.raises(Unavailable, match=r"decode-0: .*sent reserved instead of tokens or finished"):
            await opened.decode(member, 16).read("tokens", "finished")


async def test_a_stream_that_ends_early_is_an_error(worker, member, messages):
    async def only_reserve(request):
        yield messages.reserved()

    worker.decode = only_reserve
    async with calls() as opened:
        call = opened.decode(member, 16)
        await call.read("reserved")
        with pytest.raises(Unavailable, match=r"decode-0: .*ended its stream before tokens"):
            await call.read("tokens")


async def test_a_workers_error_keeps_its_type_and_gets_its_place(worker, member):
    worker.before_decode.append(InvalidRequest("no such token"))
    async with calls() as opened:
        with pytest.raises(InvalidRequest, match="decode-0: no such token") as caught:
            await opened.decode(member, 16).read("reserved")
    assert caught.value.metadata == {"stage": "decode", "worker": "decode-0"}


async def test_the_end_of_the_context_cancels_what_is_open(worker, member, messages, eventually):
    async def wait(request):
        yield messages.reserved()
        await asyncio.Event().wait()

    worker.decode = wait
    async with calls() as opened:
        await opened.decode(member, 16).read("reserved")
        assert worker.open_calls == ["decode"]
    await eventually(lambda: not worker.open_calls)


async def test_a_call_has_what_remains_of_the_time(worker, member, messages, eventually):

    async def wait(request):
        await asyncio.Event().wait()
        yield messages.reserved()

    worker.decode = wait
    async with calls(timeout_s=0.2) as opened:
        with pytest.raises(DeadlineExceeded):
            await opened.decode(member, 16).read("reserved")
    await eventually(lambda: not worker.open_calls)


async def test_nothing_is_sent_when_the_time_is_over(worker, member):
    async with calls(timeout_s=-0.01) as opened:
        with pytest.raises(DeadlineExceeded):
            opened.decode(member, 16)
        with pytest.raises(DeadlineExceeded):
            opened.prefill(member, None)
    assert not worker.decode_requests
    assert not worker.prefill_requests


@asynccontextmanager
async def relayed(address, tear):
    """The address of a TCP relay to `address` that closes both ends at once when `tear` is set."""
    host, port = address.rsplit(":", 1)
    is_torn = asyncio.Event()

    async def relay(reader, writer):
        to_reader, to_writer = await asyncio.open_connection(host, int(port))

        async def copy(source, sink):
            while data := await source.read(65536):
                sink.write(data)

        copies = [asyncio.create_task(copy(reader, to_writer)), asyncio.create_task(copy(to_reader, writer))]
        await tear.wait()
        for copying in copies:
            copying.cancel()
        await asyncio.wait(copies)
        for torn in (writer, to_writer):
            torn.transport.abort()
            with suppress(ConnectionError):
                await torn.wait_closed()
        is_torn.set()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(is_torn.wait(), 10)


async def test_a_connection_that_breaks_is_unavailable_and_names_the_worker(worker):
    """A worker killed in mid-stream: gRPC says UNKNOWN, INTERNAL or UNAVAILABLE, as it happens."""
    tear = asyncio.Event()

    async def reserve_and_wait(request):
        yield worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved())
        await asyncio.Event().wait()

    worker.decode = reserve_and_wait
    async with relayed(worker.address.address, tear) as address, channel(address) as opened, calls() as calling:
        call = calling.decode(Member("decode-0", address, opened), 16)
        await call.read("reserved")
        tear.set()
        with pytest.raises(Unavailable, match="decode-0: the connection broke") as raised:
            await call.read("tokens")
    assert raised.value.reason == "CONNECTION_LOST"
    assert raised.value.retry_after_s is not None
