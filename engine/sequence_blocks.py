"""Blocks of a sequence: taking them with what the prefix cache has, growing, registering, giving back. Pure."""

from dataclasses import dataclass

from engine.admission import num_kv_tokens
from engine.block_hash import block_hash, root_hash
from engine.block_pool import BlockPool, OutOfBlocks
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Claim:
    """What a sequence without blocks would take now.

    `hit_block_ids` are found in the prefix cache, `num_new_blocks` must be allocated; both together lower the
    pool's `num_available` by `num_taken_blocks`. `missed_hash` is the first full block that was not found,
    None if there is none that could be used.
    """

    hit_block_ids: list[int]
    num_new_blocks: int
    num_taken_blocks: int
    missed_hash: bytes | None


class SequenceBlocks:
    """Moves blocks between a pool and sequences of one model. The pool is shared with nobody else."""

    def __init__(self, pool: BlockPool, model_fingerprint: str) -> None:
        self.pool = pool
        self._model_fingerprint = model_fingerprint

    def claim(self, seq: Sequence) -> Claim:
        """What `seq` would take for all its tokens and one more, so that its first decode step has room.

        At most len(token_ids) - 1 tokens count as cached, in whole blocks: the last one is always run.
        """
        self._extend_hashes(seq)
        usable = seq.block_hashes[: (len(seq.token_ids) - 1) // self.pool.block_size]
        hits = self.pool.match_prefix(usable)
        num_blocks = self.pool.blocks_for(min(len(seq.token_ids) + 1, num_kv_tokens(seq)))
        num_new_blocks = num_blocks - len(hits)
        return Claim(
            hit_block_ids=hits,
            num_new_blocks=num_new_blocks,
            num_taken_blocks=num_new_blocks + self.pool.count_cached(hits),
            missed_hash=usable[len(hits)] if len(hits) < len(usable) else None,
        )

    def take(self, seq: Sequence, *, watermark_blocks: int) -> None:
        """Give `seq` what it claims. Raises OutOfBlocks, having changed nothing, if too little would be left."""
        claim = self.claim(seq)
        if claim.num_taken_blocks + watermark_blocks > self.pool.num_available:
            raise OutOfBlocks(
                f"{claim.num_taken_blocks} KV blocks are needed and {watermark_blocks} kept for running "
                f"sequences, {self.pool.num_available} of {self.pool.num_blocks} are available; retry when "
                "others have ended"
            )
        self.pool.acquire(claim.hit_block_ids)
        seq.block_ids = claim.hit_block_ids + self.pool.allocate(claim.num_new_blocks)
        seq.num_computed_tokens = len(claim.hit_block_ids) * self.pool.block_size
        seq.num_cached_tokens = seq.num_computed_tokens

    def has_room(self, seq: Sequence) -> bool:
        """The blocks cover all tokens of `seq`."""
        return len(seq.block_ids) * self.pool.block_size >= len(seq.token_ids)

    def grow(self, seq: Sequence) -> None:
        """Add a block. Raises OutOfBlocks."""
        seq.block_ids += self.pool.allocate(1)

    def uncomputed_hashes(self, seq: Sequence) -> list[bytes]:
        """Hashes of the full blocks of `seq` that are still to be computed."""
        self._extend_hashes(seq)
        return seq.block_hashes[seq.num_computed_tokens // self.pool.block_size :]

    def advance(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Note that the KV of this many tokens is there now; blocks that became full can be found from now on."""
        first = seq.num_computed_tokens // self.pool.block_size
        seq.num_computed_tokens = num_computed_tokens
        self._extend_hashes(seq)
        for i in range(first, num_computed_tokens // self.pool.block_size):
            self.pool.register(seq.block_ids[i], seq.block_hashes[i])

    def free(self, seq: Sequence) -> None:
        """Give all blocks back."""
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_computed_tokens = 0

    def _extend_hashes(self, seq: Sequence) -> None:
        size = self.pool.block_size
        hashes = seq.block_hashes
        if not hashes and len(seq.token_ids) >= size:
            hashes.append(block_hash(root_hash(self._model_fingerprint, seq.cache_salt), seq.token_ids[:size]))
        for i in range(len(hashes), len(seq.token_ids) // size):
            hashes.append(block_hash(hashes[-1], seq.token_ids[i * size : (i + 1) * size]))
