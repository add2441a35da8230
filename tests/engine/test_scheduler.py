"""Hand-worked lives of sequences: what each step brings, what is cached, kept and given back."""

import pytest

from engine.admission import DuplicateSequence, QueueFull, UnknownSequence
from engine.block_pool import BlockPool, Ledger, OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.step_plan import SequenceOutput, StepOutcome, StepPlan, StepResult


def _scheduler(num_blocks: int = 64, block_size: int = 16, **limits: int) -> Scheduler:
    defaults = {"max_step_tokens": 64, "max_batch_sequences": 8, "context_window_tokens": 4096, "watermark_blocks": 0}
    return Scheduler(SchedulerConfig(**(defaults | limits)), BlockPool(num_blocks, block_size), "model")


def _seq(sequence_id: str, prompt: list[int], max_tokens: int = 1, *, hold: bool = False, salt: str = "") -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset([2]))
    return Sequence(sequence_id, list(prompt), len(prompt), sampling, salt, hold)


def _distinct(start: int, count: int) -> list[int]:
    return list(range(1000 * start + 10, 1000 * start + 10 + count))


def _commit(scheduler: Scheduler, plan: StepPlan, token_id: int = 5) -> list[SequenceOutput]:
    outcome = scheduler.commit(plan, StepResult({r.sequence_id: token_id for r in plan.sequences if r.sample}))
    assert outcome.failed_ids == []
    return outcome.outputs


def _step(scheduler: Scheduler) -> dict[str, int]:
    """Run one step; returns the tokens computed by sequence."""
    plan = scheduler.schedule()
    if plan is None:
        return {}
    _commit(scheduler, plan)
    return {r.sequence_id: len(r.token_ids) for r in plan.sequences}


def _drain(scheduler: Scheduler, max_steps: int = 1000) -> None:
    for _ in range(max_steps):
        if not _step(scheduler):
            break
    assert scheduler.num_sequences == 0
    assert scheduler.ledger().owned == 0


class TestOneSequence:
    def test_prompt_in_chunks_then_one_token_a_step(self) -> None:
        scheduler = _scheduler(max_step_tokens=8)
        scheduler.add(_seq("a", _distinct(1, 20), max_tokens=3))
        assert scheduler.num_queued_tokens == 20
        starts = []
        outputs = []
        while (plan := scheduler.schedule()) is not None:
            [row] = plan.sequences
            starts.append((row.start, len(row.token_ids), row.sample, len(row.block_ids)))
            outputs += _commit(scheduler, plan)
        assert starts == [(0, 8, False, 1), (8, 8, False, 1), (16, 4, True, 2), (20, 1, True, 2), (21, 1, True, 2)]
        assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
        assert scheduler.num_sequences == 0
        assert scheduler.ledger() == Ledger(total=64, free=63, cached=1, owned=0)

    def test_stop_token_ends_and_is_counted(self) -> None:
        scheduler = _scheduler()
        seq = _seq("a", [7, 8], max_tokens=5)
        scheduler.add(seq)
        plan = scheduler.schedule()
        assert plan is not None
        assert _commit(scheduler, plan, token_id=2) == [SequenceOutput("a", (2,), FinishReason.STOP, 2)]
        assert seq.token_ids == [7, 8, 2]
        assert seq.status is SequenceStatus.FINISHED

    @pytest.mark.parametrize("max_tokens", [1, 5])
    def test_held_until_aborted(self, max_tokens: int) -> None:
        scheduler = _scheduler()
        seq = _seq("a", _distinct(1, 32), max_tokens, hold=True)
        scheduler.add(seq)
        plan = scheduler.schedule()
        assert plan is not None
        assert _commit(scheduler, plan) == [SequenceOutput("a", (5,), None)]
        assert seq.status is SequenceStatus.HELD
        assert scheduler.ledger().owned == 2
        assert scheduler.schedule() is None
        assert scheduler.num_running == 0
        scheduler.abort("a")
        assert scheduler.ledger() == Ledger(total=64, free=62, cached=2, owned=0)
        with pytest.raises(UnknownSequence):
            scheduler.activate("a", 5)

    def test_misuse_raises(self) -> None:
        scheduler = _scheduler(max_waiting=1)
        scheduler.add(_seq("a", [7]))
        with pytest.raises(DuplicateSequence):
            scheduler.add(_seq("a", [8]))
        with pytest.raises(QueueFull, match="the limit is 1"):
            scheduler.add(_seq("b", [8]))
        with pytest.raises(ValueError, match="waiting, not reserved"):
            scheduler.activate("a", 5)
        with pytest.raises(ValueError, match="cannot both"):
            scheduler.reserve(_seq("c", [8], hold=True))
        plan = scheduler.schedule()
        assert plan is not None
        with pytest.raises(RuntimeError, match="in flight"):
            scheduler.schedule()
        _commit(scheduler, plan)
        with pytest.raises(ValueError, match="not the one in flight"):
            _commit(scheduler, plan)


class TestPrefixCache:
    @pytest.mark.parametrize(
        ("num_prompt", "num_cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)]
    )
    def test_at_most_all_but_one_token_in_whole_blocks(self, num_prompt: int, num_cached: int) -> None:
        scheduler = _scheduler()
        scheduler.add(_seq("first", [7] * num_prompt))
        _drain(scheduler)
        again = _seq("again", [7] * num_prompt)
        scheduler.add(again)
        assert _step(scheduler) == {"again": num_prompt - num_cached}
        assert again.num_cached_tokens == num_cached
        assert scheduler.reserve(_seq("reserved", [7] * num_prompt)) == num_cached

    def test_the_next_turn_finds_prompt_and_answer(self) -> None:
        """37 prompt tokens and 8 generated: the KV of 44 is there, 5 blocks of 8."""
        scheduler = _scheduler(block_size=8)
        turn1 = _seq("1", _distinct(1, 37), max_tokens=8)
        scheduler.add(turn1)
        _drain(scheduler)
        turn2 = _seq("2", turn1.token_ids + _distinct(2, 14), max_tokens=1)
        scheduler.add(turn2)
        assert _step(scheduler) == {"2": 19}
        assert turn2.num_cached_tokens == 40

    def test_salts_share_nothing(self) -> None:
        scheduler = _scheduler()
        cached = []
        for i, salt in enumerate(["a", "a", "b", "", "a"]):
            seq = _seq(str(i), _distinct(1, 64), salt=salt)
            scheduler.add(seq)
            _drain(scheduler)
            cached.append(seq.num_cached_tokens)
        assert cached == [0, 48, 0, 0, 48]

    def test_a_block_that_is_being_computed_is_waited_for(self) -> None:
        scheduler = _scheduler(max_step_tokens=32)
        scheduler.add(_seq("a", _distinct(1, 64)))
        same = _seq("same", [*_distinct(1, 48), 7])
        other = _seq("other", _distinct(2, 4))
        scheduler.add(same)
        scheduler.add(other)
        assert _step(scheduler) == {"a": 28, "other": 4}
        assert _step(scheduler) == {"a": 32}
        assert _step(scheduler) == {"a": 4, "same": 1}
        assert same.num_cached_tokens == 48

    def test_kv_that_never_arrived_is_not_cached(self) -> None:
        scheduler = _scheduler()
        scheduler.reserve(_seq("a", _distinct(1, 64)))
        scheduler.abort("a")
        assert scheduler.ledger() == Ledger(total=64, free=64, cached=0, owned=0)
        assert scheduler.reserve(_seq("a", _distinct(1, 64))) == 0

    def test_an_admission_may_evict_what_the_next_one_was_to_share(self) -> None:
        """The first block that `late` would share is cached, the second is owned by `y`, found only after the first.

        1 block is free and 3 are cached: `big` needs 2 and `late` 2 as long as it finds both, but 3 otherwise.
        """
        scheduler = _scheduler(num_blocks=7, block_size=2)
        scheduler.reserve(_seq("y", [7, 7, 8, 8], max_tokens=3))
        for sequence_id, prompt in (("x", [7, 7]), ("z", [6, 6, 6, 6])):
            scheduler.add(_seq(sequence_id, prompt))
            _step(scheduler)
        scheduler.activate("y", 5)
        assert scheduler.ledger() == Ledger(total=7, free=1, cached=3, owned=3)
        big = _seq("big", [3, 3, 3, 3])
        big.priority = -1
        scheduler.add(big)
        scheduler.add(_seq("late", [7, 7, 8, 8, 9]))
        assert _step(scheduler) == {"y": 1, "big": 4}
        _drain(scheduler)


class TestInFlight:
    def test_blocks_of_an_aborted_sequence_stay_until_commit(self) -> None:
        scheduler = _scheduler(num_blocks=2)
        scheduler.add(_seq("a", _distinct(1, 20)))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.abort("a")
        assert scheduler.num_sequences == 0
        assert scheduler.ledger().owned == 2
        with pytest.raises(OutOfBlocks):
            scheduler.reserve(_seq("b", _distinct(2, 20)))
        scheduler.add(_seq("a", _distinct(3, 20)))
        assert _commit(scheduler, plan) == []
        assert scheduler.ledger() == Ledger(total=2, free=1, cached=1, owned=0)
        assert _step(scheduler) == {"a": 20}

    def test_a_failed_step_ends_its_sequences_only(self) -> None:
        scheduler = _scheduler()
        for sequence_id in "ab":
            scheduler.add(_seq(sequence_id, _distinct(1, 20)))
        plan = scheduler.schedule()
        assert plan is not None
        assert [r.sequence_id for r in plan.sequences] == ["a"]
        scheduler.add(_seq("c", _distinct(3, 20)))
        assert scheduler.fail(plan) == ["a"]
        assert scheduler.ledger() == Ledger(total=64, free=64, cached=0, owned=0)
        assert _step(scheduler) == {"b": 20, "c": 20}

    def test_a_step_that_brings_too_few_tokens_fails_those_that_lack_one(self) -> None:
        scheduler = _scheduler(max_step_tokens=41)
        for i, sequence_id in enumerate(["fine", "short", "aborted"]):
            scheduler.add(_seq(sequence_id, _distinct(1 + i, 10), max_tokens=2))
        partial = _seq("partial", _distinct(9, 40), max_tokens=2)
        scheduler.add(partial)
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.abort("aborted")
        outcome = scheduler.commit(plan, StepResult({"fine": 5}))
        assert outcome == StepOutcome([SequenceOutput("fine", (5,))], ["short"])
        assert scheduler.num_sequences == 2
        assert partial.num_computed_tokens == 11
        assert scheduler.ledger().cached == 0, "what was computed for the failed ones is not to be found"
        assert _step(scheduler) == {"fine": 1, "partial": 29}
        _drain(scheduler)

    def test_a_reserved_sequence_counts_as_in_flight_but_for_what_is_cached(self) -> None:
        scheduler = _scheduler()
        scheduler.add(_seq("before", _distinct(1, 40)))
        _drain(scheduler)
        assert scheduler.reserve(_seq("a", _distinct(1, 60), max_tokens=5)) == 32
        assert scheduler.ledger() == Ledger(total=64, free=60, cached=0, owned=2, in_flight=2)
        scheduler.activate("a", 5)
        assert scheduler.ledger() == Ledger(total=64, free=60, cached=0, owned=4, in_flight=0)

    def test_abort_in_every_state(self) -> None:
        scheduler = _scheduler()
        scheduler.add(_seq("held", _distinct(1, 20), hold=True))
        _step(scheduler)
        scheduler.add(_seq("running", _distinct(2, 20), max_tokens=5))
        _step(scheduler)
        scheduler.add(_seq("waiting", _distinct(3, 20)))
        scheduler.reserve(_seq("reserved", _distinct(4, 20)))
        for sequence_id in ("held", "running", "waiting", "reserved", "reserved", "", "never seen"):
            scheduler.abort(sequence_id)
        assert scheduler.num_sequences == scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.num_reserved == 0
        assert scheduler.ledger() == Ledger(total=64, free=62, cached=2, owned=0)

    def test_an_active_sequence_may_end_at_its_first_token(self) -> None:
        scheduler = _scheduler()
        scheduler.reserve(_seq("a", _distinct(1, 20), max_tokens=5))
        assert scheduler.activate("a", 2) == SequenceOutput("a", (2,), FinishReason.STOP, 2)
        scheduler.reserve(_seq("b", _distinct(1, 20), max_tokens=1))
        assert scheduler.activate("b", 5) == SequenceOutput("b", (5,), FinishReason.LENGTH)
        assert scheduler.ledger() == Ledger(total=64, free=63, cached=1, owned=0)


def test_prompt_tokens_count_as_prefilled_when_their_step_begins_and_generated_ones_never() -> None:
    scheduler = _scheduler(max_step_tokens=8)
    scheduler.add(_seq("a", _distinct(1, 20), max_tokens=3))
    counts = []
    while (plan := scheduler.schedule()) is not None:
        counts.append(scheduler.num_prefilled_tokens)
        _commit(scheduler, plan)
    assert counts == [8, 16, 20, 20, 20]
