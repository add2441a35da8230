"""Differences are found where they are, and only rounding makes a near-tie of one."""

import math
import random

import pytest

from bench.verify.comparison import (
    Answer,
    Comparison,
    Difference,
    Divergence,
    ending_problem,
    judge_divergences,
    judge_tokens,
    next_divergence,
    worst_of,
)
from engine.sampling_params import SamplingParams

EOS, STOP = 2, 77
SAMPLING = SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=frozenset([EOS, STOP]))
FULL = Answer((10, 11, 12, 13, 14), "length")
STOPPED = Answer((10, 11, STOP), "stop", STOP)
TOLERANCE = 0.1


class Fixed:
    """A position at which the errors needed for some tokens are given; the first of them is chosen."""

    def __init__(self, errors: dict[int, float]) -> None:
        self.token_id = next(iter(errors))
        self._errors = errors

    def error_needed(self, token_id: int) -> float:
        return self._errors.get(token_id, math.inf)


CHOICES = [Fixed({token_id: 0.0, 50: 0.09, 51: 0.11, 52: math.nan}) for token_id in FULL.token_ids]


def _judge(*token_ids: int) -> Comparison:
    count = len(token_ids)
    return Comparison(judge_tokens(token_ids, CHOICES[:count], [TOLERANCE] * count))


class TestEnding:
    @pytest.mark.parametrize(
        "answer", [FULL, STOPPED, Answer((EOS,), "stop", EOS), Answer((20, 21, 22, 23, EOS), "stop", EOS)]
    )
    def test_right(self, answer: Answer) -> None:
        assert ending_problem(answer, SAMPLING) == ""

    @pytest.mark.parametrize(
        ("answer", "told"),
        [
            (Answer((), "length"), "no token"),
            (Answer((10, 11, 12, 13), "length"), "ended after 4 of 5"),
            (Answer((10, 11, 12, 13, 14, 15), "length"), "6 tokens came, at most 5"),
            (Answer((10, EOS, 12, 13, 14), "length"), "went on after token 1"),
            (Answer((10, EOS, STOP), "stop", STOP), "went on after token 1"),
            (Answer((10, 11, STOP), "stop", EOS), "stop (token 2), it ended with stop (token 77)"),
            (Answer((10, 11, STOP), "stop"), "it ended with stop (token 77)"),
            (Answer((10, 11, STOP), "length"), "it ended with stop (token 77)"),
            (Answer((10, 11, 12), "stop", 12), "ended after 3 of 5"),
            (Answer((10, 11, 12, 13, 14), "stop", 14), "it ended with length"),
            (Answer((10, 11, 12, 13, 14), "unknown"), "says it ended with unknown"),
        ],
    )
    def test_wrong(self, answer: Answer, told: str) -> None:
        assert told in ending_problem(answer, SAMPLING)


class TestNextDivergence:
    def test_equal_answers_do_not_diverge(self) -> None:
        assert next_divergence(FULL, FULL, 0) is None
        assert next_divergence(FULL, Answer((12, 13, 14), "length"), 2) is None

    @pytest.mark.parametrize("index", range(5))
    def test_the_first_other_token_is_found(self, index: int) -> None:
        other = Answer((*FULL.token_ids[:index], 99, *[98] * (4 - index)), "length")
        assert next_divergence(FULL, other, 0) == Divergence(index, 99)

    def test_the_index_counts_from_the_beginning_of_the_answer(self) -> None:
        assert next_divergence(FULL, Answer((12, 99, 14), "length"), 2) == Divergence(3, 99)

    @pytest.mark.parametrize(
        "other",
        [
            Answer((10, 11, 12, 13), "length"),
            Answer((10, 11, 12, 13, 14, 15), "length"),
            Answer((10, 11, 12, 13, 14), "stop", 14),
            Answer((), "length"),
        ],
    )
    def test_only_the_end_differs(self, other: Answer) -> None:
        found = next_divergence(FULL, other, 0)
        assert isinstance(found, str)
        assert found.endswith("the answer after 5 tokens with length")

    def test_another_stop_token_is_an_end_that_differs(self) -> None:
        assert isinstance(next_divergence(STOPPED, Answer((10, 11, STOP), "stop", EOS), 0), str)


class TestJudge:
    def test_the_choices_themselves(self) -> None:
        comparison = _judge(*FULL.token_ids)
        assert comparison == Comparison()
        assert not comparison.is_wrong

    def test_within_the_tolerance_is_a_near_tie(self) -> None:
        comparison = _judge(10, 50, 12, 50, 14)
        assert comparison.differences[0] == Difference(1, 50, 11, 0.09, TOLERANCE)
        assert not comparison.is_wrong
        assert comparison.tie_indices == {1, 3}

    @pytest.mark.parametrize("token_id", [51, 52, 60])
    @pytest.mark.parametrize("index", range(5))
    def test_anything_else_is_wrong_wherever_it_is(self, token_id: int, index: int) -> None:
        """Needing a little too much, needing what is not a number, and never."""
        token_ids = list(FULL.token_ids)
        token_ids[index] = token_id
        comparison = _judge(*token_ids)
        assert comparison.is_wrong
        assert comparison.tie_indices == set()

    def test_a_near_tie_does_not_hide_a_wrong_token(self) -> None:
        assert _judge(50, 51, 50, 50, 50).is_wrong

    def test_a_tolerance_that_is_not_a_number_explains_nothing(self) -> None:
        assert Comparison(judge_tokens([50], CHOICES[:1], [math.nan])).is_wrong

    def test_rows_and_tokens_must_be_as_many(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            judge_tokens(FULL.token_ids, CHOICES[:4], [TOLERANCE] * 4)

    def test_a_problem_is_wrong_without_any_difference(self) -> None:
        assert Comparison(problem="ends early").is_wrong


class TestDivergences:
    def _judge(self, answer: tuple[int, ...], other_token_id: int) -> Comparison:
        divergences = [Divergence(1, other_token_id)]
        return Comparison(judge_divergences(answer, divergences, CHOICES, [TOLERANCE] * 5))

    def test_both_ways_are_as_good(self) -> None:
        comparison = self._judge((10, 50, 12, 13, 14), 11)
        assert comparison.differences == (Difference(1, 50, 11, 0.09, TOLERANCE),)
        assert comparison.tie_indices == {1}

    @pytest.mark.parametrize(("ours", "other"), [(11, 51), (51, 11), (60, 11), (11, 60), (50, 51)])
    def test_one_way_is_wrong(self, ours: int, other: int) -> None:
        assert self._judge((10, ours, 12, 13, 14), other).is_wrong

    def test_of_several_judgements_the_least_kind_counts(self) -> None:
        kind, strict = Difference(1, 50, 11, 0.09, 0.1), Difference(1, 50, 11, 0.02, 0.01)
        assert worst_of([(kind,), (strict,)]) == (strict,)
        assert worst_of([(strict,), (kind,)]) == (strict,)
        assert worst_of([()]) == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_random_other_answer_is_wrong(seed: int) -> None:
    other = random.Random(seed).sample(range(100, 200), 5)
    assert _judge(*other).is_wrong
