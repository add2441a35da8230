import pytest

from bench.bar import Bar, BarsFailed, ratio_of_medians


@pytest.mark.parametrize(
    ("measured", "is_limit", "is_met"),
    [(8.0, False, True), (7.99, False, False), (9.0, False, True), (8.0, True, True), (8.01, True, False)],
)
def test_a_bar_is_met_at_its_very_edge(measured, is_limit, is_met):
    assert Bar("b", measured, 8.0, "", is_limit=is_limit).is_met is is_met


def test_one_bad_sample_does_not_move_the_ratio():
    assert ratio_of_medians([10.0, 10.0, 900.0], [5.0, 0.001, 5.0]) == 2.0


def test_a_comparison_with_nothing_is_refused():
    with pytest.raises(BarsFailed, match="nothing was measured"):
        ratio_of_medians([1.0], [0.0])
