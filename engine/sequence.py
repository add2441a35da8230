"""A sequence: a request being computed. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = "waiting"  # admitted, holds no blocks
    RESERVED = "reserved"  # holds blocks for KV that arrives from elsewhere
    RUNNING = "running"  # holds blocks, computed tokens catch up with tokens
    HELD = "held"  # prefill done, blocks kept until it is aborted
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Sequence:
    """One request being computed.

    `token_ids` is the prompt followed by what was generated; `num_computed_tokens` of them have their KV in
    `block_ids`. There is no prefill or decode phase: computed catches up with `len(token_ids)`.
    `hold_after_prefill` marks the prefill role: after token 0 the sequence keeps its blocks (HELD) until aborted.
    `priority`: the lower, the more important.
    """

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""
    hold_after_prefill: bool = False
    priority: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    arrival: int = 0  # counts up in the scheduler: the lower, the older

    @property
    def rank(self) -> tuple[int, int]:
        """The lower, the more important; of equal priorities the older. No two live sequences have the same."""
        return self.priority, self.arrival

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not there yet."""
        return len(self.token_ids) - self.num_computed_tokens
