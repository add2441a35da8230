"""From a request message to a prompt that can be served, or an error that says what to change. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.answer import MAX_PRIORITY, MIN_PRIORITY
from baton.errors import FieldViolation, InvalidRequest, ModelNotFound
from baton.v1.inference_pb2 import GenerateRequest
from baton.v1.request_pb2 import SamplingParams as SamplingMessage
from baton.v1.request_pb2 import StoppingCriteria
from engine.chat_encoder import ChatTemplateError
from engine.sampling_params import SamplingParams
from engine.text_codec import TextCodec

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_BYTES = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What can be served at all.

    `kv_pool_tokens` is the KV capacity of the smallest worker a request must fit into. `max_request_bytes`
    bounds the work of tokenizing.
    """

    context_window_tokens: int
    kv_pool_tokens: int
    max_request_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the router fills in where a request says nothing: drawn anew for each request."""

    request_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request that fits: tokenized, with nothing left to default. The lower its priority, the earlier its turn."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int = 0


def check_fields(request: GenerateRequest, *, model: str, vocab_size: int, limits: Limits) -> None:
    """Checks all of a request that can be checked without tokenizing it.

    Raises InvalidRequest with the fields at fault, and ModelNotFound if it is not for the served `model`.
    """
    if request.model not in ("", model):
        raise ModelNotFound(f"model {request.model[:128]!r} is not served here; the served model is {model!r}")
    _refuse(_request_violations(request, limits))
    _refuse(_sampling_violations(request.sampling))
    _refuse(_stopping_violations(request.stopping, vocab_size))


def tokenize(request: GenerateRequest, *, codec: TextCodec, limits: Limits, defaults: Defaults) -> PromptRequest:
    """Tokenizes a request whose fields were checked, and checks that it fits.

    Nothing is ever cut to fit. Unset max_tokens means what context window and KV pool leave. Raises InvalidRequest.
    """
    token_ids = _token_ids(request, codec)
    max_tokens = _max_tokens(len(token_ids), request.stopping, limits)
    return PromptRequest(
        request_id=request.request_id or defaults.request_id,
        token_ids=token_ids,
        sampling=_sampling(request, codec, max_tokens, defaults.seed),
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _refuse(violations: Iterator[FieldViolation]) -> None:
    found = list(violations)
    if found:
        raise InvalidRequest("; ".join(f"{v.field} {v.description}" for v in found), violations=found)


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {description}", violations=[FieldViolation(field, description)])


def _request_violations(request: GenerateRequest, limits: Limits) -> Iterator[FieldViolation]:
    request_id = request.request_id
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        yield FieldViolation(
            "request_id", f"has {len(request_id)} characters; at most {MAX_REQUEST_ID_CHARS} are allowed"
        )
    if not (request_id.isascii() and request_id.isprintable()) or " " in request_id:
        yield FieldViolation("request_id", "may hold only printable ASCII characters, without spaces")
    salt_bytes = len(request.cache_salt.encode())
    if salt_bytes > MAX_CACHE_SALT_BYTES:
        yield FieldViolation("cache_salt", f"has {salt_bytes} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed")
    if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
        yield FieldViolation(
            "priority", f"is {request.priority}; it must be in [{MIN_PRIORITY}, {MAX_PRIORITY}], the lower the earlier"
        )
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        yield FieldViolation("prompt", "is missing: set one of text, token_ids, chat")
    elif request.ByteSize() > limits.max_request_bytes:
        yield FieldViolation(
            prompt, f"makes a request of {request.ByteSize()} bytes; at most {limits.max_request_bytes} are allowed"
        )


def _sampling_violations(sampling: SamplingMessage) -> Iterator[FieldViolation]:
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if not (math.isfinite(temperature) and temperature >= 0):
        yield FieldViolation("sampling.temperature", f"is {temperature:g}; it must be finite and at least 0")
    if top_k < 0:
        yield FieldViolation("sampling.top_k", f"is {top_k}; it must be at least 0, which is no limit")
    if sampling.HasField("top_p") and not 0 < top_p <= 1:
        yield FieldViolation("sampling.top_p", f"is {top_p:g}; it must be above 0 and at most 1")


def _stopping_violations(stopping: StoppingCriteria, vocab_size: int) -> Iterator[FieldViolation]:
    if stopping.HasField("max_tokens") and stopping.max_tokens == 0:
        yield FieldViolation("stopping.max_tokens", "is 0; it must be at least 1")
    num_stop_ids = len(stopping.stop_token_ids)
    if num_stop_ids > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stopping.stop_token_ids", f"has {num_stop_ids} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    yield from _token_id_violations("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)
    if len(stopping.stop) > MAX_STOP_STRINGS:
        yield FieldViolation(
            "stopping.stop", f"has {len(stopping.stop)} strings; at most {MAX_STOP_STRINGS} are allowed"
        )
    for i, stop in enumerate(stopping.stop[:MAX_STOP_STRINGS]):
        if not 0 < len(stop) <= MAX_STOP_STRING_CHARS:
            yield FieldViolation(
                f"stopping.stop[{i}]", f"has {len(stop)} characters; 1 to {MAX_STOP_STRING_CHARS} are allowed"
            )


def _token_id_violations(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[FieldViolation]:
    """The first id outside the vocabulary: one says it."""
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            yield FieldViolation(f"{field}[{i}]", f"is {token_id}; it must be in [0, {vocab_size}), the vocabulary")
            return


def _token_ids(request: GenerateRequest, codec: TextCodec) -> tuple[int, ...]:
    if request.HasField("token_ids"):
        token_ids = list(request.token_ids.ids)
        _refuse(_token_id_violations("token_ids.ids", token_ids, codec.vocab_size))
    elif request.HasField("text"):
        token_ids = codec.encode(request.text)
    else:
        token_ids = _encode_chat(request, codec)
    if not token_ids:
        raise _invalid("prompt", "is empty: there are no tokens to continue from")
    return tuple(token_ids)


def _encode_chat(request: GenerateRequest, codec: TextCodec) -> list[int]:
    messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
    try:
        return codec.encode_chat(messages)
    except ChatTemplateError as error:
        raise _invalid("chat.messages", f"cannot be used: {error}") from error


def _max_tokens(num_prompt_tokens: int, stopping: StoppingCriteria, limits: Limits) -> int:
    """Tokens to generate: what was asked for, or all that fits. Prompt and answer share the context window;
    the KV pool must hold all of them but the last token, whose KV nobody reads.
    """
    is_set = stopping.HasField("max_tokens")
    wanted = stopping.max_tokens if is_set else 1
    window_room = limits.context_window_tokens - num_prompt_tokens
    pool_room = limits.kv_pool_tokens + 1 - num_prompt_tokens
    request = f"has {num_prompt_tokens} tokens and {'max_tokens is' if is_set else 'needs room for'} {wanted}"
    if wanted > window_room:
        raise _invalid(
            "prompt",
            f"{request}: together {num_prompt_tokens + wanted}; the context window is "
            f"{limits.context_window_tokens} tokens. Shorten the prompt or lower max_tokens",
        )
    if wanted > pool_room:
        raise _invalid(
            "prompt",
            f"{request}: the KV of {num_prompt_tokens + wanted - 1} tokens can never fit; a worker's KV pool "
            f"holds {limits.kv_pool_tokens}. Shorten the prompt or lower max_tokens",
        )
    return stopping.max_tokens if is_set else min(window_room, pool_room)


def _sampling(request: GenerateRequest, codec: TextCodec, max_tokens: int, drawn_seed: int) -> SamplingParams:
    sampling, stopping = request.sampling, request.stopping
    eos_token_ids = frozenset() if stopping.ignore_eos else codec.eos_token_ids
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k if sampling.top_k < codec.vocab_size else 0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        seed=sampling.seed if sampling.HasField("seed") else drawn_seed,
        max_tokens=max_tokens,
        stop_token_ids=eos_token_ids | frozenset(stopping.stop_token_ids),
    )
