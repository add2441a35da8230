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
    BLOCKED = "every pair of prefill and decode workers has failed too often of late"
    NO_ROOM = "every worker is full"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks of workers now, in tokens.

    To be prefilled (in a recovery the prompt with what was generated so far), still to be generated, and to have
    room for on the decode worker: at least one more than are prefilled. `avoid` are names of workers that have just
    failed this request: they are taken only if there is no other.
    """

    num_prompt_tokens: int
    max_tokens: int
    num_room_tokens: int
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves: a pair, or `decode` alone when it prefills by itself (`prefill` is None), or `prefill` alone
    when one token is all that is asked for (`decode` is None).
    """

    prefill: str | None
    decode: str | None
    reason: str


def choose(
    claim: Claim, workers: Sequence[WorkerView], blocked_pairs: frozenset[tuple[str, str]] = frozenset()
) -> Decision | Refusal:
    """Picks the pair with the least work before it.

    Prefill workers are ranked by the prompt tokens queued there, decode workers by the share of their batch
    that is taken and then by free blocks. Of all that can be taken now, those with the fewest workers to be avoided
    come first. Pairs (prefill, decode) in `blocked_pairs` are never made. Pure prefill and decode workers come
    before mixed ones, which serve alone. Of equals the one that was sent least takes its turn, then the first by
    name: equal snapshots give equal decisions.
    """
    ready = sorted((w for w in workers if w.is_ready), key=lambda w: w.name)
    if not ready:
        return Refusal.NO_WORKERS
    if claim.max_tokens == 1 and any(w.can_prefill for w in ready):
        return _choose_prefill(claim, [w for w in ready if w.can_prefill])
    prefills = [w for w in ready if w.can_prefill and not w.can_decode]
    decodes = [w for w in ready if w.can_decode and not w.can_prefill]
    pair = _choose_pair(claim, prefills, decodes, blocked_pairs)
    mixed = [w for w in ready if w.can_prefill and w.can_decode]
    if not mixed:
        return pair
    alone = _choose_mixed(claim, mixed)
    decisions = [choice for choice in (pair, alone) if isinstance(choice, Decision)]
    return min(decisions, key=lambda d: _num_avoided(claim, d.prefill, d.decode), default=alone)


def _choose_prefill(claim: Claim, prefills: Sequence[WorkerView]) -> Decision | Refusal:
    with_room = _by_queue(claim, prefills)
    if not with_room:
        return Refusal.NO_ROOM
    return Decision(with_room[0].name, None, "one token asked for: the prefill worker samples it")


def _choose_pair(
    claim: Claim,
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    blocked_pairs: frozenset[tuple[str, str]],
) -> Decision | Refusal:
    if not prefills or not decodes:
        return Refusal.NO_PAIR
    fitting = [(p.name, d.name) for p in prefills for d in decodes if p.fingerprint == d.fingerprint]
    if not fitting:
        return Refusal.MISMATCH
    if blocked_pairs.issuperset(fitting):
        return Refusal.BLOCKED
    with_room = _by_queue(claim, prefills)
    pairs = [
        (p, d)
        for d in _by_load(claim, decodes)
        for p in with_room
        if p.fingerprint == d.fingerprint and (p.name, d.name) not in blocked_pairs
    ]
    if not pairs:
        return Refusal.NO_ROOM
    prefill, decode = min(pairs, key=lambda pair: _num_avoided(claim, pair[0].name, pair[1].name))
    reason = (
        f"least queued prefill ({prefill.num_queued_tokens} tokens), least loaded decode "
        f"({decode.num_sequences}/{decode.max_batch_sequences} sequences)"
    )
    return Decision(prefill.name, decode.name, reason)


def _choose_mixed(claim: Claim, mixed: Sequence[WorkerView]) -> Decision | Refusal:
    with_room = _by_load(claim, [w for w in mixed if _has_queue_room(w)])
    if not with_room:
        return Refusal.NO_ROOM
    return Decision(None, with_room[0].name, "no prefill and decode pair: a mixed worker serves alone")


def _num_avoided(claim: Claim, *names: str | None) -> int:
    return sum(name in claim.avoid for name in names)


def _by_load(claim: Claim, workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Those with room for the prompt and what is to grow at once, those with the most room first."""
    return sorted(
        (w for w in workers if w.num_sequences < w.max_batch_sequences and _has_blocks(w, claim.num_room_tokens)),
        key=lambda w: (
            w.name in claim.avoid,
            w.num_sequences / w.max_batch_sequences,
            -w.num_free_blocks / w.num_blocks,
            w.num_ever_sent,
        ),
    )


def _by_queue(claim: Claim, workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Those with room in their queue, the least queued first."""
    return sorted(
        (w for w in workers if _has_queue_room(w)),
        key=lambda w: (w.name in claim.avoid, w.num_queued_tokens, w.num_ever_sent),
    )


def _has_blocks(worker: WorkerView, num_tokens: int) -> bool:
    num_kept_blocks = KEPT_BLOCKS if worker.num_sequences else 0
    return worker.num_free_blocks >= worker.blocks_for(num_tokens) + num_kept_blocks


def _has_queue_room(worker: WorkerView) -> bool:
    return worker.num_queued_tokens < QUEUED_STEPS * worker.max_step_tokens
