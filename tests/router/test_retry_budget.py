from hypothesis import given
from hypothesis import strategies as st

from router.retry_budget import RetryBudget


def test_all_streams_of_a_dead_worker_may_go_on_at_once():
    budget = RetryBudget(capacity=32)
    assert all(budget.take(0.0) for _ in range(32))
    assert not budget.take(0.0)


def test_requests_earn_retries():
    budget = RetryBudget(capacity=1, per_request=0.5, per_second=0.0)
    assert budget.take(0.0)
    budget.note_request(0.0)
    assert not budget.take(0.0)
    budget.note_request(0.0)
    assert budget.take(0.0)


def test_time_earns_retries_up_to_the_capacity():
    budget = RetryBudget(capacity=4, per_request=0.0, per_second=2.0)
    assert [budget.take(0.0) for _ in range(5)] == [True] * 4 + [False]
    assert budget.take(0.5)
    assert not budget.take(0.5)
    assert [budget.take(1000.0) for _ in range(5)] == [True] * 4 + [False]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=200),
    st.floats(0, 20),
)
def test_retries_never_exceed_what_was_earned(steps, capacity):
    budget, now_s, num_requests, num_retries = RetryBudget(capacity=capacity), 0.0, 0, 0
    budget.note_request(0.0)
    for pause_s, is_request in steps:
        now_s += pause_s
        if is_request:
            num_requests += 1
            budget.note_request(now_s)
        elif budget.take(now_s):
            num_retries += 1
    assert num_retries <= capacity + 0.2 * (num_requests + 1) + 5.0 * now_s + 1e-6
