"""Tokens are drawn from the distribution asked for, by a number that (seed, position) alone decides."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import sample, uniform
from engine.sampling_params import SamplingParams

# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16, shuffled over the ids: most likely is id 3, then 1, 4, and 0 before 2.
PROBABILITIES = [1 / 16, 1 / 4, 1 / 16, 1 / 2, 1 / 8]
LOGITS = torch.tensor(PROBABILITIES).log()[None] + 7.5
NUM_DRAWS = 4000


def _draws(logits: torch.Tensor = LOGITS, count: int = NUM_DRAWS, **params: float) -> Counter[int]:
    """How often each token comes at positions 0 to count, one row each as in a batch."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Counter(sample(logits.expand(count, -1), [sampling] * count, list(range(count))))


def _assert_distribution(drawn: Counter[int], expected: dict[int, float]) -> None:
    """Pearson's chi-square, below the quantile 0.9999 for its degrees of freedom; no token of probability 0."""
    assert set(drawn) <= set(expected)
    count = drawn.total()
    statistic = sum((drawn[token] - count * p) ** 2 / (count * p) for token, p in expected.items())
    quantiles = {0: 1e-9, 1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51}
    assert statistic < quantiles[len(expected) - 1]


class TestGreedy:
    def test_takes_the_most_likely_and_the_first_of_equals(self) -> None:
        logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0], [-5.0, -4.0, -4.0]])
        assert sample(logits, [SamplingParams(temperature=0)] * 3, [0, 1, 2]) == [1, 0, 1]

    def test_of_bfloat16_and_of_no_rows(self) -> None:
        assert sample(torch.tensor([[0.0, 3.0]]).bfloat16(), [SamplingParams(temperature=0)], [4]) == [1]
        assert sample(torch.empty(0, 5), [], []) == []

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
    def test_a_tiny_temperature_is_greedy_without_overflow(self, temperature: float) -> None:
        """Logits of a thousand over 1e-6 would be infinite in float32 if they were not shifted first."""
        assert set(_draws(LOGITS + 1000, 50, temperature=temperature)) == {3}

    def test_rows_of_one_batch_are_each_chosen_in_their_way(self) -> None:
        params = [
            SamplingParams(temperature=0),
            SamplingParams(top_k=1),
            SamplingParams(seed=5),
            SamplingParams(temperature=0),
        ]
        alone = sample(LOGITS, [params[2]], [11])
        assert sample(LOGITS.expand(4, -1), params, [9, 10, 11, 12]) == [3, 3, *alone, 3]


class TestDistribution:
    def test_plain(self) -> None:
        _assert_distribution(_draws(), dict(enumerate(PROBABILITIES)))

    def test_temperature_two_takes_square_roots(self) -> None:
        roots = [math.sqrt(p) for p in PROBABILITIES]
        _assert_distribution(_draws(temperature=2.0), {i: r / sum(roots) for i, r in enumerate(roots)})

    @pytest.mark.parametrize(
        ("top_k", "expected"),
        [
            (1, {3: 1.0}),
            (2, {3: 2 / 3, 1: 1 / 3}),
            (3, {3: 4 / 7, 1: 2 / 7, 4: 1 / 7}),
            (4, {3: 8 / 15, 1: 4 / 15, 4: 2 / 15, 0: 1 / 15}),  # of the equals, the lower id
            (5, dict(enumerate(PROBABILITIES))),
            (6, dict(enumerate(PROBABILITIES))),
            (2**31 - 1, dict(enumerate(PROBABILITIES))),
        ],
    )
    def test_top_k(self, top_k: int, expected: dict[int, float]) -> None:
        _assert_distribution(_draws(top_k=top_k), expected)

    def test_of_many_equals_the_lowest_ids_stay(self) -> None:
        assert set(_draws(torch.zeros(1, 50_000), 60, top_k=3)) == {0, 1, 2}

    @pytest.mark.parametrize(
        ("top_p", "expected"),
        [
            (1e-9, {3: 1.0}),
            (0.49, {3: 1.0}),
            (0.51, {3: 2 / 3, 1: 1 / 3}),
            (0.74, {3: 2 / 3, 1: 1 / 3}),
            (0.76, {3: 4 / 7, 1: 2 / 7, 4: 1 / 7}),
            (0.9, {3: 8 / 15, 1: 4 / 15, 4: 2 / 15, 0: 1 / 15}),
            (0.95, dict(enumerate(PROBABILITIES))),
            (1.0, dict(enumerate(PROBABILITIES))),
        ],
    )
    def test_top_p_keeps_the_fewest_that_reach_it(self, top_p: float, expected: dict[int, float]) -> None:
        _assert_distribution(_draws(top_p=top_p), expected)

    def test_top_p_is_of_what_top_k_left(self) -> None:
        """Of 2/3 and 1/3, 0.6 is reached by the first; of all it would take two tokens."""
        assert set(_draws(top_k=2, top_p=0.6)) == {3}

    def test_top_p_is_of_the_distribution_at_the_temperature(self) -> None:
        """At temperature 1/2 the first has 64/86: it reaches 0.7."""
        assert set(_draws(temperature=0.5, top_p=0.7)) == {3}

    def test_seeds_draw_independently(self) -> None:
        params = [SamplingParams(seed=seed) for seed in range(NUM_DRAWS)]
        drawn = Counter(sample(LOGITS.expand(NUM_DRAWS, -1), params, [3] * NUM_DRAWS))
        _assert_distribution(drawn, dict(enumerate(PROBABILITIES)))

    def test_impossible_tokens_never_come(self) -> None:
        logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
        _assert_distribution(_draws(logits), {1: 0.5, 3: 0.5})

    @settings(max_examples=100)
    @given(
        logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
        temperature=st.floats(1e-6, 100),
        top_k=st.integers(0, 50),
        top_p=st.floats(0, 1, exclude_min=True),
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 2**20),
    )
    def test_any_draw_is_among_the_top_k(
        self, logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
    ) -> None:
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        [token] = sample(torch.tensor([logits]), [sampling], [position])
        num_better = sum(other > logits[token] for other in logits)
        assert num_better < (top_k or len(logits))


class TestSeed:
    def test_seeds_give_several_texts(self) -> None:
        flat = torch.zeros(8, 50)
        texts = {tuple(sample(flat, [SamplingParams(seed=seed)] * 8, list(range(8)))) for seed in range(8)}
        assert len(texts) == 8

    def test_a_draw_depends_on_neither_batch_nor_order(self) -> None:
        """As after a re-ticket or a preemption: the same seed and position in other company."""
        positions = list(range(100, 120))
        together = sample(LOGITS.expand(20, -1), [SamplingParams(seed=9)] * 20, positions)
        backwards = sample(LOGITS.expand(20, -1), [SamplingParams(seed=9)] * 20, positions[::-1])
        assert backwards[::-1] == together
        assert [sample(LOGITS, [SamplingParams(seed=9)], [p])[0] for p in positions] == together

    @given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
    def test_uniform_is_a_function_in_the_half_open_interval(self, seed: int, position: int) -> None:
        number = uniform(seed, position)
        assert 0.0 <= number < 1.0
        assert uniform(seed, position) == number
        assert uniform(seed, position + 1) != number
        assert uniform((seed + 1) % 2**64, position) != number

    def test_seed_and_position_do_not_stand_for_each_other(self) -> None:
        numbers = {uniform(seed, position) for seed in range(40) for position in range(40)}
        assert len(numbers) == 1600
