"""The data frame: 64 bytes of header, then KV in the order layer, k/v, head, token, dim; and its checksums."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kv_transfer.errors import ChecksumMismatch, MalformedFrame, OutOfRange
from kv_transfer.fingerprint import PROTOCOL_VERSION
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_plan import KvSlice

MAGIC = b"KVS1"
HEADER_BYTES = 64
DEFAULT_MAX_FRAME_BYTES = 2 << 20

Buffer = bytes | bytearray | memoryview

# magic, version, reserved, ticket, epoch, frame number, first layer, number of layers, first token, number of
# tokens, first head, number of heads, payload bytes; the checksum follows.
_FIELDS = struct.Struct("<4sHH16s8sIHHIIHHI")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame carries and for whom. `ticket_id` is 32, `epoch` 16 hexadecimal digits, lower case."""

    ticket_id: str
    epoch: str
    frame_number: int
    part: KvSlice
    heads: range
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as received; `payload` refers to the received bytes. Its checksum is not verified yet."""

    header: FrameHeader
    checksum: int
    sealed: memoryview
    payload: memoryview


def seal(header: FrameHeader, payload: Buffer) -> tuple[bytes, int]:
    """The header's 64 bytes for `payload`, and the checksum in them.

    Raises ValueError if an id is not hexadecimal of its length or a number does not fit its field.
    """
    part = header.part
    try:
        fields = _FIELDS.pack(
            MAGIC,
            PROTOCOL_VERSION,
            0,
            _from_hex(header.ticket_id, 16),
            _from_hex(header.epoch, 8),
            header.frame_number,
            *(part.layers.start, len(part.layers)),
            *(part.tokens.start, len(part.tokens)),
            *(header.heads.start, len(header.heads)),
            header.kv_bytes,
        )
    except struct.error as error:
        raise ValueError(f"{header} does not fit the frame format: {error}") from error
    checksum = _checksum(fields, payload)
    return fields + _CHECKSUM.pack(checksum), checksum


def unpack(data: Buffer) -> Frame:
    """Reads a frame without copying its payload.

    Raises MalformedFrame, and nothing else, whatever the bytes are.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise MalformedFrame(f"{len(view)} bytes are fewer than the {HEADER_BYTES} of a header")
    sealed, payload = view[: _FIELDS.size], view[HEADER_BYTES:]
    magic, version, reserved, ticket, epoch, number, *ranges, kv_bytes = _FIELDS.unpack(sealed)
    if (magic, version, reserved) != (MAGIC, PROTOCOL_VERSION, 0):
        raise MalformedFrame(
            f"magic {magic!r}, version {version}, reserved {reserved}: expected {MAGIC!r}, {PROTOCOL_VERSION}, 0"
        )
    if kv_bytes != len(payload):
        raise MalformedFrame(f"the header announces {kv_bytes} bytes, {len(payload)} follow")
    layers, tokens, heads = (range(lo, lo + n) for lo, n in zip(ranges[::2], ranges[1::2], strict=True))
    if not (layers and tokens and heads):
        raise MalformedFrame(f"layers {layers}, tokens {tokens}, heads {heads}: none may be empty")
    header = FrameHeader(ticket.hex(), epoch.hex(), number, KvSlice(layers, tokens), heads, kv_bytes)
    (checksum,) = _CHECKSUM.unpack(view[_FIELDS.size : HEADER_BYTES])
    return Frame(header, checksum, sealed, payload)


def check_sizes(header: FrameHeader, layout: KvLayout, max_frame_bytes: int) -> None:
    """Refuses a frame that cannot be for this layout, before its payload is looked at.

    Raises OutOfRange for layers or heads the layout lacks, MalformedFrame for a wrong size.
    """
    layers, all_heads = header.part.layers, range(layout.num_kv_heads)
    if layers.stop > layout.num_layers or header.heads != all_heads:
        raise OutOfRange(
            f"layers {layers}, heads {header.heads}: this side has {layout.num_layers} layers and takes all "
            f"{layout.num_kv_heads} heads at once"
        )
    expected = header.part.num_cells * layout.token_bytes
    if header.kv_bytes != expected:
        raise MalformedFrame(
            f"{header.kv_bytes} bytes for {header.part}: {layout.token_bytes} per token and layer make {expected}"
        )
    if HEADER_BYTES + expected > max_frame_bytes:
        raise MalformedFrame(
            f"a frame of {HEADER_BYTES + expected} bytes exceeds the limit of {max_frame_bytes}: send smaller slices"
        )


def verify_checksum(frame: Frame) -> None:
    """Raises ChecksumMismatch if header or payload differ from what was sealed."""
    actual = _checksum(frame.sealed, frame.payload)
    if actual != frame.checksum:
        raise ChecksumMismatch(
            f"frame {frame.header.frame_number}: checksum {actual:016x}, sent was {frame.checksum:016x}"
        )


def digest(checksums: Iterable[int]) -> int:
    """XXH3-64 over the frames' checksums, 8 bytes little-endian each, in order of frame number."""
    return xxhash.xxh3_64_intdigest(b"".join(_CHECKSUM.pack(checksum) for checksum in checksums))


def prompt_hash(token_ids: Sequence[int]) -> int:
    """XXH3-64 of the token ids as little-endian uint32: whose KV a transfer carries."""
    return xxhash.xxh3_64_intdigest(np.asarray(token_ids, dtype="<u4").tobytes())


def _checksum(fields: Buffer, payload: Buffer) -> int:
    # The header seeds the payload's hash, so that a frame whose place was corrupted does not verify either.
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(fields))


def _from_hex(text: str, num_bytes: int) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != num_bytes or raw.hex() != text:
        raise ValueError(f"{text!r} is not {2 * num_bytes} lower-case hexadecimal digits")
    return raw
