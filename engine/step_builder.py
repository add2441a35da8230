"""What goes into the next step: who decodes, who prefills how much, who is admitted, who is preempted. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.block_pool import OutOfBlocks
from engine.prefill_sharing import share_prefill_tokens
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence, SequenceStatus
from engine.sequence_blocks import SequenceBlocks
from engine.step_plan import ScheduledSequence, StepPlan
from engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A candidate for prefill tokens; `passed` are the waiting sequences that it would overtake."""

    seq: Sequence
    num_tokens: int
    passed: tuple[Sequence, ...] = ()


class StepBuilder:
    """Builds one plan, moving sequences between `waiting` and `running` as needed.

    1. Sequences that need one token come first, oldest first. Only the last row is left to a prefill, if one
       is older than the sequence whose turn it is: so neither side can starve the other.
    2. A sequence that needs a block when none is available takes those of the youngest running sequence,
       which is recomputed later; if no younger one runs it skips the step. The oldest is never preempted, so
       some work always gets to its end.
    3. What is left of the step is shared by `share_prefill_tokens` among partial prefills and those waiting
       sequences that fit; none is admitted in a step in which one was preempted.
    4. A waiting sequence whose next block is being computed by another one waits to find it in the cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        waiting: WaitingQueue,
        running: dict[str, Sequence],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._rows: dict[str, ScheduledSequence] = {}
        self._tokens_left = config.max_step_tokens  # at least one for each row that is left
        self._preempted = False

    @property
    def _rows_left(self) -> int:
        return self._config.max_batch_sequences - len(self._rows)

    def build(self) -> StepPlan | None:
        """The plan, or None if nothing can be computed now."""
        by_age = sorted(self._running.values(), key=_arrival)
        decodes = [s for s in by_age if s.num_uncomputed_tokens == 1]
        partials = [s for s in by_age if s.num_uncomputed_tokens > 1]
        candidates = partials[:1] + self._waiting.first(self._config.admission_window)
        yield_to = min((s.arrival for s in candidates), default=None)
        left_over = self._add_decodes(decodes, yield_to)
        self._add_prefills()
        self._add_decodes(left_over, None)
        return StepPlan(tuple(self._rows.values())) if self._rows else None

    def _add_decodes(self, decodes: list[Sequence], yield_to: int | None) -> list[Sequence]:
        """Add one token each; returns those for whom no row was left, or only the one kept for `yield_to`."""
        for i, seq in enumerate(decodes):
            yields = self._rows_left == 1 and yield_to is not None and yield_to < seq.arrival
            if yields or self._rows_left == 0:
                return decodes[i:]
            if seq.status is SequenceStatus.RUNNING and self._make_room(seq):
                self._add_row(seq, 1)
        return []

    def _make_room(self, seq: Sequence) -> bool:
        """Grow `seq` by a block if it needs one, at the cost of younger sequences. False if there is no way."""
        if self._blocks.has_room(seq):
            return True
        while self._blocks.pool.num_available == 0:
            victim = max(self._preemptable(), key=_arrival, default=seq)
            if victim.arrival <= seq.arrival:
                return False
            self._preempt(victim)
        self._blocks.grow(seq)
        return True

    def _preemptable(self) -> Iterator[Sequence]:
        """All but those whose blocks a push may be reading.

        What has a row in this step may be among them, but is older than any sequence that still asks for room.
        """
        return (s for s in self._running.values() if not s.hold_after_prefill)

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.sequence_id]
        self._blocks.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self._waiting.push_front(seq)
        self._preempted = True

    def _add_prefills(self) -> None:
        if self._rows_left == 0:
            return
        partials = [s for s in self._running.values() if s.num_uncomputed_tokens > 1]
        candidates = [_Prefill(s, s.num_uncomputed_tokens) for s in partials]
        if not self._preempted:
            candidates += self._admissible(partials)
        candidates.sort(key=lambda c: c.seq.arrival)
        shares = share_prefill_tokens(
            [c.num_tokens for c in candidates],
            max_tokens=self._tokens_left,
            max_sequences=self._rows_left,
            max_chunk_tokens=self._config.max_prefill_chunk_tokens,
        )
        for candidate, share in zip(candidates, shares, strict=True):
            if share > 0 and self._admit(candidate):
                self._add_row(candidate.seq, share)

    def _admissible(self, partials: list[Sequence]) -> list[_Prefill]:
        """First waiting sequences that fit, all together, into what is available."""
        pool = self._blocks.pool
        available = pool.num_available
        watermark_blocks = self._config.watermark_blocks if self._running else 0
        being_computed = {h for s in partials for h in self._blocks.uncomputed_hashes(s)}
        admissible: list[_Prefill] = []
        passed: list[Sequence] = []
        for seq in self._waiting.first(self._config.admission_window):
            claim = self._blocks.claim(seq)
            if claim.missed_hash in being_computed:
                continue
            if claim.num_taken_blocks + watermark_blocks > available:
                passed.append(seq)
                if self._waiting.mark_unfit(seq):
                    break
                continue
            num_cached_tokens = len(claim.hit_block_ids) * pool.block_size
            admissible.append(_Prefill(seq, len(seq.token_ids) - num_cached_tokens, tuple(passed)))
            available -= claim.num_taken_blocks
            watermark_blocks = self._config.watermark_blocks
            being_computed.update(seq.block_hashes[len(claim.hit_block_ids) :])
        return admissible

    def _admit(self, candidate: _Prefill) -> bool:
        """Let a waiting candidate run. False if it does not fit any more."""
        seq = candidate.seq
        if seq.status is SequenceStatus.RUNNING:
            return True
        try:
            # The watermark was kept when all candidates were counted together.
            self._blocks.take(seq, watermark_blocks=0)
        except OutOfBlocks:
            # An admission in this step evicted a cached block that led to others which this one was to share.
            return False
        self._waiting.remove(seq)
        self._waiting.count_bypass(candidate.passed)
        seq.status = SequenceStatus.RUNNING
        self._running[seq.sequence_id] = seq
        return True

    def _add_row(self, seq: Sequence, num_tokens: int) -> None:
        start = seq.num_computed_tokens
        end = start + num_tokens
        self._tokens_left -= num_tokens
        self._rows[seq.sequence_id] = ScheduledSequence(
            sequence_id=seq.sequence_id,
            start=start,
            token_ids=tuple(seq.token_ids[start:end]),
            block_ids=tuple(seq.block_ids[: self._blocks.pool.blocks_for(end)]),
            sample=end == len(seq.token_ids),
            sampling=seq.sampling,
        )


def _arrival(seq: Sequence) -> int:
    return seq.arrival
