"""Whatever was done to a pool's books, an audit makes them agree with what sequences hold, and names what was wrong."""

from collections import Counter, OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool, Books, Ledger
from engine.ledger_audit import Repair, audit
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

NOTHING = Repair(0, "")


class Rig:
    """12 blocks: 0 and 1 shared by two sequences, 2 and 3 of one each; 4 and 5 cached; the others free."""

    def __init__(self) -> None:
        self.pool = BlockPool(num_blocks=12, block_size=16)
        blocks = self.pool.allocate(6)
        assert blocks == [0, 1, 2, 3, 4, 5]
        self.pool.acquire([0, 1])
        for block_id in (0, 1, 4, 5):
            self.pool.register(block_id, b"%d" % block_id)
        self.pool.release([4, 5])
        self.holders = [self._holder("a", [0, 1, 2]), self._holder("b", [0, 1, 3])]

    def _holder(self, sequence_id: str, block_ids: list[int]) -> Sequence:
        return Sequence(sequence_id, [7], 1, SamplingParams(), block_ids=block_ids)

    def check(self) -> None:
        """The books are right, and the pool works: all can be given back, and each block is handed out once."""
        assert audit(self.pool, self.holders, thorough=True) == NOTHING
        self.pool.ledger().check()
        owners = Counter(b for holder in self.holders for b in holder.block_ids)
        assert {b: self.pool.num_owners(b) for b in owners} == owners
        assert self.pool.ledger().owned == len(owners)
        for holder in self.holders:
            self.pool.release(holder.block_ids)
        found = [h for h in self.pool.books.block_by_hash if self.pool.match_prefix([h])]
        for content_hash in found:
            self.pool.acquire(self.pool.match_prefix([content_hash]))
            self.pool.release(self.pool.match_prefix([content_hash]))
        assert sorted(self.pool.allocate(12)) == list(range(12))
        assert self.pool.ledger() == Ledger(total=12, free=0, cached=0, owned=12)


def _leak(rig: Rig) -> None:
    rig.pool.allocate(1)


def _leak_cached(rig: Rig) -> None:
    rig.pool.acquire([4])


def _lose_a_release(rig: Rig) -> None:
    rig.pool.acquire([1])


def _release_twice(rig: Rig) -> None:
    rig.pool.release([1])


def _release_a_held_block(rig: Rig) -> None:
    rig.pool.release([2])


def _forget_a_sequence(rig: Rig) -> None:
    rig.holders.pop()


def _lose_a_free_block(rig: Rig) -> None:
    rig.pool._free.remove(9)


def _lose_a_cached_block(rig: Rig) -> None:
    del rig.pool._cached[4]


def _lose_an_owned_block(rig: Rig) -> None:
    del rig.pool._owner_counts[2]


def _free_twice(rig: Rig) -> None:
    rig.pool._free.append(9)


def _free_and_cached(rig: Rig) -> None:
    rig.pool._free.append(4)


def _free_and_owned(rig: Rig) -> None:
    rig.pool._free.append(1)


def _cached_and_owned(rig: Rig) -> None:
    rig.pool._cached[0] = None


def _cached_without_content(rig: Rig) -> None:
    del rig.pool._hash_by_block[5]


def _free_with_content(rig: Rig) -> None:
    rig.pool._hash_by_block[9] = b"9"
    rig.pool._block_by_hash[b"9"] = 9


def _found_by_two_hashes(rig: Rig) -> None:
    rig.pool._block_by_hash[b"other"] = 4


def _two_with_one_content(rig: Rig) -> None:
    rig.pool._hash_by_block[3] = b"4"


def _free_is_found(rig: Rig) -> None:
    rig.pool._block_by_hash[b"other"] = 9


def _unknown_block(rig: Rig) -> None:
    rig.pool._free.append(12)


def _owned_by_none(rig: Rig) -> None:
    rig.pool._free.remove(9)
    rig.pool._owner_counts[9] = 0


# What was done, what is said, the ledger afterwards.
CORRUPTIONS: list[tuple[Callable[[Rig], None], str, tuple[int, int, int]]] = [
    (_leak, "6 owned by nobody that exists", (6, 2, 4)),
    (_leak_cached, "4 owned by nobody that exists", (6, 2, 4)),
    (_lose_a_release, "1 counted with more or fewer owners than there are", (6, 2, 4)),
    (_release_twice, "1 counted with more or fewer owners than there are", (6, 2, 4)),
    (_release_a_held_block, "2 counted with more or fewer owners than there are", (6, 2, 4)),
    (
        _forget_a_sequence,
        "3 owned by nobody that exists; 0, 1 counted with more or fewer owners than there are",
        (7, 2, 3),
    ),
    (_lose_a_free_block, "9 in no list", (6, 2, 4)),
    (_lose_a_cached_block, "4 in no list", (7, 1, 4)),
    (_lose_an_owned_block, "2 in no list", (6, 2, 4)),
    (_free_twice, "9 in two lists", (6, 2, 4)),
    (_free_and_cached, "4 in two lists", (7, 1, 4)),
    (_free_and_owned, "1 in two lists", (6, 2, 4)),
    (_cached_and_owned, "0 in two lists", (6, 2, 4)),
    (_cached_without_content, "5 found by content they do not have", (7, 1, 4)),
    (_free_with_content, "9 found by content they do not have", (6, 2, 4)),
    (_found_by_two_hashes, "4 found by content they do not have", (7, 1, 4)),
    (_two_with_one_content, "3 found by content they do not have", (6, 2, 4)),
    (_free_is_found, "9 found by content they do not have", (6, 2, 4)),
    (_unknown_block, "12 that are none of the pool's", (6, 2, 4)),
    (_owned_by_none, "9 in no list", (6, 2, 4)),
]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    rig = Rig()
    books = rig.pool.books
    before = (list(books.free), dict(books.owner_counts), list(books.cached), dict(books.block_by_hash))
    assert audit(rig.pool, rig.holders, thorough=True) == NOTHING
    books = rig.pool.books
    assert before == (books.free, books.owner_counts, list(books.cached), books.block_by_hash)
    rig.check()


@pytest.mark.parametrize(("corrupt", "said", "ledger"), CORRUPTIONS, ids=[c[0].__name__[1:] for c in CORRUPTIONS])
def test_what_is_wrong_is_named_and_put_right(
    corrupt: Callable[[Rig], None], said: str, ledger: tuple[int, int, int]
) -> None:
    rig = Rig()
    corrupt(rig)
    repair = audit(rig.pool, rig.holders, thorough=True)
    assert repair.num_blocks == len(said.split("KV")[0].replace(";", ",").split(",")) == _num_named(repair.description)
    assert repair.description.startswith(f"KV blocks {said}")
    free, cached, owned = ledger
    assert rig.pool.ledger() == Ledger(total=12, free=free, cached=cached, owned=owned)
    rig.check()


def _num_named(description: str) -> int:
    return sum(word.rstrip(",").isdigit() for word in description.split())


@pytest.mark.parametrize("corrupt", [c[0] for c in CORRUPTIONS if "found by" not in c[1]])
def test_a_quick_look_shows_wrong_owners_and_wrong_sums(corrupt: Callable[[Rig], None]) -> None:
    rig = Rig()
    assert audit(rig.pool, rig.holders, thorough=False) == NOTHING
    corrupt(rig)
    assert audit(rig.pool, rig.holders, thorough=False).num_blocks > 0
    rig.check()


def test_a_quick_look_may_miss_what_adds_up_and_a_thorough_one_does_not() -> None:
    rig = Rig()
    _lose_a_free_block(rig)
    _free_and_cached(rig)
    assert audit(rig.pool, rig.holders, thorough=False) == NOTHING
    repair = audit(rig.pool, rig.holders, thorough=True)
    assert repair == Repair(2, "KV blocks 9 in no list; 4 in two lists")
    rig.check()


def test_a_leaked_block_keeps_its_content_and_a_doubled_one_does_not() -> None:
    rig = Rig()
    _leak_cached(rig)
    rig.pool._free.append(5)
    audit(rig.pool, rig.holders, thorough=True)
    assert rig.pool.match_prefix([b"4"]) == [4]
    assert rig.pool.match_prefix([b"5"]) == []


def test_only_some_of_many_are_named() -> None:
    pool = BlockPool(num_blocks=40, block_size=16)
    pool.allocate(30)
    repair = audit(pool, [], thorough=True)
    assert repair.num_blocks == 30
    assert repair.description.endswith(" 14, 15, ... owned by nobody that exists")
    assert pool.ledger() == Ledger(total=40, free=40, cached=0, owned=0)


block_ids = st.integers(-1, 8)
hashes = st.sampled_from([b"a", b"b", b"c", b"d"])


@given(
    free=st.lists(block_ids, max_size=8),
    owner_counts=st.dictionaries(block_ids, st.integers(0, 3), max_size=6),
    cached=st.lists(block_ids, max_size=6),
    block_by_hash=st.dictionaries(hashes, block_ids),
    hash_by_block=st.dictionaries(block_ids, hashes),
    holdings=st.lists(st.lists(st.integers(0, 7), unique=True, max_size=4), max_size=3),
)
def test_any_books_at_all_are_put_right_at_once(
    free: list[int],
    owner_counts: dict[int, int],
    cached: list[int],
    block_by_hash: dict[bytes, int],
    hash_by_block: dict[int, bytes],
    holdings: list[list[int]],
) -> None:
    pool = BlockPool(num_blocks=8, block_size=16)
    pool.replace_books(Books(free, owner_counts, OrderedDict.fromkeys(cached), block_by_hash, hash_by_block))
    holders = [Sequence(str(i), [7], 1, SamplingParams(), block_ids=held) for i, held in enumerate(holdings)]
    first = audit(pool, holders, thorough=True)
    assert (first.num_blocks == 0) == (first.description == "")
    assert audit(pool, holders, thorough=True) == NOTHING
    pool.ledger().check()
    for held in holdings:
        pool.release(held)
    for content_hash in (b"a", b"b", b"c", b"d"):
        found = pool.match_prefix([content_hash])
        pool.acquire(found)
        pool.release(found)
    assert sorted(pool.allocate(8)) == list(range(8))
