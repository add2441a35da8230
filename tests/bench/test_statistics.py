import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.statistics import Summary, median, percentile, summarize

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 10.0), (25, 20.0), (50, 30.0), (60, 34.0), (90, 46.0), (100, 50.0)],
)
def test_percentiles_of_five_numbers_by_hand(percent, expected):
    # Ranks 0 to 4: 60 % is rank 2.4, that is 30 + 0.4 * 10.
    assert percentile([50.0, 10.0, 40.0, 20.0, 30.0], percent) == pytest.approx(expected)


@given(samples, st.floats(0, 100))
def test_percentile_agrees_with_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_percentile_refuses_what_has_no_answer():
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_median_of_an_even_number_lies_between_the_middle_two():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_summary_by_hand():
    # 1 to 101: rank equals percent.
    assert summarize([float(n) for n in range(1, 102)]) == Summary(count=101, mean=51.0, p50=51.0, p90=91.0, p99=100.0)


def test_nothing_has_no_summary():
    assert summarize([]) is None
