import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.drill.memory import MIB, MemoryCurve, curves


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 1 << 34)), min_size=2, max_size=60, unique_by=lambda s: s[0]
    )
)
def test_the_slope_is_that_of_numpy(points):
    samples = tuple((float(time_s), size) for time_s, size in sorted(points))
    times_s, sizes = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    slope, _ = np.polyfit(times_s, sizes, 1)
    assert MemoryCurve("w", 1, samples).growth_mib_per_min == pytest.approx(slope * 60 / MIB, rel=1e-6, abs=1e-4)


def test_one_moment_has_no_slope():
    assert MemoryCurve("w", 1, ((3.0, 5),)).growth_mib_per_min == 0


def test_the_later_half_leaves_out_how_a_process_filled_its_caches():
    samples = tuple((float(s), (s if s < 50 else 50) * MIB) for s in range(101))
    curve = MemoryCurve("w", 1, samples)
    assert curve.growth_mib_per_min > 20
    assert curve.later_half.growth_mib_per_min == pytest.approx(0)
    assert curve.later_half.samples[0][0] == 50.0


def test_samples_become_one_curve_for_each_process():
    found = curves([(0.0, "a", 1, 10), (0.0, "b", 2, 20), (1.0, "a", 1, 11), (2.0, "a", 3, 5)])
    assert [(curve.name, curve.pid, curve.samples) for curve in found] == [
        ("a", 1, ((0.0, 10), (1.0, 11))),
        ("b", 2, ((0.0, 20),)),
        ("a", 3, ((2.0, 5),)),
    ]
    assert found[0].duration_s == 1.0


def test_the_sparkline_shows_the_shape():
    rising = MemoryCurve("w", 1, tuple((float(s), s) for s in range(8)))
    assert rising.sparkline(8) == "▁▂▃▄▅▆▇█"
    assert rising.sparkline(2) == "▁█"
    assert rising.sparkline(100) == rising.sparkline(8)
    flat = MemoryCurve("w", 1, tuple((float(s), 7) for s in range(8)))
    assert flat.sparkline(4) == "▁▁▁▁"
