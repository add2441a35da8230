"""What the router knows of one worker at one moment. Pure."""

from dataclasses import dataclass

from kv_transfer.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A snapshot for the policy.

    `load_*` come from the worker, some tens of milliseconds old; `sent_*` are the router's own requests to it
    that the worker's figures may not show yet, `num_ever_sent` all it ever sent. Tokens are prompt tokens to be
    computed.
    """

    name: str
    can_prefill: bool
    can_decode: bool
    is_ready: bool
    fingerprint: Fingerprint
    block_size_tokens: int
    num_blocks: int
    max_batch_sequences: int
    max_step_tokens: int
    load_free_blocks: int
    load_sequences: int
    load_queued_tokens: int
    sent_sequences: int
    sent_prompt_tokens: int
    sent_blocks: int
    num_ever_sent: int

    @property
    def num_sequences(self) -> int:
        """Sequences there, as far as known."""
        return max(self.load_sequences, self.sent_sequences)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to be computed there, as far as known."""
        return max(self.load_queued_tokens, self.sent_prompt_tokens)

    @property
    def num_free_blocks(self) -> int:
        """Blocks a new sequence could have, as far as known."""
        return min(self.load_free_blocks, self.num_blocks - self.sent_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that many tokens need here."""
        return -(-num_tokens // self.block_size_tokens)
