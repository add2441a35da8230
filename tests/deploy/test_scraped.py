import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from deploy.scraped import Change, Scrape, bar, seconds

BOUNDS = (0.1, 0.2, 0.4, 0.8)


class Process:
    """Has metrics that a test moves."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.things = Counter("things", "Things.", ["kind"], registry=self.registry)
        self.time = Histogram("time_seconds", "Time.", registry=self.registry, buckets=BOUNDS)

    def scrape(self, at_s):
        return Scrape.parsed(at_s, generate_latest(self.registry).decode())


@pytest.fixture
def process():
    return Process()


def test_rates_are_by_second_and_by_label(process):
    process.things.labels("a").inc(5)
    before = process.scrape(10.0)
    process.things.labels("a").inc(4)
    process.things.labels("b").inc(2)
    change = Change(before, process.scrape(12.0))
    assert change.rate("things_total", kind="a") == 2
    assert change.rate("things_total", kind="b") == 1
    assert change.rate("things_total") == 3
    assert change.rate("nothing_total") == 0
    assert change.after.by("things_total", "kind") == {"a": 9, "b": 2}


def test_a_process_that_was_replaced_begins_at_nothing(process):
    process.things.labels("a").inc(100)
    other = Process()
    other.things.labels("a").inc(3)
    assert Change(process.scrape(0.0), other.scrape(1.0)).rate("things_total") == 3


def test_quantiles_are_of_what_happened_in_between(process):
    for _ in range(1000):
        process.time.observe(0.7)
    before = process.scrape(0.0)
    assert Change(before, before).quantile(0.5, "time_seconds") is None
    assert Change(before, before).mean("time_seconds") is None
    for _ in range(10):
        process.time.observe(0.15)
    change = Change(before, process.scrape(1.0))
    assert change.quantile(0.5, "time_seconds") == pytest.approx(0.15)  # the middle of its bucket
    assert change.mean("time_seconds") == pytest.approx(0.15)


@given(st.lists(st.floats(0.001, 0.79), min_size=1, max_size=50), st.sampled_from([0.01, 0.5, 0.95, 1.0]))
def test_a_quantile_lies_in_the_bucket_of_the_real_one(values, q):
    process = Process()
    before = process.scrape(0.0)
    for value in values:
        process.time.observe(value)
    estimate = Change(before, process.scrape(1.0)).quantile(q, "time_seconds")
    rank = max(-(-q * len(values) // 1), 1)
    real = sorted(values)[int(rank) - 1]
    bounds = (0.0, *BOUNDS)
    low = max(bound for bound in bounds if bound < real)
    high = min(bound for bound in bounds if bound >= real)
    assert low - 1e-9 <= estimate <= high + 1e-9


def test_what_lies_above_all_bounds_counts_as_the_last(process):
    before = process.scrape(0.0)
    process.time.observe(5.0)
    assert Change(before, process.scrape(1.0)).quantile(0.5, "time_seconds") == BOUNDS[-1]


@pytest.mark.parametrize(("share", "text"), [(0, "░░░░"), (0.5, "██░░"), (1, "████"), (7, "████"), (-1, "░░░░")])
def test_a_bar_is_as_long_as_its_share(share, text):
    assert bar(share, 4) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0126, "13 ms"), (0.9994, "999 ms"), (1.25, "1.2 s")])
def test_seconds_for_people(value, text):
    assert seconds(value) == text
