"""Reads and writes token ranges of a paged KV pool as bytes in wire order: layer, k/v, head, token, dim."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.errors import OutOfRange
from kv_transfer.layout import KvLayout

_Rows = npt.NDArray[np.uint8]


class KvPool:
    """A pool tensor of shape `[num_blocks, *layout.block_shape]`, contiguous, on any device.

    Token t of a sequence lies in block `block_ids[t // block_size]` at `t % block_size`, whatever the block
    size of the other side. Safe to use from several threads as long as no two touch the same blocks.
    """

    def __init__(self, tensor: torch.Tensor, layout: KvLayout) -> None:
        if tuple(tensor.shape[1:]) != layout.block_shape or not tensor.is_contiguous():
            raise ValueError(
                f"the pool has shape {tuple(tensor.shape)}, contiguous: {tensor.is_contiguous()}; "
                f"needed is a contiguous [num_blocks, {', '.join(map(str, layout.block_shape))}]"
            )
        if tensor.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"the pool holds {tensor.dtype}, the layout says {layout.dtype}")
        self.layout = layout
        self.num_blocks = tensor.shape[0]
        # True: a copy waits for the device, so an event loop must not run it itself.
        self.copies_wait = tensor.device.type != "cpu"
        self._tensor = tensor
        # Bytes, as numpy knows no bfloat16. Rows of one head are adjacent, so its tokens form one axis.
        self._rows = None if self.copies_wait else _rows_of(tensor, layout)

    def check(self, block_ids: Sequence[int], layers: range, tokens: range) -> None:
        """Raises OutOfRange unless the blocks exist and cover `tokens`, and the layers exist."""
        layout = self.layout
        if layers.step != 1 or tokens.step != 1 or layers.start < 0 or layers.stop > layout.num_layers:
            raise OutOfRange(f"layers {layers}, tokens {tokens}: steps of 1 in {layout.num_layers} layers")
        capacity = len(block_ids) * layout.block_size
        if tokens.start < 0 or tokens.stop > capacity:
            raise OutOfRange(
                f"tokens [{tokens.start}, {tokens.stop}): {len(block_ids)} blocks of {layout.block_size} hold "
                f"[0, {capacity})"
            )
        used = block_ids[tokens.start // layout.block_size : layout.num_blocks_for(tokens.stop)]
        if used and (min(used) < 0 or max(used) >= self.num_blocks):
            raise OutOfRange(f"blocks {min(used)} to {max(used)}: the pool has {self.num_blocks}")

    def read(self, block_ids: Sequence[int], layers: range, tokens: range) -> memoryview:
        """Copies KV out: `len(layers) * len(tokens) * token_bytes` bytes, contiguous. Raises OutOfRange."""
        self.check(block_ids, layers, tokens)
        if self._rows is None:
            return self._gather(block_ids, layers, tokens)
        layout = self.layout
        shape = (len(layers), 2, layout.num_kv_heads, len(tokens) * layout.row_bytes)
        out = np.empty(shape, dtype=np.uint8)
        for block_id, inside, outside in self._spans(block_ids, tokens):
            out[..., outside] = self._rows[block_id, layers.start : layers.stop, :, :, inside]
        return out.reshape(-1).data

    def write(self, block_ids: Sequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        """Copies KV in, the reverse of `read`. Raises OutOfRange, also if the payload's size is wrong."""
        self.check(block_ids, layers, tokens)
        layout = self.layout
        expected = len(layers) * len(tokens) * layout.token_bytes
        if len(payload) != expected:
            raise OutOfRange(f"{len(payload)} bytes for {len(layers)} layers, {len(tokens)} tokens: {expected}")
        if self._rows is None:
            self._scatter(block_ids, layers, tokens, payload)
            return
        rows = np.frombuffer(payload, dtype=np.uint8).reshape(len(layers), 2, layout.num_kv_heads, -1)
        for block_id, inside, outside in self._spans(block_ids, tokens):
            self._rows[block_id, layers.start : layers.stop, :, :, inside] = rows[..., outside]

    def _spans(self, block_ids: Sequence[int], tokens: range) -> Iterator[tuple[int, slice, slice]]:
        """For each block: its id, the bytes of a row within it, the same bytes within the payload's row."""
        if not tokens:
            return
        size, row_bytes = self.layout.block_size, self.layout.row_bytes
        for index in range(tokens.start // size, self.layout.num_blocks_for(tokens.stop)):
            first = max(tokens.start, index * size)
            last = min(tokens.stop, (index + 1) * size)
            inside = slice((first - index * size) * row_bytes, (last - index * size) * row_bytes)
            outside = slice((first - tokens.start) * row_bytes, (last - tokens.start) * row_bytes)
            yield block_ids[index], inside, outside

    def _gather(self, block_ids: Sequence[int], layers: range, tokens: range) -> memoryview:
        """`read` for a device: one gather there, one copy into pinned host memory, which waits for both."""
        blocks, offsets = self._positions(block_ids, tokens)
        found = self._tensor[blocks, layers.start : layers.stop, :, :, offsets].permute(1, 2, 3, 0, 4)
        host = self._host_buffer(found.shape)
        host.copy_(found)
        return host.view(torch.uint8).numpy().reshape(-1).data

    def _scatter(self, block_ids: Sequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        """`write` for a device; returns when the device has written, so that the KV may be announced."""
        layout = self.layout
        host = self._host_buffer((len(layers), 2, layout.num_kv_heads, len(tokens), layout.head_dim))
        host.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(payload, dtype=np.uint8)
        blocks, offsets = self._positions(block_ids, tokens)
        values = host.to(self._tensor.device, non_blocking=True).permute(3, 0, 1, 2, 4)
        self._tensor[blocks, layers.start : layers.stop, :, :, offsets] = values
        if self._tensor.device.type == "cuda":
            torch.cuda.current_stream(self._tensor.device).synchronize()

    def _positions(self, block_ids: Sequence[int], tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(tokens.start, tokens.stop)
        blocks = torch.tensor(block_ids)[position // self.layout.block_size]
        device = self._tensor.device
        return blocks.to(device), (position % self.layout.block_size).to(device)

    def _host_buffer(self, shape: Sequence[int]) -> torch.Tensor:
        pinned = self._tensor.device.type == "cuda"
        return torch.empty(tuple(shape), dtype=self._tensor.dtype, pin_memory=pinned)


def _rows_of(tensor: torch.Tensor, layout: KvLayout) -> _Rows:
    heads = (layout.num_layers, 2, layout.num_kv_heads)
    return tensor.view(torch.uint8).numpy().reshape(len(tensor), *heads, layout.block_size * layout.row_bytes)
