import itertools

import pytest

from bench.arrivals import poisson_arrivals


def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others():
    assert poisson_arrivals(5.0, 20, seed=1) == poisson_arrivals(5.0, 20, seed=1)
    assert poisson_arrivals(5.0, 20, seed=1) != poisson_arrivals(5.0, 20, seed=2)


def test_arrivals_begin_at_once_and_go_forward():
    arrivals_s = poisson_arrivals(5.0, 200, seed=1)
    assert arrivals_s[0] == 0.0
    assert arrivals_s == sorted(arrivals_s)


def test_twice_the_rate_halves_every_gap():
    slow, fast = poisson_arrivals(2.0, 50, seed=3), poisson_arrivals(4.0, 50, seed=3)
    assert fast == pytest.approx([time_s / 2 for time_s in slow])


def test_gaps_are_exponential():
    # Exponential gaps of mean m: their standard deviation is m too, and 1 - 1/e of them are shorter than m.
    arrivals_s = poisson_arrivals(10.0, 20_001, seed=4)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(arrivals_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    deviation_s = (sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s)) ** 0.5
    assert mean_s == pytest.approx(0.1, rel=0.05)
    assert deviation_s == pytest.approx(0.1, rel=0.05)
    assert sum(gap_s < 0.1 for gap_s in gaps_s) / len(gaps_s) == pytest.approx(0.632, abs=0.02)


def test_no_requests_arrive_never():
    assert poisson_arrivals(1.0, 0, seed=0) == []


@pytest.mark.parametrize(("rate", "number"), [(0.0, 1), (-1.0, 1), (1.0, -1)])
def test_impossible_wishes_are_refused(rate, number):
    with pytest.raises(ValueError, match="positive rate"):
        poisson_arrivals(rate, number, seed=0)
