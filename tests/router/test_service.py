import asyncio
import logging
import threading

import grpc
import pytest

from baton.channel import channel
from baton.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ResourceExhausted,
    Unavailable,
)
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2, worker_pb2
from engine.text_codec import TextCodec
from router.router_metrics import RouterMetrics
from router.service import MAX_TOKENIZING, InferenceServicer

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
        raise FailedPrecondition("the step failed")

    pair[1].decode = fail
    _, client = await start_router(*pair)
    stream = client.generate([1], max_tokens=9)
    with caplog.at_level(logging.INFO, "router.service"), pytest.raises(FailedPrecondition) as caught:
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


@pytest.mark.parametrize("error", [FailedPrecondition, InvalidRequest])
async def test_a_workers_code_reaches_the_client(start_router, pair, messages, error):
    """After the first token, if nobody else could do better."""

    async def fail(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101)
        raise error("said so")

    pair[1].decode = fail
    _, client = await start_router(*pair)
    with pytest.raises(error, match="decode-0: said so"):
        await client.generate([1], max_tokens=9).read()


@pytest.mark.parametrize("error", [Unavailable, DataLoss, InternalError])
async def test_a_workers_code_reaches_the_client_when_trying_again_is_of_no_use(start_router, pair, messages, error):
    async def fail(request):
        yield messages.reserved()
        raise error("said so")

    pair[0].prefill, pair[1].decode = never, fail
    _, client = await start_router(*pair)
    with pytest.raises(error, match="decode-0: said so") as caught:
        await client.generate([1], max_tokens=9).read()
    assert caught.value.metadata["tokens_sent"] == "0"


class Plain:
    """A connection of its own to a router, without the client library."""

    def __init__(self, router):
        self.channel = channel(router.address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def generate(self, text="Hi", max_tokens=9, **fields):
        stopping = request_pb2.StoppingCriteria(max_tokens=max_tokens)
        return self.stub.Generate(inference_pb2.GenerateRequest(text=text, stopping=stopping, **fields), timeout=30)


@pytest.fixture
async def connect():
    opened = []

    def connect(router):
        opened.append(Plain(router))
        return opened[-1]

    yield connect
    for plain in opened:
        await plain.channel.close()


@pytest.fixture
def is_released(eventually):
    """Waits until nothing is held for anybody: no call on a worker, nothing counted, no task."""

    async def wait(router, *workers):
        await eventually(lambda: not any(worker.open_calls for worker in workers))
        await eventually(lambda: all(v.sent_sequences == 0 for v in router._membership.views()))
        await eventually(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "reply"])

    return wait


def prefill_then_hang(messages):
    async def prefill(request):
        yield messages.first_token(100)
        await asyncio.Event().wait()

    return prefill


@pytest.mark.parametrize("leave", ["cancel", "close"])
@pytest.mark.parametrize("has_token", [False, True])
async def test_a_client_that_goes_away_releases_both_workers(
    start_router, pair, messages, connect, eventually, is_released, caplog, has_token, leave
):
    pair[0].prefill = prefill_then_hang(messages) if has_token else never
    pair[1].decode = hold_reservation
    router, _ = await start_router(*pair)
    client = connect(router)
    call = client.generate(request_id="gone")
    if has_token:
        await call.read()
    await eventually(lambda: pair[0].open_calls and pair[1].open_calls)
    with caplog.at_level(logging.INFO, "router.service"):
        if leave == "cancel":
            call.cancel()
        else:
            await client.channel.close()
        await is_released(router, *pair)
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert [r.getMessage() for r in caplog.records if "gone" in r.getMessage()] == [
        f"request gone was cancelled after {int(has_token)} tokens"
    ]


async def test_a_request_cancelled_as_it_is_sent_leaves_nothing_behind(
    start_router, pair, connect, is_released, eventually
):
    """At once, and after some turns of the event loop, which all of them share here."""
    router, client = await start_router(*pair)
    plain = connect(router)
    pair[0].prefill, pair[1].decode = never, hold_reservation
    for num_turns in range(40):
        call = plain.generate()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        call.cancel()
    await is_released(router, *pair)
    pair[0].prefill, pair[1].decode = pair[0].prefill_at_once, pair[1].decode_at_once
    assert await client.generate("Hi", max_tokens=2).read()


async def test_a_request_cancelled_in_the_queue_reaches_nobody(
    start_router, pair, connect, eventually, is_released, caplog
):
    router, client = await start_router(*pair)
    pair[1].report(num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    call = connect(router).generate(request_id="queued")
    assert dict(await call.initial_metadata())["x-request-id"] == "queued"
    with caplog.at_level(logging.INFO, "router.service"):
        call.cancel()
        await eventually(lambda: "request queued was cancelled" in caplog.text)
    pair[1].report(num_free_blocks=64)
    assert await client.generate("Hi", max_tokens=2).read()
    assert len(pair[1].decode_requests) == 1
    await is_released(router, *pair)


async def test_a_request_whose_time_ends_in_the_queue_reaches_nobody(start_router, pair, eventually, is_released):
    router, client = await start_router(*pair)
    pair[1].report(num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    streams = [client.generate("Hi", max_tokens=2, timeout_s=0.3).read() for _ in range(5)]
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert {type(result) for result in results} == {DeadlineExceeded}
    pair[1].report(num_free_blocks=64)
    assert await client.generate("Hi", max_tokens=2).read()
    assert (len(pair[0].prefill_requests), len(pair[1].decode_requests)) == (1, 1)
    await is_released(router, *pair)


@pytest.mark.parametrize("timeout_s", [1e-9, 1e-4, 1e-3])
async def test_a_deadline_that_is_over_at_once_is_no_more_than_that(start_router, pair, is_released, timeout_s):
    pair[0].prefill, pair[1].decode = never, hold_reservation
    router, client = await start_router(*pair)
    with pytest.raises(DeadlineExceeded):
        await client.generate([1], max_tokens=9, timeout_s=timeout_s).read()
    await is_released(router, *pair)


class SlowTokenizer:
    """Stands before the codec's `encode`: counts the texts, and holds them back until `go`."""

    def __init__(self, monkeypatch):
        self.num_started = 0
        self.go = threading.Event()
        encode = TextCodec.encode

        def hold(codec, text):
            self.num_started += 1
            assert self.go.wait(60)
            return encode(codec, text)

        monkeypatch.setattr(TextCodec, "encode", hold)


@pytest.fixture
def tokenizer(monkeypatch):
    tokenizer = SlowTokenizer(monkeypatch)
    yield tokenizer
    tokenizer.go.set()


@pytest.fixture
def _all_are_long(monkeypatch):
    monkeypatch.setattr("router.service.LONG_REQUEST_BYTES", 0)


@pytest.mark.usefixtures("_all_are_long")
@pytest.mark.parametrize("end", ["cancel", "abort", "deadline"])
async def test_a_request_that_ends_while_it_is_tokenized_is_not_dispatched(
    start_router, pair, connect, tokenizer, eventually, is_released, caplog, end
):
    router, client = await start_router(*pair)
    timeout_s = 0.5 if end == "deadline" else 30
    request = inference_pb2.GenerateRequest(request_id="r-1", text="Hi")
    call = connect(router).stub.Generate(request, timeout=timeout_s)
    await eventually(lambda: tokenizer.num_started == 1)
    with caplog.at_level(logging.INFO, "router.service"):
        if end == "cancel":
            call.cancel()
        elif end == "abort":
            assert await client.abort("r-1") == 1
        assert await call.code() is (
            grpc.StatusCode.DEADLINE_EXCEEDED if end == "deadline" else grpc.StatusCode.CANCELLED
        )
        await eventually(lambda: "request r-1" in caplog.text)
    tokenizer.go.set()
    assert await client.generate("Hi", max_tokens=2).read()
    assert (len(pair[0].prefill_requests), len(pair[1].decode_requests)) == (1, 1)
    await is_released(router, *pair)


async def test_of_a_burst_each_ends_once_and_the_limit_holds(start_router, pair, tokenizer, eventually, is_released):
    tokenizer.go.set()
    router, client = await start_router(*pair, max_waiting=5)
    pair[1].report(num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    reading = [asyncio.create_task(client.generate("Hi", max_tokens=2).read()) for _ in range(100)]
    await eventually(lambda: sum(task.done() for task in reading) == 95)
    assert tokenizer.num_started == 5
    pair[1].report(num_free_blocks=64)
    results = await asyncio.gather(*reading, return_exceptions=True)
    refusals = [result for result in results if isinstance(result, ResourceExhausted)]
    assert {(refusal.reason, refusal.retry_after_s is not None) for refusal in refusals} == {("QUEUE_FULL", True)}
    assert (len(refusals), sum(isinstance(result, str) for result in results)) == (95, 5)
    await is_released(router, *pair)


class CallInMemory:
    """The server's side of a call without network, so that many begin in the very same moment."""

    def __init__(self):
        self.messages = []

    def time_remaining(self):
        return 30.0

    async def send_initial_metadata(self, metadata):
        await asyncio.sleep(0)

    async def write(self, message):
        self.messages.append(message)


@pytest.fixture
async def burst(pair, membership, follow, make_dispatcher, model_dir, eventually, monkeypatch):
    """So many requests at once to a router whose workers are full; returns it and their tasks."""
    # However slow the machine: workers that seem lost for a while would let those who wait go, and others in.
    monkeypatch.setattr("router.membership.SILENCE_LIMIT_S", 300.0)
    tasks = []

    async def start(count):
        await follow(*pair)
        pair[1].report(num_free_blocks=0)
        await eventually(lambda: membership.member("decode-0").view().num_free_blocks == 0)
        servicer = InferenceServicer(
            "tiny", TextCodec.from_directory(model_dir), membership, make_dispatcher(), RouterMetrics()
        )
        stopping = request_pb2.StoppingCriteria(max_tokens=2)
        request = inference_pb2.GenerateRequest(text="Hi", stopping=stopping)
        tasks.extend(asyncio.create_task(servicer.Generate(request, CallInMemory())) for _ in range(count))
        return tasks

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


QUEUE_LIMIT = 100  # of `make_dispatcher`


async def test_a_burst_in_the_same_moment_is_refused_before_it_is_tokenized(burst, tokenizer, eventually):
    tokenizer.go.set()
    tasks = await burst(5 * QUEUE_LIMIT)
    await eventually(lambda: sum(task.done() for task in tasks) == 4 * QUEUE_LIMIT)
    assert tokenizer.num_started == QUEUE_LIMIT
    assert {task.exception().reason for task in tasks if task.done()} == {"QUEUE_FULL"}


@pytest.mark.usefixtures("_all_are_long")
async def test_a_burst_of_long_texts_is_refused_before_nearly_all_are_tokenized(burst, tokenizer, eventually):
    """A few at a time are tokenized, beside the event loop, and the queue is looked at before each."""
    tasks = await burst(5 * QUEUE_LIMIT)
    await eventually(lambda: tokenizer.num_started == MAX_TOKENIZING)
    tokenizer.go.set()
    await eventually(lambda: sum(task.done() for task in tasks) == 4 * QUEUE_LIMIT)
    assert tokenizer.num_started < QUEUE_LIMIT + MAX_TOKENIZING


async def test_a_bad_request_is_a_bad_request_also_when_the_queue_is_full(start_router, pair, eventually):
    router, client = await start_router(*pair, max_waiting=1)
    pair[1].report(num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    reading = [asyncio.create_task(client.generate("Hi", max_tokens=2).read()) for _ in range(2)]
    (refused,), _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert isinstance(refused.exception(), ResourceExhausted)
    with pytest.raises(InvalidRequest, match=r"priority is 101; it must be in \[-100, 100\]"):
        await client.generate("Hi", max_tokens=2, priority=101).read()
    pair[1].report(num_free_blocks=64)
    await asyncio.gather(*reading, return_exceptions=True)


async def test_the_priority_reaches_both_workers(start_router, pair):
    _, client = await start_router(*pair)
    await client.generate("Hi", max_tokens=2, priority=-7).read()
    await client.generate("Hi", max_tokens=2).read()
    assert [request.priority for request in pair[0].prefill_requests] == [-7, 0]
    assert [request.priority for request in pair[1].decode_requests] == [-7, 0]


@pytest.fixture
def held(pair, messages):
    """Answers of both workers stop after two tokens until `go`."""
    go = asyncio.Event()

    async def decode(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(101)
        await go.wait()
        yield messages.tokens(102)
        yield messages.finished()

    pair[1].decode = decode
    return go


async def begin(client, request_id):
    """A request that has its first tokens."""
    stream = client.generate([1], max_tokens=3, request_id=request_id)
    while len(stream.token_ids) < 2:
        await anext(stream)
    return stream


async def test_abort_ends_exactly_the_requests_of_one_id(start_router, pair, held, eventually, is_released):
    router, client = await start_router(*pair)
    streams = {request_id: await begin(client, request_id) for request_id in ("a", "ab", "abc")}
    with pytest.raises(InvalidRequest, match="request_id is empty") as caught:
        await client.abort("")
    assert [violation.field for violation in caught.value.violations] == ["request_id"]
    assert [await client.abort(request_id) for request_id in ("b", "abcd", "A")] == [0, 0, 0]
    assert await client.abort("a") == 1
    with pytest.raises(Cancelled) as caught:
        await streams["a"].read()
    assert caught.value.reason == "ABORTED_BY_ID"
    assert caught.value.metadata["tokens_sent"] == "2"
    assert streams["a"].token_ids == [100, 101]
    await eventually(lambda: pair[1].open_calls == ["decode", "decode"])
    assert await client.abort("a") == 0
    held.set()
    for request_id in ("ab", "abc"):
        await streams[request_id].read()
        assert streams[request_id].token_ids == [100, 101, 102]
    await is_released(router, *pair)


async def test_two_requests_of_one_id_are_both_right_and_both_aborted(start_router, pair, held, is_released):
    router, client = await start_router(*pair)
    first = [await begin(client, "abc") for _ in range(2)]
    assert await client.abort("abc") == 2
    results = await asyncio.gather(*(stream.read() for stream in first), return_exceptions=True)
    assert [type(result) for result in results] == [Cancelled, Cancelled]
    await is_released(router, *pair)
    held.set()
    for _ in range(2):  # the id can be used again, also after its request has ended well
        again = client.generate([1], max_tokens=3, request_id="abc")
        await again.read()
        assert again.token_ids == [100, 101, 102]
    assert await client.abort("abc") == 0
    await is_released(router, *pair)


async def test_requests_without_an_id_are_aborted_by_the_one_they_got(start_router, pair, held, is_released):
    router, client = await start_router(*pair)
    streams = [await begin(client, "") for _ in range(10)]
    assert len({stream.request_id for stream in streams}) == 10
    with pytest.raises(InvalidRequest):
        await client.abort("")
    assert await client.abort(streams[3].request_id) == 1
    held.set()
    results = await asyncio.gather(*(stream.read() for stream in streams), return_exceptions=True)
    assert [i for i, result in enumerate(results) if isinstance(result, Cancelled)] == [3]
    assert all(stream.token_ids == [100, 101, 102] for i, stream in enumerate(streams) if i != 3)
    await is_released(router, *pair)


@pytest.mark.parametrize("is_queued", [False, True])
async def test_a_request_is_aborted_before_its_first_token(
    start_router, pair, connect, eventually, is_released, is_queued
):
    """In the queue it has reached nobody."""
    router, client = await start_router(*pair)
    pair[0].prefill, pair[1].decode = never, hold_reservation
    if is_queued:
        pair[1].report(num_free_blocks=0)
        await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    call = connect(router).generate(request_id="r-1")
    await call.initial_metadata()
    if not is_queued:
        await eventually(lambda: pair[0].open_calls and pair[1].open_calls)
    assert await client.abort("r-1") == 1
    assert await call.code() is grpc.StatusCode.CANCELLED
    await is_released(router, *pair)
    assert bool(pair[1].decode_requests) is not is_queued


async def test_a_stop_string_ends_the_workers_calls_at_the_token_that_completes_it(
    start_router, pair, messages, eventually
):
    """DEF comes from the prefill worker; the decode worker would go on for ever."""

    async def first(request):
        yield messages.first_token(DEF)

    async def go_on(request):
        yield messages.reserved()
        yield messages.committed()
        yield messages.tokens(57, 58, 59)  # I, J, K
        await asyncio.Event().wait()

    pair[0].prefill, pair[1].decode = first, go_on
    _, client = await start_router(*pair)
    stream = client.generate([1], max_tokens=16, stop=["EFIJ"])
    assert await stream.read() == "D"
    assert (stream.finish_reason, stream.stop_text, stream.stop_token_id) == ("stop", "EFIJ", None)
    assert stream.token_ids == [DEF, 57, 58]
    assert stream.usage.completion_tokens == 3
    await eventually(lambda: not pair[0].open_calls and not pair[1].open_calls)


async def test_a_stop_string_is_found_over_a_change_of_workers(start_router, pair, messages):
    num_calls = 0

    async def first(request):
        yield messages.first_token(DEF if DEF not in request.token_ids else 58)

    async def fail_once(request):
        nonlocal num_calls
        num_calls += 1
        yield messages.reserved()
        yield messages.committed()
        if num_calls == 1:
            yield messages.tokens(57)
            raise Unavailable("the worker dies here")
        yield messages.tokens(59, 60)
        await asyncio.Event().wait()

    pair[0].prefill, pair[1].decode = first, fail_once
    _, client = await start_router(*pair)
    stream = client.generate([1], max_tokens=16, stop=["EFIJK"], include_stop_in_output=True)
    assert await stream.read() == "DEFIJK"
    assert (stream.stop_text, stream.timeline.num_recoveries) == ("EFIJK", 1)
