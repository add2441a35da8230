"""The choice against the engine's sampler and against hand-made distributions; the error against real errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.verify.token_choice import TokenChoice
from engine.sampler import sample, uniform
from engine.sampling_params import SamplingParams

# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16 in another order of ids: 3, 1, 4, then 0 before 2.
LOGITS = np.log([1 / 16, 1 / 4, 1 / 16, 1 / 2, 1 / 8]) + 7.5
GREEDY = SamplingParams(temperature=0.0)

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0713, 0.3319, 0.6171, 0.9137, 1.0]),  # no sum of equal weights comes close to one
    seed=st.integers(0, 2**64 - 1),
)
# Few different values, so that there are equals.
rows = st.lists(st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(-8, 8, width=16)), min_size=2, max_size=24)


def _choice(sampling: SamplingParams, number: float = 0.0) -> TokenChoice:
    return TokenChoice(LOGITS, sampling, number)


class TestChoice:
    @settings(max_examples=300)
    @given(row=rows, sampling=samplings, position=st.integers(0, 2**20))
    def test_equals_the_engines_sampler(self, row: list[float], sampling: SamplingParams, position: int) -> None:
        [expected] = sample(torch.tensor([row]), [sampling], [position])
        choice = TokenChoice(np.array(row), sampling, uniform(sampling.seed, position))
        assert choice.token_id == expected
        assert choice.error_needed(expected) == 0.0

    @pytest.mark.parametrize(
        ("number", "token_id"),
        [(0.0, 3), (0.49, 3), (0.51, 1), (0.74, 1), (0.76, 4), (0.87, 4), (0.88, 0), (0.93, 0), (0.94, 2), (0.999, 2)],
    )
    def test_inverts_the_cumulative_distribution(self, number: float, token_id: int) -> None:
        assert _choice(SamplingParams(), number).token_id == token_id

    def test_top_k_comes_before_top_p(self) -> None:
        """Of 2/3 and 1/3, 0.6 is reached by the first."""
        assert _choice(SamplingParams(top_k=2, top_p=0.6), 0.999).token_id == 3

    def test_greedy_takes_the_first_of_equals(self) -> None:
        assert TokenChoice(np.array([0.0, 2.0, 2.0]), GREEDY, 0.7).token_id == 1


class TestErrorNeeded:
    def test_greedy_is_half_the_gap(self) -> None:
        assert _choice(GREEDY).error_needed(1) == pytest.approx(math.log(2) / 2)
        assert _choice(GREEDY).error_needed(0) == pytest.approx(math.log(8) / 2)
        assert TokenChoice(np.array([0.0, 2.0, 2.0]), GREEDY, 0.0).error_needed(2) == 0.0

    def test_a_number_close_to_a_boundary_needs_little(self) -> None:
        """At 1/2 - d, what is drawn is 3; 1 needs its share before it to fall by d."""
        needed = [_choice(SamplingParams(), 0.5 - distance).error_needed(1) for distance in (1e-6, 1e-4, 1e-2, 1e-1)]
        # s / (s + r (1 - s)) = s - d with s = 1/2 and r = exp(2 E): E is 2 d for small d.
        assert needed[:3] == pytest.approx([2e-6, 2e-4, 2e-2], rel=0.02)
        assert needed == sorted(needed)

    def test_equals_may_change_places(self) -> None:
        """Two equals in the middle of the distribution: whichever is drawn, the other needs nearly nothing."""
        choice = TokenChoice(np.log([0.4, 0.3, 0.3]), SamplingParams(), 0.55)
        assert choice.token_id == 1
        assert choice.error_needed(2) < 1e-12

    def test_what_top_k_cuts_needs_half_the_gap_to_the_last_kept(self) -> None:
        """0 has 1/16, the last kept 1/8; with their places changed 0 is at the end, where the number is."""
        assert _choice(SamplingParams(top_k=3), 0.9999).error_needed(0) == pytest.approx(math.log(2) / 2)

    def test_what_top_p_cuts_needs_the_boundary_to_move(self) -> None:
        """0.76 is just reached by three; with 0.751 the third is nearly left out and with 0.749 it is."""
        near = TokenChoice(LOGITS, SamplingParams(top_p=0.749), 0.9999)
        far = TokenChoice(LOGITS, SamplingParams(top_p=0.6), 0.9999)
        assert near.token_id == far.token_id == 1
        assert 0 < near.error_needed(4) < 0.01
        assert far.error_needed(4) > 0.1

    def test_ids_out_of_range_and_broken_logits_are_never_explained(self) -> None:
        assert _choice(GREEDY).error_needed(5) == math.inf
        assert _choice(GREEDY).error_needed(-1) == math.inf
        for value in (math.nan, math.inf):
            broken = TokenChoice(np.array([0.0, value]), GREEDY, 0.0)
            assert broken.token_id == -1
            assert [broken.error_needed(i) for i in (0, 1)] == [math.inf, math.inf]

    @settings(max_examples=500)
    @given(
        row=rows, sampling=samplings, number=st.floats(0, 1, exclude_max=True), error=st.floats(0, 2), data=st.data()
    )
    def test_no_choice_of_wrong_logits_needs_more_than_their_error(
        self, row: list[float], sampling: SamplingParams, number: float, error: float, data: st.DataObject
    ) -> None:
        shifts = st.lists(st.floats(-1, 1), min_size=len(row), max_size=len(row))
        wrong = np.array(row) + error * np.array(data.draw(shifts))
        chosen = TokenChoice(wrong, sampling, number).token_id
        assert TokenChoice(np.array(row), sampling, number).error_needed(chosen) <= error * (1 + 1e-6) + 1e-9

    @settings(max_examples=50)
    @given(row=rows, sampling=samplings, number=st.floats(0, 1, exclude_max=True))
    def test_every_token_of_finite_logits_has_a_finite_error(
        self, row: list[float], sampling: SamplingParams, number: float
    ) -> None:
        choice = TokenChoice(np.array(row), sampling, number)
        assert all(0 <= choice.error_needed(token_id) <= 17 for token_id in range(len(row)))
