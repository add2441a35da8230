"""Which sequences can be served at all, and why one is refused. Pure."""

from engine.block_pool import BlockPool
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence


class NeverFits(ValueError):
    """The sequence needs more than there is, however long it waits."""


class QueueFull(RuntimeError):
    """The waiting queue is at its limit; retry later or elsewhere."""


class DuplicateSequence(ValueError):
    """A live sequence has the same id."""


class UnknownSequence(KeyError):
    """No live sequence has this id: it never came, has ended or was aborted."""


def num_kv_tokens(seq: Sequence) -> int:
    """Tokens of `seq` whose KV will be held at most; that of the last generated token is never needed."""
    if seq.hold_after_prefill:
        return seq.num_prompt_tokens
    return seq.num_prompt_tokens + seq.sampling.max_tokens - 1


def check_admissible(seq: Sequence, config: SchedulerConfig, pool: BlockPool) -> None:
    """Raise NeverFits if `seq` is beyond the context window or the whole pool, ValueError if it is malformed."""
    if not seq.token_ids or len(seq.token_ids) != seq.num_prompt_tokens or seq.sampling.max_tokens < 1:
        raise ValueError(
            f"sequence {seq.sequence_id!r} has {len(seq.token_ids)} tokens, a prompt of "
            f"{seq.num_prompt_tokens} and max_tokens {seq.sampling.max_tokens}: a new sequence is a prompt of "
            "at least one token that asks for at least one more"
        )
    num_generated = 1 if seq.hold_after_prefill else seq.sampling.max_tokens
    num_tokens = seq.num_prompt_tokens + num_generated
    if num_tokens > config.context_window_tokens:
        raise NeverFits(
            f"a prompt of {seq.num_prompt_tokens} tokens and {num_generated} to generate are {num_tokens} "
            f"tokens, the context window is {config.context_window_tokens}; shorten the prompt or max_tokens"
        )
    num_blocks = pool.blocks_for(num_kv_tokens(seq))
    if num_blocks > pool.num_blocks:
        raise NeverFits(
            f"{num_kv_tokens(seq)} tokens need {num_blocks} KV blocks, the pool has {pool.num_blocks} "
            f"({pool.num_blocks * pool.block_size} tokens); shorten the prompt or max_tokens"
        )
