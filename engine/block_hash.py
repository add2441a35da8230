"""Content hash of full KV blocks, chained so that equal hashes mean equal tokens from the start. Pure."""

import struct
from collections.abc import Sequence

import xxhash

_FORMAT = b"baton.block.v1"


def root_hash(model_fingerprint: str, cache_salt: str) -> bytes:
    """Parent (16 bytes) of the first block of every sequence of this model and salt.

    Both texts are preceded by their length, so no two pairs give the same bytes to hash.
    """
    texts = (model_fingerprint.encode(), cache_salt.encode())
    return xxhash.xxh3_128_digest(_FORMAT + b"".join(struct.pack("<I", len(t)) + t for t in texts))


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash (16 bytes) of one full block: xxh3_128 of its parent's hash and its tokens as little-endian uint32.

    It is the same in every process and after every restart. It guards against chance, not against somebody
    who searches for collisions: tenants that do not trust each other use different salts.
    """
    return xxhash.xxh3_128_digest(parent + struct.pack(f"<{len(token_ids)}I", *token_ids))
