"""Continuous batching with chunked prefill: which sequences are live and what each step brings them. Pure."""

from engine.admission import DuplicateSequence, QueueFull, UnknownSequence, check_admissible
from engine.block_pool import BlockPool, Ledger, OutOfBlocks
from engine.ledger_audit import Repair, audit
from engine.scheduler_config import SchedulerConfig
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.sequence_blocks import SequenceBlocks
from engine.step_builder import StepBuilder
from engine.step_plan import ScheduledSequence, SequenceOutput, StepOutcome, StepPlan, StepResult
from engine.waiting_queue import WaitingQueue


class Scheduler:
    """Live sequences and their blocks. The rules of a step are in `StepBuilder`, of the queue in `WaitingQueue`.

    `schedule` and `commit` (or `fail`) alternate. Not thread-safe: the caller has a lock for every call, but
    not while the step runs, so any other method may be called in between. The blocks of a step in flight are
    then kept until its commit, whatever happens to its sequences.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, model_fingerprint: str) -> None:
        self._config = config
        self._pool = pool
        self._blocks = SequenceBlocks(pool, model_fingerprint)
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(config.max_bypasses)
        self._running: dict[str, Sequence] = {}
        self._reserved: dict[str, Sequence] = {}
        self._plan: StepPlan | None = None
        # Objects, not ids: an id may be in use again when the step of its aborted sequence ends.
        self._in_flight: dict[str, Sequence] = {}
        self.num_prefilled_tokens = 0  # prompt tokens that steps have computed, or are computing
        self._num_arrivals = 0
        self._num_steps = 0
        self._lacking: dict[str, Sequence] = {}  # skipped a step for lack of a block
        self._handed_back: list[str] = []

    @property
    def num_sequences(self) -> int:
        """Live sequences, in whatever state."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences being computed."""
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Sequences whose KV is to arrive from elsewhere."""
        return len(self._reserved)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be prefilled, whether their sequence waits or is under way."""
        partial = (s for s in self._running.values() if s.num_uncomputed_tokens > 1)
        return sum(s.num_uncomputed_tokens for group in (self._waiting, partial) for s in group)

    def ledger(self) -> Ledger:
        """Where the blocks are now; in flight are those that wait for KV from elsewhere."""
        size = self._pool.block_size
        return self._pool.ledger(sum(len(s.block_ids) - s.num_cached_tokens // size for s in self._reserved.values()))

    def audit(self, *, thorough: bool) -> Repair:
        """Compare the pool's books with what sequences hold, and put right what does not agree; see `audit`."""
        ended_in_flight = [s for s in self._in_flight.values() if s.status is SequenceStatus.FINISHED]
        return audit(self._pool, [*self._sequences.values(), *ended_in_flight], thorough=thorough)

    def drop_cache(self) -> int:
        """Forget what can be found in blocks, owned ones included; returns how many could be."""
        return self._pool.drop_cache()

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises NeverFits, QueueFull, DuplicateSequence; then nothing has changed."""
        self._check_new(seq)
        max_waiting = self._config.max_waiting
        if max_waiting is not None and len(self._waiting) >= max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} sequences wait, the limit is {max_waiting}; retry later or elsewhere"
            )
        self._enter(seq, SequenceStatus.WAITING)
        self._waiting.append(seq)

    def reserve(self, seq: Sequence) -> int:
        """Take blocks for a sequence whose KV arrives from elsewhere, for its prompt and one token more.

        Returns how many prompt tokens the prefix cache has: whole blocks, at most the prompt - 1. Raises
        NeverFits, DuplicateSequence, or OutOfBlocks if there is no room now; then nothing has changed.
        """
        self._check_new(seq)
        if seq.hold_after_prefill:
            raise ValueError(f"sequence {seq.sequence_id!r} cannot both hold after prefill and receive KV")
        if self._waiting.claims_blocks:
            raise OutOfBlocks(
                f"a waiting sequence was overtaken {self._config.max_bypasses} times and is next; retry later"
            )
        if any(s.status is SequenceStatus.RUNNING for s in self._lacking.values()):
            raise OutOfBlocks("a running sequence lacks a KV block and is next; retry later")
        self._blocks.take(seq, watermark_blocks=self._config.watermark_blocks if self._running else 0)
        self._waiting.count_reservation()
        self._enter(seq, SequenceStatus.RESERVED)
        self._reserved[seq.sequence_id] = seq
        return seq.num_cached_tokens

    def activate(self, sequence_id: str, first_token_id: int) -> SequenceOutput:
        """Let a reserved sequence run: the KV of its whole prompt has arrived, and so has its first token.

        Raises UnknownSequence, ValueError if it is not reserved.
        """
        seq = self._find(sequence_id, SequenceStatus.RESERVED)
        del self._reserved[sequence_id]
        seq.status = SequenceStatus.RUNNING
        self._running[sequence_id] = seq
        self._blocks.advance(seq, seq.num_prompt_tokens)
        return self._append_token(seq, first_token_id)

    def abort(self, sequence_id: str) -> None:
        """End a sequence in any state; an unknown id is ignored, as the sequence may just have ended.

        Blocks go back at once unless a step in flight uses them. Transfers into or out of the blocks are the
        caller's: they must be over before.
        """
        seq = self._sequences.get(sequence_id)
        if seq is not None:
            self._end(seq)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed until another method has been called.

        Sequences may have been handed back for lack of blocks: `take_handed_back` tells which.
        """
        if self._plan is not None:
            raise RuntimeError("the step before is still in flight; commit it or fail it first")
        by_age = (self._num_steps + 1) % self._config.age_turn_steps == 0
        builder = StepBuilder(
            self._config, self._blocks, self._waiting, self._running, self._lacking.values(), by_age=by_age
        )
        self._plan, self._lacking = builder.build(), builder.lacking
        for seq in builder.handed_back:
            del self._sequences[seq.sequence_id]
            self._handed_back.append(seq.sequence_id)
        if self._plan is not None:
            self._num_steps += 1
            self._in_flight = {r.sequence_id: self._running[r.sequence_id] for r in self._plan.sequences}
            self.num_prefilled_tokens += sum(map(self._num_prompt_tokens, self._plan.sequences))
        return self._plan

    def _num_prompt_tokens(self, row: ScheduledSequence) -> int:
        end = min(row.start + len(row.token_ids), self._in_flight[row.sequence_id].num_prompt_tokens)
        return max(0, end - row.start)

    def take_handed_back(self) -> list[str]:
        """Ids of sequences that were ended for lack of blocks since the last call; they can go on elsewhere."""
        handed_back, self._handed_back = self._handed_back, []
        return handed_back

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take over what the step computed; returns what it brought to sequences that are still live.

        A sequence for which a token is missing that the plan asked for ends as if its step had failed.
        """
        in_flight = self._land(plan)
        outputs, failed = [], []
        for row in plan.sequences:
            seq = in_flight[row.sequence_id]
            if row.sample and row.sequence_id not in result.sampled:
                failed += self._end_failed(seq)
                continue
            self._blocks.advance(seq, row.start + len(row.token_ids))
            if seq.status is SequenceStatus.FINISHED:
                self._blocks.free(seq)
            elif row.sample:
                outputs.append(self._append_token(seq, result.sampled[row.sequence_id]))
        return StepOutcome(outputs, failed)

    def fail(self, plan: StepPlan) -> list[str]:
        """The step raised: end all its sequences. Returns the ids of those that were still live."""
        return [sequence_id for seq in self._land(plan).values() for sequence_id in self._end_failed(seq)]

    def _land(self, plan: StepPlan) -> dict[str, Sequence]:
        if plan is not self._plan:
            raise ValueError("this plan is not the one in flight")
        in_flight, self._in_flight, self._plan = self._in_flight, {}, None
        return in_flight

    def _check_new(self, seq: Sequence) -> None:
        if seq.sequence_id in self._sequences:
            raise DuplicateSequence(f"sequence {seq.sequence_id!r} is live already; use another id")
        check_admissible(seq, self._config, self._pool)

    def _enter(self, seq: Sequence, status: SequenceStatus) -> None:
        seq.status = status
        seq.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._sequences[seq.sequence_id] = seq

    def _find(self, sequence_id: str, status: SequenceStatus) -> Sequence:
        seq = self._sequences.get(sequence_id)
        if seq is None:
            raise UnknownSequence(f"no live sequence {sequence_id!r}: it has ended or was aborted")
        if seq.status is not status:
            raise ValueError(f"sequence {sequence_id!r} is {seq.status.value}, not {status.value}")
        return seq

    def _append_token(self, seq: Sequence, token_id: int) -> SequenceOutput:
        """Append the next token and end or hold the sequence if it was the last one here."""
        seq.token_ids.append(token_id)
        reason: FinishReason | None = None
        if seq.hold_after_prefill:
            del self._running[seq.sequence_id]
            seq.status = SequenceStatus.HELD
        elif token_id in seq.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif seq.num_output_tokens >= seq.sampling.max_tokens:  # admission keeps it within the context window
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(seq)
        stop_token_id = token_id if reason is FinishReason.STOP else None
        return SequenceOutput(seq.sequence_id, (token_id,), reason, stop_token_id)

    def _end_failed(self, seq: Sequence) -> list[str]:
        """End a sequence of a step that has landed; returns its id if it was live."""
        if seq.status is SequenceStatus.FINISHED:
            self._blocks.free(seq)
            return []
        self._end(seq)
        return [seq.sequence_id]

    def _end(self, seq: Sequence) -> None:
        del self._sequences[seq.sequence_id]
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._running.pop(seq.sequence_id, None)
        self._reserved.pop(seq.sequence_id, None)
        seq.status = SequenceStatus.FINISHED
        if self._in_flight.get(seq.sequence_id) is not seq:
            self._blocks.free(seq)
