"""Who holds which KV block, and which unheld blocks still have content worth finding again. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class OutOfBlocks(RuntimeError):
    """Not enough KV blocks are free now; retry when others have ended."""


class LedgerError(RuntimeError):
    """The blocks do not add up: one was lost or counted twice."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the blocks of a pool are: `free` (no content), `cached` (content, no owner), `owned`, `in_flight`.

    In flight are those reserved for KV that is still to arrive; they do not count as owned.
    """

    total: int
    free: int
    cached: int
    owned: int
    in_flight: int = 0

    def check(self) -> None:
        """Raise LedgerError unless free + cached + owned + in flight = total."""
        if self.free + self.cached + self.owned + self.in_flight != self.total:
            raise LedgerError(
                f"{self.free} free + {self.cached} cached + {self.owned} owned + {self.in_flight} in flight KV blocks "
                f"are not the {self.total} of the pool"
            )


@dataclass(frozen=True, slots=True)
class Books:
    """The tables of a pool: what is free, owned by how many, cached (least recently used first), found by what."""

    free: list[int]
    owner_counts: dict[int, int]
    cached: OrderedDict[int, None]
    block_by_hash: dict[bytes, int]
    hash_by_block: dict[int, bytes]


class BlockPool:
    """Reference counts and a content-addressed cache over `num_blocks` block ids of `block_size` tokens.

    A block is free, cached (registered under a hash, no owner) or owned by one or more. Every operation costs
    O(1) a block. Not thread-safe: the caller has a lock.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owner_counts: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of registered `hashes` from the first; takes nothing."""
        block_ids = []
        for content_hash in hashes:
            block_id = self._block_by_hash.get(content_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def count_cached(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks have no owner: as many fewer are available once they are acquired."""
        return sum(block_id in self._cached for block_id in block_ids)

    def num_owners(self, block_id: int) -> int:
        """How many own the block."""
        return self._owner_counts.get(block_id, 0)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add an owner to blocks that are owned or cached. Raises ValueError for a free block."""
        for block_id in block_ids:
            owner_count = self._owner_counts.get(block_id, 0)
            if owner_count == 0:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} holds no content to acquire; allocate it instead")
                del self._cached[block_id]
            self._owner_counts[block_id] = owner_count + 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out blocks without content, free ones first, then the least recently used cached ones.

        Raises OutOfBlocks, having changed nothing, if fewer are available.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(
                f"{num_blocks} KV blocks are needed, {self.num_available} of {self.num_blocks} are available; "
                "retry when others have ended"
            )
        return [self._allocate_one() for _ in range(num_blocks)]

    def _allocate_one(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            del self._block_by_hash[self._hash_by_block.pop(block_id)]
        self._owner_counts[block_id] = 1
        return block_id

    def register(self, block_id: int, content_hash: bytes) -> None:
        """Make a full, computed, owned block findable; a hash that another block has stays with that block.

        Raises ValueError if nobody owns the block or if it is registered under another hash.
        """
        if block_id not in self._owner_counts:
            raise ValueError(f"block {block_id} is registered but nobody owns it")
        if self._hash_by_block.get(block_id, content_hash) != content_hash:
            raise ValueError(f"block {block_id} is registered under two hashes: its content was overwritten")
        if content_hash not in self._block_by_hash:
            self._block_by_hash[content_hash] = block_id
            self._hash_by_block[block_id] = content_hash

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove an owner; a block without owners is cached if registered, else free.

        The last block goes first: of an unowned prefix the tail is evicted before what it hangs on.
        Raises ValueError for a block that nobody owns.
        """
        for block_id in reversed(block_ids):
            owner_count = self._owner_counts.get(block_id, 0)
            if owner_count == 0:
                raise ValueError(f"block {block_id} is released but nobody owns it")
            if owner_count > 1:
                self._owner_counts[block_id] = owner_count - 1
                continue
            del self._owner_counts[block_id]
            if block_id in self._hash_by_block:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def drop_cache(self) -> int:
        """Forget all content; owners keep their blocks. Returns how many blocks were registered."""
        num_registered = len(self._hash_by_block)
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_by_hash.clear()
        self._hash_by_block.clear()
        return num_registered

    def ledger(self, num_in_flight: int = 0) -> Ledger:
        """Where the blocks are now, given how many of the owned ones wait for KV."""
        return Ledger(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            owned=len(self._owner_counts) - num_in_flight,
            in_flight=num_in_flight,
        )

    @property
    def books(self) -> Books:
        """The tables themselves, for an audit: to be read only."""
        return Books(self._free, self._owner_counts, self._cached, self._block_by_hash, self._hash_by_block)

    def replace_books(self, books: Books) -> None:
        """Go on with other tables."""
        self._free, self._owner_counts, self._cached = books.free, books.owner_counts, books.cached
        self._block_by_hash, self._hash_by_block = books.block_by_hash, books.hash_by_block
