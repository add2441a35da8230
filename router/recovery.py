"""What follows when a try of a request has failed: another one, when and where, or the end. Pure.

One event for everything that takes a request's place away: a worker died, drained or went silent, a transfer failed,
KV blocks ran out. The request needs a new ticket, for its prompt and the tokens it has already brought.
"""

from dataclasses import dataclass

from baton.errors import (
    Aborted,
    BatonError,
    DataLoss,
    DeadlineExceeded,
    InternalError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from router.circuit_breaker import CircuitBreaker

MAX_TRIES_WITHOUT_PROGRESS = 4
MAX_TRIES = 32
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
# A preempted request asks for room to grow by this much more the next time, and twice as much each time after.
HEADROOM_TOKENS = 64

HANDED_BACK = frozenset({"PREEMPTED", "DRAINING"})
# Refusals of a transfer that another ticket mends, whatever their code.
MENDABLE = frozenset({"EPOCH_MISMATCH", "PROMPT_MISMATCH", "MALFORMED"})
_RETRYABLE = (Unavailable, Aborted, DataLoss, InternalError, NotFound, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Retry:
    """Another try is due.

    `max_delay_s`: wait for a random part of this first (full jitter). `needs_budget`: only if the retry budget
    allows. `after_news`: the picture of the workers was stale, so wait until it changes.
    """

    max_delay_s: float = 0.0
    needs_budget: bool = False
    after_news: bool = False


@dataclass(slots=True)
class Recovery:
    """One request's tries.

    `avoid` are workers to be taken only if there is no other, `headroom_tokens` the room to ask for beyond what
    is needed at once, `cause` the first failure since the request last made progress.
    """

    avoid: frozenset[str] = frozenset()
    headroom_tokens: int = 0
    num_recoveries: int = 0
    cause: BatonError | None = None
    _num_in_a_row: int = 0
    _num_tokens: int = 0

    def on_failure(self, error: BatonError, num_tokens: int, workers: tuple[str, ...]) -> Retry | None:
        """What follows when the workers of a try failed with `error`, after `num_tokens` tokens in all; None: the end.

        A worker that is full after all costs nothing: nothing was computed. Being handed back is nobody's
        failure. Anything else is tried again MAX_TRIES_WITHOUT_PROGRESS times in a row at most, tokens being
        the progress.
        """
        if num_tokens > self._num_tokens:
            self._num_tokens, self._num_in_a_row = num_tokens, 0
            self.cause, self.avoid = None, frozenset()
        if isinstance(error, ResourceExhausted):
            return Retry(after_news=True)
        if error.reason in HANDED_BACK:
            return self._handed_back(error, workers)
        if not _is_retryable(error):
            return None
        self.cause = self.cause or error
        self._num_in_a_row += 1
        self.num_recoveries += 1
        if self._num_in_a_row >= MAX_TRIES_WITHOUT_PROGRESS or self.num_recoveries >= MAX_TRIES:
            return None
        self.avoid |= frozenset(blamed(error, workers))
        backoff_s = 0.0 if self._num_in_a_row == 1 else FIRST_BACKOFF_S * 2.0 ** (self._num_in_a_row - 1)
        return Retry(max_delay_s=min(backoff_s, MAX_BACKOFF_S), needs_budget=True)

    def _handed_back(self, error: BatonError, workers: tuple[str, ...]) -> Retry:
        self.num_recoveries += 1
        if error.reason == "DRAINING":
            self.avoid |= frozenset(blamed(error, workers))
        else:
            self.headroom_tokens = max(HEADROOM_TOKENS, 2 * self.headroom_tokens)
        return Retry()


def blamed(error: BatonError, workers: tuple[str, ...]) -> tuple[str, ...]:
    """The workers that an error speaks against: the one it names, or for a failed transfer both."""
    if error.metadata.get("stage") == "transfer" or error.metadata.get("worker") not in workers:
        return workers
    return (error.metadata["worker"],)


def note_failure(
    breaker: CircuitBreaker, error: BatonError, workers: tuple[str, ...], sent_at_s: float, now_s: float
) -> tuple[str, ...] | None:
    """Counts a failed try against a worker, or for a failed transfer against the pair; tells whom it takes out.

    What says nothing about their health counts against nobody: a wrong request, a full worker, a hand-back.
    """
    guilty = blamed(error, workers)
    if error.reason in HANDED_BACK or not _is_retryable(error) or (len(guilty) != 1 and len(workers) != 2):
        return None
    key = guilty[0] if len(guilty) == 1 else workers
    return guilty if breaker.note_failure(key, sent_at_s, now_s) else None


def _is_retryable(error: BatonError) -> bool:
    return isinstance(error, _RETRYABLE) or error.reason in MENDABLE
