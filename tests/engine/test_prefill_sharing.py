"""Prefill tokens of a step go to one after the other, but always half of them to the one that is assured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefill_sharing import share_prefill_tokens


@pytest.mark.parametrize(
    ("remaining", "assured", "max_tokens", "max_sequences", "max_chunk_tokens", "shares"),
    [
        ([], 0, 64, 4, None, []),
        ([2000], 0, 64, 4, None, [64]),
        ([5, 2000], 1, 64, 4, None, [5, 59]),
        ([5, 2000, 2000], 1, 64, 4, None, [5, 59, 0]),
        ([100, 2000], 1, 64, 4, None, [32, 32]),
        ([2000, 100], 1, 64, 4, None, [32, 32]),
        ([10, 2000], 0, 64, 4, None, [10, 54]),
        ([1000, 2000], 0, 64, 4, None, [64, 0]),
        ([5, 20, 20, 2000], 3, 64, 4, None, [5, 20, 7, 32]),
        ([5, 20, 20, 2000], 3, 64, 2, None, [5, 0, 0, 59]),
        ([5, 2000], 1, 64, 1, None, [0, 64]),
        ([1000, 2000], 0, 64, 4, 16, [16, 16]),
        ([5, 2000], 1, 1, 4, None, [0, 1]),
        ([5, 2000], 1, 0, 4, None, [0, 0]),
        ([5, 2000], 1, 64, 0, None, [0, 0]),
    ],
)
def test_shares(
    remaining: list[int],
    assured: int,
    max_tokens: int,
    max_sequences: int,
    max_chunk_tokens: int | None,
    shares: list[int],
) -> None:
    assert shares == share_prefill_tokens(
        remaining,
        assured=assured,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        max_chunk_tokens=max_chunk_tokens,
    )


@given(
    st.data(),
    st.lists(st.integers(1, 50), min_size=1, max_size=8),
    st.integers(1, 64),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_limits_hold_and_nobody_is_passed_over(
    data: st.DataObject, remaining: list[int], max_tokens: int, max_sequences: int, chunk: int | None
) -> None:
    assured = data.draw(st.integers(0, len(remaining) - 1))
    shares = share_prefill_tokens(
        remaining, assured=assured, max_tokens=max_tokens, max_sequences=max_sequences, max_chunk_tokens=chunk
    )
    caps = [min(n, chunk or n) for n in remaining]
    assert sum(shares) <= max_tokens
    assert sum(share > 0 for share in shares) <= max_sequences
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))
    assert shares[assured] >= min(caps[assured], max_tokens / 2)
    others = shares[:assured] + shares[assured + 1 :]
    num_served = sum(share > 0 for share in others)
    assert all(share > 0 for share in others[:num_served]), "one gets tokens only if all before it do"
    has_taker = sum(s > 0 for s in shares) < min(max_sequences, len(shares)) or any(
        0 < s < cap for s, cap in zip(shares, caps, strict=True)
    )
    assert sum(shares) == max_tokens or not has_taker
