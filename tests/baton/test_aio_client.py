import asyncio

import pytest

import baton
from baton.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, ModelNotFound, Unavailable


@pytest.fixture
async def client(inference):
    async with baton.AsyncClient(inference[1]) as client:
        yield client


async def test_chunks_arrive_in_order_and_add_up(client):
    stream = client.generate("Hi")
    assert [chunk async for chunk in stream] == [baton.Chunk("Hel", (1,)), baton.Chunk("lo", (2, 3))]
    assert (stream.text, stream.token_ids, stream.finish_reason) == ("Hello", [1, 2, 3], "length")
    assert (stream.num_prompt_tokens, stream.usage.completion_tokens) == (3, 3)
    assert (stream.timeline.decode_worker, stream.timeline.ttft_s) == ("decode-0", 0.25)
    assert stream.request_id == "made-by-router"


async def test_read_returns_the_whole_text(client):
    assert await client.generate([1, 2, 3], request_id="mine").read() == "Hello"


async def test_the_request_arrives_as_it_was_asked_for(client, inference):
    stream = client.generate("Hi", temperature=0, seed=0, max_tokens=5, request_id="mine", priority=-3)
    await stream.read()
    (request,) = inference[0].requests
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert (request.stopping.max_tokens, request.priority) == (5, -3)
    assert stream.request_id == "mine"


async def test_an_error_before_the_first_piece_is_typed(client):
    with pytest.raises(ModelNotFound, match="no model 'x'"):
        await client.generate("refuse").read()


async def test_an_error_in_the_middle_keeps_what_has_arrived(client):
    stream = client.generate("fail")
    with pytest.raises(Unavailable) as caught:
        await stream.read()
    assert caught.value.retry_after_s == 0.5
    assert (stream.text, stream.finish_reason) == ("Hel", None)


async def test_a_stream_without_its_last_message_is_an_error(client):
    with pytest.raises(InternalError, match="last message"):
        await client.generate("cut").read()


async def test_half_a_surrogate_pair_is_refused_before_anything_is_sent(client, inference):
    with pytest.raises(InvalidRequest, match="index 2"):
        client.generate("x \ud83d y")
    assert await client.generate("Hi").read() == "Hello"
    assert len(inference[0].requests) == 1


async def test_cancel_ends_the_request_on_the_server(client, inference):
    stream = client.generate("wait")
    await anext(stream)
    stream.cancel()
    with pytest.raises(Cancelled):
        await anext(stream)
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_leaving_the_block_early_cancels(client, inference):
    async with client.generate("wait") as stream:
        async for _ in stream:
            break
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_cancelling_the_task_cancels_the_request_and_stays_a_cancellation(client, inference):
    task = asyncio.create_task(client.generate("wait").read())
    await asyncio.wait_for(inference[0].is_waiting.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_the_deadline_ends_the_request(client, inference):
    with pytest.raises(DeadlineExceeded):
        await client.generate("wait", timeout_s=0.3).read()
    await asyncio.wait_for(inference[0].was_cancelled.wait(), 10)


async def test_abort_names_the_request_and_tells_how_many_there_were(client, inference):
    assert [await client.abort("r-1"), await client.abort("r-2")] == [1, 2]
    assert inference[0].aborted == ["r-1", "r-2"]


@pytest.mark.parametrize("request_id", ["", "\ud83d"])
async def test_abort_of_what_is_no_id_is_refused(client, inference, request_id):
    with pytest.raises(InvalidRequest, match="request_id"):
        await client.abort(request_id)
    assert not inference[0].aborted


async def test_model_info(client):
    assert (await client.model_info()).model == "tiny"


async def test_no_server_is_unavailable():
    async with baton.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.model_info()
        with pytest.raises(Unavailable):
            await client.abort("r-1")
        with pytest.raises(Unavailable):
            await client.generate("Hi").read()
