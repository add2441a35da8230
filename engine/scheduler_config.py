"""Limits of the scheduler. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler; a role is a choice of these.

    `max_step_tokens` and `max_batch_sequences` bound one step, `max_prefill_chunk_tokens` (None: no limit) one
    sequence's part of it. `max_waiting` (None: no limit) bounds the queue. `watermark_blocks` stay available
    on admission while anything runs, so that what runs can grow. Admission looks at the first
    `admission_window` waiting sequences; one is overtaken by younger ones at most `max_bypasses` times. Every
    `age_turn_steps`-th step goes by age alone, so that a stream of more important sequences starves nobody.
    """

    max_step_tokens: int
    max_batch_sequences: int
    context_window_tokens: int
    max_prefill_chunk_tokens: int | None = None
    max_waiting: int | None = None
    watermark_blocks: int = 1
    admission_window: int = 16
    max_bypasses: int = 16
    age_turn_steps: int = 4

    def __post_init__(self) -> None:
        """Raise ValueError for limits under which work could stand still."""
        chunk = self.max_prefill_chunk_tokens
        at_least_1 = (self.max_batch_sequences, self.admission_window, self.age_turn_steps, chunk or 1)
        if min(at_least_1) < 1 or chunk == 0:
            raise ValueError(
                f"max_batch_sequences, admission_window, age_turn_steps and chunk must be at least 1: {self}"
            )
        if min(self.watermark_blocks, self.max_bypasses, self.max_waiting or 0) < 0:
            raise ValueError(f"watermark_blocks, max_bypasses and max_waiting must not be negative: {self}")
        if self.max_step_tokens < self.max_batch_sequences:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is below max_batch_sequences "
                f"{self.max_batch_sequences}: a full batch needs one token for each sequence"
            )
