from dataclasses import replace

import pytest

from kv_transfer.fingerprint import PROTOCOL_VERSION, Fingerprint, mismatch

MINE = Fingerprint(PROTOCOL_VERSION, "ab12", "bfloat16", num_layers=30, num_kv_heads=3, head_dim=64)


def test_equal_fingerprints_match() -> None:
    assert mismatch(MINE, replace(MINE)) is None


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("protocol_version", PROTOCOL_VERSION + 1),
        ("model", "cd34"),
        ("kv_dtype", "float32"),
        ("num_layers", 28),
        ("num_kv_heads", 8),
        ("head_dim", 128),
    ],
)
def test_a_difference_is_named_with_both_values(field: str, theirs: int | str) -> None:
    text = mismatch(MINE, replace(MINE, **{field: theirs}))
    assert text == f"{field} differs: {getattr(MINE, field)!r} here, {theirs!r} at the peer"


def test_the_protocol_version_is_named_first() -> None:
    theirs = replace(MINE, protocol_version=9, head_dim=1)
    assert (mismatch(MINE, theirs) or "").startswith("protocol_version differs")
