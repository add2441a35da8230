"""What both clients share: how a request is built and how the pieces of its answer are put together. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from google.protobuf.message import Message

from baton.errors import FieldViolation, InternalError, InvalidRequest
from baton.v1 import inference_pb2, request_pb2

REQUEST_ID_KEY = "x-request-id"
MIN_PRIORITY, MAX_PRIORITY = -100, 100
DEFAULT_TIMEOUT_S = 600.0
MODEL_INFO_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 10.0

ChatMessages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | ChatMessages

_FINISH_REASONS: Mapping[int, str] = {
    request_pb2.FINISH_REASON_STOP: "stop",
    request_pb2.FINISH_REASON_LENGTH: "length",
}


class GenerateOptions(TypedDict, total=False):
    """What may be said about a request besides its prompt; None and left out are the same: the default.

    temperature: >= 0, 0 is greedy, default 1. top_k: most likely tokens kept, default no limit. top_p: in
    (0, 1], default 1. seed: default random. max_tokens: default what the context window leaves.
    stop_token_ids: end the answer, beside the model's end tokens, which ignore_eos switches off.
    stop: strings that end the answer, whose text ends before them, or after with include_stop_in_output.
    timeout_s: seconds for the whole answer, default the client's. model: default the only one served.
    request_id: default one that the server makes. cache_salt: who gives the same shares the prefix cache.
    priority: in [-100, 100], the lower the earlier its turn, default 0.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: str | Sequence[str] | None
    include_stop_in_output: bool
    timeout_s: float | None
    model: str
    request_id: str
    cache_salt: str
    priority: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of an answer. `text` may lag behind `token_ids` while a character is incomplete."""

    text: str
    token_ids: tuple[int, ...]


class Answer:
    """An answer as far as it has arrived.

    None until its end: `finish_reason` ("stop" or "length"), `stop_token_id` and `stop_text` (None also if no stop
    token or string ended it), `usage` (token counts) and `timeline` (where the time went, seconds).
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_token_id: int | None = None
        self.stop_text: str | None = None
        self.usage: request_pb2.Usage | None = None
        self.timeline: request_pb2.Timeline | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> list[int]:
        """All generated token ids so far."""
        return list(self._token_ids)

    def fold(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """Adds one message; returns its piece, or None if it brought no text and no tokens."""
        if response.HasField("prompt_info"):
            self.num_prompt_tokens = response.prompt_info.num_prompt_tokens
        if response.HasField("finish"):
            self._fold_finish(response.finish)
        if not response.text and not response.token_ids:
            return None
        self._texts.append(response.text)
        self._token_ids.extend(response.token_ids)
        return Chunk(response.text, tuple(response.token_ids))

    def check_finished(self) -> None:
        """Raises InternalError if the stream has ended well, but before its last message."""
        if self.finish_reason is None:
            raise InternalError("the answer ended without its last message", reason="INCOMPLETE_ANSWER")

    def _fold_finish(self, finish: inference_pb2.Finish) -> None:
        self.finish_reason = _FINISH_REASONS.get(finish.reason, "unknown")
        self.stop_token_id = finish.stop_token_id if finish.HasField("stop_token_id") else None
        self.stop_text = finish.stop_text if finish.HasField("stop_text") else None
        self.usage = finish.usage
        self.timeline = finish.timeline


def build_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request message. Raises InvalidRequest for what no message can hold, so nothing of it is sent.

    An empty list is an empty list of token ids. Raises TypeError for an option that does not exist.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        known = sorted(GenerateOptions.__annotations__)
        raise TypeError(f"unknown options {sorted(unknown)}; known are {known}")
    request = inference_pb2.GenerateRequest()
    for name in ("request_id", "model", "cache_salt", "priority"):
        _set(request, name, options.get(name), name)
    for name in ("temperature", "top_k", "top_p", "seed"):
        _set(request.sampling, name, options.get(name), f"sampling.{name}")
    for name in ("max_tokens", "ignore_eos", "include_stop_in_output"):
        _set(request.stopping, name, options.get(name), f"stopping.{name}")
    stop_token_ids = options.get("stop_token_ids") or ()
    _extend(request.stopping.stop_token_ids, stop_token_ids, "stopping.stop_token_ids", "token ids")
    stop = options.get("stop")
    if stop is not None:
        _extend(request.stopping.stop, [stop] if isinstance(stop, str) else stop, "stopping.stop", "strings")
    _set_prompt(request, prompt)
    return request


def build_abort(request_id: str) -> inference_pb2.AbortRequest:
    """The message that aborts requests of this id. Raises InvalidRequest for what no message can hold."""
    request = inference_pb2.AbortRequest()
    _set(request, "request_id", request_id, "request_id")
    return request


def request_id_of(metadata: Any) -> str:
    """The request id that a server tells in its initial metadata, or nothing."""
    return next((str(value) for key, value in metadata or () if key == REQUEST_ID_KEY), "")


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt, "text")
        return
    if prompt and isinstance(prompt[0], Mapping):
        for i, message in enumerate(prompt):
            _add_message(request.chat, message, f"chat.messages[{i}]")
        return
    request.token_ids.SetInParent()
    _extend(request.token_ids.ids, prompt, "token_ids.ids", "token ids")


def _add_message(chat: inference_pb2.Chat, message: Any, path: str) -> None:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise _invalid(path, "must be a dict with exactly the keys role and content")
    added = chat.messages.add()
    for name in ("role", "content"):
        if not isinstance(message[name], str):
            raise _invalid(f"{path}.{name}", f"must be text, not {type(message[name]).__name__}")
        _set(added, name, message[name], f"{path}.{name}")


def _set(message: Message, name: str, value: object, path: str) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except UnicodeEncodeError as error:
        raise _invalid(path, f"is not valid Unicode: {error.reason} at index {error.start}") from error
    except (TypeError, ValueError) as error:
        raise _invalid(path, f"cannot be sent: {error}") from error


def _extend(field: Any, values: Any, path: str, what: str) -> None:
    try:
        field.extend(values)
    except (TypeError, ValueError) as error:
        raise _invalid(path, f"must be a list of {what}: {error}") from error


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest(f"{path} {description}", violations=[FieldViolation(path, description)])
