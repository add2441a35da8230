"""The server runs in the test's event loop, so the blocking client works in a thread."""

import asyncio

import pytest

import baton
from baton.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, ModelNotFound, Unavailable


@pytest.fixture
async def run(inference):
    """Calls a function with a Client in a thread."""

    def with_client(function):
        with baton.Client(inference[1]) as client:
            return function(client)

    return lambda function: asyncio.to_thread(with_client, function)


async def test_chunks_arrive_in_order_and_add_up(run):
    def generate(client):
        stream = client.generate("Hi")
        return list(stream), stream

    chunks, stream = await run(generate)
    assert chunks == [baton.Chunk("Hel", (1,)), baton.Chunk("lo", (2, 3))]
    assert (stream.text, stream.token_ids, stream.finish_reason) == ("Hello", [1, 2, 3], "length")
    assert (stream.usage.completion_tokens, stream.timeline.ttft_s) == (3, 0.25)
    assert stream.request_id == "made-by-router"


async def test_read_returns_the_whole_text(run, inference):
    messages = [{"role": "user", "content": "Hi"}]
    assert await run(lambda client: client.generate(messages, temperature=0, priority=7).read()) == "Hello"
    (request,) = inference[0].requests
    assert request.chat.messages[0].content == "Hi"
    assert request.sampling.HasField("temperature")
    assert request.priority == 7


@pytest.mark.parametrize(
    ("prompt", "error"), [("refuse", ModelNotFound), ("fail", Unavailable), ("cut", InternalError)]
)
async def test_errors_are_typed(run, prompt, error):
    with pytest.raises(error):
        await run(lambda client: client.generate(prompt).read())


async def test_half_a_surrogate_pair_is_refused_before_anything_is_sent(run, inference):
    with pytest.raises(InvalidRequest):
        await run(lambda client: client.generate("x \ud83d y"))
    assert not inference[0].requests


async def test_cancel_ends_the_request_on_the_server(run, inference):
    def cancel(client):
        stream = client.generate("wait")
        next(stream)
        stream.cancel()
        next(stream)

    with pytest.raises(Cancelled):
        await run(cancel)
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_leaving_the_block_early_cancels(run, inference):
    def leave(client):
        with client.generate("wait") as stream:
            return next(stream)

    assert (await run(leave)).text == "Hel"
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_the_deadline_ends_the_request(run, inference):
    with pytest.raises(DeadlineExceeded):
        await run(lambda client: client.generate("wait", timeout_s=0.3).read())
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_abort_names_the_request_and_tells_how_many_there_were(run, inference):
    assert await run(lambda client: [client.abort("r-1"), client.abort("r-2")]) == [1, 2]
    assert inference[0].aborted == ["r-1", "r-2"]


async def test_abort_without_an_id_is_refused(run, inference):
    with pytest.raises(InvalidRequest):
        await run(lambda client: client.abort(""))
    assert not inference[0].aborted


async def test_model_info(run):
    assert (await run(lambda client: client.model_info())).context_window_tokens == 64


def test_no_server_is_unavailable():
    with baton.Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            client.model_info()
        with pytest.raises(Unavailable):
            client.abort("r-1")
        with pytest.raises(Unavailable):
            client.generate("Hi").read()
