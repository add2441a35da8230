"""Which workers serve a request. Pure: a snapshot in, a decision with its reasons out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from router.worker_view import WorkerView

# A prefill worker is kept busy by one step's tokens in work and one in waiting; more would only wait there,
# with blocks already reserved for it on a decode worker.
QUEUED_STEPS = 2


class Refusal(Enum):
    """Why nobody serves the request now."""

    NO_WORKERS = "no workers"
    NO_PAIR = "no pair of prefill and decode workers fits together"
    NO_ROOM = "every worker is full"


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves: a pair, or `decode` alone when it prefills by itself (`prefill` is None), or `prefill` alone
    when one token is all that is asked for (`decode` is None).
    """

    prefill: str | None
    decode: str | None
    reason: str


def choose(num_prompt_tokens: int, max_tokens: int, workers: Sequence[WorkerView]) -> Decision | Refusal:
    """Picks the pair with the least work before it.

    Prefill workers are ranked by the prompt tokens queued there, decode workers by the share of their batch
    that is taken and then by free blocks. Pure prefill and decode workers come first; mixed workers serve
    alone when there is no such pair. Ties go to the first by name, so equal snapshots give equal decisions.
    """
    ready = sorted((w for w in workers if w.is_ready), key=lambda w: w.name)
    if not ready:
        return Refusal.NO_WORKERS
    if max_tokens == 1:
        alone = _least_queued(w for w in ready if w.can_prefill)
        if alone is not None:
            return Decision(alone.name, None, "one token asked for: the prefill worker samples it")
    prefills = [w for w in ready if w.can_prefill and not w.can_decode]
    decodes = [w for w in ready if w.can_decode and not w.can_prefill]
    if prefills and decodes:
        return _choose_pair(num_prompt_tokens, prefills, decodes)
    mixed = [w for w in ready if w.can_prefill and w.can_decode]
    if not mixed:
        return Refusal.NO_PAIR
    return _choose_mixed(num_prompt_tokens, mixed)


def _choose_pair(
    num_prompt_tokens: int, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
) -> Decision | Refusal:
    shared = {w.fingerprint for w in prefills} & {w.fingerprint for w in decodes}
    if not shared:
        return Refusal.NO_PAIR
    decode = _least_loaded((w for w in decodes if w.fingerprint in shared), num_prompt_tokens)
    if decode is None:
        return Refusal.NO_ROOM
    prefill = _least_queued(w for w in prefills if w.fingerprint == decode.fingerprint)
    if prefill is None:
        return Refusal.NO_ROOM
    reason = (
        f"least queued prefill ({prefill.num_queued_tokens} tokens), least loaded decode "
        f"({decode.num_sequences}/{decode.max_batch_sequences} sequences)"
    )
    return Decision(prefill.name, decode.name, reason)


def _choose_mixed(num_prompt_tokens: int, mixed: Sequence[WorkerView]) -> Decision | Refusal:
    worker = _least_loaded((w for w in mixed if _has_queue_room(w)), num_prompt_tokens)
    if worker is None:
        return Refusal.NO_ROOM
    return Decision(None, worker.name, "no prefill and decode pair: a mixed worker serves alone")


def _least_loaded(workers: Iterable[WorkerView], num_prompt_tokens: int) -> WorkerView | None:
    """The decode worker with the most room, among those with room for the prompt and one token more."""
    fitting = [
        w
        for w in workers
        if w.num_sequences < w.max_batch_sequences and w.num_free_blocks >= w.blocks_for(num_prompt_tokens + 1)
    ]
    return min(
        fitting,
        key=lambda w: (w.num_sequences / w.max_batch_sequences, -w.num_free_blocks / w.num_blocks),
        default=None,
    )


def _least_queued(workers: Iterable[WorkerView]) -> WorkerView | None:
    return min((w for w in workers if _has_queue_room(w)), key=lambda w: w.num_queued_tokens, default=None)


def _has_queue_room(worker: WorkerView) -> bool:
    return worker.num_queued_tokens < QUEUED_STEPS * worker.max_step_tokens
