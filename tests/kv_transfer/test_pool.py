from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.errors import OutOfRange
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool

NewPool = Callable[[KvLayout, int, int], KvPool]
KvOf = Callable[[KvPool, list[int], range], torch.Tensor]
NUM_BLOCKS = 7

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8]),
    block_size=st.sampled_from([1, 2, 5, 16]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
together = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def any_range(data: st.DataObject, end: int) -> range:
    first = data.draw(st.integers(0, end - 1))
    return range(first, data.draw(st.integers(first + 1, end)))


@together
@given(layout=layouts, blocks=st.permutations(range(NUM_BLOCKS)), data=st.data())
def test_what_is_read_is_in_wire_order(
    new_pool: NewPool, kv_of: KvOf, layout: KvLayout, blocks: list[int], data: st.DataObject
) -> None:
    pool = new_pool(layout, NUM_BLOCKS, 1)
    layers, tokens = any_range(data, layout.num_layers), any_range(data, NUM_BLOCKS * layout.block_size)
    # [token, layer, k/v, head, byte] to [layer, k/v, head, token, byte].
    expected = kv_of(pool, blocks, tokens)[:, layers.start : layers.stop].permute(1, 2, 3, 0, 4).flatten()
    assert bytes(pool.read(blocks, layers, tokens)) == bytes(expected.tolist())


@together
@given(
    layout=layouts,
    other_size=st.sampled_from([1, 3, 16]),
    blocks=st.permutations(range(NUM_BLOCKS)),
    data=st.data(),
)
def test_what_is_written_is_there_and_nothing_else_changed(
    new_pool: NewPool, kv_of: KvOf, layout: KvLayout, other_size: int, blocks: list[int], data: st.DataObject
) -> None:
    source = new_pool(layout, NUM_BLOCKS, 1)
    there = KvLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, other_size, layout.dtype)
    num_tokens = NUM_BLOCKS * layout.block_size
    target = new_pool(there, there.num_blocks_for(num_tokens), 2)
    target_blocks = data.draw(st.permutations(range(target.num_blocks)))
    layers, tokens = any_range(data, layout.num_layers), any_range(data, num_tokens)
    everything = range(target.num_blocks * other_size)
    expected = kv_of(target, target_blocks, everything)
    expected[tokens.start : tokens.stop, layers.start : layers.stop] = kv_of(source, blocks, tokens)[
        :, layers.start : layers.stop
    ]
    target.write(target_blocks, layers, tokens, source.read(blocks, layers, tokens))
    assert torch.equal(kv_of(target, target_blocks, everything), expected)


@together
@given(layout=layouts, blocks=st.permutations(range(NUM_BLOCKS)), data=st.data())
def test_the_way_over_a_device_moves_the_same_bytes(
    new_pool: NewPool, kv_of: KvOf, layout: KvLayout, blocks: list[int], data: st.DataObject
) -> None:
    source, by_host, by_device = (new_pool(layout, NUM_BLOCKS, seed) for seed in (1, 2, 2))
    # No device here: the same torch code on the CPU, without pinned memory.
    source_on_device = KvPool(source._tensor, layout)
    source_on_device._rows = by_device._rows = None
    layers, tokens = any_range(data, layout.num_layers), any_range(data, NUM_BLOCKS * layout.block_size)
    payload = source.read(blocks, layers, tokens)
    assert source_on_device.read(blocks, layers, tokens) == payload
    by_host.write(blocks, layers, tokens, payload)
    by_device.write(blocks, layers, tokens, payload)
    everything = range(NUM_BLOCKS * layout.block_size)
    assert torch.equal(kv_of(by_device, blocks, everything), kv_of(by_host, blocks, everything))


LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")


@pytest.mark.parametrize(
    ("block_ids", "layers", "tokens", "text"),
    [
        ([0, 1], range(3), range(9), r"tokens \[0, 9\): 2 blocks of 4 hold \[0, 8\)"),
        ([0, 1], range(3), range(-1, 4), r"tokens \[-1, 4\)"),
        ([0, 7], range(3), range(8), r"blocks 0 to 7: the pool has 7"),
        ([0, -1], range(3), range(8), r"blocks -1 to 0"),
        ([0, 1], range(4), range(8), r"in 3 layers"),
        ([0, 1], range(-1, 2), range(8), r"in 3 layers"),
        ([0, 1], range(3), range(0, 8, 2), r"steps of 1"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_moves(
    new_pool: NewPool, block_ids: list[int], layers: range, tokens: range, text: str
) -> None:
    pool = new_pool(LAYOUT, NUM_BLOCKS, 1)
    before = pool._tensor.clone().view(torch.uint8)
    with pytest.raises(OutOfRange, match=text):
        pool.read(block_ids, layers, tokens)
    payload = memoryview(bytes(max(0, len(layers) * len(tokens) * LAYOUT.token_bytes)))
    with pytest.raises(OutOfRange, match=text):
        pool.write(block_ids, layers, tokens, payload)
    assert torch.equal(pool._tensor.view(torch.uint8), before)


def test_a_payload_of_the_wrong_size_is_refused(new_pool: NewPool) -> None:
    pool = new_pool(LAYOUT, NUM_BLOCKS, 1)
    with pytest.raises(OutOfRange, match="31 bytes"):
        pool.write([0], range(1), range(1), memoryview(bytes(31)))


def test_blocks_before_the_range_may_be_anything(new_pool: NewPool) -> None:
    pool = new_pool(LAYOUT, NUM_BLOCKS, 1)
    assert len(pool.read([99, 1], range(3), range(4, 8))) == 3 * 4 * LAYOUT.token_bytes


def test_an_empty_range_is_nothing(new_pool: NewPool) -> None:
    pool = new_pool(LAYOUT, NUM_BLOCKS, 1)
    assert len(pool.read([0], range(3), range(2, 2))) == 0
    pool.write([0], range(3), range(2, 2), memoryview(b""))


def test_a_tensor_of_another_shape_order_or_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needed is a contiguous \[num_blocks, 3, 2, 2, 4, 4\]"):
        KvPool(torch.zeros(7, 2, 3, 2, 4, 4, dtype=torch.bfloat16), LAYOUT)
    with pytest.raises(ValueError, match="contiguous: False"):
        KvPool(torch.zeros(7, 3, 2, 2, 4, 4, dtype=torch.bfloat16).transpose(4, 5), LAYOUT)
    with pytest.raises(ValueError, match=r"holds torch\.float32, the layout says bfloat16"):
        KvPool(torch.zeros(7, 3, 2, 2, 4, 4), LAYOUT)
