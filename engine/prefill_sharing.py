"""How the prefill tokens of one step are shared among sequences that compete for them. Pure."""

from collections.abc import Sequence


def share_prefill_tokens(
    remaining: Sequence[int], *, max_tokens: int, max_sequences: int, max_chunk_tokens: int | None
) -> list[int]:
    """Tokens of this step for each sequence, given the tokens each has left, oldest sequence first.

    Shortest remaining first, so that a short prompt does not wait for long ones before it; but the oldest is
    always given half of the tokens (rounded up, or what it has left), so that it ends whatever comes after
    it, and then the next one is the oldest. At most `max_sequences` get tokens and none more than
    `max_chunk_tokens`; tokens stay unused only if one of these limits leaves nobody to take them.
    """
    shares = [0] * len(remaining)
    if not remaining or max_tokens < 1 or max_sequences < 1:
        return shares
    caps = [n if max_chunk_tokens is None else min(n, max_chunk_tokens) for n in remaining]
    shares[0] = min(caps[0], -(-max_tokens // 2))
    tokens_left = max_tokens - shares[0]
    others_left = max_sequences - 1
    for i in sorted(range(len(remaining)), key=lambda i: (remaining[i], i)):
        if i > 0 and others_left == 0:
            continue
        extra = min(caps[i] - shares[i], tokens_left)
        shares[i] += extra
        tokens_left -= extra
        others_left -= i > 0 and extra > 0
    return shares
