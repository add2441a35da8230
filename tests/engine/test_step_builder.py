"""Hand-worked steps: who computes how much, who is admitted, who is handed back, and that nobody starves."""

import pytest

from engine.admission import NeverFits
from engine.block_pool import BlockPool, OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence, SequenceStatus
from engine.step_plan import StepResult


def _scheduler(num_blocks: int = 64, block_size: int = 16, **limits: int) -> Scheduler:
    defaults = {"max_step_tokens": 64, "max_batch_sequences": 8, "context_window_tokens": 4096, "watermark_blocks": 0}
    return Scheduler(SchedulerConfig(**(defaults | limits)), BlockPool(num_blocks, block_size), "model")


def _seq(sequence_id: str, prompt: list[int], max_tokens: int = 1, *, priority: int = 0) -> Sequence:
    return Sequence(sequence_id, list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens), priority=priority)


def _distinct(start: int, count: int) -> list[int]:
    return list(range(1000 * start + 10, 1000 * start + 10 + count))


def _step(scheduler: Scheduler) -> dict[str, int]:
    """Run one step; returns the tokens computed by sequence."""
    plan = scheduler.schedule()
    if plan is None:
        return {}
    scheduler.commit(plan, StepResult({r.sequence_id: 5 for r in plan.sequences if r.sample}))
    return {r.sequence_id: len(r.token_ids) for r in plan.sequences}


def _drain(scheduler: Scheduler, max_steps: int = 1000) -> None:
    for _ in range(max_steps):
        if not _step(scheduler):
            break
    assert scheduler.num_sequences == 0
    assert scheduler.ledger().owned == 0


class TestSharing:
    def test_short_prompts_do_not_wait_for_a_long_one(self) -> None:
        scheduler = _scheduler(num_blocks=256)
        scheduler.add(_seq("long", _distinct(1, 2000)))
        num_steps = 0
        for i in range(3):
            for _ in range(2):
                assert _step(scheduler) == {"long": 64}
            scheduler.add(_seq(f"short{i}", _distinct(2 + i, 5)))
            assert _step(scheduler) == {"long": 59, f"short{i}": 5}
            num_steps += 3
        while _step(scheduler):
            num_steps += 1
        assert num_steps <= 32 * 1.25  # 2000 / 64 alone

    def test_decode_gets_a_token_in_every_step(self) -> None:
        scheduler = _scheduler(num_blocks=512)
        scheduler.add(_seq("stream", [7], max_tokens=30))
        _step(scheduler)
        for i in range(4):
            scheduler.add(_seq(f"long{i}", _distinct(1 + i, 700)))
        for _ in range(29):
            tokens = _step(scheduler)
            assert tokens["stream"] == 1
            assert sum(tokens.values()) == 64

    def test_a_long_prompt_ends_however_many_short_ones_come(self) -> None:
        scheduler = _scheduler(num_blocks=512)
        long = _seq("long", _distinct(1, 2000))
        scheduler.add(long)
        for num_steps in range(1, 64):
            for i in range(16):
                scheduler.add(_seq(f"short{num_steps}-{i}", _distinct(2 + num_steps * 16 + i, 5)))
            _step(scheduler)
            assert long.num_computed_tokens >= 32 * num_steps or long.status is SequenceStatus.FINISHED
        assert long.status is SequenceStatus.FINISHED

    def test_a_prompt_starts_however_many_reserved_ones_become_active(self) -> None:
        scheduler = _scheduler(max_batch_sequences=2, max_step_tokens=8)
        for i in range(2):
            scheduler.reserve(_seq(f"early{i}", [7], max_tokens=4))
            scheduler.activate(f"early{i}", 5)
        waiting = _seq("waiting", _distinct(1, 30), max_tokens=3)
        scheduler.add(waiting)
        for i in range(40):
            scheduler.reserve(_seq(f"late{i}", [7], max_tokens=20))
            scheduler.activate(f"late{i}", 5)
            _step(scheduler)
            if waiting.status is SequenceStatus.FINISHED:
                break
        assert waiting.status is SequenceStatus.FINISHED


class TestBlocksRunOut:
    @pytest.mark.parametrize("first", ["add", "reserve"])
    def test_the_whole_pool_can_be_used_by_one(self, first: str) -> None:
        scheduler = _scheduler(num_blocks=8, watermark_blocks=2)
        for i, (num_prompt, max_tokens) in enumerate([(128, 1), (127, 2), (100, 29)]):
            seq = _seq(str(i), _distinct(i, num_prompt), max_tokens)
            getattr(scheduler, first)(seq)
            if first == "reserve":
                scheduler.activate(str(i), 5)
            _drain(scheduler)
        with pytest.raises(NeverFits):
            getattr(scheduler, first)(_seq("a", _distinct(1, 129)))

    @pytest.mark.parametrize("priorities", [(0, 0), (1, 1), (0, 1), (-2, 7)])
    def test_the_youngest_of_equals_or_the_least_important_is_handed_back(self, priorities: tuple[int, int]) -> None:
        scheduler = _scheduler(num_blocks=4, block_size=4)
        old = _seq("old", _distinct(1, 7), max_tokens=8, priority=priorities[0])
        young = _seq("young", _distinct(2, 7), max_tokens=3, priority=priorities[1])
        scheduler.add(old)
        scheduler.add(young)
        assert _step(scheduler) == {"old": 7, "young": 7}
        assert _step(scheduler) == {"old": 1, "young": 1}
        assert scheduler.take_handed_back() == []
        # Both have 8 tokens in 2 blocks and a ninth to compute. The old one takes a block of the young one.
        assert _step(scheduler) == {"old": 1}
        assert scheduler.take_handed_back() == ["young"]
        assert scheduler.take_handed_back() == []
        assert (young.status, young.block_ids) == (SequenceStatus.FINISHED, [])
        assert young.token_ids == [*_distinct(2, 7), 5, 5], "two were generated, and are kept for who goes on"
        assert (scheduler.num_sequences, scheduler.ledger().owned) == (1, 3)
        scheduler.abort("young")
        _drain(scheduler)
        assert len(old.token_ids) == 15

    def test_the_more_important_takes_a_block_of_an_older_one(self) -> None:
        scheduler = _scheduler(num_blocks=4, block_size=4)
        scheduler.add(_seq("old", _distinct(1, 7), max_tokens=8, priority=1))
        scheduler.add(_seq("young", _distinct(2, 7), max_tokens=3))
        steps = [_step(scheduler) for _ in range(3)]
        assert steps == [{"old": 7, "young": 7}, {"old": 1, "young": 1}, {"young": 1}]
        assert scheduler.take_handed_back() == ["old"]

    def test_the_least_important_goes_before_the_youngest(self) -> None:
        scheduler = _scheduler(num_blocks=7, block_size=4)
        for sequence_id, priority, num_prompt in (("first", 0, 7), ("low", 1, 5), ("last", 0, 5)):
            scheduler.add(_seq(sequence_id, _distinct(len(sequence_id), num_prompt), max_tokens=8, priority=priority))
        _step(scheduler)
        scheduler.reserve(_seq("reserved", _distinct(9, 3)))
        _step(scheduler)
        assert scheduler.take_handed_back() == []
        _step(scheduler)
        assert scheduler.take_handed_back() == ["low"]

    def test_nobody_is_handed_back_in_vain(self) -> None:
        """The youngest shares its only block with a reserved one, so its end would bring nothing."""
        scheduler = _scheduler(num_blocks=4, block_size=4)
        for i, sequence_id in enumerate(["asker", "middle", "youngest"]):
            scheduler.add(_seq(sequence_id, _distinct(i, 3), max_tokens=9))
        assert _step(scheduler) == {"asker": 3, "middle": 3, "youngest": 3}
        assert _step(scheduler) == {"asker": 1, "middle": 1, "youngest": 1}
        assert scheduler.reserve(_seq("reserved", [*_distinct(2, 3), 5, 7])) == 4
        assert _step(scheduler) == {"asker": 1}
        assert scheduler.take_handed_back() == ["middle"]

    def test_a_sequence_with_a_row_in_the_step_is_not_handed_back(self) -> None:
        """In a step by age the old one comes first, though it is less important; the next step is not by age."""
        scheduler = _scheduler(num_blocks=5, block_size=4, age_turn_steps=3)
        scheduler.add(_seq("old", _distinct(1, 7), max_tokens=9, priority=1))
        scheduler.add(_seq("young", _distinct(2, 7), max_tokens=9))
        steps = [_step(scheduler) for _ in range(4)]
        assert steps == [{"old": 7, "young": 7}, {"old": 1, "young": 1}, {"old": 1}, {"young": 1}]
        assert scheduler.take_handed_back() == ["old"]

    def test_what_is_left_of_a_hand_back_may_be_used_at_once(self) -> None:
        scheduler = _scheduler(num_blocks=5, block_size=4)
        scheduler.add(_seq("old", _distinct(1, 7), max_tokens=8))
        scheduler.add(_seq("young", _distinct(2, 11), max_tokens=6))
        scheduler.add(_seq("small", _distinct(3, 2)))
        assert _step(scheduler) == {"old": 7, "young": 11}
        assert _step(scheduler) == {"old": 1, "young": 1}
        assert _step(scheduler) == {"old": 1, "small": 2}
        assert scheduler.take_handed_back() == ["young"]

    def test_nobody_new_gets_blocks_before_one_that_skipped_a_step_for_lack_of_one(self) -> None:
        """4 blocks: `low` wants a third when the reserved one has two."""
        scheduler = _scheduler(num_blocks=4, block_size=4)
        low = _seq("low", _distinct(1, 7), max_tokens=4, priority=9)
        scheduler.add(low)
        scheduler.reserve(_seq("important", _distinct(2, 5), max_tokens=2))
        assert [_step(scheduler) for _ in range(3)] == [{"low": 7}, {"low": 1}, {}]
        scheduler.add(_seq("waiting", _distinct(3, 3)))
        assert _step(scheduler) == {}
        scheduler.abort("important")
        with pytest.raises(OutOfBlocks, match="lacks a KV block"):
            scheduler.reserve(_seq("new", _distinct(4, 7)))
        assert _step(scheduler) == {"low": 1, "waiting": 3}
        scheduler.reserve(_seq("new", _distinct(4, 3)))
        scheduler.activate("new", 5)
        _drain(scheduler)
        assert low.num_output_tokens == 4

    def test_one_that_lacks_a_block_gets_it_before_it_gets_a_row(self) -> None:
        """One row, and it goes to the important: the other has its block again, so new ones may come."""
        scheduler = _scheduler(num_blocks=6, block_size=4, max_batch_sequences=1, age_turn_steps=100)
        low = _seq("low", _distinct(1, 7), max_tokens=9, priority=9)
        scheduler.add(low)
        assert [_step(scheduler) for _ in range(2)] == [{"low": 7}, {"low": 1}]
        scheduler.reserve(_seq("important", _distinct(2, 2), max_tokens=9))
        scheduler.reserve(_seq("reserved", _distinct(3, 11), max_tokens=2))
        assert _step(scheduler) == {}
        scheduler.activate("important", 5)
        scheduler.abort("reserved")
        with pytest.raises(OutOfBlocks, match="lacks a KV block"):
            scheduler.reserve(_seq("new", _distinct(4, 2)))
        assert _step(scheduler) == {"important": 1}
        assert len(low.block_ids) == 3
        scheduler.reserve(_seq("new", _distinct(4, 2)))
        scheduler.activate("new", 5)
        _drain(scheduler)
        assert low.num_output_tokens == 9

    def test_a_prefill_to_be_held_is_not_handed_back(self) -> None:
        """Its KV is being pushed while it is computed: the older one waits for its end instead."""
        scheduler = _scheduler(num_blocks=4, block_size=4, max_step_tokens=10, max_prefill_chunk_tokens=3)
        scheduler.add(_seq("old", _distinct(1, 3), max_tokens=8))
        _step(scheduler)
        held = Sequence("held", _distinct(2, 12), 12, SamplingParams(), hold_after_prefill=True)
        scheduler.add(held)
        steps = [_step(scheduler) for _ in range(4)]
        assert steps == [{"old": 1, "held": 3}, {"held": 3}, {"held": 3}, {"held": 3}]
        assert held.status is SequenceStatus.HELD
        assert scheduler.schedule() is None
        scheduler.abort("held")
        _drain(scheduler)

    def test_reserved_and_held_sequences_keep_their_blocks(self) -> None:
        scheduler = _scheduler(num_blocks=4, block_size=4)
        running = _seq("running", _distinct(1, 4), max_tokens=8)
        scheduler.add(running)
        _step(scheduler)
        scheduler.reserve(_seq("reserved", _distinct(2, 7), max_tokens=1))
        for _ in range(4):
            _step(scheduler)
        # Two blocks each; the running one needs a third, which only the end of the reserved one brings.
        assert scheduler.ledger().in_flight == 2
        assert scheduler.schedule() is None
        assert scheduler.num_running == 1
        scheduler.activate("reserved", 5)
        _drain(scheduler)
        assert len(running.token_ids) == 12

    def test_two_that_fill_the_pool_together_both_end(self) -> None:
        """7 blocks of 16: 64 + 40 tokens take all 7, 48 + 40 tokens take 6."""
        scheduler = _scheduler(num_blocks=7)
        scheduler.reserve(_seq("a", _distinct(1, 64), max_tokens=40))
        with pytest.raises(OutOfBlocks):
            scheduler.reserve(_seq("b", _distinct(2, 48), max_tokens=40))
        scheduler.reserve(_seq("b", _distinct(2, 31), max_tokens=40))
        assert scheduler.ledger().in_flight == 7
        scheduler.activate("b", 5)
        scheduler.activate("a", 5)
        _drain(scheduler)

    def test_admission_leaves_the_watermark_while_something_runs(self) -> None:
        scheduler = _scheduler(num_blocks=6, block_size=4, watermark_blocks=2)
        scheduler.add(_seq("a", _distinct(1, 7), max_tokens=8))
        _step(scheduler)
        with pytest.raises(OutOfBlocks, match="3 KV blocks are needed and 2 kept"):
            scheduler.reserve(_seq("b", _distinct(2, 9), max_tokens=2))
        assert scheduler.reserve(_seq("c", _distinct(2, 7), max_tokens=2)) == 0

    def test_those_admitted_together_fit_together(self) -> None:
        scheduler = _scheduler(num_blocks=6, block_size=4, watermark_blocks=2)
        scheduler.add(_seq("a", _distinct(1, 9)))
        scheduler.add(_seq("b", _distinct(2, 9)))
        scheduler.add(_seq("c", _distinct(3, 3)))
        assert _step(scheduler) == {"a": 9, "c": 3}
        assert _step(scheduler) == {"b": 9}

    def test_a_large_one_is_passed_over_only_so_often(self) -> None:
        scheduler = _scheduler(num_blocks=8, block_size=4, max_bypasses=3)
        scheduler.add(_seq("first", _distinct(1, 3), max_tokens=6))
        _step(scheduler)
        large = _seq("large", _distinct(2, 32))
        scheduler.add(large)
        admitted = []
        for i in range(20):
            scheduler.add(_seq(f"small{i}", _distinct(3 + i, 3), max_tokens=3))
            admitted += [s for s in _step(scheduler) if s.startswith(("small", "large")) and s not in admitted]
            if large.status is SequenceStatus.FINISHED:
                break
        assert admitted[:4] == ["small0", "small1", "small2", "large"]

    def test_reservations_pass_a_waiting_one_only_so_often(self) -> None:
        scheduler = _scheduler(num_blocks=4, block_size=4, max_bypasses=1)
        scheduler.add(_seq("first", _distinct(1, 3), max_tokens=3))
        _step(scheduler)
        scheduler.add(_seq("large", _distinct(2, 16)))
        _step(scheduler)
        scheduler.reserve(_seq("r0", _distinct(3, 2)))
        with pytest.raises(OutOfBlocks, match="overtaken 1 times"):
            scheduler.reserve(_seq("r1", _distinct(4, 2)))
        scheduler.activate("r0", 5)
        _drain(scheduler)
