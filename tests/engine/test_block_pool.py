"""No block is lost, owned twice by chance, or handed out while somebody owns it; the oldest content goes first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, Ledger, LedgerError, OutOfBlocks


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    assert pool.ledger() == Ledger(total=3, free=3, cached=0, owned=0)
    assert pool.num_available == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.num_available == 0


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (128, 8), (129, 9)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(num_blocks=1, block_size=16).blocks_for(num_tokens) == num_blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match=r"3 KV blocks are needed, 2 of 3"):
        pool.allocate(3)
    assert pool.ledger() == Ledger(total=3, free=2, cached=0, owned=1)


def test_released_content_is_found_until_it_is_evicted_tail_first() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    blocks = pool.allocate(3)
    hashes = [b"h0", b"h1", b"h2"]
    for block_id, content_hash in zip(blocks, hashes, strict=True):
        pool.register(block_id, content_hash)
    pool.release(blocks)
    assert pool.ledger() == Ledger(total=3, free=0, cached=3, owned=0)
    assert pool.match_prefix(hashes) == blocks
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match_prefix(hashes) == blocks[:2]
    assert pool.allocate(1) == [blocks[1]]
    assert pool.match_prefix(hashes) == blocks[:1]


def test_use_makes_content_recent() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    for content_hash in (b"a", b"b"):
        [block_id] = pool.allocate(1)
        pool.register(block_id, content_hash)
    [a], [b] = pool.match_prefix([b"a"]), pool.match_prefix([b"b"])
    pool.release([a])
    pool.release([b])
    pool.acquire([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    [block_id] = pool.allocate(1)
    pool.register(block_id, b"a")
    pool.release([block_id])
    assert pool.allocate(1) != [block_id]
    assert pool.match_prefix([b"a"]) == [block_id]


def test_shared_blocks_stay_until_the_last_owner_is_gone() -> None:
    pool = BlockPool(num_blocks=1, block_size=16)
    blocks = pool.allocate(1)
    pool.acquire(blocks)
    assert pool.num_owners(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_owners(blocks[0]) == 1
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.release(blocks)
    assert pool.allocate(1) == blocks


def test_the_first_block_of_a_content_keeps_it() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.match_prefix([b"a"]) == [first]
    pool.release([first, second])
    assert pool.ledger() == Ledger(total=2, free=1, cached=1, owned=0)


def test_drop_cache_forgets_owned_content_too() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    a, b = pool.allocate(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([a])
    assert pool.drop_cache() == 2
    assert pool.match_prefix([b"a"]) == []
    assert pool.match_prefix([b"b"]) == []
    pool.release([b])
    assert pool.ledger() == Ledger(total=3, free=3, cached=0, owned=0)


def test_misuse_raises() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    [block_id] = pool.allocate(1)
    pool.release([block_id])
    for misuse in (pool.release, pool.acquire):
        with pytest.raises(ValueError, match=f"block {block_id}"):
            misuse([block_id])
    with pytest.raises(ValueError, match="nobody owns"):
        pool.release([-1])
    with pytest.raises(ValueError, match="nobody owns"):
        pool.register(block_id, b"a")
    [block_id] = pool.allocate(1)
    pool.register(block_id, b"a")
    with pytest.raises(ValueError, match="two hashes"):
        pool.register(block_id, b"b")
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks=0, block_size=16)


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    Ledger(total=6, free=1, cached=2, owned=2, in_flight=1).check()
    with pytest.raises(LedgerError, match=r"1 free \+ 2 cached \+ 2 owned \+ 0 in flight .* 6"):
        Ledger(total=6, free=1, cached=2, owned=2).check()


def test_blocks_in_flight_do_not_count_as_owned() -> None:
    pool = BlockPool(num_blocks=5, block_size=16)
    pool.allocate(4)
    assert pool.ledger(num_in_flight=3) == Ledger(total=5, free=1, cached=0, owned=1, in_flight=3)


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool in plain sets: who owns what, what is cached in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=6, block_size=16)
        self.holdings: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # registered, owned or not
        self.recency: list[int] = []  # cached, least recent first

    @property
    def owners(self) -> Counter[int]:
        return Counter(block_id for holding in self.holdings for block_id in holding)

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        owned = set(self.owners)
        num_free = 6 - len(owned) - len(self.recency)
        if count > 6 - len(owned):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert owned.isdisjoint(blocks)
        num_evicted = max(0, count - num_free)
        evicted, self.recency = self.recency[:num_evicted], self.recency[num_evicted:]
        assert blocks[count - num_evicted :] == evicted
        for block_id in evicted:
            del self.content[block_id]
        self.holdings.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), content_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, content_hash: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.owners)))
        if self.content.get(block_id, content_hash) != content_hash:
            return
        self.pool.register(block_id, content_hash)
        if content_hash not in self.content.values():
            self.content[block_id] = content_hash

    @rule(hashes=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True))
    def match_and_acquire(self, hashes: list[bytes]) -> None:
        block_by_hash = {h: b for b, h in self.content.items()}
        expected = []
        for content_hash in hashes:
            if content_hash not in block_by_hash:
                break
            expected.append(block_by_hash[content_hash])
        blocks = self.pool.match_prefix(hashes)
        assert blocks == expected
        available = self.pool.num_available
        num_cached = self.pool.count_cached(blocks)
        self.pool.acquire(blocks)
        assert self.pool.num_available == available - num_cached
        self.recency = [b for b in self.recency if b not in blocks]
        self.holdings.append(blocks)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        self.pool.release(blocks)
        owners = self.owners
        self.recency += [b for b in reversed(blocks) if b not in owners and b in self.content]

    @rule()
    def drop_cache(self) -> None:
        assert self.pool.drop_cache() == len(self.content)
        self.content.clear()
        self.recency.clear()

    @invariant()
    def blocks_add_up(self) -> None:
        ledger = self.pool.ledger()
        ledger.check()
        assert ledger.owned == len(self.owners)
        assert {b: self.pool.num_owners(b) for b in range(6)} == {b: self.owners[b] for b in range(6)}
        assert ledger.cached == len(self.recency)
        assert self.pool.num_available == 6 - len(self.owners)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
