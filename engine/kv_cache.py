"""The memory of the KV blocks."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one block holds. `dtype` is the torch dtype of keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        numbers = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return numbers * self.dtype.itemsize


def allocate_kv(shape: KvShape, num_blocks: int, device: torch.device) -> torch.Tensor:
    """One zeroed tensor [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    A block of all layers is contiguous, and so is a head's run of tokens in it: long runs for the wire. Zeroed,
    so that memory is really there and a never-written slot is a number.
    """
    sizes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return torch.zeros(sizes, dtype=shape.dtype, device=device)
