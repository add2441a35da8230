"""Restarts back off, and a long life is forgiven."""

from hypothesis import given
from hypothesis import strategies as st

from deploy.restart_policy import HeartbeatPolicy, RestartPolicy


def test_delay_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(initial_delay_s=1, growth=2, max_delay_s=10)
    assert [policy.delay_s(failures) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]


def test_limit_holds_for_the_first_delay_too() -> None:
    assert RestartPolicy(initial_delay_s=5, max_delay_s=3).delay_s(1) == 3


@given(st.integers(1, 10_000))
def test_delay_never_shrinks_and_never_exceeds_the_limit(failures: int) -> None:
    policy = RestartPolicy()
    assert policy.delay_s(failures) <= policy.delay_s(failures + 1) <= policy.max_delay_s


def test_failures_add_up_until_a_long_life() -> None:
    policy = RestartPolicy(stable_after_s=60)
    assert policy.failures_in_a_row(0, 0.0) == 1
    assert policy.failures_in_a_row(3, 59.0) == 4
    assert policy.failures_in_a_row(3, 60.0) == 1


def test_a_single_missed_heartbeat_is_forgiven() -> None:
    policy = HeartbeatPolicy(max_missed=3)
    assert [policy.is_lost(missed) for missed in range(5)] == [False, False, False, True, True]


def test_a_frozen_worker_is_lost_within_ten_seconds() -> None:
    policy = HeartbeatPolicy()
    assert policy.max_missed * (policy.interval_s + policy.timeout_s) < 10
