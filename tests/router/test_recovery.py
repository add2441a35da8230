import pytest

from baton.errors import (
    Aborted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from router.circuit_breaker import FAILURES_TO_OPEN, CircuitBreaker
from router.recovery import (
    HEADROOM_TOKENS,
    MAX_TRIES,
    MAX_TRIES_WITHOUT_PROGRESS,
    Recovery,
    Retry,
    note_failure,
)

PAIR = ("prefill-0", "decode-0")
LOST = Unavailable("gone", reason="CONNECTION_LOST").at(stage="decode", worker="decode-0")
DAMAGED = DataLoss("damaged", reason="CHECKSUM_MISMATCH").at(stage="transfer", worker="decode-0")
PREEMPTED = Aborted("no blocks", reason="PREEMPTED").at(stage="decode", worker="decode-0")
DRAINING = Aborted("it leaves", reason="DRAINING").at(stage="decode", worker="decode-0")


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        DAMAGED,
        Aborted("missing", reason="INCOMPLETE"),
        InternalError("the step failed"),
        NotFound("no such ticket", reason="TICKET_UNKNOWN"),
        DeadlineExceeded("a frame took too long", reason="TIMEOUT"),
        FailedPrecondition("another life", reason="EPOCH_MISMATCH"),
        InvalidRequest("no frame", reason="MALFORMED"),
    ],
)
def test_what_another_ticket_may_mend_is_tried_again_at_once_and_within_the_budget(error):
    assert Recovery().on_failure(error, 0, PAIR) == Retry(max_delay_s=0.0, needs_budget=True)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad"),
        Unimplemented("no"),
        Cancelled("cancelled"),
        FailedPrecondition("other models", reason="FINGERPRINT_MISMATCH"),
    ],
)
def test_what_no_other_ticket_mends_ends_the_request(error):
    assert Recovery().on_failure(error, 0, PAIR) is None


def test_a_full_worker_costs_no_try_and_waits_for_news():
    recovery = Recovery()
    for _ in range(10 * MAX_TRIES):
        assert recovery.on_failure(ResourceExhausted("full"), 0, PAIR) == Retry(after_news=True)
    assert recovery.num_recoveries == 0


def test_tries_without_progress_are_bounded_and_back_off():
    recovery = Recovery()
    retries = [recovery.on_failure(LOST, 3, PAIR) for _ in range(MAX_TRIES_WITHOUT_PROGRESS)]
    assert retries[-1] is None
    delays_s = [retry.max_delay_s for retry in retries[:-1]]
    assert delays_s[0] == 0.0
    assert delays_s == sorted(set(delays_s))


def test_tokens_are_progress():
    recovery = Recovery()
    for num_tokens in range(1, MAX_TRIES):
        retry = recovery.on_failure(LOST, num_tokens, PAIR)
        assert retry == Retry(needs_budget=True)
    assert recovery.on_failure(LOST, 1000, PAIR) is None


def test_the_first_cause_since_the_last_progress_is_kept():
    recovery = Recovery()
    recovery.on_failure(DAMAGED, 1, PAIR)
    recovery.on_failure(LOST, 1, PAIR)
    assert recovery.cause is DAMAGED
    recovery.on_failure(LOST, 2, PAIR)
    assert recovery.cause is LOST


def test_the_worker_that_failed_is_avoided_and_both_after_a_failed_transfer():
    recovery = Recovery()
    recovery.on_failure(LOST, 0, PAIR)
    assert recovery.avoid == {"decode-0"}
    recovery.on_failure(DAMAGED, 0, ("prefill-1", "decode-1"))
    assert recovery.avoid == {"decode-0", "prefill-1", "decode-1"}


def test_a_preempted_request_asks_for_ever_more_room_and_is_not_limited():
    recovery = Recovery()
    for doubling in range(MAX_TRIES + 5):
        assert recovery.on_failure(PREEMPTED, 0, PAIR) == Retry()
        assert recovery.headroom_tokens == HEADROOM_TOKENS * 2**doubling
    assert not recovery.avoid
    assert recovery.cause is None


def test_a_draining_worker_is_avoided_and_nobody_s_failure():
    recovery = Recovery()
    assert recovery.on_failure(DRAINING, 0, PAIR) == Retry()
    assert recovery.avoid == {"decode-0"}


def breaker_after(error, workers=PAIR):
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        note_failure(breaker, error, workers, 0.0, 0.0)
    return breaker.blocked(0.0)


def test_who_is_taken_out():
    assert breaker_after(LOST) == ["decode-0"]
    assert breaker_after(DAMAGED) == [PAIR]
    assert breaker_after(InternalError("bug").at(stage="prefill", worker="prefill-0")) == ["prefill-0"]
    assert breaker_after(InternalError("bug"), ("mixed-0",)) == ["mixed-0"]


@pytest.mark.parametrize(
    "error",
    [
        PREEMPTED,
        DRAINING,
        InvalidRequest("too long").at(stage="decode", worker="decode-0"),
        ResourceExhausted("full").at(stage="decode", worker="decode-0"),
        Cancelled("cancelled").at(stage="decode", worker="decode-0"),
        Unimplemented("no").at(stage="decode", worker="decode-0"),
    ],
)
def test_what_says_nothing_about_a_worker_takes_nobody_out(error):
    assert breaker_after(error) == []
