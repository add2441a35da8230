"""Continuous batching with chunked prefill: which sequences are live and what each step brings them. Pure."""

from engine.admission import DuplicateSequence, QueueFull, UnknownSequence, check_admissible
from engine.block_pool import BlockPool, Ledger, OutOfBlocks
from engine.scheduler_config import SchedulerConfig
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.sequence_blocks import SequenceBlocks
from engine.step_builder import StepBuilder
from engine.step_plan import SequenceOutput, StepPlan, StepResult
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
        self._num_arrivals = 0

    @property
    def num_sequences(self) -> int:
        """Live sequences, in whatever state."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: new or preempted."""
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
    def num_in_flight_blocks(self) -> int:
        """Blocks, among those owned, that wait for KV from elsewhere."""
        return sum(len(s.block_ids) - s.num_cached_tokens // self._pool.block_size for s in self._reserved.values())

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be prefilled, whether their sequence waits or is under way."""
        partial = (s for s in self._running.values() if s.num_uncomputed_tokens > 1)
        return sum(s.num_uncomputed_tokens for group in (self._waiting, partial) for s in group)

    @property
    def has_work(self) -> bool:
        """Something waits or runs. If `schedule` still returns None, it needs blocks of others than these."""
        return bool(self._waiting) or bool(self._running)

    def ledger(self) -> Ledger:
        """Where the blocks are now."""
        return self._pool.ledger()

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
        if self._waiting.has_due:
            raise OutOfBlocks(
                f"a waiting sequence was passed over {self._config.max_bypasses} times and is next; retry later"
            )
        self._blocks.take(seq, watermark_blocks=self._config.watermark_blocks if self._running else 0)
        self._waiting.count_bypass()
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
        """The next step, or None if nothing can be computed until another method has been called."""
        if self._plan is not None:
            raise RuntimeError("the step before is still in flight; commit it or fail it first")
        self._plan = StepBuilder(self._config, self._blocks, self._waiting, self._running).build()
        if self._plan is not None:
            self._in_flight = {r.sequence_id: self._running[r.sequence_id] for r in self._plan.sequences}
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Take over what the step computed; returns what it brought to sequences that are still live.

        Raises ValueError, having changed nothing, if a token that the plan asked for is missing.
        """
        missing = [r.sequence_id for r in plan.sequences if r.sample and r.sequence_id not in result.sampled]
        if missing:
            raise ValueError(f"the step brought no token for {missing}")
        in_flight = self._land(plan)
        outputs = []
        for row in plan.sequences:
            seq = in_flight[row.sequence_id]
            self._blocks.advance(seq, row.start + len(row.token_ids))
            if seq.status is SequenceStatus.FINISHED:
                self._blocks.free(seq)
            elif row.sample:
                outputs.append(self._append_token(seq, result.sampled[row.sequence_id]))
        return outputs

    def fail(self, plan: StepPlan) -> list[str]:
        """The step raised: end all its sequences. Returns the ids of those that were still live."""
        failed = []
        for seq in self._land(plan).values():
            if seq.status is SequenceStatus.FINISHED:
                self._blocks.free(seq)
            else:
                failed.append(seq.sequence_id)
                self._end(seq)
        return failed

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

    def _end(self, seq: Sequence) -> None:
        del self._sequences[seq.sequence_id]
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._running.pop(seq.sequence_id, None)
        self._reserved.pop(seq.sequence_id, None)
        seq.status = SequenceStatus.FINISHED
        if self._in_flight.get(seq.sequence_id) is not seq:
            self._blocks.free(seq)
