"""Which workers serve a request. Pure: a snapshot in, a decision with its reasons out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from router.worker_view import WorkerView

# A prefill worker is kept busy by one step's tokens in work and one in waiting; more would only wait there,
# with blocks already reserved for it on a decode worker.
QUEUED_STEPS = 2
# A worker on which something runs keeps a block free for it to grow, and refuses who would take that one.
KEPT_BLOCKS = 1


class Refusal(Enum):
    """Why nobody serves the request now."""

    NO_WORKERS = "no worker is ready"
    NO_PAIR = "no ready pair of prefill and decode workers"
    MISMATCH = "no ready prefill worker fits any decode worker"
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
    alone what no such pair can take now. Of equals the one that was sent least takes its turn, then the first by
    name: equal snapshots give equal decisions.
    """
    ready = sorted((w for w in workers if w.is_ready), key=lambda w: w.name)
    if not ready:
        return Refusal.NO_WORKERS
    if max_tokens == 1 and any(w.can_prefill for w in ready):
        return _choose_prefill([w for w in ready if w.can_prefill])
    prefills = [w for w in ready if w.can_prefill and not w.can_decode]
    decodes = [w for w in ready if w.can_decode and not w.can_prefill]
    pair = _choose_pair(num_prompt_tokens, prefills, decodes)
    mixed = [w for w in ready if w.can_prefill and w.can_decode]
    if isinstance(pair, Decision) or not mixed:
        return pair
    return _choose_mixed(num_prompt_tokens, mixed)


def _choose_prefill(prefills: Sequence[WorkerView]) -> Decision | Refusal:
    with_room = [w for w in prefills if _has_queue_room(w)]
    if not with_room:
        return Refusal.NO_ROOM
    return Decision(_least_queued(with_room).name, None, "one token asked for: the prefill worker samples it")


def _choose_pair(
    num_prompt_tokens: int, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
) -> Decision | Refusal:
    if not prefills or not decodes:
        return Refusal.NO_PAIR
    if not {w.fingerprint for w in prefills} & {w.fingerprint for w in decodes}:
        return Refusal.MISMATCH
    with_room = [w for w in prefills if _has_queue_room(w)]
    fitting = {w.fingerprint for w in with_room}
    decode = _least_loaded((w for w in decodes if w.fingerprint in fitting), num_prompt_tokens)
    if decode is None:
        return Refusal.NO_ROOM
    prefill = _least_queued(w for w in with_room if w.fingerprint == decode.fingerprint)
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
    return min(
        (w for w in workers if w.num_sequences < w.max_batch_sequences and _has_blocks(w, num_prompt_tokens + 1)),
        key=lambda w: (w.num_sequences / w.max_batch_sequences, -w.num_free_blocks / w.num_blocks, w.num_ever_sent),
        default=None,
    )


def _has_blocks(worker: WorkerView, num_tokens: int) -> bool:
    num_kept_blocks = KEPT_BLOCKS if worker.num_sequences else 0
    return worker.num_free_blocks >= worker.blocks_for(num_tokens) + num_kept_blocks


def _least_queued(workers: Iterable[WorkerView]) -> WorkerView:
    return min(workers, key=lambda w: (w.num_queued_tokens, w.num_ever_sent))


def _has_queue_room(worker: WorkerView) -> bool:
    return worker.num_queued_tokens < QUEUED_STEPS * worker.max_step_tokens
