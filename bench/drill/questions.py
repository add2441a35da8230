"""What a drill asks: a fixed set of prompts of real words, each with one right answer. Pure."""

import random
from collections.abc import Callable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

# Every fourth question is sampled, with a seed of its own; the others are greedy.
_SAMPLED_EVERY = 4
_TEMPERATURE = 0.8
_WEATHER = ("mild and grey", "clear with a light wind", "wet until noon", "cold but bright", "stormy near the coast")
_CARGO = ("timber", "salt fish", "copper wire", "oranges", "window glass", "grain", "printing paper")
_NEWS = (
    "The harbour master asked for two more lamps at the northern pier.",
    "Nobody had seen the old ferry since the market closed.",
    "The children counted every mast before breakfast.",
    "A letter from the islands arrived after all, five weeks late.",
    "In the evening the crane was repaired and worked again.",
)


@dataclass(frozen=True, slots=True)
class QuestionShape:
    """How long prompts and answers are, in tokens: lengths of a set grow by equal factors from end to end."""

    prompt_tokens: tuple[int, int] = (40, 600)
    output_tokens: tuple[int, int] = (16, 64)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and how it is to be answered: exactly `max_tokens` tokens, greedy at temperature 0."""

    number: int
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


def make_questions(num_questions: int, shape: QuestionShape, encode: Encode, seed: int) -> list[Question]:
    """Always the same for a seed. No two begin with the same block of tokens."""
    generator = random.Random(seed)
    prompt_lengths = _spread(num_questions, shape.prompt_tokens)
    output_lengths = _spread(num_questions, shape.output_tokens)
    generator.shuffle(output_lengths)
    return [
        Question(
            number=number,
            token_ids=tuple(encode(_text(number, num_tokens, generator))[:num_tokens]),
            max_tokens=max_tokens,
            temperature=_TEMPERATURE if number % _SAMPLED_EVERY == _SAMPLED_EVERY - 1 else 0.0,
            seed=generator.getrandbits(32),
        )
        for number, (num_tokens, max_tokens) in enumerate(zip(prompt_lengths, output_lengths, strict=True))
    ]


def _spread(count: int, limits: tuple[int, int]) -> list[int]:
    low, high = limits
    return [round(low * (high / low) ** (i / max(count - 1, 1))) for i in range(count)]


def _text(number: int, num_tokens: int, generator: random.Random) -> str:
    """At least so many tokens, as a token is at most a word and its space in text like this."""
    lines = [f"{_WEATHER[number % len(_WEATHER)].capitalize()}: page {number + 1} of the harbour book."]
    num_words = 0
    while num_words < num_tokens:
        lines.append(
            f"Day {generator.randrange(1, 366)}: {generator.choice(_WEATHER)}. {generator.randrange(2, 40)} ships "
            f"came in with {generator.choice(_CARGO)}, {generator.randrange(2, 40)} left. {generator.choice(_NEWS)}"
        )
        num_words = sum(len(line.split()) for line in lines)
    return "\n".join(lines)
