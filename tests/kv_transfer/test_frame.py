import struct
from dataclasses import replace
from uuid import uuid4

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kv_transfer.errors import ChecksumMismatch, KvTransferError, MalformedFrame, OutOfRange
from kv_transfer.frame import (
    DEFAULT_MAX_FRAME_BYTES,
    HEADER_BYTES,
    FrameHeader,
    check_sizes,
    digest,
    prompt_hash,
    seal,
    unpack,
    verify_checksum,
)
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_plan import KvSlice

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=2, block_size=4, dtype="float32")
PART = KvSlice(range(1, 3), range(5, 8))
PAYLOAD = bytes(range(192))  # 2 layers, 3 tokens, 32 bytes each
HEADER = FrameHeader("00112233445566778899aabbccddeeff", "0123456789abcdef", 7, PART, range(2), len(PAYLOAD))


def spans(limit: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, limit), st.integers(1, limit)).map(lambda pair: range(pair[0], sum(pair)))


headers = st.builds(
    FrameHeader,
    ticket_id=st.uuids().map(lambda uuid: uuid.hex),
    epoch=st.binary(min_size=8, max_size=8).map(bytes.hex),
    frame_number=st.integers(0, 2**32 - 1),
    part=st.builds(KvSlice, layers=spans(2**16 - 1), tokens=spans(2**32 - 1)),
    heads=spans(2**16 - 1),
    kv_bytes=st.integers(0, 0),
)


@given(headers, st.binary(max_size=300))
def test_what_was_sealed_is_read_back(header: FrameHeader, payload: bytes) -> None:
    header = replace(header, kv_bytes=len(payload))
    sealed, checksum = seal(header, payload)
    frame = unpack(sealed + payload)
    assert len(sealed) == HEADER_BYTES
    assert (frame.header, frame.checksum, bytes(frame.payload)) == (header, checksum, payload)
    verify_checksum(frame)


def test_the_header_is_laid_out_as_documented() -> None:
    sealed, checksum = seal(HEADER, PAYLOAD)
    fields = b"".join(
        [
            b"KVS1",
            struct.pack("<HH", 1, 0),
            bytes.fromhex(HEADER.ticket_id),
            bytes.fromhex(HEADER.epoch),
            struct.pack("<I", 7),
            struct.pack("<HH", 1, 2),
            struct.pack("<II", 5, 3),
            struct.pack("<HH", 0, 2),
            struct.pack("<I", 192),
        ]
    )
    assert sealed == fields + struct.pack("<Q", checksum)
    assert checksum == xxhash.xxh3_64_intdigest(PAYLOAD, seed=xxhash.xxh3_64_intdigest(fields))


@given(st.binary(max_size=400))
@example(b"KVS1" + bytes(60))
@example(b"KVS1\x01\x00\x00\x00" + bytes(56))
def test_random_bytes_raise_nothing_but_the_typed_error(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        unpack(data)


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1), st.integers(1, 255))
def test_no_changed_byte_passes(position: int, change: int) -> None:
    data = bytearray(seal(HEADER, PAYLOAD)[0] + PAYLOAD)
    data[position] ^= change
    with pytest.raises(KvTransferError) as caught:
        verify_checksum(unpack(data))
    assert isinstance(caught.value, MalformedFrame | ChecksumMismatch)


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1))
def test_a_cut_frame_is_malformed(length: int) -> None:
    with pytest.raises(MalformedFrame):
        unpack((seal(HEADER, PAYLOAD)[0] + PAYLOAD)[:length])


def test_another_version_is_named() -> None:
    data = bytearray(seal(HEADER, PAYLOAD)[0] + PAYLOAD)
    data[4] = 2
    with pytest.raises(MalformedFrame, match="version 2"):
        unpack(data)


def test_the_payload_is_not_copied() -> None:
    data = bytearray(seal(HEADER, PAYLOAD)[0] + PAYLOAD)
    frame = unpack(data)
    data[-1] ^= 1
    assert frame.payload[-1] == PAYLOAD[-1] ^ 1


@pytest.mark.parametrize(
    "change",
    [
        {"ticket_id": "12"},
        {"ticket_id": "zz" * 16},
        {"ticket_id": str(uuid4())},
        {"ticket_id": "AB" * 16},
        {"epoch": "00"},
        {"frame_number": 2**32},
        {"heads": range(2**16, 2**16 + 1)},
    ],
)
def test_a_header_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|hexadecimal"):
        seal(replace(HEADER, **change), PAYLOAD)


def test_sizes_that_fit_the_layout_pass() -> None:
    check_sizes(HEADER, LAYOUT, DEFAULT_MAX_FRAME_BYTES)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"part": KvSlice(range(3, 5), range(5, 8))}, OutOfRange),
        ({"heads": range(1)}, OutOfRange),
        ({"heads": range(1, 3)}, OutOfRange),
        ({"kv_bytes": 191}, MalformedFrame),
        ({"part": KvSlice(range(1, 3), range(5, 9))}, MalformedFrame),
    ],
)
def test_sizes_that_contradict_the_layout_are_refused(change: dict[str, object], error: type[KvTransferError]) -> None:
    with pytest.raises(error):
        check_sizes(replace(HEADER, **change), LAYOUT, DEFAULT_MAX_FRAME_BYTES)


def test_a_frame_over_the_limit_is_refused_with_both_numbers() -> None:
    check_sizes(HEADER, LAYOUT, 256)
    with pytest.raises(MalformedFrame, match="256 bytes exceeds the limit of 255"):
        check_sizes(HEADER, LAYOUT, 255)


def test_the_digest_is_over_checksums_in_order() -> None:
    assert digest([1, 2**64 - 1]) == xxhash.xxh3_64_intdigest(struct.pack("<QQ", 1, 2**64 - 1))
    assert digest([1, 2]) != digest([2, 1])
    assert digest([]) == xxhash.xxh3_64_intdigest(b"")


def test_the_prompt_hash_is_over_little_endian_uint32() -> None:
    assert prompt_hash([1, 70000]) == xxhash.xxh3_64_intdigest(struct.pack("<II", 1, 70000))
    assert prompt_hash((1,)) != prompt_hash((1, 0))
