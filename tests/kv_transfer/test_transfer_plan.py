from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import DuplicateFrame, OutOfRange
from kv_transfer.transfer_plan import Coverage, KvSlice, SliceGrouper, cut


def cells(parts: list[KvSlice]) -> Counter[tuple[int, int]]:
    return Counter(cell for part in parts for cell in product(part.layers, part.tokens))


def ranges(end: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, end), st.integers(0, end)).map(lambda ends: range(min(ends), max(ends)))


@given(ranges(12), ranges(40), st.integers(1, 50), st.integers(0, 400))
def test_slices_cover_everything_once_within_the_limit(
    layers: range, tokens: range, token_bytes: int, extra_bytes: int
) -> None:
    max_bytes = token_bytes + extra_bytes
    parts = cut(layers, tokens, token_bytes, max_bytes)
    assert cells(parts) == Counter(product(layers, tokens))
    assert all(0 < part.num_cells * token_bytes <= max_bytes for part in parts)


def test_whole_layers_are_grouped() -> None:
    # 512 tokens of SmolLM2: 393,216 bytes a layer, two fit into 1 MiB.
    parts = cut(range(5), range(512), 768)
    assert parts == [KvSlice(range(lo, hi), range(512)) for lo, hi in ((0, 2), (2, 4), (4, 5))]


def test_a_layer_too_large_is_cut_by_tokens() -> None:
    parts = cut(range(1, 3), range(10, 15), 10, 20)
    tokens = (range(10, 12), range(12, 14), range(14, 15))
    assert parts == [KvSlice(range(layer, layer + 1), part) for layer in (1, 2) for part in tokens]


def test_a_token_larger_than_a_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="11 bytes, more than the 10"):
        cut(range(1), range(1), 11, 10)


@given(
    num_layers=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    max_bytes=st.integers(3, 120),
    data=st.data(),
)
def test_the_grouper_gives_what_it_took_never_earlier_and_keeps_nothing_after_the_last_layer(
    num_layers: int, chunks: list[int], max_bytes: int, data: st.DataObject
) -> None:
    grouper = SliceGrouper(num_layers, 3, max_bytes)
    taken: Counter[tuple[int, int]] = Counter()
    given_back: Counter[tuple[int, int]] = Counter()
    first = 0
    for size in chunks:
        tokens, layer = range(first, first + size), 0
        while layer < num_layers:
            stop = data.draw(st.integers(layer + 1, num_layers))
            taken += Counter(product(range(layer, stop), tokens))
            parts = grouper.add(range(layer, stop), tokens)
            assert all(part.num_cells * 3 <= max_bytes for part in parts)
            given_back += cells(parts)
            assert given_back <= taken
            layer = stop
        assert given_back == taken
        first += size
    assert grouper.flush() == []


def test_layers_wait_until_they_fill_a_slice() -> None:
    grouper = SliceGrouper(num_layers=8, token_bytes=1, max_bytes=30)
    tokens = range(10)
    assert grouper.add(range(1), tokens) == []
    assert grouper.add(range(1, 2), tokens) == []
    assert grouper.add(range(2, 3), tokens) == [KvSlice(range(3), tokens)]
    assert grouper.add(range(3, 4), tokens) == []
    # Another chunk does not continue the group.
    assert grouper.add(range(1), range(10, 12)) == [KvSlice(range(3, 4), tokens)]
    assert grouper.flush() == [KvSlice(range(1), range(10, 12))]


def test_coverage_counts_down_and_names_the_first_hole() -> None:
    coverage = Coverage(2, range(10, 14))
    coverage.claim(KvSlice(range(2), range(10, 12)))
    coverage.claim(KvSlice(range(1), range(12, 14)))
    assert coverage.num_missing == 2
    assert coverage.first_missing() == (1, 12)
    coverage.claim(KvSlice(range(1, 2), range(12, 14)))
    assert coverage.first_missing() is None


@pytest.mark.parametrize("tokens", [range(9, 11), range(13, 15)])
def test_coverage_refuses_what_lies_outside(tokens: range) -> None:
    with pytest.raises(OutOfRange, match="outside layers"):
        Coverage(2, range(10, 14)).claim(KvSlice(range(1), tokens))


@pytest.mark.parametrize("layers", [range(1, 3), range(-1, 1)])
def test_coverage_refuses_layers_that_do_not_exist(layers: range) -> None:
    with pytest.raises(OutOfRange, match="outside layers"):
        Coverage(2, range(10, 14)).claim(KvSlice(layers, range(10, 11)))


def test_a_refused_claim_changes_nothing() -> None:
    coverage = Coverage(2, range(4))
    coverage.claim(KvSlice(range(1), range(1, 2)))
    with pytest.raises(DuplicateFrame, match="delivered before"):
        coverage.claim(KvSlice(range(2), range(4)))
    assert coverage.num_missing == 7


def test_no_tokens_are_covered_from_the_start() -> None:
    coverage = Coverage(2, range(4, 4))
    assert coverage.num_missing == 0
    assert coverage.first_missing() is None
