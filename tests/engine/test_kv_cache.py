"""The KV blocks are as large and laid out as they say."""

import torch

from engine.kv_cache import KvShape, allocate_kv


def test_a_block_of_the_default_model_is_720_kib_in_float32() -> None:
    """30 layers x (key, value) x 3 heads x 16 tokens x 64 numbers x 4 bytes = 737,280."""
    shape = KvShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
    assert shape.block_bytes == 737_280


def test_memory_is_zeroed_contiguous_and_of_the_promised_size() -> None:
    shape = KvShape(num_layers=3, num_kv_heads=2, head_dim=32, block_size=8, dtype=torch.bfloat16)
    kv = allocate_kv(shape, 5, torch.device("cpu"))
    assert kv.shape == (5, 3, 2, 2, 8, 32)
    assert kv.nbytes == 5 * shape.block_bytes
    assert kv.is_contiguous()
    assert not kv.any()
