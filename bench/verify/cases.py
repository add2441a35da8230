"""What a cluster is asked: real prompts of every kind, at the edges of KV blocks, greedy and seeded. Pure."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.answer import GenerateOptions, Prompt
from engine.sampling_params import SamplingParams

# Around one and two KV blocks of 16 tokens.
EDGE_LENGTHS = (15, 16, 17, 31, 32, 33)
LONG_LENGTH = 300

_CAPITAL = "The capital of France is"
_COUNT = "1, 2, 3, 4, 5,"
_UNICODE = "Grüße aus Zürich: naïve façades, Ελληνικά, Привет, 東京の天気は"
_EMOJI = "👩‍👩‍👧‍👦 went to 🇫🇮 ☀️ 🏖️ and then to"
_STOP_TEXT = ","
_PASSAGE = """The ferry leaves the old harbour at seven in the morning, before the market opens. On the quay the \
fishermen mend their nets and talk about the weather; a boy counts the gulls on the roof of the customs house. By noon \
the wind has turned, the bay is grey, and the lighthouse keeper writes the first line of the day into his book: rain \
from the west, two ships in, none out. He has kept the book for thirty years, and his father kept it before him. """


@dataclass(frozen=True, slots=True)
class Case:
    """One request: `token_ids` is what `prompt` should become, `sampling` all that decides the answer.

    `sampling.stop_token_ids` has the model's end tokens too unless they are ignored; `own_stop_ids` has not.
    """

    kind: str
    prompt: Prompt
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    own_stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def options(self) -> GenerateOptions:
        """The request as the client library takes it."""
        sampling = self.sampling
        return {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": self.own_stop_ids,
            "ignore_eos": self.ignore_eos,
        }

    @property
    def how(self) -> str:
        """How its tokens are chosen, in few words."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return "greedy"
        top_k = f" k={sampling.top_k}" if sampling.top_k else ""
        top_p = f" p={sampling.top_p:.3g}" if sampling.top_p < 1 else ""
        return f"seed {sampling.seed}{top_k}{top_p}"


class PromptEncoder(Protocol):
    """The text side of the model, by an implementation that is not the cluster's."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Token ids of a conversation; None if the model has no chat template."""
        ...


def make_cases(encoder: PromptEncoder, eos_token_ids: Sequence[int], max_tokens: int) -> list[Case]:
    """All cases, of at most `max_tokens` generated tokens each."""
    return [*_chats(encoder, eos_token_ids, max_tokens), *_texts(encoder, eos_token_ids, max_tokens)] + [
        Case(f"{len(token_ids)} token ids", token_ids, tuple(token_ids), sampling, ignore_eos=True)
        for token_ids, sampling in _token_ids(encoder, max_tokens)
    ]


def greedy(max_tokens: int, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
    """The likeliest token each time."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids))


def seeded(
    seed: int, max_tokens: int, stop_token_ids: Sequence[int] = (), *, top_k: int = 0, top_p: float = 1.0
) -> SamplingParams:
    """Drawn at temperature 0.8. Numbers are as a request carries them, in single precision."""
    return SamplingParams(
        temperature=_single(0.8),
        top_k=top_k,
        top_p=_single(top_p),
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids),
    )


def _chats(encoder: PromptEncoder, eos: Sequence[int], max_tokens: int) -> Iterator[Case]:
    question = {"role": "user", "content": "What is the capital of France?"}
    talk = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a river in Germany."},
        {"role": "assistant", "content": "The Rhine."},
        {"role": "user", "content": f"And what does this say? {_UNICODE} {_EMOJI}"},
    ]
    for kind, messages, sampling in (
        ("chat", [question], greedy(max_tokens, eos)),
        ("chat", [question], seeded(1, max_tokens, eos, top_p=0.95)),
        ("chat, emoji", talk, greedy(max_tokens, eos)),
        ("chat, emoji", talk, seeded(2, max_tokens, eos, top_k=40)),
    ):
        token_ids = encoder.encode_chat(messages)
        if token_ids is not None:
            yield Case(kind, messages, tuple(token_ids), sampling)


def _texts(encoder: PromptEncoder, eos: Sequence[int], max_tokens: int) -> Iterator[Case]:
    for kind, text, sampling in (
        ("text", _CAPITAL, greedy(max_tokens, eos)),
        ("text", _CAPITAL, seeded(0, max_tokens, eos)),
        ("text", _CAPITAL, seeded(2**64 - 1, max_tokens, eos, top_k=20, top_p=0.9)),
        ("text, one token", _CAPITAL, greedy(1, eos)),
        ("text, one token", _CAPITAL, seeded(3, 1, eos)),
        ("text, a word", "Hello", greedy(max_tokens, eos)),
        ("text, unicode", _UNICODE, greedy(max_tokens, eos)),
        ("text, unicode", _UNICODE, seeded(4, max_tokens, eos, top_p=0.95)),
        ("text, emoji", _EMOJI, greedy(max_tokens, eos)),
        ("text, emoji", _EMOJI, seeded(5, max_tokens, eos)),
    ):
        yield Case(kind, text, tuple(encoder.encode(text)), sampling)
    stop_id = encoder.encode(_STOP_TEXT)[-1]
    yield Case(
        "text, stop token",
        _COUNT,
        tuple(encoder.encode(_COUNT)),
        greedy(max_tokens, [*eos, stop_id]),
        own_stop_ids=(stop_id,),
    )


def _token_ids(encoder: PromptEncoder, max_tokens: int) -> Iterator[tuple[list[int], SamplingParams]]:
    passage = encoder.encode(_PASSAGE)
    lengths = (*EDGE_LENGTHS, LONG_LENGTH)
    for i, length in enumerate(lengths):
        # Each begins at another word.
        token_ids = (passage[i:] + passage * (length // len(passage) + 1))[:length]
        yield token_ids, greedy(max_tokens)
        yield token_ids, seeded(100 + i, max_tokens, top_k=(0, 50)[i % 2], top_p=(0.95, 1.0, 0.9)[i % 3])


def _single(number: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)
