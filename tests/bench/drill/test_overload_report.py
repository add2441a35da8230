import pytest

from bench.drill.memory import MIB, MemoryCurve
from bench.drill.overload_report import Fate, Overload, fate
from bench.measurement import Measurement

ANSWERED = Measurement(0.0, 1.0, (0.5, 1.0))
REJECTED = Measurement(0.0, 0.05, failure="RESOURCE_EXHAUSTED")
LATE = Measurement(0.0, 3.0, failure="DEADLINE_EXCEEDED")
LATE_IN_THE_MIDDLE = Measurement(0.0, 3.0, (0.5,), failure="DEADLINE_EXCEEDED")
BROKEN = Measurement(0.0, 1.0, (0.5,), failure="UNAVAILABLE")
SLOWLY_REJECTED = Measurement(0.0, 1.0, failure="RESOURCE_EXHAUSTED")


def curve(name, *sizes_mib):
    """A sample each 10 s."""
    return MemoryCurve(name, 1, tuple((10.0 * number, size * MIB) for number, size in enumerate(sizes_mib)))


def overload(measurements, **fields):
    known = {
        "capacity_per_s": 2.0,
        "offered_per_s": 6.0,
        "duration_s": 10.0,
        "deadline_s": 3.0,
        "prompt_tokens": 50,
        "num_prefilled_tokens": 50 * sum(not m.failure for m in measurements),
        "curves": [curve("router", 100, 101, 101)],
    }
    return Overload(measurements=measurements, **{**known, **fields})


@pytest.mark.parametrize(
    ("measurement", "expected"),
    [
        (ANSWERED, Fate.ANSWERED),
        (REJECTED, Fate.REJECTED),
        (SLOWLY_REJECTED, Fate.REJECTED),
        (LATE, Fate.TIMED_OUT),
        (LATE_IN_THE_MIDDLE, Fate.TIMED_OUT),
        (BROKEN, Fate.BROKEN),
        (Measurement(0.0, 0.05, failure="DEADLINE_EXCEEDED"), Fate.REJECTED),
    ],
)
def test_fates(measurement, expected):
    assert fate(measurement, 3.0) is expected


def test_a_graceful_overload_has_no_violations():
    found = overload([ANSWERED] * 16 + [REJECTED] * 40 + [LATE])
    assert found.goodput_ratio == pytest.approx(0.8)
    assert found.rejection_s == pytest.approx(0.05)
    assert found.violations == ()


def test_a_fall_of_goodput_is_told():
    found = overload([ANSWERED] * 15 + [LATE] * 45)
    assert found.violations == ("goodput fell to 75% of capacity, needed are 80%",)
    assert found.rejection_s is None


def test_slow_rejections_are_told():
    assert "1000 ms" in overload([ANSWERED] * 20 + [SLOWLY_REJECTED] * 3).violations[0]


def test_broken_answers_are_told():
    assert "1 answers broke off" in overload([ANSWERED] * 20 + [BROKEN]).violations[0]


def test_rejected_prompts_must_not_have_been_prefilled():
    measurements = [ANSWERED] * 20 + [REJECTED] * 10 + [LATE] * 5
    # What timed out may have been prefilled: 25 prompts need no explanation, one more does.
    assert overload(measurements, num_prefilled_tokens=25 * 50).violations == ()
    found = overload(measurements, num_prefilled_tokens=26 * 50)
    assert found.num_rejected_prefilled == 1
    assert found.num_unanswered_prefilled == 6
    assert "at least 1 rejected" in found.violations[0]


def test_workers_that_do_not_count_are_told():
    assert "do not count" in overload([ANSWERED] * 20, num_prefilled_tokens=0).violations[0]


def test_memory_that_still_grows_in_the_later_half_is_told():
    curves = [curve("router", 100, 110, 141), curve("prefill-0", 100, 300, 330), curve("decode-0", 100, 90, 40)]
    found = overload([ANSWERED] * 20, curves=curves)
    assert found.violations == ("router still grew by 31 MiB in the later half",)
