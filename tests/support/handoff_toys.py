"""What toy workers are made of: blocks, messages, and a network that only a test moves.

Nothing here waits or decides: a test says what happens next. What must never happen is asserted where it would.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.frame import FrameHeader
from kv_transfer.landing import TransferClaim
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_plan import KvSlice

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=2, dtype="float32")
NUM_TOKENS, NUM_BLOCKS_A_CALL = 4, 2

Cells = dict[tuple[int, int], tuple[int, int, int]]  # (layer, token) -> whose KV it is: (prompt, layer, token)


class Pool:
    """Blocks with owners and content. Whoever does what he may not is caught in the act."""

    def __init__(self, num_blocks: int) -> None:
        self._owners: list[object | None] = [None] * num_blocks
        self._cells: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    @property
    def num_owned(self) -> int:
        return sum(owner is not None for owner in self._owners)

    def take(self, owner: object) -> list[int] | None:
        free = [i for i, other in enumerate(self._owners) if other is None][:NUM_BLOCKS_A_CALL]
        if len(free) < NUM_BLOCKS_A_CALL:
            return None
        for i in free:
            self._owners[i] = owner
        return free

    def give(self, owner: object, blocks: list[int]) -> None:
        self._check(owner, blocks)
        for i in blocks:
            self._owners[i] = None

    def write(self, owner: object, blocks: list[int], cells: Cells) -> None:
        self._check(owner, blocks)
        self._cells.update({self._place(blocks, *cell): value for cell, value in cells.items()})

    def read(self, owner: object, blocks: list[int], part: KvSlice) -> Cells:
        self._check(owner, blocks)
        cells = [(layer, token) for layer in part.layers for token in part.tokens]
        return {cell: self._cells[self._place(blocks, *cell)] for cell in cells}

    def _check(self, owner: object, blocks: list[int]) -> None:
        assert all(self._owners[i] is owner for i in blocks), "these blocks are somebody else's, or nobody's"

    def _place(self, blocks: list[int], layer: int, token: int) -> tuple[int, int, int]:
        return blocks[token // LAYOUT.block_size], token % LAYOUT.block_size, layer


@dataclass(frozen=True)
class Message:
    """`push` is the call that it belongs to; the rest as its kind needs it."""

    kind: str
    push: int
    ticket: str = ""
    epoch: str = ""
    header: FrameHeader | None = None
    checksum: int = 0
    cells: Any = None
    claim: TransferClaim | None = None
    number: int = -1
    error: Exception | None = None


def checksum(header: FrameHeader, cells: Cells) -> int:
    address = (header.ticket_id, header.epoch, header.frame_number, repr(header.part))
    return hash((address, tuple(sorted(cells.items())))) & (2**64 - 1)


class Terminals:
    """Counts the ends of one call."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def end(self, how: str) -> Callable[[], None]:
        def action() -> None:
            assert not self.ends, f"{how} after {self.ends}"
            self.ends.append(how)

        return action


@dataclass
class Network:
    """What is under way."""

    to_decode: list[Message] = field(default_factory=list)
    to_prefill: list[Message] = field(default_factory=list)
