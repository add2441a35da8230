"""What one step computes: data passed from the scheduler to the runner and back. Pure."""

from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: tokens [start, start + len(token_ids)) of it are computed.

    `block_ids` covers tokens [0, start + len(token_ids)). `sample` is True if these are the sequence's last
    tokens, so that the next token is chosen from their logits; its position is `start + len(token_ids)`.
    """

    sequence_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: bool
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in the order its rows stand in the batch."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled token by sequence id, for those scheduled with `sample`."""

    sampled: dict[str, int]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step brought for one sequence; `finish_reason` marks the last."""

    sequence_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought to the live sequences; `failed_ids` are of those that ended as it brought no token."""

    outputs: list[SequenceOutput]
    failed_ids: list[str]
