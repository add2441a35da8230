"""The router in front of real workers: what only shows when all parts are there."""

import asyncio

import pytest
import pytest_asyncio
from worker_rig import ALPHABET, ALPHABET_ANSWER, COUNT, COUNT_ANSWER, HELLO, HELLO_ANSWER, decode_request, read

from baton.aio_client import AsyncClient
from baton.errors import Aborted, BatonError, Cancelled, DeadlineExceeded, InvalidRequest, Unavailable
from baton.v1 import request_pb2
from router.server import RouterServer, RouterSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

CAPITAL_CHAT = [{"role": "user", "content": "What is the capital of France?"}]
CAPITAL_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # by transformers; 2 is the end token
LOCAL_PREFILL_MAX_TOKENS = 4


@pytest_asyncio.fixture(loop_scope="session")
async def router(workers, model_dir, eventually):
    started = RouterServer()
    spec = RouterSpec(
        str(model_dir), "smollm2", local_prefill_max_tokens=LOCAL_PREFILL_MAX_TOKENS, recovery_patience_s=1.0
    )
    started.address = await started.start(spec)
    await started.set_workers([worker.address for worker in workers])
    await eventually(lambda: started.ready)
    yield started
    await started.stop(grace_s=0)


@pytest_asyncio.fixture(loop_scope="session")
async def client(router):
    async with AsyncClient(router.address, timeout_s=30.0) as opened:
        yield opened


async def answer(client, prompt, **options):
    stream = client.generate(prompt, **({"temperature": 0.0, "max_tokens": 5} | options))
    await stream.read()
    return stream


def is_idle(router):
    return all((v.sent_sequences, v.sent_prompt_tokens, v.sent_blocks) == (0, 0, 0) for v in router._membership.views())


async def test_text_goes_through_both_workers(client, router):
    stream = await answer(client, ALPHABET)
    assert stream.token_ids == ALPHABET_ANSWER
    assert stream.text == "DEFGHIJK"
    t = stream.timeline
    assert (t.path, t.prefill_worker, t.decode_worker) == (request_pb2.PATH_DISAGGREGATED, "prefill-0", "decode-0")
    assert (t.kv_bytes, t.transport) == (7 * 46_080, "grpc")
    assert t.queue_s + t.reserve_s + t.dispatch_s + t.prefill_queue_s + t.prefill_s == pytest.approx(t.ttft_s)
    assert t.first_decode_step_s > 0
    assert is_idle(router)


async def test_a_conversation_ends_by_itself(client):
    stream = await answer(client, CAPITAL_CHAT, max_tokens=16)
    assert stream.text == "The capital of France is Paris."
    assert stream.token_ids == CAPITAL_ANSWER
    assert (stream.finish_reason, stream.stop_token_id) == ("stop", 2)
    assert stream.usage.completion_tokens == 8


async def test_the_next_turn_finds_the_last_one(client):
    """The prompt and the answer of turn 1 are cached where they live, in whole blocks."""
    await answer(client, CAPITAL_CHAT, max_tokens=16)
    turns = [
        *CAPITAL_CHAT,
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Spain?"},
    ]
    stream = await answer(client, turns, max_tokens=16)
    assert stream.text == "The capital of Spain is Madrid."
    assert stream.num_prompt_tokens == 59
    assert (stream.usage.prefill_cached_tokens, stream.usage.decode_cached_tokens) == (32, 32)


async def test_ids_in_are_the_ids_used(client):
    """Both read "What is the capital"."""
    first = await answer(client, [1780, 314, 260, 3575])
    second = await answer(client, [1780, 314, 252, 255, 3575])
    assert first.token_ids == [282, 4649, 47, 2]
    assert second.token_ids == [282, 260, 905, 47, 2]
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (4, 5)


@pytest.mark.parametrize(("max_tokens", "token_ids"), [(1, [7042]), (2, [7042, 30])])
async def test_max_tokens_one_and_two(client, max_tokens, token_ids):
    stream = await answer(client, "The capital of France is", max_tokens=max_tokens)
    assert (stream.token_ids, stream.finish_reason) == (token_ids, "length")
    assert stream.timeline.decode_worker == ("prefill-0" if max_tokens == 1 else "decode-0")


async def test_the_end_token_as_the_very_first_token(client, workers, eventually):
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nThe capital of France is Paris."
    )
    stream = await answer(client, prompt, max_tokens=16)
    assert stream.num_prompt_tokens == 44
    assert (stream.text, stream.finish_reason, stream.stop_token_id) == ("", "stop", 2)
    assert (stream.token_ids, stream.usage.completion_tokens) == ([2], 1)
    await eventually(lambda: all(worker.is_clean for worker in workers))
    going_on = await answer(client, prompt, max_tokens=4, ignore_eos=True)
    assert len(going_on.token_ids) == 4


async def test_a_stop_token_of_ordinary_text_as_the_very_first_token(client):
    stream = await answer(client, ALPHABET, max_tokens=16, stop_token_ids=ALPHABET_ANSWER[:1])
    assert (stream.text, stream.finish_reason, stream.stop_token_id) == ("", "stop", ALPHABET_ANSWER[0])


@pytest.mark.parametrize(("path", "num_more"), [("local", LOCAL_PREFILL_MAX_TOKENS), ("pair", 5)])
async def test_a_prompt_that_is_nearly_cached_is_prefilled_where_it_is(client, path, num_more):
    await answer(client, [HELLO] * 32)
    stream = await answer(client, [HELLO] * (32 + num_more))
    paths = {"local": request_pb2.PATH_LOCAL_PREFILL, "pair": request_pb2.PATH_DISAGGREGATED}
    assert stream.timeline.path == paths[path]
    assert len(stream.token_ids) == 5
    t = stream.timeline
    assert t.queue_s + t.reserve_s + t.dispatch_s + t.prefill_queue_s + t.prefill_s == pytest.approx(t.ttft_s)


async def test_requests_of_one_id_do_not_cross(client):
    streams = await asyncio.gather(*(answer(client, text, request_id="abc") for text in (ALPHABET, COUNT)))
    assert [stream.token_ids for stream in streams] == [ALPHABET_ANSWER, COUNT_ANSWER]
    assert (await answer(client, ALPHABET, request_id="abc")).token_ids == ALPHABET_ANSWER


async def test_requests_wait_for_a_full_decode_worker_and_all_end(client, workers, router, eventually):
    """Together they would need 6 of the 4 blocks there are."""
    holder = workers[1].decode(decode_request([1] * 447))
    await read(holder, "reserved")
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 4)
    streams = await asyncio.gather(*(answer(client, [HELLO] * n) for n in (16, 32, 33, 32)))
    assert [stream.token_ids for stream in streams] == [HELLO_ANSWER] * 4
    holder.cancel()


async def test_what_can_never_fit_is_refused_and_stands_in_nobodys_way(client):
    """The smaller pool, of the decode worker, holds 512 tokens."""
    with pytest.raises(InvalidRequest, match=r"513.*512"):
        await answer(client, [1] * 400, max_tokens=114)
    assert (await answer(client, ALPHABET)).token_ids == ALPHABET_ANSWER


async def test_clients_that_go_away_leave_nothing(client, workers, router, eventually):
    """With their KV on its way, while 3 others with the same prompt go on."""
    prefill, decode = workers
    decode.gate.shut()
    streams = [client.generate([HELLO] * 33, temperature=0.0, max_tokens=5) for _ in range(6)]
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await eventually(lambda: len(decode.gate.frames) >= 6)
    for stream in streams[:3]:
        stream.cancel()
    results = await asyncio.gather(*reading[:3], return_exceptions=True)
    assert [type(result) for result in results] == [Cancelled] * 3
    decode.gate.open()
    await asyncio.gather(*reading[3:])
    assert [stream.token_ids for stream in streams[3:]] == [HELLO_ANSWER] * 3
    await eventually(lambda: prefill.is_clean and decode.is_clean and is_idle(router))


async def test_the_deadline_counts_while_tokens_flow(client, workers, eventually):
    with pytest.raises(DeadlineExceeded):
        await answer(client, ALPHABET, max_tokens=400, ignore_eos=True, timeout_s=0.5)
    await eventually(lambda: all(worker.is_clean for worker in workers))
    assert (await answer(client, ALPHABET)).token_ids == ALPHABET_ANSWER


@pytest.mark.parametrize("dies", ["prefill", "decode"])
async def test_a_worker_that_dies_in_the_middle_of_a_transfer(client, workers, router, eventually, dies):
    """One typed error, soon; the other worker is clean, and the router counts nothing."""
    prefill, decode = workers
    decode.gate.shut()
    reading = asyncio.create_task(answer(client, [HELLO] * 33))
    await eventually(lambda: decode.gate.frames)
    dead, survivor = (prefill, decode) if dies == "prefill" else (decode, prefill)
    await dead.server.stop(grace=0)
    async with asyncio.timeout(5):
        with pytest.raises((Unavailable, Aborted)) as caught:
            await reading
    assert isinstance(caught.value, BatonError)
    decode.gate.open()
    await eventually(lambda: survivor.is_clean and is_idle(router))
    assert decode.num_cached_blocks == 0


async def test_equal_seeds_give_equal_answers(client):
    """Token 0 of the prefill worker, the rest of the decode worker, or all of it of one of them."""
    options = {"temperature": 1.0, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    split = await answer(client, [HELLO] * 36, **options)
    local = await answer(client, [HELLO] * 36, **options)
    other = await answer(client, [HELLO] * 36, **(options | {"seed": 8}))
    assert local.timeline.path == request_pb2.PATH_LOCAL_PREFILL
    assert split.token_ids == local.token_ids
    assert split.token_ids != other.token_ids


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFGHIJ", ""),
        ("GHIJK", "DEF"),
        ("FG", "DE"),
        ("DEFGX", "DEFGHIJKLMNOP"),  # what was kept back is not lost
        ("CDE", "DEFGHIJKLMNOP"),  # the prompt ends with C
        (["JK", "HI"], "DEFG"),
        ([], "DEFGHIJKLMNOP"),
    ],
)
async def test_stop_strings_do_not_follow_token_borders(client, router, eventually, stop, text):
    stream = client.generate(ALPHABET, temperature=0.0, max_tokens=8, stop=stop)
    pieces = [chunk.text async for chunk in stream]
    assert "".join(pieces) == text
    is_whole = text.endswith("P")
    assert stream.finish_reason == ("length" if is_whole else "stop")
    assert (stream.stop_text is None) == is_whole
    await eventually(lambda: is_idle(router))


async def test_a_stop_string_inside_the_first_token(client):
    stream = await answer(client, "The capital of France is", stop=["Pari"])
    assert (stream.text, stream.stop_text, stream.token_ids) == (" ", "Pari", [7042])


async def test_a_stop_string_of_several_tokens_for_one_character(client):
    chat = [{"role": "user", "content": "Reply with only emojis: 😀 🔥 👍"}]
    stream = await answer(client, chat, max_tokens=12, stop=["🔥"])
    assert (stream.text, stream.token_ids) == ("👍", [10813, 235, 231, 10813, 238, 115])
