"""Whatever is called in whatever order: KV is never overwritten while needed, limits hold, and all work ends.

The device is simulated by what each KV slot holds: a key of all tokens up to it. A step checks the slots it
reads and writes its own only at commit, as late as possible; the next token is a function of all before it.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.admission import NeverFits, QueueFull
from engine.block_pool import BlockPool, OutOfBlocks
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
        )
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.config, self.pool, "model")
        self.device = Device()
        self.live: dict[str, Sequence] = {}
        self.emitted: dict[str, list[int]] = {}
        self.plan: StepPlan | None = None
        self.plan_seqs: dict[str, Sequence] = {}

    def _new(self, prompt: list[int], max_tokens: int, salt: str, hold: bool = False) -> Sequence:
        # Ids are used again as soon as they are free, also while an aborted one is in flight.
        sequence_id = next(str(i) for i in range(99) if str(i) not in self.live)
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset([STOP_TOKEN]))
        return Sequence(sequence_id, list(prompt), len(prompt), sampling, salt, hold)

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
    )
    def add(self, prompt: list[int], max_tokens: int, salt: str, hold: int) -> None:
        seq = self._new(prompt, max_tokens, salt, bool(hold))
        try:
            self.scheduler.add(seq)
        except NeverFits:
            num_kv = len(prompt) + (0 if hold else max_tokens - 1)
            assert num_kv > self.pool.num_blocks * BLOCK_SIZE or len(prompt) + max_tokens > 40
        except QueueFull:
            assert self.scheduler.num_waiting >= 8
        else:
            self._enter(seq)

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), salt=st.sampled_from(["", "", "a"]))
    def reserve(self, prompt: list[int], max_tokens: int, salt: str) -> None:
        seq = self._new(prompt, max_tokens, salt)
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
        self.plan = self.scheduler.schedule()
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
        plan, self.plan = self.plan, None
        outputs = self.scheduler.commit(plan, result)
        still_live = {i for i, s in self.plan_seqs.items() if self.live.get(i) is s}
        assert {o.sequence_id for o in outputs} == still_live & result.sampled.keys()
        for output in outputs:
            self._take_output(output)

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
        assert ledger.owned == len({b for s in holders.values() for b in s.block_ids})
        for seq in self.live.values():
            assert bool(seq.block_ids) == (seq.status is not SequenceStatus.WAITING)
            assert seq.num_cached_tokens <= max(0, seq.num_prompt_tokens - 1)
        assert self.scheduler.num_sequences == len(self.live)
        assert self.scheduler.num_running == len(self._with_status(SequenceStatus.RUNNING))
        assert self.scheduler.num_waiting == len(self._with_status(SequenceStatus.WAITING))
        assert self.scheduler.num_reserved == len(self._with_status(SequenceStatus.RESERVED))
        assert 0 <= self.scheduler.num_in_flight_blocks <= ledger.owned

    def teardown(self) -> None:
        """Once KV arrives and held blocks are fetched, all work ends within a bound of steps."""
        if not hasattr(self, "scheduler"):
            return
        num_tokens = sum(s.num_prompt_tokens + s.sampling.max_tokens for s in self.live.values())
        max_steps = 2 + num_tokens * (len(self.live) + 1)  # each preemption may cost the tokens of one again
        for _ in range(max_steps):
            for sequence_id in self._with_status(SequenceStatus.RESERVED):
                self._activate(sequence_id)
            for sequence_id in self._with_status(SequenceStatus.HELD):
                self._release(sequence_id)
            if self.plan is None:
                self.schedule()
                assert (self.plan is not None) == self.scheduler.has_work
            if self.plan is None:
                break
            self.commit()
        assert not self.live
        assert self.scheduler.num_queued_tokens == 0
        ledger = self.scheduler.ledger()
        assert (ledger.owned, ledger.free + ledger.cached) == (0, self.pool.num_blocks)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
