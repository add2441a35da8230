import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest, ModelNotFound
from baton.v1.inference_pb2 import Chat, ChatMessage, Finish, GenerateRequest, TokenIds
from baton.v1.request_pb2 import SamplingParams, StoppingCriteria
from engine.text_codec import TextCodec
from router.validation import Defaults, Limits, check_fields, tokenize

HELLO = 38699  # " Hello"
LIMITS = Limits(context_window_tokens=64, kv_pool_tokens=1024)


@pytest.fixture(scope="module")
def codec(model_dir):
    return TextCodec.from_directory(model_dir)


def accept(request, codec, limits=LIMITS):
    """The request as the service makes it."""
    check_fields(request, model="tiny", vocab_size=codec.vocab_size, limits=limits)
    return tokenize(request, codec=codec, limits=limits, defaults=Defaults(request_id="made-here", seed=77))


@pytest.fixture
def check(codec):
    """Validates a request given by its fields; the prompt is one token unless told."""

    def run(limits=LIMITS, **fields):
        if not {"text", "token_ids", "chat"} & fields.keys():
            fields["token_ids"] = TokenIds(ids=[HELLO])
        return accept(GenerateRequest(**fields), codec, limits)

    return run


def refused(check, field, *parts, **request):
    """The request is refused for this field, with these words in the message."""
    with pytest.raises(InvalidRequest) as caught:
        check(**request)
    assert [v.field for v in caught.value.violations] == [field]
    for part in (field, *parts):
        assert part in caught.value.message


def chat(*turns):
    return Chat(messages=[ChatMessage(role=role, content=content) for role, content in turns])


def hellos(count):
    return TokenIds(ids=[HELLO] * count)


def test_a_text_is_tokenized_as_it_is(check, codec):
    assert check(text="The capital of France is").token_ids == tuple(codec.encode("The capital of France is"))
    assert len(check(text="The capital of France is").token_ids) == 5
    assert check(text=" ").token_ids == (216,)


def test_token_ids_are_used_as_they_are(check):
    """These read as a text that has other ids."""
    ids = [1780, 314, 252, 255, 3575]
    assert check(token_ids=TokenIds(ids=ids)).token_ids == tuple(ids)
    assert check(token_ids=TokenIds(ids=[0, 49151])).token_ids == (0, 49151)


def test_a_conversation_is_rendered(check):
    assert len(check(chat=chat(("user", "What is the capital of France?"))).token_ids) == 37
    assert check(chat=chat(("user", ""))).token_ids


def test_unset_fields_get_the_documented_defaults(check):
    request = check()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (1.0, 0, 1.0, 77)
    assert sampling.max_tokens == 63
    assert sampling.stop_token_ids == {2}
    assert (request.request_id, request.cache_salt, request.priority) == ("made-here", "", 0)


def test_zero_is_not_unset(check):
    sampling = check(sampling=SamplingParams(temperature=0, top_k=0, seed=0)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.0, 0, 0)


def test_every_number_whose_zero_means_something_has_presence():
    """Over the descriptors."""
    messages = [SamplingParams, StoppingCriteria]
    fields = [field for message in messages for field in message.DESCRIPTOR.fields]
    numbers = [f for f in fields if f.cpp_type != f.CPPTYPE_BOOL and not f.is_repeated]  # false is the default
    assert {f.name for f in numbers} == {"temperature", "top_k", "top_p", "seed", "max_tokens"}
    for field in (*numbers, Finish.DESCRIPTOR.fields_by_name["stop_token_id"]):
        assert field.has_presence, field.full_name


def test_values_that_are_set_arrive(check):
    request = check(
        request_id="r-1",
        model="tiny",
        cache_salt="tenant",
        sampling=SamplingParams(temperature=0.5, top_k=40, top_p=0.25, seed=2**64 - 1),
        stopping=StoppingCriteria(max_tokens=3, stop_token_ids=[5, 7]),
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 40, 0.25, 2**64 - 1)
    assert (sampling.max_tokens, sampling.stop_token_ids) == (3, {2, 5, 7})
    assert (request.request_id, request.cache_salt) == ("r-1", "tenant")


def test_ignore_eos_leaves_the_stop_tokens(check):
    ignoring = StoppingCriteria(ignore_eos=True, stop_token_ids=[5])
    assert check(stopping=ignoring).sampling.stop_token_ids == {5}
    naming = StoppingCriteria(ignore_eos=True, stop_token_ids=[2])
    assert check(stopping=naming).sampling.stop_token_ids == {2}


@pytest.mark.parametrize("top_k", [49152, 60000, 2**31 - 1])
def test_top_k_above_the_vocabulary_is_no_limit(check, top_k):
    assert check(sampling=SamplingParams(top_k=top_k)).sampling.top_k == 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 100.0])
def test_extreme_temperatures_are_fine(check, temperature):
    sampling = check(sampling=SamplingParams(temperature=temperature)).sampling
    assert math.isclose(sampling.temperature, temperature, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -1, "at least 0"),
        ("temperature", math.inf, "finite"),
        ("temperature", math.nan, "finite"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.5, "at most 1"),
        ("top_p", -0.1, "above 0"),
        ("top_p", math.nan, "above 0"),
        ("top_k", -1, "at least 0"),
    ],
)
def test_sampling_outside_its_range_is_refused(check, name, value, limit):
    refused(check, f"sampling.{name}", limit, sampling=SamplingParams(**{name: value}))


def test_all_wrong_sampling_fields_are_told_at_once(check):
    with pytest.raises(InvalidRequest) as caught:
        check(sampling=SamplingParams(temperature=-1, top_p=2, top_k=-3))
    assert {v.field for v in caught.value.violations} == {"sampling.temperature", "sampling.top_p", "sampling.top_k"}


def test_max_tokens_zero_is_refused(check):
    refused(check, "stopping.max_tokens", "0", "at least 1", stopping=StoppingCriteria(max_tokens=0))


def test_ids_outside_the_vocabulary_are_refused_by_index_value_and_size(check):
    refused(check, "token_ids.ids[1]", "49152", "[0, 49152)", token_ids=TokenIds(ids=[0, 49152]))
    refused(check, "token_ids.ids[0]", "-1", "49152", token_ids=TokenIds(ids=[-1]))
    stopping = StoppingCriteria(stop_token_ids=[3, 151645])
    refused(check, "stopping.stop_token_ids[1]", "151645", "49152", stopping=stopping)


def test_too_many_stop_ids_are_refused(check):
    stopping = StoppingCriteria(stop_token_ids=range(1025))
    refused(check, "stopping.stop_token_ids", "1025", "1024", stopping=stopping)


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("prompt", {"text": ""}),
        ("prompt", {"text": "\x04"}),  # not in this vocabulary: gives no tokens
        ("prompt", {"token_ids": TokenIds()}),
        ("chat.messages", {"chat": Chat()}),
    ],
)
def test_nothing_to_run_is_refused(check, field, request_fields):
    refused(check, field, **request_fields)


def test_a_request_without_a_prompt_is_refused(codec):
    with pytest.raises(InvalidRequest, match="set one of text, token_ids, chat"):
        accept(GenerateRequest(), codec)


def test_an_unknown_model_is_not_found(check):
    with pytest.raises(ModelNotFound, match=r"'huge'.*'tiny'"):
        check(model="huge")


@pytest.mark.parametrize("priority", [-100, -1, 0, 100])
def test_priorities_within_the_limits_arrive(check, priority):
    assert check(priority=priority).priority == priority


@pytest.mark.parametrize("priority", [-(2**31), -101, 101, 2**31 - 1])
def test_priorities_beyond_are_refused_with_value_and_limits(check, priority):
    refused(check, "priority", str(priority), "[-100, 100]", priority=priority)


@pytest.mark.parametrize("request_id", ["a b", "a\nb", "é", "\x00", "a\x7f", "x" * 129])
def test_unprintable_and_long_request_ids_are_refused(check, request_id):
    refused(check, "request_id", request_id=request_id)


def test_the_longest_request_id_and_salt_pass(check):
    assert check(request_id="x" * 128, cache_salt="s" * 256).request_id == "x" * 128
    refused(check, "cache_salt", "258", "256", cache_salt="é" * 129)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "granted"),
    [(62, None, 2), (62, 1, 1), (62, 2, 2), (63, None, 1), (63, 1, 1)],
)
def test_the_whole_window_can_be_used(check, num_prompt, max_tokens, granted):
    request = check(token_ids=hellos(num_prompt), stopping=StoppingCriteria(max_tokens=max_tokens))
    assert request.sampling.max_tokens == granted
    assert len(request.token_ids) == num_prompt


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "wanted"),
    [(62, 3, 3), (63, 2, 2), (64, None, 1), (64, 1, 1), (65, None, 1), (65, 3, 3), (1, 2**32 - 1, 2**32 - 1)],
)
def test_beyond_the_window_is_refused_with_the_numbers(check, num_prompt, max_tokens, wanted):
    stopping = StoppingCriteria(max_tokens=max_tokens)
    numbers = [str(num_prompt), str(wanted), "64"]
    refused(check, "prompt", *numbers, token_ids=hellos(num_prompt), stopping=stopping)


SMALL_POOL = Limits(context_window_tokens=256, kv_pool_tokens=128)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(127, 1), (128, 1), (100, 29), (5, 124)])
def test_what_needs_exactly_the_whole_pool_passes(check, num_prompt, max_tokens):
    """The last token's KV is never computed."""
    request = check(SMALL_POOL, token_ids=hellos(num_prompt), stopping=StoppingCriteria(max_tokens=max_tokens))
    assert request.sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("num_prompt", "max_tokens", "needed"), [(129, 1, 129), (100, 100, 199), (128, 2, 129)])
def test_what_never_fits_the_pool_is_refused_with_both_numbers(check, num_prompt, max_tokens, needed):
    stopping = StoppingCriteria(max_tokens=max_tokens)
    request = {"limits": SMALL_POOL, "token_ids": hellos(num_prompt), "stopping": stopping}
    refused(check, "prompt", str(needed), "128", **request)


def test_unset_max_tokens_takes_what_the_pool_leaves(check):
    assert check(SMALL_POOL, token_ids=hellos(100)).sampling.max_tokens == 29


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a" * 5_000_000},
        {"text": "Hi", "sampling": SamplingParams(top_p=2)},
        {"text": "Hi", "stopping": StoppingCriteria(max_tokens=0)},
        {"text": "Hi", "request_id": "\n"},
        {"text": "Hi", "priority": 101},
    ],
)
def test_cheap_checks_come_before_tokenizing(codec, fields):
    with pytest.raises(InvalidRequest):
        check_fields(GenerateRequest(**fields), model="tiny", vocab_size=codec.vocab_size, limits=LIMITS)


def test_a_request_of_too_many_bytes_is_refused_with_both_numbers(check):
    refused(check, "text", str(1 << 20), text="a" * 2_000_000)


def test_a_conversation_the_template_rejects_is_refused(model_dir, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(model_dir / name)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('unknown role') }}")
    codec = TextCodec.from_directory(tmp_path)
    request = GenerateRequest(chat=chat(("judge", "Hi")))
    with pytest.raises(InvalidRequest, match="unknown role") as caught:
        accept(request, codec)
    assert caught.value.violations[0].field == "chat.messages"


def test_what_is_accepted_always_fits(check):
    @settings(max_examples=200)
    @given(st.integers(0, 40), st.none() | st.integers(0, 40), st.integers(1, 32), st.integers(1, 32))
    def fits(num_prompt, max_tokens, window, pool):
        limits = Limits(context_window_tokens=window, kv_pool_tokens=pool)
        wanted = 1 if max_tokens is None else max_tokens
        can_fit = num_prompt and wanted and num_prompt + wanted <= window and num_prompt + wanted - 1 <= pool
        stopping = StoppingCriteria(max_tokens=max_tokens)
        if not can_fit:
            with pytest.raises(InvalidRequest):
                check(limits, token_ids=hellos(num_prompt), stopping=stopping)
            return
        granted = check(limits, token_ids=hellos(num_prompt), stopping=stopping).sampling.max_tokens
        assert granted >= 1
        if max_tokens is None:
            assert num_prompt + granted == min(window, pool + 1)
        else:
            assert granted == max_tokens

    fits()


@pytest.mark.parametrize(
    ("stop", "field", "parts"),
    [
        ([""], "stopping.stop[0]", ["0 characters", "256"]),
        (["abc", ""], "stopping.stop[1]", ["0 characters", "256"]),
        (["a" * 257], "stopping.stop[0]", ["257", "256"]),
        (["a"] * 17, "stopping.stop", ["17", "16"]),
    ],
)
def test_stop_strings_beyond_the_limits_are_refused(check, stop, field, parts):
    refused(check, field, *parts, stopping=StoppingCriteria(stop=stop))


def test_stop_strings_at_the_limits_are_accepted(check):
    assert check(stopping=StoppingCriteria(stop=["a" * 256] * 16)).token_ids == (HELLO,)
