"""What goes into the next step: who decodes, who prefills how much, who is admitted, who is handed back. Pure."""

from collections.abc import Iterable
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
    """A candidate for prefill tokens."""

    seq: Sequence
    num_tokens: int


class StepBuilder:
    """Builds one plan: lets `waiting` sequences run, and ends `running` ones for lack of blocks.

    A more important sequence comes before a less important one, and of equals the older; before both, a waiting
    one that was overtaken too often. In a step `by_age`, which comes every few steps, only age counts: there the
    oldest gets ahead whatever the priorities, so that each sequence ends after a bounded number of steps.

    1. Sequences that need one token come first. Only the last row is left to a prefill, if one comes before the
       sequence whose turn it is: so neither side can starve the other.
    2. A sequence that needs a block when none is available takes one of the least important running sequence, of
       equals the youngest, which is handed back to its owner. Never handed back are a sequence that is more
       important than the one that asks, or as important and older, one with a row in this step, and one whose
       blocks are read by a push.
    3. If nobody can be handed back, the sequence skips the step, and nobody new gets blocks before it does. That
       cannot last: those before it run, the first of them never lacks a block for long as all others are behind
       it, and each that ends gives its blocks back; reserved and held sequences are activated or ended by their
       owners.
    4. What is left of the step is shared by `share_prefill_tokens` among partial prefills and those waiting
       sequences that fit, the more important first and of equals the shorter.
    5. A waiting sequence whose next block is being computed by another one waits to find it in the cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        waiting: WaitingQueue,
        running: dict[str, Sequence],
        lacking: Iterable[Sequence],
        *,
        by_age: bool,
    ) -> None:
        """`lacking` are those of the builder before."""
        self._config = config
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._by_age = by_age
        self._rows: dict[str, ScheduledSequence] = {}
        self._tokens_left = config.max_step_tokens  # at least one for each row that is left
        self.handed_back: list[Sequence] = []
        # Those that skipped a step for lack of a block and still have none.
        self.lacking = {
            s.sequence_id: s for s in lacking if s.status is SequenceStatus.RUNNING and not blocks.has_room(s)
        }

    @property
    def _rows_left(self) -> int:
        return self._config.max_batch_sequences - len(self._rows)

    def build(self) -> StepPlan | None:
        """The plan, or None if nothing can be computed now."""
        in_order = sorted(self._running.values(), key=self._claim)
        decodes = [s for s in in_order if s.num_uncomputed_tokens == 1]
        partials = [s for s in in_order if s.num_uncomputed_tokens > 1]
        candidates = partials[:1] + self._waiting.first(self._config.admission_window)
        yield_to = min(map(self._claim, candidates), default=None)
        left_over = self._add_decodes(decodes, yield_to)
        self._add_prefills()
        self._add_decodes(left_over, None)
        self._grow_lacking()
        return StepPlan(tuple(self._rows.values())) if self._rows else None

    def _claim(self, seq: Sequence) -> tuple[int, int, int]:
        """The lower, the earlier its turn in this step."""
        if self._by_age or self._waiting.is_due(seq):
            return 0, 0, seq.arrival
        return 1, *seq.rank

    def _add_decodes(self, decodes: list[Sequence], yield_to: tuple[int, int, int] | None) -> list[Sequence]:
        """Add one token each; returns those for whom no row was left, or only the one kept for `yield_to`."""
        for i, seq in enumerate(decodes):
            yields = self._rows_left == 1 and yield_to is not None and yield_to < self._claim(seq)
            if yields or self._rows_left == 0:
                return decodes[i:]
            if seq.status is SequenceStatus.RUNNING and self._make_room(seq):
                self._add_row(seq, 1)
        return []

    def _make_room(self, seq: Sequence) -> bool:
        """Grow `seq` by a block if it needs one, at the cost of others behind it. False if there is no way."""
        if self._blocks.has_room(seq):
            return True
        if self._blocks.pool.num_available == 0:
            victim = self._victim(seq)
            if victim is None:
                self.lacking[seq.sequence_id] = seq
                return False
            self._hand_back(victim)
        self._blocks.grow(seq)
        self.lacking.pop(seq.sequence_id, None)
        return True

    def _grow_lacking(self) -> None:
        """Blocks that are left go to those who lack one, though they have no row: others may be admitted again."""
        for seq in sorted(self.lacking.values(), key=_rank):
            if self._blocks.pool.num_available == 0:
                return
            self._blocks.grow(seq)
            del self.lacking[seq.sequence_id]

    def _victim(self, asker: Sequence) -> Sequence | None:
        """The last in rank that may be handed back and has a block of its own: else it would be in vain.

        Of those that share blocks, the one admitted last has some of its own, unless a held or reserved one came
        after it: if none has, their end is to be awaited.
        """
        behind = [
            seq
            for seq in self._running.values()
            if seq.rank > asker.rank
            and not seq.hold_after_prefill
            and seq.sequence_id not in self._rows
            and any(self._blocks.pool.num_owners(b) == 1 for b in reversed(seq.block_ids))
        ]
        return max(behind, key=_rank, default=None)

    def _hand_back(self, seq: Sequence) -> None:
        del self._running[seq.sequence_id]
        self._blocks.free(seq)
        seq.status = SequenceStatus.FINISHED
        self.lacking.pop(seq.sequence_id, None)
        self.handed_back.append(seq)

    def _add_prefills(self) -> None:
        if self._rows_left == 0:
            return
        partials = [s for s in self._running.values() if s.num_uncomputed_tokens > 1]
        candidates = [_Prefill(s, s.num_uncomputed_tokens) for s in partials]
        if not self.lacking:
            candidates += self._admissible(partials)
        if not candidates:
            return
        candidates.sort(key=self._service)
        claims = [self._claim(c.seq) for c in candidates]
        shares = share_prefill_tokens(
            [c.num_tokens for c in candidates],
            assured=claims.index(min(claims)),
            max_tokens=self._tokens_left,
            max_sequences=self._rows_left,
            max_chunk_tokens=self._config.max_prefill_chunk_tokens,
        )
        for candidate, share in zip(candidates, shares, strict=True):
            if share > 0 and self._admit(candidate.seq):
                self._add_row(candidate.seq, share)

    def _service(self, candidate: _Prefill) -> tuple[int, int, int, int]:
        """The lower, the earlier it is served: of equal priorities the shorter, but one that is due by age."""
        seq = candidate.seq
        if self._waiting.is_due(seq):
            return 0, 0, 0, seq.arrival
        return 1, seq.priority, candidate.num_tokens, seq.arrival

    def _admissible(self, partials: list[Sequence]) -> list[_Prefill]:
        """First waiting sequences that fit, all together, into what is available."""
        pool = self._blocks.pool
        available = pool.num_available
        watermark_blocks = self._config.watermark_blocks if self._running else 0
        being_computed = {h for s in partials for h in self._blocks.uncomputed_hashes(s)}
        admissible: list[_Prefill] = []
        for seq in self._waiting.first(self._config.admission_window):
            claim = self._blocks.claim(seq)
            is_shared_soon = claim.missed_hash in being_computed
            is_unfit = not is_shared_soon and claim.num_taken_blocks + watermark_blocks > available
            if is_unfit:
                self._waiting.mark_unfit(seq)
            if is_shared_soon or is_unfit:
                if self._waiting.is_due(seq):
                    break
                continue
            num_cached_tokens = len(claim.hit_block_ids) * pool.block_size
            admissible.append(_Prefill(seq, len(seq.token_ids) - num_cached_tokens))
            available -= claim.num_taken_blocks
            watermark_blocks = self._config.watermark_blocks
            being_computed.update(seq.block_hashes[len(claim.hit_block_ids) :])
        return admissible

    def _admit(self, seq: Sequence) -> bool:
        """Let a candidate run. False if those admitted before it in this step leave no way."""
        if seq.status is SequenceStatus.RUNNING:
            return True
        if not self._waiting.may_admit(seq):
            return False
        try:
            # The watermark was kept when all candidates were counted together.
            self._blocks.take(seq, watermark_blocks=0)
        except OutOfBlocks:
            # An admission in this step evicted a cached block that led to others which this one was to share.
            return False
        self._waiting.remove(seq)
        self._waiting.count_admission(seq)
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


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
