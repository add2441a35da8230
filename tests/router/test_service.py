import asyncio
import logging

import grpc
import pytest

from baton.channel import channel
from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ResourceExhausted,
    Unavailable,
)
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2, worker_pb2

DEF = 33203  # " DEF"


async def test_an_answer_is_streamed_with_counts_and_timeline(start_router, pair):
    _, client = await start_router(*pair)
    stream = client.generate([1, 2, 3], max_tokens=4, request_id="r-1")
    assert await stream.read() == stream.text
    assert stream.token_ids == [100, 101, 102, 103]
    assert (stream.request_id, stream.num_prompt_tokens, stream.finish_reason) == ("r-1", 3, "length")
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 4)
    t = stream.timeline
    assert t.queue_s + t.reserve_s + t.dispatch_s + t.prefill_queue_s + t.prefill_s == pytest.approx(t.ttft_s)
    assert 0 < t.ttft_s <= t.e2e_s


async def test_an_id_is_made_for_a_request_without_one(start_router, pair):
    _, client = await start_router(*pair)
    streams = [client.generate([1], max_tokens=2) for _ in range(2)]
    for stream in streams:
        await stream.read()
    assert len({stream.request_id for stream in streams} - {""}) == 2


async def test_the_same_request_id_twice_at_once_is_two_requests(start_router, pair):
    _, client = await start_router(*pair)
    streams = [client.generate([1], max_tokens=n, request_id="abc") for n in (2, 3)]
    await asyncio.gather(*(stream.read() for stream in streams))
    assert [stream.token_ids for stream in streams] == [[100, 101], [100, 101, 102]]


async def test_the_first_message_tells_of_the_prompt_and_only_the_last_of_the_end(start_router, pair):
    _, client = await start_router(*pair)
    stub = inference_pb2_grpc.InferenceServiceStub(client._channel)
    request = inference_pb2.GenerateRequest(text="Hi", stopping=request_pb2.StoppingCriteria(max_tokens=3))
    responses = [response async for response in stub.Generate(request, timeout=5)]
    assert [r.HasField("prompt_info") for r in responses] == [True] + [False] * (len(responses) - 1)
    assert [r.HasField("finish") for r in responses] == [False] * (len(responses) - 1) + [True]


async def test_a_stop_token_is_counted_and_has_no_text(start_router, pair, messages):
    """A stop token that is ordinary text, as the very first token and later."""

    async def first(request):
        yield messages.first_token(DEF)

    async def hold(request):
        yield messages.reserved()
        await asyncio.Event().wait()

    pair[0].prefill, pair[1].decode = first, hold
    _, client = await start_router(*pair)
    stream = client.generate([1], max_tokens=16, stop_token_ids=[DEF])
    assert await stream.read() == ""
    assert (stream.finish_reason, stream.stop_token_id, stream.token_ids) == ("stop", DEF, [DEF])
    assert stream.usage.completion_tokens == 1


async def test_a_later_stop_token_has_no_text_either(start_router, pair, messages):
    async def first(request):
        yield messages.first_token(57)

    async def stop(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(58, DEF)
        finish = worker_pb2.DecodeFinished(reason=request_pb2.FINISH_REASON_STOP, stop_token_id=DEF)
        yield worker_pb2.DecodeResponse(finished=finish)

    pair[0].prefill, pair[1].decode = first, stop
    _, client = await start_router(*pair)
    stream = client.generate([1], max_tokens=16, stop_token_ids=[DEF])
    assert await stream.read() == "IJ"
    assert stream.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "options", "error", "parts"),
    [
        ("Hi", {"model": "huge"}, ModelNotFound, ["huge", "tiny"]),
        ("Hi", {"temperature": -1.0}, InvalidRequest, ["sampling.temperature"]),
        ("Hi", {"max_tokens": 0}, InvalidRequest, ["max_tokens"]),
        ("", {}, InvalidRequest, ["prompt"]),
        ([], {}, InvalidRequest, ["prompt"]),
        ([5] * 1024, {}, InvalidRequest, ["1024", "context window"]),
        ([5] * 1000, {"max_tokens": 25}, InvalidRequest, ["1000", "1025", "1024"]),
        ([49152], {}, InvalidRequest, ["49152"]),
    ],
)
async def test_what_cannot_be_served_is_refused_by_type_and_reaches_nobody(
    start_router, pair, prompt, options, error, parts
):
    _, client = await start_router(*pair)
    with pytest.raises(error) as caught:
        await client.generate(prompt, **options).read()
    assert all(part in caught.value.message for part in parts)
    assert not pair[0].prefill_requests
    assert not pair[1].decode_requests
    assert await client.generate("Hi", max_tokens=2).read()


async def test_the_smallest_worker_sets_the_limits(start_router, start_worker):
    """Refused at once, before prefill, with both numbers."""
    prefill = await start_worker("p0", "prefill", num_blocks=8)
    decode = await start_worker("d0", "decode", context_window_tokens=256)
    _, client = await start_router(prefill, decode)
    info = await client.model_info()
    assert (info.context_window_tokens, info.model, info.dtype) == (256, "tiny", "float32")
    assert info.eos_token_ids == [2]
    await client.generate([5] * 128, max_tokens=1).read()
    with pytest.raises(InvalidRequest, match=r"129.*128"):
        await client.generate([5] * 129, max_tokens=1).read()


async def test_nothing_is_told_of_the_model_without_workers(start_router):
    _, client = await start_router()
    with pytest.raises(Unavailable):
        await client.model_info()


async def hold_reservation(request):
    yield worker_pb2.DecodeResponse(reserved=worker_pb2.DecodeReserved(ticket=worker_pb2.Ticket(id="t")))
    await asyncio.Event().wait()


async def never(request):
    await asyncio.Event().wait()
    yield


async def test_the_deadline_ends_the_request_everywhere(start_router, pair, eventually):
    pair[0].prefill, pair[1].decode = never, hold_reservation
    router, client = await start_router(*pair)
    with pytest.raises(DeadlineExceeded):
        await client.generate([1], max_tokens=9, timeout_s=0.3).read()
    await eventually(lambda: not pair[0].open_calls and not pair[1].open_calls)
    await eventually(lambda: all(v.sent_sequences == 0 for v in router._membership.views()))


async def test_a_client_without_deadline_gets_ours(start_router, pair, monkeypatch):
    monkeypatch.setattr("router.service.DEFAULT_TIMEOUT_S", 0.2)
    pair[0].prefill, pair[1].decode = never, hold_reservation
    _, client = await start_router(*pair)
    with pytest.raises(DeadlineExceeded, match=r"within 0.2 s; 0 tokens") as caught:
        await client.generate([1], max_tokens=9, request_id="r-1").read()
    assert "r-1" in caught.value.message


async def test_an_error_tells_how_far_the_answer_was(start_router, pair, messages, caplog):
    async def fail(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101, 102)
        raise InternalError("the step failed")

    pair[1].decode = fail
    _, client = await start_router(*pair)
    stream = client.generate([1], max_tokens=9)
    with caplog.at_level(logging.INFO, "router.service"), pytest.raises(InternalError) as caught:
        await stream.read()
    assert caught.value.metadata == {"stage": "decode", "worker": "decode-0", "tokens_sent": "3"}
    assert stream.token_ids == [100, 101, 102]
    assert "decode-0: the step failed" in caplog.text


async def test_a_bug_reaches_the_client_without_its_text(start_router, pair, caplog):
    """20 kB of details that hold the prompt."""

    async def crash(request):
        raise RuntimeError("secret " * 3000)
        yield

    pair[0].prefill, pair[1].decode = crash, hold_reservation
    _, client = await start_router(*pair)
    with pytest.raises(InternalError) as caught:
        await client.generate([1], max_tokens=9).read()
    assert "secret" not in caught.value.message
    assert len(caught.value.message) < 1000
    assert "secret" in caplog.text


@pytest.mark.parametrize("error", [ResourceExhausted, InvalidRequest, Unavailable])
async def test_a_workers_code_reaches_the_client(start_router, pair, messages, error):
    """The same code from either worker, after the first token."""

    async def fail(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101)
        raise error("said so")

    pair[1].decode = fail
    _, client = await start_router(*pair)
    with pytest.raises(error, match="decode-0: said so"):
        await client.generate([1], max_tokens=9).read()


@pytest.mark.parametrize("has_token", [False, True])
async def test_a_client_that_goes_away_releases_both_workers(start_router, pair, messages, has_token, eventually):

    async def prefill(request):
        if has_token:
            yield messages.first_token(100)
        await asyncio.Event().wait()
        yield

    pair[0].prefill, pair[1].decode = prefill, hold_reservation
    router, _ = await start_router(*pair)
    opened = channel(router.address)
    stub = inference_pb2_grpc.InferenceServiceStub(opened)
    request = inference_pb2.GenerateRequest(text="Hi", stopping=request_pb2.StoppingCriteria(max_tokens=9))
    call = stub.Generate(request, timeout=10)
    if has_token:
        await call.read()
    await eventually(lambda: pair[0].open_calls and pair[1].open_calls)
    await opened.close()
    await eventually(lambda: not pair[0].open_calls and not pair[1].open_calls)
    await eventually(lambda: all(v.sent_sequences == 0 for v in router._membership.views()))
    assert await call.code() is grpc.StatusCode.CANCELLED
