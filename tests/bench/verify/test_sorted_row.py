"""A row's bounds are true for every error within them."""

from itertools import pairwise

import numpy as np
import pytest

from bench.verify.sorted_row import SortedRow
from engine.sampling_params import SamplingParams

LOGITS = np.log([0.1, 0.4, 0.2, 0.3])  # by rank: ids 1, 3, 2, 0


def _row(**sampling: float) -> SortedRow:
    return SortedRow(LOGITS, SamplingParams(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "token_id"), [(0.0, 1), (0.39, 1), (0.41, 3), (0.69, 3), (0.71, 2), (0.91, 0)])
def test_chooses_by_the_cumulative_distribution(number: float, token_id: int) -> None:
    row = _row()
    assert row.choose(number) == token_id
    assert [i for i in range(4) if row.may_choose(LOGITS[i], number, 0.0)] == [token_id]


def test_with_a_larger_error_never_fewer_tokens_may_be_chosen() -> None:
    errors = (0.0, 0.01, 0.1, 0.3, 1.0, 3.0)
    for sampling in ({}, {"top_k": 2}, {"top_p": 0.65}, {"top_k": 3, "top_p": 0.8}, {"temperature": 0.3}):
        for number in np.linspace(0, 0.999, 40):
            possible = [{i for i in range(4) if _row(**sampling).may_choose(LOGITS[i], number, e)} for e in errors]
            assert all(fewer <= more for fewer, more in pairwise(possible))
            assert _row(**sampling).choose(number) in possible[0]
            assert possible[-1] == {0, 1, 2, 3}


def test_what_is_surely_cut_cannot_be_chosen() -> None:
    assert not _row(top_k=2).may_choose(LOGITS[0], 0.999, 0.1)
    assert not _row(top_p=0.6).may_choose(LOGITS[0], 0.999, 0.1)
