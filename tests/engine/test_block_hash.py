"""Block hashes are the same everywhere and differ wherever the content does."""

import os
import subprocess
import sys

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.block_hash import block_hash, root_hash

_PRINT_HASHES = """
from engine.block_hash import block_hash, root_hash
parent = root_hash("model-a", "")
for start in range(0, 48, 16):
    parent = block_hash(parent, range(start, start + 16))
    print(parent.hex())
"""

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32)


def _hashes_in_process(hash_seed: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", _PRINT_HASHES],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout


def test_hashes_do_not_depend_on_the_process() -> None:
    first, second = _hashes_in_process("1"), _hashes_in_process("2")
    assert first == second
    assert len(set(first.split())) == 3
    assert all(len(bytes.fromhex(h)) == 16 for h in first.split())


def test_the_format_is_parent_then_little_endian_uint32() -> None:
    parent = root_hash("m", "")
    expected = xxhash.xxh3_128(parent + b"\x01\x00\x00\x00" + b"\xff\xff\xff\xff").digest()
    assert block_hash(parent, [1, 2**32 - 1]) == expected


@given(tokens, tokens)
def test_equal_hashes_mean_equal_tokens(a: list[int], b: list[int]) -> None:
    parent = root_hash("m", "")
    assert (block_hash(parent, a) == block_hash(parent, b)) == (a == b)


def test_parent_salt_and_model_change_the_hash() -> None:
    roots = [root_hash("m", ""), root_hash("m", "a"), root_hash("m", "b"), root_hash("n", "")]
    hashes = {block_hash(root, [1, 2, 3]) for root in roots}
    assert len(hashes) == 4
    assert block_hash(block_hash(roots[0], [1]), [2]) != block_hash(block_hash(roots[0], [2]), [2])


texts = st.text(max_size=4)


@given(texts, texts, texts, texts)
def test_model_and_salt_cannot_be_shifted_into_one_another(m1: str, s1: str, m2: str, s2: str) -> None:
    assert (root_hash(m1, s1) == root_hash(m2, s2)) == ((m1, s1) == (m2, s2))


def test_salt_cannot_be_shifted_into_tokens() -> None:
    assert block_hash(root_hash("m", "a"), [ord("b"), 1]) != block_hash(root_hash("m", "ab"), [1])
