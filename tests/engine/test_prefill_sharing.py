"""Prefill tokens of a step go to short prompts first, but always half of them to the oldest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefill_sharing import share_prefill_tokens


@pytest.mark.parametrize(
    ("remaining", "max_tokens", "max_sequences", "max_chunk_tokens", "shares"),
    [
        ([], 64, 4, None, []),
        ([2000], 64, 4, None, [64]),
        ([2000, 5], 64, 4, None, [59, 5]),
        ([2000, 5, 2000], 64, 4, None, [59, 5, 0]),
        ([2000, 100], 64, 4, None, [32, 32]),
        ([10, 2000], 64, 4, None, [10, 54]),
        ([1000, 2000], 64, 4, None, [64, 0]),
        ([2000, 20, 20, 5], 64, 4, None, [32, 20, 7, 5]),
        ([2000, 20, 20, 5], 64, 2, None, [59, 0, 0, 5]),
        ([2000, 5], 64, 1, None, [64, 0]),
        ([2000, 1000], 64, 4, 16, [16, 16]),
        ([2000, 5], 1, 4, None, [1, 0]),
        ([2000, 5], 0, 4, None, [0, 0]),
        ([2000, 5], 64, 0, None, [0, 0]),
    ],
)
def test_shares(
    remaining: list[int], max_tokens: int, max_sequences: int, max_chunk_tokens: int | None, shares: list[int]
) -> None:
    assert shares == share_prefill_tokens(
        remaining, max_tokens=max_tokens, max_sequences=max_sequences, max_chunk_tokens=max_chunk_tokens
    )


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8),
    st.integers(1, 64),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_limits_hold_and_the_oldest_gets_half(
    remaining: list[int], max_tokens: int, max_sequences: int, chunk: int | None
) -> None:
    shares = share_prefill_tokens(remaining, max_tokens=max_tokens, max_sequences=max_sequences, max_chunk_tokens=chunk)
    caps = [min(n, chunk or n) for n in remaining]
    assert sum(shares) <= max_tokens
    assert sum(share > 0 for share in shares) <= max_sequences
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))
    assert shares[0] >= min(caps[0], max_tokens / 2)
    has_taker = sum(s > 0 for s in shares) < min(max_sequences, len(shares)) or any(
        0 < s < cap for s, cap in zip(shares, caps, strict=True)
    )
    assert sum(shares) == max_tokens or not has_taker
