"""The more important comes first, and yet a stream of important ones starves nobody."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import QueueFull
from engine.block_pool import BlockPool, OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence, SequenceStatus
from engine.step_plan import StepResult

AGE_TURN = 4


def _scheduler(num_blocks: int = 512, **limits: int) -> Scheduler:
    defaults = {"max_step_tokens": 64, "max_batch_sequences": 8, "context_window_tokens": 4096, "watermark_blocks": 0}
    return Scheduler(SchedulerConfig(**(defaults | limits)), BlockPool(num_blocks, 16), "model")


def _seq(sequence_id: str, num_prompt: int, max_tokens: int = 1, *, priority: int = 0, first: int = 1) -> Sequence:
    prompt = list(range(1000 * first, 1000 * first + num_prompt))
    return Sequence(sequence_id, prompt, num_prompt, SamplingParams(max_tokens=max_tokens), priority=priority)


def _step(scheduler: Scheduler) -> dict[str, int]:
    """Run one step; returns the tokens computed by sequence."""
    plan = scheduler.schedule()
    if plan is None:
        return {}
    scheduler.commit(plan, StepResult({r.sequence_id: 5 for r in plan.sequences if r.sample}))
    return {r.sequence_id: len(r.token_ids) for r in plan.sequences}


class TestOrder:
    def test_an_important_prompt_is_computed_before_others_but_for_every_few_steps(self) -> None:
        scheduler = _scheduler()
        scheduler.add(_seq("low", 1000, priority=1))
        assert _step(scheduler) == {"low": 64}
        scheduler.add(_seq("important", 250, first=2))
        steps = [_step(scheduler) for _ in range(5)]
        assert steps == [
            {"important": 64},
            {"important": 64},
            {"important": 32, "low": 32},
            {"important": 64},
            {"important": 26, "low": 38},
        ]

    def test_among_the_rest_the_more_important_goes_before_the_shorter(self) -> None:
        scheduler = _scheduler()
        scheduler.add(_seq("first", 1000))
        scheduler.add(_seq("short", 20, priority=1, first=2))
        scheduler.add(_seq("long", 30, first=3))
        assert _step(scheduler) == {"long": 30, "first": 34}

    def test_an_important_one_decodes_in_all_steps_and_the_others_every_few(self) -> None:
        scheduler = _scheduler(max_batch_sequences=1)
        for i, priority in enumerate([1, 0]):
            scheduler.reserve(_seq(f"{priority}", 3, 20, priority=priority, first=i))
            scheduler.activate(f"{priority}", 5)
        assert [list(_step(scheduler)) for _ in range(8)] == [["0"], ["0"], ["0"], ["1"]] * 2

    def test_the_last_row_goes_to_the_more_important_of_a_decode_and_a_prefill(self) -> None:
        scheduler = _scheduler(max_batch_sequences=1)
        scheduler.reserve(_seq("decode", 3, 20, priority=1))
        scheduler.activate("decode", 5)
        scheduler.add(_seq("prefill", 100, first=2))
        assert [_step(scheduler) for _ in range(3)] == [{"prefill": 64}, {"prefill": 36}, {"decode": 1}]

    def test_the_important_of_those_that_wait_is_admitted_first(self) -> None:
        scheduler = _scheduler(num_blocks=2)
        for i, priority in enumerate([2, 1, 0, 1]):
            scheduler.add(_seq(str(i), 32, priority=priority, first=i))
        assert [list(_step(scheduler)) for _ in range(4)] == [["2"], ["1"], ["3"], ["0"]]

    def test_one_that_was_overtaken_so_often_is_admitted_before_more_important_ones(self) -> None:
        scheduler = _scheduler(num_blocks=2, max_bypasses=3)
        scheduler.add(_seq("low", 32, priority=1))
        admitted: list[str] = []
        for i in range(5):
            scheduler.add(_seq(f"important{i}", 32, first=i + 2))
            admitted += _step(scheduler)
        assert admitted == ["important0", "important1", "important2", "low", "important3"]


arrivals = st.tuples(
    st.sampled_from(["add", "reserve"]),
    st.integers(0, 3),  # priority
    st.integers(1, 12),  # prompt tokens
    st.integers(1, 8),  # tokens to generate
)


class Stream:
    """A scheduler to which sequences come again and again in the same pattern, as many as there is room for."""

    def __init__(self, num_blocks: int, max_batch: int, max_bypasses: int) -> None:
        self.max_bypasses = max_bypasses
        config = SchedulerConfig(
            max_step_tokens=max_batch + 4,
            max_batch_sequences=max_batch,
            context_window_tokens=40,
            max_waiting=20,
            watermark_blocks=0,
            max_bypasses=max_bypasses,
            age_turn_steps=AGE_TURN,
        )
        self.scheduler = Scheduler(config, BlockPool(num_blocks, 4), "model")
        self.sequences: list[Sequence] = []
        self.num_overtaken: dict[str, int] = {}

    def arrive(self, arrival: tuple[str, int, int, int]) -> None:
        how, priority, num_prompt, max_tokens = arrival
        seq = _seq(str(len(self.sequences)), num_prompt, max_tokens, priority=priority, first=len(self.sequences))
        try:
            getattr(self.scheduler, how)(seq)
        except (QueueFull, OutOfBlocks):
            return
        self.sequences.append(seq)
        self.num_overtaken[seq.sequence_id] = 0
        if how == "reserve":
            self.scheduler.activate(seq.sequence_id, 5)

    def step(self) -> None:
        before = self._waiting()
        _step(self.scheduler)
        after = self._waiting()
        for admitted in (s for s in before if s not in after):
            for seq in after:
                self.num_overtaken[seq.sequence_id] += seq.arrival < admitted.arrival
        assert all(number <= self.max_bypasses for number in self.num_overtaken.values())

    def _waiting(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is SequenceStatus.WAITING]


@pytest.mark.parametrize("num_blocks", [5, 12, 400])
@settings(max_examples=100)
@given(
    early=st.lists(arrivals, min_size=1, max_size=6),
    pattern=st.lists(st.lists(arrivals, max_size=2), min_size=1, max_size=5),
    max_batch=st.integers(1, 4),
    max_bypasses=st.integers(0, 4),
)
def test_everybody_ends_within_a_bound_whatever_comes_later(
    num_blocks: int,
    early: list[tuple[str, int, int, int]],
    pattern: list[list[tuple[str, int, int, int]]],
    max_batch: int,
    max_bypasses: int,
) -> None:
    """Served, or handed back for lack of blocks. The stream would go on for ever.

    At least every AGE_TURN steps somebody advances by a token who is among the early ones, or has overtaken one of
    them, or has blocks for which one of them waits.
    """
    stream = Stream(num_blocks, max_batch, max_bypasses)
    for arrival in early:
        stream.arrive(arrival)
    first = list(stream.sequences)
    most_tokens = 12 + 8
    num_in_the_way = len(first) * (1 + max_bypasses) + min(num_blocks, 20 + max_batch)
    num_steps = 0
    while any(s.status is not SequenceStatus.FINISHED for s in first):
        for arrival in pattern[num_steps % len(pattern)]:
            stream.arrive(arrival)
        stream.step()
        num_steps += 1
        assert num_steps <= AGE_TURN * most_tokens * num_in_the_way
    handed_back = stream.scheduler.take_handed_back()
    for seq in first:
        assert seq.num_output_tokens == seq.sampling.max_tokens or seq.sequence_id in handed_back
