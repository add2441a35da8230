"""Compares answers token for token, and tells near-ties from wrong tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: `finish_reason` is stop or length, `stop_token_id` the token that ended it, if one did."""

    token_ids: tuple[int, ...]
    finish_reason: str
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """At token `index` of the answer, the other side has another one after the same tokens before."""

    index: int
    other_token_id: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A token of the answer and what another says instead.

    `error` is how wrong a logit must be for both to be right (infinite: never), `tolerance` what rounding explains.
    """

    index: int
    token_id: int
    other_token_id: int
    error: float
    tolerance: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it. Never for what is not a number."""
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error in units of the tolerance."""
        return self.error / self.tolerance if self.tolerance > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Comparison:
    """An answer against one other; `problem` is what no near-tie explains, or empty."""

    differences: tuple[Difference, ...] = ()
    problem: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether anything differs that is not a near-tie."""
        return bool(self.problem) or not all(difference.is_tie for difference in self.differences)

    @property
    def tie_indices(self) -> frozenset[int]:
        """Tokens at which there is a near-tie."""
        return frozenset(difference.index for difference in self.differences if difference.is_tie)


class Choice(Protocol):
    """What a model says of one position, see `bench.verify.token_choice.TokenChoice`."""

    @property
    def token_id(self) -> int:
        """The token chosen."""
        ...

    def error_needed(self, token_id: int) -> float:
        """The error of a logit that explains another."""
        ...


def ending_problem(answer: Answer, sampling: SamplingParams) -> str:
    """What is wrong with the end of an answer by itself, or nothing."""
    token_ids, max_tokens = answer.token_ids, sampling.max_tokens
    if not token_ids:
        return "no token came"
    if len(token_ids) > max_tokens:
        return f"{len(token_ids)} tokens came, at most {max_tokens} were asked for"
    passed = next((i for i, token_id in enumerate(token_ids[:-1]) if token_id in sampling.stop_token_ids), None)
    if passed is not None:
        return f"went on after token {passed}, which is the stop token {token_ids[passed]}"
    last = token_ids[-1]
    if last in sampling.stop_token_ids:
        expected: tuple[str, int | None] = ("stop", last)
    elif len(token_ids) == max_tokens:
        expected = ("length", None)
    else:
        return f"ended after {len(token_ids)} of {max_tokens} tokens, and not with a stop token"
    told = (answer.finish_reason, answer.stop_token_id)
    return "" if told == expected else f"says it ended with {_ending(*told)}, it ended with {_ending(*expected)}"


def next_divergence(answer: Answer, other: Answer, start: int) -> Divergence | str | None:
    """Compares tokens from `start` on with what another generated after those before: the first difference.

    A text says that only their ends differ; None that nothing does.
    """
    rest = answer.token_ids[start:]
    for i, (token_id, other_token_id) in enumerate(zip(rest, other.token_ids, strict=False)):
        if token_id != other_token_id:
            return Divergence(start + i, other_token_id)
    ours = (len(rest), answer.finish_reason, answer.stop_token_id)
    theirs = (len(other.token_ids), other.finish_reason, other.stop_token_id)
    return None if ours == theirs else f"ends {_end_of(start, other)}, the answer {_end_of(0, answer)}"


def judge_tokens(
    token_ids: Sequence[int], choices: Sequence[Choice], tolerances: Sequence[float]
) -> tuple[Difference, ...]:
    """Each token of an answer against the choice at its position."""
    return tuple(
        Difference(i, token_id, choice.token_id, choice.error_needed(token_id), tolerance)
        for i, (token_id, choice, tolerance) in enumerate(zip(token_ids, choices, tolerances, strict=True))
        if token_id != choice.token_id
    )


def judge_divergences(
    token_ids: Sequence[int],
    divergences: Sequence[Divergence],
    choices: Sequence[Choice],
    tolerances: Sequence[float],
) -> tuple[Difference, ...]:
    """Where another went another way: both ways must be explained."""
    return tuple(
        Difference(
            d.index,
            token_ids[d.index],
            d.other_token_id,
            max(choices[d.index].error_needed(way) for way in (token_ids[d.index], d.other_token_id)),
            tolerances[d.index],
        )
        for d in divergences
    )


def worst_of(judgements: Sequence[tuple[Difference, ...]]) -> tuple[Difference, ...]:
    """The same differences judged in several ways: of each, the judgement that explains it least."""
    return tuple(max(judged, key=lambda difference: difference.excess) for judged in zip(*judgements, strict=True))


def _ending(reason: str, stop_token_id: int | None) -> str:
    return reason if stop_token_id is None else f"{reason} (token {stop_token_id})"


def _end_of(start: int, answer: Answer) -> str:
    ending = _ending(answer.finish_reason, answer.stop_token_id)
    return f"after {start + len(answer.token_ids)} tokens with {ending}"
