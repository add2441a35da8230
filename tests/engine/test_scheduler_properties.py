"""Whatever is called in whatever order: KV is never overwritten while needed, limits hold, and all work ends.

What is handed back for lack of blocks goes on in a new sequence, as it would on another worker.

The device is simulated by what each KV slot holds: a key of all tokens up to it. A step checks the slots it
reads and writes its own only at commit, as late as possible; the next token is a function of all before it.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.admission import NeverFits, QueueFull
from engine.block_pool import BlockPool, OutOfBlocks
from engine.ledger_audit import Repair
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.step_plan import SequenceOutput, StepPlan, StepResult

BLOCK_SIZE = 4
STOP_TOKEN = 9


def _next_token(token_ids: list[int]) -> int:
    return sum((i + 1) * (t + 3) for i, t in enumerate(token_ids)) % 11


def _answer(prompt: list[int], max_tokens: int) -> list[int]:
    """What the sequence must generate, whoever else is there."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(_next_token(token_ids))
        if token_ids[-1] == STOP_TOKEN:
            break
    return token_ids[len(prompt) :]


@dataclass
class Device:
    """KV slots by (block, offset)."""

    slots: dict[tuple[int, int], object] = field(default_factory=dict)

    def write(self, seq: Sequence, block_ids: tuple[int, ...], start: int, end: int) -> None:
        for i in range(start, end):
            self.slots[block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE] = self._key(seq, i)

    def check(self, seq: Sequence, block_ids: tuple[int, ...], end: int) -> None:
        for i in range(end):
            assert self.slots[block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE] == self._key(seq, i)

    def _key(self, seq: Sequence, i: int) -> object:
        return seq.cache_salt, tuple(seq.token_ids[: i + 1])


prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=18),
    st.integers(1, 24).map(lambda n: [5] * n),  # shared prefixes at every block edge
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 12),
        max_batch=st.integers(1, 4),
        extra_tokens=st.integers(0, 12),
        chunk=st.one_of(st.none(), st.integers(1, 6)),
        watermark=st.integers(0, 2),
        max_bypasses=st.integers(0, 3),
        window=st.integers(1, 4),
        age_turn=st.integers(1, 4),
    )
    def start(
        self,
        num_blocks: int,
        max_batch: int,
        extra_tokens: int,
        chunk: int | None,
        watermark: int,
        max_bypasses: int,
        window: int,
        age_turn: int,
    ) -> None:
        self.config = SchedulerConfig(
            max_step_tokens=max_batch + extra_tokens,
            max_batch_sequences=max_batch,
            context_window_tokens=40,
            max_prefill_chunk_tokens=chunk,
            max_waiting=8,
            watermark_blocks=watermark,
            admission_window=window,
            max_bypasses=max_bypasses,
            age_turn_steps=age_turn,
        )
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.config, self.pool, "model")
        self.device = Device()
        self.live: dict[str, Sequence] = {}
        self.emitted: dict[str, list[int]] = {}
        self.plan: StepPlan | None = None
        self.plan_seqs: dict[str, Sequence] = {}
        self.continuations: list[Sequence] = []  # of those handed back

    def _new(self, prompt: list[int], max_tokens: int, salt: str, hold: bool = False, priority: int = 0) -> Sequence:
        # Ids are used again as soon as they are free, also while an aborted one is in flight.
        sequence_id = next(str(i) for i in range(99) if str(i) not in self.live)
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset([STOP_TOKEN]))
        return Sequence(sequence_id, list(prompt), len(prompt), sampling, salt, hold, priority)

    def _enter(self, seq: Sequence) -> None:
        self.live[seq.sequence_id] = seq
        self.emitted[seq.sequence_id] = []

    def _take_output(self, output: SequenceOutput) -> None:
        seq = self.live[output.sequence_id]
        emitted = self.emitted[output.sequence_id]
        emitted += output.token_ids
        expected = _answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling.max_tokens)
        assert emitted == expected[: len(emitted)]
        assert seq.token_ids[seq.num_prompt_tokens :] == emitted
        if output.finish_reason is not None:
            assert emitted == expected
            is_stop = expected[-1] == STOP_TOKEN
            assert output.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            assert output.stop_token_id == (STOP_TOKEN if is_stop else None)
            del self.live[output.sequence_id]
        else:
            assert (seq.status is SequenceStatus.HELD) == seq.hold_after_prefill
            assert seq.hold_after_prefill or emitted != expected

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        salt=st.sampled_from(["", "", "a"]),
        hold=st.sampled_from([0, 0, 1]),
        priority=st.integers(0, 2),
    )
    def add(self, prompt: list[int], max_tokens: int, salt: str, hold: int, priority: int) -> None:
        seq = self._new(prompt, max_tokens, salt, bool(hold), priority)
        try:
            self.scheduler.add(seq)
        except NeverFits:
            num_kv = len(prompt) + (0 if hold else max_tokens - 1)
            assert num_kv > self.pool.num_blocks * BLOCK_SIZE or len(prompt) + max_tokens > 40
        except QueueFull:
            assert self.scheduler.num_waiting >= 8
        else:
            self._enter(seq)

    @precondition(lambda self: self.continuations and self.scheduler.num_waiting < 8)
    @rule()
    def go_on(self) -> None:
        handed_back = self.continuations.pop()
        max_tokens = handed_back.sampling.max_tokens - handed_back.num_output_tokens
        seq = self._new(handed_back.token_ids, max_tokens, handed_back.cache_salt, priority=handed_back.priority)
        self.scheduler.add(seq)
        self._enter(seq)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 2),
    )
    def reserve(self, prompt: list[int], max_tokens: int, salt: str, priority: int) -> None:
        seq = self._new(prompt, max_tokens, salt, priority=priority)
        before = self.pool.ledger(), self.pool.num_available
        try:
            num_cached = self.scheduler.reserve(seq)
        except (NeverFits, OutOfBlocks):
            assert (self.pool.ledger(), self.pool.num_available) == before
            return
        self._enter(seq)
        assert num_cached % BLOCK_SIZE == 0
        assert num_cached <= len(prompt) - 1
        assert len(seq.block_ids) * BLOCK_SIZE >= len(prompt) + (max_tokens > 1)
        self.device.check(seq, tuple(seq.block_ids), num_cached)

    def _with_status(self, status: SequenceStatus) -> list[str]:
        return [i for i, s in self.live.items() if s.status is status]

    def _activate(self, sequence_id: str) -> None:
        seq = self.live[sequence_id]
        self.device.write(seq, tuple(seq.block_ids), seq.num_cached_tokens, seq.num_prompt_tokens)
        self._take_output(self.scheduler.activate(sequence_id, _next_token(seq.token_ids)))

    def _release(self, sequence_id: str) -> None:
        seq = self.live.pop(sequence_id)
        self.device.check(seq, tuple(seq.block_ids), seq.num_prompt_tokens)
        self.scheduler.abort(sequence_id)

    @precondition(lambda self: self._with_status(SequenceStatus.RESERVED))
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        self._activate(data.draw(st.sampled_from(self._with_status(SequenceStatus.RESERVED))))

    @precondition(lambda self: self._with_status(SequenceStatus.HELD))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self._with_status(SequenceStatus.HELD))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[sequence_id]
        self.scheduler.abort(sequence_id)
        self.scheduler.abort(sequence_id)

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        running = {i: self.live[i] for i in self._with_status(SequenceStatus.RUNNING)}
        self.plan = self.scheduler.schedule()
        self._take_handed_back(running)
        if self.plan is None:
            return
        rows = self.plan.sequences
        self.plan_seqs = {r.sequence_id: self.live[r.sequence_id] for r in rows}
        assert 0 < self.plan.num_tokens <= self.config.max_step_tokens
        assert len(rows) == len(self.plan_seqs) <= self.config.max_batch_sequences
        for row in rows:
            seq = self.live[row.sequence_id]
            end = row.start + len(row.token_ids)
            assert row.token_ids == tuple(seq.token_ids[row.start : end])
            assert len(row.block_ids) == -(-end // BLOCK_SIZE)
            assert row.sample == (end == len(seq.token_ids))
            chunk = self.config.max_prefill_chunk_tokens
            assert chunk is None or len(row.token_ids) <= chunk
            self.device.check(seq, row.block_ids, row.start)

    def _take_handed_back(self, running: dict[str, Sequence]) -> None:
        handed_back = [self.live.pop(i) for i in self.scheduler.take_handed_back()]
        assert self.scheduler.take_handed_back() == []
        rows = {} if self.plan is None else {r.sequence_id: self.live[r.sequence_id] for r in self.plan.sequences}
        for seq in handed_back:
            assert running[seq.sequence_id] is seq
            assert not seq.hold_after_prefill
            assert (seq.status, seq.block_ids) == (SequenceStatus.FINISHED, [])
            assert any(s.rank < seq.rank for s in rows.values()), "for somebody more important or older"
            assert seq.token_ids[seq.num_prompt_tokens :] == self.emitted[seq.sequence_id]
            assert self.emitted[seq.sequence_id] != _answer(
                seq.token_ids[: seq.num_prompt_tokens], seq.sampling.max_tokens
            )
            self.continuations.append(seq)

    def _run(self) -> StepResult:
        assert self.plan is not None
        for row in self.plan.sequences:
            self.device.check(self.plan_seqs[row.sequence_id], row.block_ids, row.start)
        for row in self.plan.sequences:
            end = row.start + len(row.token_ids)
            self.device.write(self.plan_seqs[row.sequence_id], row.block_ids, row.start, end)
        sampling_rows = [r.sequence_id for r in self.plan.sequences if r.sample]
        return StepResult({i: _next_token(self.plan_seqs[i].token_ids) for i in sampling_rows})

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        result = self._run()
        self._commit(result)

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data(), often=st.integers(0, 9))
    def commit_too_few_tokens(self, data: st.DataObject, often: int) -> None:
        sampled = self._run().sampled
        if sampled and not often:
            kept = data.draw(st.sets(st.sampled_from(sorted(sampled))))
            self._commit(StepResult({i: sampled[i] for i in kept}))

    def _commit(self, result: StepResult) -> None:
        plan, self.plan = self.plan, None
        outcome = self.scheduler.commit(plan, result)
        still_live = {i for i, s in self.plan_seqs.items() if self.live.get(i) is s}
        asked = {r.sequence_id for r in plan.sequences if r.sample}
        assert {o.sequence_id for o in outcome.outputs} == still_live & result.sampled.keys()
        assert set(outcome.failed_ids) == still_live & asked - result.sampled.keys()
        for output in outcome.outputs:
            self._take_output(output)
        for sequence_id in outcome.failed_ids:
            del self.live[sequence_id]

    @precondition(lambda self: self.plan is not None)
    @rule(often=st.integers(0, 9))
    def fail(self, often: int) -> None:
        if often:
            return
        plan, self.plan = self.plan, None
        failed = self.scheduler.fail(plan)
        assert set(failed) == {i for i, s in self.plan_seqs.items() if self.live.get(i) is s}
        for sequence_id in failed:
            del self.live[sequence_id]

    @rule(often=st.integers(0, 9))
    def drop_cache(self, often: int) -> None:
        if not often:
            self.scheduler.drop_cache()
            assert self.scheduler.ledger().cached == 0

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        ledger = self.scheduler.ledger()
        ledger.check()
        holders = {id(s): s for s in self.live.values()}
        if self.plan is not None:
            holders |= {id(s): s for s in self.plan_seqs.values()}
        assert ledger.owned + ledger.in_flight == len({b for s in holders.values() for b in s.block_ids})
        reserved = [self.live[i] for i in self._with_status(SequenceStatus.RESERVED)]
        assert ledger.in_flight == sum(len(s.block_ids) - s.num_cached_tokens // BLOCK_SIZE for s in reserved)
        assert self.scheduler.audit(thorough=True) == Repair(0, "")
        for seq in self.live.values():
            assert bool(seq.block_ids) == (seq.status is not SequenceStatus.WAITING)
            assert seq.num_cached_tokens <= max(0, seq.num_prompt_tokens - 1)
        assert self.scheduler.num_sequences == len(self.live)
        assert self.scheduler.num_running == len(self._with_status(SequenceStatus.RUNNING))
        assert self.scheduler.num_waiting == len(self._with_status(SequenceStatus.WAITING))
        assert self.scheduler.num_reserved == len(self._with_status(SequenceStatus.RESERVED))

    def _owners_act(self) -> None:
        for sequence_id in self._with_status(SequenceStatus.RESERVED):
            self._activate(sequence_id)
        for sequence_id in self._with_status(SequenceStatus.HELD):
            self._release(sequence_id)

    def teardown(self) -> None:
        """Once KV arrives and held blocks are fetched, all work ends within a bound of steps."""
        if not hasattr(self, "scheduler"):
            return
        sequences = [*self.live.values(), *self.continuations]
        num_tokens = sum(len(s.token_ids) + s.sampling.max_tokens for s in sequences)
        # Each time the first in rank ends, all others may have been handed back and begin again.
        for _ in range(2 + num_tokens * (len(sequences) + 1) * self.config.age_turn_steps):
            while self.continuations and self.scheduler.num_waiting < 8:
                self.go_on()
            self._owners_act()
            if self.plan is None:
                self.schedule()
            if self.plan is not None:
                self.commit()
                continue
            assert not self.live, "nobody is stuck"
            if not self.continuations:
                break
        assert not self.live
        assert not self.continuations
        assert self.scheduler.num_queued_tokens == 0
        ledger = self.scheduler.ledger()
        assert (ledger.owned, ledger.in_flight, ledger.free + ledger.cached) == (0, 0, self.pool.num_blocks)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
