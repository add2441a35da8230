from hypothesis import given
from hypothesis import strategies as st

from router.circuit_breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S, CircuitBreaker

PAIR = ("prefill-0", "decode-0")


def opened(now_s=0.0, key="decode-0"):
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.note_failure(key, now_s, now_s)
    return breaker


def test_a_worker_that_nobody_knows_is_allowed():
    assert CircuitBreaker().allows("decode-0", 0.0)


def test_failures_in_a_row_take_it_out_and_the_last_one_says_so():
    breaker = CircuitBreaker()
    told = [breaker.note_failure("decode-0", 5.0, 5.0) for _ in range(FAILURES_TO_OPEN)]
    assert told == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert not breaker.allows("decode-0", 5.0)
    assert breaker.blocked(5.0) == ["decode-0"]


def test_a_success_in_between_starts_the_count_anew():
    breaker = CircuitBreaker()
    for _ in range(5):
        breaker.note_failure("decode-0", 0.0, 0.0)
        breaker.note_failure("decode-0", 0.0, 0.0)
        breaker.note_success("decode-0")
    assert breaker.allows("decode-0", 0.0)


def test_after_the_pause_one_trial_at_a_time():
    breaker = opened()
    assert not breaker.allows("decode-0", FIRST_PAUSE_S - 0.01)
    assert breaker.allows("decode-0", FIRST_PAUSE_S)
    breaker.note_sent("decode-0")
    assert not breaker.allows("decode-0", FIRST_PAUSE_S)


def test_a_trial_that_succeeds_brings_it_fully_back():
    breaker = opened()
    breaker.note_sent("decode-0")
    breaker.note_success("decode-0")
    for _ in range(10):
        assert breaker.allows("decode-0", FIRST_PAUSE_S)
        breaker.note_sent("decode-0")


def test_a_trial_that_fails_doubles_the_pause():
    breaker = opened()
    breaker.note_sent("decode-0")
    breaker.note_failure("decode-0", 1.0, 1.0)
    assert not breaker.allows("decode-0", 1.0 + 2 * FIRST_PAUSE_S - 0.01)
    assert breaker.allows("decode-0", 1.0 + 2 * FIRST_PAUSE_S)


def test_a_trial_that_proves_nothing_makes_way_for_another():
    breaker = opened()
    breaker.note_sent("decode-0")
    breaker.note_neither("decode-0")
    assert breaker.allows("decode-0", FIRST_PAUSE_S)


def test_the_pause_has_a_limit():
    breaker = CircuitBreaker()
    now_s = 0.0
    for _ in range(1000):
        now_s += MAX_PAUSE_S
        breaker.note_failure("decode-0", now_s, now_s)
    assert not breaker.allows("decode-0", now_s + MAX_PAUSE_S - 0.01)
    assert breaker.allows("decode-0", now_s + MAX_PAUSE_S)


def test_one_event_that_fails_all_that_is_under_way_costs_one_pause():
    breaker = CircuitBreaker()
    told = [breaker.note_failure("decode-0", sent_at_s, 7.0) for sent_at_s in range(7)]
    assert told == [False] * (FAILURES_TO_OPEN - 1) + [True] + [False] * (7 - FAILURES_TO_OPEN)
    assert breaker.allows("decode-0", 7.0 + FIRST_PAUSE_S)
    breaker.note_sent("decode-0")
    assert not breaker.note_failure("decode-0", 6.5, 9.0)  # one more of then: the trial goes on
    assert not breaker.allows("decode-0", 9.0)
    assert breaker.note_failure("decode-0", 8.5, 9.0)


def test_a_pair_that_is_out_leaves_its_workers_in():
    breaker = opened(key=PAIR)
    assert not breaker.allows(PAIR, 0.0)
    assert breaker.allows("prefill-0", 0.0)
    assert breaker.allows("decode-0", 0.0)


def test_a_new_life_closes_the_circuits_of_a_worker_and_its_pairs_only():
    breaker = opened()
    for key in (PAIR, ("prefill-1", "decode-1")):
        for _ in range(FAILURES_TO_OPEN):
            breaker.note_failure(key, 0.0, 0.0)
    breaker.forget("decode-0")
    assert breaker.blocked(0.0) == [("prefill-1", "decode-1")]


@given(st.lists(st.sampled_from(["sent", "success", "failure", "neither"]), max_size=40), st.booleans())
def test_whatever_happens_it_is_allowed_again_after_the_longest_pause(events, is_new):
    breaker = CircuitBreaker()
    for event in events:
        if event == "failure":
            breaker.note_failure("w", 0.0 if is_new else -1.0, 0.0)
        else:
            getattr(breaker, f"note_{event}")("w")
    breaker.note_neither("w")
    assert breaker.allows("w", MAX_PAUSE_S)
