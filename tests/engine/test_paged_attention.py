"""Attention over blocks is dense softmax attention, whichever way it is computed."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.native_kernels import NativeKernels
from engine.paged_attention import (
    NativeAttention,
    PagedAttention,
    TorchAttention,
    VarlenAttention,
    choose_attention,
    varlen_inputs,
)
from engine.sampling_params import SamplingParams
from engine.step_plan import ScheduledSequence, StepPlan
from engine.step_tensors import build_step_tensors

BF16, F32 = torch.bfloat16, torch.float32
LAYERS, LAYER, SCALE = 3, 1, 0.17


@dataclass(frozen=True)
class Geometry:
    """`group` query heads for each KV head; `parts` are (start, rows) by sequence."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    parts: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    seed: int = 0


class Batch:
    """Random keys and values in permuted blocks, all else in the pool NaN: who reads it shows it."""

    def __init__(self, g: Geometry) -> None:
        self.geometry = g
        self.generator = torch.Generator().manual_seed(g.seed)
        counts = [-(-(start + rows) // g.block_size) for start, rows in g.parts]
        order = torch.randperm(sum(counts) + 2, generator=self.generator).tolist()
        self.tables = [tuple(order[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
        self.keys = [self._random(g.kv_heads, start + rows, g.head_dim) for start, rows in g.parts]
        self.values = [self._random(g.kv_heads, start + rows, g.head_dim) for start, rows in g.parts]
        sizes = (len(order), LAYERS, 2, g.kv_heads, g.block_size, g.head_dim)
        self.kv = torch.full(sizes, torch.nan, dtype=g.dtype)
        for i, (start, _) in enumerate(g.parts):
            self._put(i, range(start))
        plan = StepPlan(
            tuple(
                ScheduledSequence(str(i), start, tuple(range(rows)), table, True, SamplingParams())
                for i, ((start, rows), table) in enumerate(zip(g.parts, self.tables, strict=True))
            )
        )
        self.step = build_step_tensors(plan, g.block_size, torch.device("cpu"))
        self.order = [int(s.sequence_id) for s in self.step.order]
        # As transformers has them: heads behind tokens in memory, before them in the shape.
        self.query = self._random(1, self.step.slots.numel(), g.kv_heads * g.group, g.head_dim).transpose(1, 2)

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.generator).to(self.geometry.dtype)

    def _put(self, i: int, tokens: range) -> None:
        size = self.geometry.block_size
        for t in tokens:
            self.kv[self.tables[i][t // size], LAYER, 0, :, t % size] = self.keys[i][:, t]
            self.kv[self.tables[i][t // size], LAYER, 1, :, t % size] = self.values[i][:, t]

    def store(self, attention: PagedAttention) -> None:
        """Stores the step's keys and values through `attention`, from strided views."""
        parts = self.geometry.parts
        key = torch.cat([self.keys[i][:, parts[i][0] :] for i in self.order], dim=1)
        value = torch.cat([self.values[i][:, parts[i][0] :] for i in self.order], dim=1)
        key = key.transpose(0, 1).contiguous().transpose(0, 1)
        attention.store(LAYER, key[None], value[None], self.step)

    def filled_kv(self) -> torch.Tensor:
        """What the pool must hold after `store`."""
        before = self.kv.clone()
        for i, (start, rows) in enumerate(self.geometry.parts):
            self._put(i, range(start, start + rows))
        filled, self.kv = self.kv, before
        return filled

    def dense(self) -> torch.Tensor:
        """Plain softmax attention in float64, [1, rows, heads, head_dim]."""
        parts, group = self.geometry.parts, self.geometry.group
        outputs, row = [], 0
        for i in self.order:
            start, rows = parts[i]
            query = self.query[0, :, row : row + rows].transpose(0, 1)
            outputs.append(dense_attention(query, self.keys[i], self.values[i], group, start))
            row += rows
        return torch.cat(outputs)[None]


def dense_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int, start: int
) -> torch.Tensor:
    """query [rows, heads, dim] of tokens from `start` on, keys and values [kv_heads, context, dim]."""
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = torch.einsum("rhd,hcd->hrc", query.double(), keys) * SCALE
    rows, context = scores.shape[1:]
    hidden = torch.arange(context)[None] > torch.arange(start, start + rows)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrc,hcd->rhd", weights, values)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _assert_close(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, rounding: float) -> None:
    """float32 sums; in bfloat16 the result is rounded, and torch's kernel rounds the weights too."""
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=rounding if dtype == BF16 else 1e-5, atol=1e-5)


parts = st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(2, 40))), min_size=1, max_size=5).map(
    tuple
)
geometries = st.builds(
    Geometry,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    parts=parts,
    dtype=st.sampled_from([F32, BF16]),
    seed=st.integers(0, 2**20),
)


class TestTorchAttention:
    @settings(max_examples=40)
    @given(geometries)
    @example(Geometry(1, 1, 32, 8, ((0, 1),), F32))
    @example(Geometry(3, 3, 64, 16, ((15, 1), (16, 1), (0, 16), (16, 17), (0, 1)), F32))
    def test_is_dense_attention(self, g: Geometry) -> None:
        batch = Batch(g)
        filled = batch.filled_kv()
        attention = TorchAttention(batch.kv)
        batch.store(attention)
        assert _same_bits(batch.kv, filled)
        out = attention.attend(LAYER, batch.query, SCALE, batch.step)
        torch.testing.assert_close(
            out.double(), batch.dense(), rtol=1e-5 if g.dtype == F32 else 2e-2, atol=1e-5 if g.dtype == F32 else 2e-2
        )


class TestNativeAttention:
    @settings(max_examples=100)
    @given(geometries)
    @example(Geometry(1, 8, 128, 8, ((0, 1), (7, 1), (8, 1), (15, 1), (16, 1)), BF16))
    @example(Geometry(3, 3, 64, 16, ((0, 1), (0, 16), (16, 17)), F32))
    @example(Geometry(2, 12, 64, 16, ((20, 1), (5, 1)), F32))
    @example(Geometry(1, 16, 256, 16, ((20, 1), (5, 1)), BF16))
    def test_is_the_reference(self, kernels: NativeKernels, g: Geometry) -> None:
        """Stores the same bits; single rows are exact up to the rounding of the result."""
        batch = Batch(g)
        filled = batch.filled_kv()
        attention = NativeAttention(batch.kv, kernels)
        batch.store(attention)
        assert _same_bits(batch.kv, filled)
        out, singles = attention.attend(LAYER, batch.query, SCALE, batch.step), batch.step.num_single_rows
        exact = batch.dense()
        rounding = 2.0**-8 if g.dtype == BF16 else 1e-5
        torch.testing.assert_close(out[:, :singles].double(), exact[:, :singles], rtol=rounding, atol=1e-5)
        reference = TorchAttention(batch.kv).attend(LAYER, batch.query, SCALE, batch.step)
        assert _same_bits(out[:, singles:], reference[:, singles:])
        tolerance = 1e-5 if g.dtype == F32 else 2e-2
        torch.testing.assert_close(out, reference, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
    def test_a_row_has_the_same_bits_alone_and_in_a_batch(self, kernels: NativeKernels, dtype: torch.dtype) -> None:
        g = Geometry(3, 3, 64, 16, tuple((start, 1) for start in (0, 1, 15, 16, 17, 40, 63, 64, 200)), dtype)
        batch = Batch(g)
        attention = NativeAttention(batch.kv, kernels)
        batch.store(attention)
        together = attention.attend(LAYER, batch.query, SCALE, batch.step)
        for row, (start, _) in enumerate(g.parts):
            scheduled = ScheduledSequence("a", start, (0,), batch.tables[row], True, SamplingParams())
            step = build_step_tensors(StepPlan((scheduled,)), g.block_size, torch.device("cpu"))
            alone = attention.attend(LAYER, batch.query[:, :, row : row + 1], SCALE, step)
            assert torch.equal(alone, together[:, row : row + 1]), f"context {start + 1}"

    def test_large_scores_do_not_overflow(self, kernels: NativeKernels) -> None:
        """Scores in the thousands: one token takes all, as in the dense softmax."""
        batch = Batch(Geometry(1, 4, 64, 16, ((50, 1), (3, 1)), F32))
        batch.query *= 4000
        attention = NativeAttention(batch.kv, kernels)
        batch.store(attention)
        out = attention.attend(LAYER, batch.query, SCALE, batch.step)
        torch.testing.assert_close(out.double(), batch.dense(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("number", [torch.nan, torch.inf])
    def test_what_is_not_finite_stays_in_its_sequence(self, kernels: NativeKernels, number: float) -> None:
        batch = Batch(Geometry(1, 2, 32, 8, ((20, 1), (20, 1), (9, 1)), F32))
        clean = batch.dense()
        batch.keys[1][0, 17, 3] = number
        batch._put(1, range(20))
        attention = NativeAttention(batch.kv, kernels)
        batch.store(attention)
        out = attention.attend(LAYER, batch.query, SCALE, batch.step)
        torch.testing.assert_close(out[:, [0, 2]].double(), clean[:, [0, 2]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.double(), batch.dense(), rtol=1e-5, atol=1e-5, equal_nan=True)

    @pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 96), (4, 64), (1, 64)])
    def test_keys_of_another_shape_than_the_blocks_are_refused(
        self, kernels: NativeKernels, kv_heads: int, head_dim: int
    ) -> None:
        """Written by pointer they would land in other blocks."""
        batch = Batch(Geometry(2, 1, 64, 8, ((0, 1),), F32))
        key = torch.zeros(1, kv_heads, 1, head_dim)
        with pytest.raises(ValueError, match=f"{kv_heads} heads of {head_dim}.*2 of 64"):
            NativeAttention(batch.kv, kernels).store(LAYER, key, key, batch.step)


class TestVarlenInputs:
    @settings(max_examples=40)
    @given(geometries)
    def test_describe_the_batch_that_the_reference_computes(self, g: Geometry) -> None:
        """Attention from lengths, contexts and tables alone, as FlashAttention reads them: the last rows of each."""
        batch = Batch(g)
        batch.kv = batch.filled_kv()
        lengths, contexts, tables = varlen_inputs(batch.step)
        assert {t.dtype for t in (lengths, contexts, tables)} == {torch.int32}
        assert (tables >= 0).all()
        keys, values = (batch.kv[:, LAYER, kind].transpose(1, 2) for kind in (0, 1))
        outputs, row = [], 0
        for length, context, table in zip(lengths.tolist(), contexts.tolist(), tables, strict=True):
            k, v = (x[table].flatten(0, 1)[:context].transpose(0, 1) for x in (keys, values))
            query = batch.query[0, :, row : row + length].transpose(0, 1)
            outputs.append(dense_attention(query, k, v, g.group, context - length))
            row += length
        assert row == batch.step.slots.numel()
        reference = TorchAttention(batch.kv).attend(LAYER, batch.query, SCALE, batch.step)
        tolerance = 1e-5 if g.dtype == F32 else 2e-2
        torch.testing.assert_close(torch.cat(outputs)[None], reference.double(), rtol=tolerance, atol=tolerance)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention over block tables needs CUDA")
    def test_on_cuda(self) -> None:
        batch = Batch(Geometry(3, 3, 64, 16, ((40, 1), (0, 33), (17, 20), (0, 1)), BF16))
        kv = batch.filled_kv().nan_to_num().cuda()
        step = build_step_tensors(StepPlan(batch.step.order), 16, kv.device)
        out = VarlenAttention(kv).attend(LAYER, batch.query.cuda(), SCALE, step)
        torch.testing.assert_close(out.cpu().double(), batch.dense(), rtol=2e-2, atol=2e-2)


def _kv(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, 1, 2, 1, 16, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kind"),
    [
        (64, F32, NativeAttention),
        (256, BF16, NativeAttention),
        (80, F32, TorchAttention),
        (288, F32, TorchAttention),
        (64, torch.float16, TorchAttention),
    ],
)
def test_kernels_are_chosen_where_they_can_compute(
    kernels: NativeKernels, head_dim: int, dtype: torch.dtype, kind: type
) -> None:
    assert type(choose_attention(_kv(head_dim, dtype), kernels)) is kind
    assert type(choose_attention(_kv(head_dim, dtype), None)) is TorchAttention
