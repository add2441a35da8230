"""Compares a pool's books with what sequences really hold, and puts right what does not agree. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from engine.block_pool import BlockPool, Books
from engine.sequence import Sequence

MAX_NAMED_BLOCKS = 16


class BlockFault(Enum):
    """What can be wrong with a block."""

    LEAKED = "owned by nobody that exists"
    MISCOUNTED = "counted with more or fewer owners than there are"
    LOST = "in no list"
    DOUBLED = "in two lists"
    MISLABELLED = "found by content they do not have, or kept for content that cannot be found"
    UNKNOWN = "that are none of the pool's"


# Of the others, somebody may have overwritten the content.
_KEEP_CONTENT = (BlockFault.LEAKED, BlockFault.MISCOUNTED)


@dataclass(frozen=True, slots=True)
class Repair:
    """How many blocks were put right, and a sentence that names them; 0 and nothing if all was well."""

    num_blocks: int
    description: str


def audit(pool: BlockPool, holders: Iterable[Sequence], *, thorough: bool) -> Repair:
    """Makes the pool agree with `holders`, all sequences that have blocks.

    Owners are compared and the lists' lengths added up: that costs as much as blocks are held, and shows any block
    that is leaked, miscounted, lost or doubled, unless one is lost for each that is doubled. A `thorough` audit
    looks at every block and what it is found by: some 0.2 ms for each thousand of the pool.
    A block without owners is cached if it has content worth finding, else free. One that only had wrong owners
    keeps its content; that of any other faulty one is forgotten. What is right stays as it is.
    """
    owner_counts = dict(Counter(chain.from_iterable(seq.block_ids for seq in holders)))
    books = pool.books
    adds_up = len(books.free) + len(books.cached) + len(owner_counts) == pool.num_blocks
    agrees = books.owner_counts == owner_counts and adds_up
    if agrees and not (thorough and _is_disordered(pool)):
        return Repair(0, "")
    faults = _find_faults(pool, owner_counts)
    pool.replace_books(_put_right(pool.books, faults, owner_counts))
    return Repair(len(faults), _describe(faults))


def _is_disordered(pool: BlockPool) -> bool:
    """Some block is not in its place. Built-in operations on whole tables are all it takes to see that."""
    books = pool.books
    blocks, hashes = books.hash_by_block.keys(), books.hash_by_block.values()
    return not (
        {*books.free, *books.cached, *books.owner_counts} == set(range(pool.num_blocks))
        and len(books.block_by_hash) == len(blocks)
        and list(map(books.block_by_hash.get, hashes)) == list(blocks)
        and books.cached.keys() <= blocks
        and blocks.isdisjoint(books.free)
    )


def _find_faults(pool: BlockPool, owner_counts: Mapping[int, int]) -> dict[int, BlockFault]:
    books = pool.books
    num_free = Counter(books.free)
    num_names = Counter(books.block_by_hash.values())
    known = {*range(pool.num_blocks), *num_free, *books.cached, *books.owner_counts, *books.hash_by_block, *num_names}
    faults = {}
    for block_id in sorted(known):
        num_counted, num_owners = books.owner_counts.get(block_id, 0), owner_counts.get(block_id, 0)
        num_places = num_free[block_id] + (block_id in books.cached) + (num_counted > 0)
        if not 0 <= block_id < pool.num_blocks:
            faults[block_id] = BlockFault.UNKNOWN
        elif num_places != 1:
            faults[block_id] = BlockFault.DOUBLED if num_places else BlockFault.LOST
        elif num_counted != num_owners:
            faults[block_id] = BlockFault.MISCOUNTED if num_owners else BlockFault.LEAKED
        elif not _is_well_labelled(block_id, books, num_names[block_id]):
            faults[block_id] = BlockFault.MISLABELLED
    return faults


def _is_well_labelled(block_id: int, books: Books, num_names: int) -> bool:
    """What has content is found by it and by nothing else; what is cached has content, what is free has none."""
    content_hash = books.hash_by_block.get(block_id)
    if content_hash is None:
        return num_names == 0 and block_id not in books.cached
    is_found = num_names == 1 and books.block_by_hash.get(content_hash) == block_id
    return is_found and (block_id in books.cached or block_id in books.owner_counts)


def _put_right(books: Books, faults: Mapping[int, BlockFault], owner_counts: Mapping[int, int]) -> Books:
    named = {b: h for b, h in books.hash_by_block.items() if b not in faults or faults[b] in _KEEP_CONTENT}
    # A leaked or miscounted block may be mislabelled too.
    hash_by_block = {b: h for b, h in named.items() if books.block_by_hash.get(h) == b}
    unowned = [b for b, fault in faults.items() if fault is not BlockFault.UNKNOWN and b not in owner_counts]
    return Books(
        free=[b for b in books.free if b not in faults] + [b for b in unowned if b not in hash_by_block],
        owner_counts=dict(owner_counts),
        cached=OrderedDict.fromkeys(
            [b for b in books.cached if b not in faults] + [b for b in unowned if b in hash_by_block]
        ),
        block_by_hash={h: b for b, h in hash_by_block.items()},
        hash_by_block=hash_by_block,
    )


def _describe(faults: Mapping[int, BlockFault]) -> str:
    parts = []
    for fault in BlockFault:
        block_ids = [b for b, f in faults.items() if f is fault]
        if block_ids:
            more = ", ..." if len(block_ids) > MAX_NAMED_BLOCKS else ""
            parts.append(f"{', '.join(map(str, block_ids[:MAX_NAMED_BLOCKS]))}{more} {fault.value}")
    return f"KV blocks {'; '.join(parts)}"
