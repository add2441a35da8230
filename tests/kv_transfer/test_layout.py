import pytest
import torch

from kv_transfer.layout import KvLayout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sizes_are_those_of_torch(dtype: str) -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    block = torch.zeros(layout.block_shape, dtype=getattr(torch, dtype))
    assert layout.itemsize == block.element_size()
    assert layout.row_bytes == block[0, 0, 0, 0].nbytes
    assert layout.token_bytes == block[0, :, :, 0].nbytes
    assert layout.num_layers * layout.block_size * layout.token_bytes == block.nbytes


def test_smollm2_has_the_sizes_known_of_it() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    assert layout.token_bytes * 16 == 12_288
    assert layout.token_bytes * 16 * 30 == 368_640


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_are_rounded_up(num_tokens: int, num_blocks: int) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
    assert layout.num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_numbers_are_positive(field: str) -> None:
    numbers = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} is 0"):
        KvLayout(**numbers, dtype="float32")


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'int8': use one of float32, bfloat16, float16"):
        KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="int8")
