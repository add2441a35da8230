"""A step plan as tensors: what the model and the attention read."""

from dataclasses import dataclass

import torch

from engine.step_plan import ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows [first_row, first_row + num_rows) of the batch: tokens [start, start + num_rows) of one sequence.

    `block_ids` [num_blocks] int64 covers tokens [0, start + num_rows).
    """

    first_row: int
    num_rows: int
    start: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step's inputs. Rows of sequences with one token come first (`num_single_rows`), then the longer ones.

    input_ids, positions [1, rows] int64; slots [rows] int64 (block * block_size + offset where each row's KV
    goes); single_tables [num_single_rows, width] int32; single_contexts [num_single_rows] int32 tokens attended,
    the row's own included; sample_rows [sampled] int64.
    """

    order: tuple[ScheduledSequence, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_single_rows: int
    single_tables: torch.Tensor
    single_contexts: torch.Tensor
    max_single_context: int
    long: tuple[SequenceRows, ...]
    sample_rows: torch.Tensor

    @property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """The sequences whose next token is chosen in this step, in the order of `sample_rows`."""
        return tuple(s for s in self.order if s.sample)


def build_step_tensors(plan: StepPlan, block_size: int, device: torch.device) -> StepTensors:
    """Lays the plan's sequences out in rows, on `device`."""
    order = tuple(sorted(plan.sequences, key=lambda s: len(s.token_ids) > 1))
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    long: list[SequenceRows] = []
    singles = [s for s in order if len(s.token_ids) == 1]
    for s in order:
        num_rows = len(s.token_ids)
        if num_rows > 1:
            block_ids = torch.tensor(s.block_ids, dtype=torch.int64, device=device)
            long.append(SequenceRows(len(ids), num_rows, s.start, block_ids))
        ids.extend(s.token_ids)
        positions.extend(range(s.start, s.start + num_rows))
        slots.extend(_slots(s, block_size))
        if s.sample:
            sample_rows.append(len(ids) - 1)
    width = max((len(s.block_ids) for s in singles), default=1)
    tables = [s.block_ids + (0,) * (width - len(s.block_ids)) for s in singles]
    contexts = [s.start + 1 for s in singles]
    return StepTensors(
        order=order,
        input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
        positions=torch.tensor([positions], dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        num_single_rows=len(singles),
        single_tables=torch.tensor(tables, dtype=torch.int32, device=device).reshape(len(singles), width),
        single_contexts=torch.tensor(contexts, dtype=torch.int32, device=device),
        max_single_context=max(contexts, default=0),
        long=tuple(long),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
    )


def _slots(s: ScheduledSequence, block_size: int) -> list[int]:
    end = s.start + len(s.token_ids)
    return [s.block_ids[t // block_size] * block_size + t % block_size for t in range(s.start, end)]
