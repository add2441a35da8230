"""Plans become rows: hand-worked, and for any plan each token at its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.step_plan import ScheduledSequence, StepPlan
from engine.step_tensors import build_step_tensors

CPU = torch.device("cpu")


def _scheduled(name: str, start: int, ids: tuple[int, ...], blocks: tuple[int, ...], sample: bool) -> ScheduledSequence:
    return ScheduledSequence(name, start, ids, blocks, sample, SamplingParams())


def test_single_rows_come_first_then_the_longer_ones() -> None:
    plan = StepPlan(
        (
            _scheduled("chunk", 6, (60, 61, 62), (9, 2, 5), sample=False),
            _scheduled("decode", 5, (70,), (1, 3), sample=True),
            _scheduled("prompt", 0, (80, 81), (4,), sample=True),
            _scheduled("first", 0, (90,), (0,), sample=True),
        )
    )
    step = build_step_tensors(plan, 4, CPU)
    assert [s.sequence_id for s in step.order] == ["decode", "first", "chunk", "prompt"]
    assert step.input_ids.tolist() == [[70, 90, 60, 61, 62, 80, 81]]
    assert step.positions.tolist() == [[5, 0, 6, 7, 8, 0, 1]]
    # Token 5 of "decode" is in its second block, 3; tokens 6 to 8 of "chunk" in its second, 2, and third, 5.
    assert step.slots.tolist() == [3 * 4 + 1, 0, 2 * 4 + 2, 2 * 4 + 3, 5 * 4, 16, 17]
    assert step.num_single_rows == 2
    assert step.single_tables.tolist() == [[1, 3], [0, 0]]
    assert step.single_contexts.tolist() == [6, 1]
    assert step.max_single_context == 6
    assert [(r.first_row, r.num_rows, r.start, r.block_ids.tolist()) for r in step.long] == [
        (2, 3, 6, [9, 2, 5]),
        (5, 2, 0, [4]),
    ]
    assert step.sample_rows.tolist() == [0, 1, 6]
    assert [s.sequence_id for s in step.sampled] == ["decode", "first", "prompt"]


def test_without_single_rows_their_tensors_are_empty() -> None:
    step = build_step_tensors(StepPlan((_scheduled("a", 0, (7, 8), (3,), sample=False),)), 16, CPU)
    assert (step.num_single_rows, step.max_single_context) == (0, 0)
    assert (len(step.single_tables), len(step.single_contexts), len(step.sample_rows)) == (0, 0, 0)
    assert step.sampled == ()


@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_every_token_has_its_row_position_and_slot(parts: list[tuple[int, int, bool]], block_size: int) -> None:
    """Token t of sequence i has id 100 * i + t and its blocks are numbered from 100 * i down."""
    plan = StepPlan(
        tuple(
            _scheduled(
                str(i),
                start,
                tuple(100 * i + t for t in range(start, start + length)),
                tuple(100 * (i + 1) - b for b in range(-(-(start + length) // block_size))),
                sample,
            )
            for i, (start, length, sample) in enumerate(parts)
        )
    )
    step = build_step_tensors(plan, block_size, CPU)
    rows = list(zip(step.input_ids[0].tolist(), step.positions[0].tolist(), step.slots.tolist(), strict=True))
    assert len(rows) == plan.num_tokens
    for token_id, position, slot in rows:
        sequence, t = divmod(token_id, 100)
        assert position == t
        assert slot == (100 * (sequence + 1) - t // block_size) * block_size + t % block_size
    last_tokens = [100 * int(s.sequence_id) + s.start + len(s.token_ids) - 1 for s in step.sampled]
    assert step.input_ids[0, step.sample_rows].tolist() == last_tokens
