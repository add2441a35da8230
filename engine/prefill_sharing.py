"""How the prefill tokens of one step are shared among sequences that compete for them. Pure."""

from collections.abc import Sequence


def share_prefill_tokens(
    remaining: Sequence[int], *, assured: int, max_tokens: int, max_sequences: int, max_chunk_tokens: int | None
) -> list[int]:
    """Tokens of this step for each sequence, given the tokens each has left, in the order in which they are served.

    But the one at index `assured` is always given half of the tokens (rounded up, or what it has left), so that
    it ends whatever is served before it. At most `max_sequences` get tokens and none more than
    `max_chunk_tokens`; tokens stay unused only if one of these limits leaves nobody to take them. Of the others,
    one gets tokens only if all before it do.
    """
    shares = [0] * len(remaining)
    if not remaining or max_tokens < 1 or max_sequences < 1:
        return shares
    caps = [n if max_chunk_tokens is None else min(n, max_chunk_tokens) for n in remaining]
    shares[assured] = min(caps[assured], -(-max_tokens // 2))
    tokens_left = max_tokens - shares[assured]
    others_left = max_sequences - 1
    for i, cap in enumerate(caps):
        if i != assured and others_left == 0:
            continue
        extra = min(cap - shares[i], tokens_left)
        shares[i] += extra
        tokens_left -= extra
        others_left -= i != assured and extra > 0
    return shares
