"""Attention over the paged KV cache, registered with transformers so that its models run on our blocks.

Three ways to compute the same: `TorchAttention` (any device, the reference), `NativeAttention` (CPU kernels for
rows of one token) and `VarlenAttention` (CUDA, FlashAttention with block tables, Dao 2023). Each stores the new
keys and values in the blocks first and then attends, so a row sees its own key.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.native_kernels import AttentionArguments, KvStoreArguments, NativeKernels
from engine.step_tensors import SequenceRows, StepTensors

NAME = "baton_paged"
MAX_NATIVE_HEAD_DIM = 256  # as in cpu_kernels.c


class PagedAttention(Protocol):
    """Keys and values into the blocks, attention out of them, for one layer and step."""

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepTensors) -> None:
        """key, value [1, kv_heads, rows, head_dim]; row i goes to `step.slots[i]`."""
        ...

    def attend(self, layer: int, query: torch.Tensor, scale: float, step: StepTensors) -> torch.Tensor:
        """query [1, heads, rows, head_dim] -> [1, rows, heads, head_dim]."""
        ...


class TorchAttention:
    """scaled_dot_product_attention over gathered blocks, sequence by sequence: the reference."""

    def __init__(self, kv: torch.Tensor) -> None:
        """`kv` [num_blocks, num_layers, 2, kv_heads, block_size, head_dim]."""
        self.kv = kv

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepTensors) -> None:
        """See `PagedAttention.store`."""
        block_size = self.kv.shape[4]
        blocks, offsets = step.slots // block_size, step.slots % block_size
        self.kv[blocks, layer, 0, :, offsets] = key[0].transpose(0, 1)
        self.kv[blocks, layer, 1, :, offsets] = value[0].transpose(0, 1)

    def attend(self, layer: int, query: torch.Tensor, scale: float, step: StepTensors) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        self._attend_single_rows(layer, query, scale, step, out)
        for rows in step.long:
            last = rows.first_row + rows.num_rows
            out[:, rows.first_row : last] = self._attend_rows(layer, query[:, :, rows.first_row : last], scale, rows)
        return out

    def _attend_single_rows(
        self, layer: int, query: torch.Tensor, scale: float, step: StepTensors, out: torch.Tensor
    ) -> None:
        for row in range(step.num_single_rows):
            context = int(step.single_contexts[row])
            rows = SequenceRows(row, 1, context - 1, step.single_tables[row].long())
            out[:, row : row + 1] = self._attend_rows(layer, query[:, :, row : row + 1], scale, rows)

    def _attend_rows(self, layer: int, query: torch.Tensor, scale: float, rows: SequenceRows) -> torch.Tensor:
        """query [1, heads, num_rows, head_dim] -> [1, num_rows, heads, head_dim]."""
        context = rows.start + rows.num_rows
        gathered = self.kv[rows.block_ids, layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        gathered = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :context]
        mask = None
        if rows.start > 0 and rows.num_rows > 1:
            mask = torch.ones(rows.num_rows, context, dtype=torch.bool, device=query.device).tril(rows.start)
        attended = scaled_dot_product_attention(
            query,
            gathered[0],
            gathered[1],
            attn_mask=mask,
            is_causal=rows.start == 0 and rows.num_rows > 1,
            scale=scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


class NativeAttention(TorchAttention):
    """Stores, and attends single rows, by the native CPU kernels; longer runs of rows as the reference does."""

    def __init__(self, kv: torch.Tensor, kernels: NativeKernels) -> None:
        """`kv` as in `TorchAttention`, on the CPU, bfloat16 or float32; head_dim a multiple of 32 up to 256."""
        super().__init__(kv)
        self.kernels = kernels
        self.layer_bytes = kv.stride(1) * kv.element_size()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepTensors) -> None:
        """See `PagedAttention.store`."""
        _, kv_heads, rows, head_dim = key.shape
        if (kv_heads, head_dim) != (self.kv.shape[3], self.kv.shape[5]):  # would be written into other blocks
            raise ValueError(
                f"the model's keys are {kv_heads} heads of {head_dim} numbers, the KV blocks are made for "
                f"{self.kv.shape[3]} of {self.kv.shape[5]}: this model's attention is of a kind that is not served"
            )
        arguments = KvStoreArguments(
            k=key.data_ptr(),
            v=value.data_ptr(),
            layer_base=self.kv.data_ptr() + layer * self.layer_bytes,
            slots=step.slots.data_ptr(),
            tokens=rows,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=self.kv.shape[4],
            block_stride=self.kv.stride(0),
            k_token_stride=key.stride(2),
            k_head_stride=key.stride(1),
            v_token_stride=value.stride(2),
            v_head_stride=value.stride(1),
            item_bytes=self.kv.element_size(),
        )
        self.kernels.kv_store(arguments)

    def _attend_single_rows(
        self, layer: int, query: torch.Tensor, scale: float, step: StepTensors, out: torch.Tensor
    ) -> None:
        if step.num_single_rows == 0:
            return
        heads, kv_heads = query.shape[1], self.kv.shape[3]
        room = -(-step.max_single_context // 16) * 16
        scores = torch.empty(heads // kv_heads * room, dtype=torch.float32)
        tokens = torch.empty(step.max_single_context, dtype=torch.int64)
        arguments = AttentionArguments(
            q=query.data_ptr(),
            layer_base=self.kv.data_ptr() + layer * self.layer_bytes,
            tables=step.single_tables.data_ptr(),
            contexts=step.single_contexts.data_ptr(),
            scores=scores.data_ptr(),
            tokens=tokens.data_ptr(),
            out=out.data_ptr(),
            rows=step.num_single_rows,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=query.shape[3],
            block_size=self.kv.shape[4],
            block_stride=self.kv.stride(0),
            table_width=step.single_tables.shape[1],
            q_token_stride=query.stride(2),
            q_head_stride=query.stride(1),
            scale=scale,
            is_bf16=query.dtype == torch.bfloat16,
        )
        self.kernels.attention(arguments)


class VarlenAttention(TorchAttention):
    """FlashAttention over block tables on CUDA, one call for all rows; float16 or bfloat16.

    Not run on the machines this was written on; tests hold its inputs against the reference's.
    """

    def attend(self, layer: int, query: torch.Tensor, scale: float, step: StepTensors) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        lengths, contexts, tables = varlen_inputs(step)
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        keys, values = self.kv[:, layer, 0].transpose(1, 2), self.kv[:, layer, 1].transpose(1, 2)
        out = varlen_attn(
            query[0].transpose(0, 1),
            keys,  # [num_blocks, block_size, kv_heads, head_dim], strided: a view of the wire's order
            values,
            starts,
            None,
            int(lengths.max()),
            int(contexts.max()),
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=contexts,
            block_table=tables,
            num_splits=1,  # the same bits alone and in a batch
        )
        assert isinstance(out, torch.Tensor)
        return out[None]


def varlen_inputs(step: StepTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [sequences], contexts [sequences] and block tables [sequences, width] of all sequences, int32."""
    device = step.slots.device
    num_singles = step.num_single_rows
    width = max([step.single_tables.shape[1] if num_singles else 1, *(len(r.block_ids) for r in step.long)])
    tables = torch.zeros(num_singles + len(step.long), width, dtype=torch.int32, device=device)
    if num_singles:
        tables[:num_singles, : step.single_tables.shape[1]] = step.single_tables
    for i, rows in enumerate(step.long):
        tables[num_singles + i, : len(rows.block_ids)] = rows.block_ids
    lengths = torch.tensor([1] * num_singles + [r.num_rows for r in step.long], dtype=torch.int32, device=device)
    long_contexts = torch.tensor([r.start + r.num_rows for r in step.long], dtype=torch.int32, device=device)
    return lengths, torch.cat([step.single_contexts, long_contexts]), tables


def choose_attention(kv: torch.Tensor, kernels: NativeKernels | None) -> PagedAttention:
    """The best way for the pool's device, dtype and head size."""
    if kv.is_cuda and kv.dtype in (torch.float16, torch.bfloat16):
        return VarlenAttention(kv)
    native_dtype = kv.dtype in (torch.float32, torch.bfloat16)
    native_head_dim = kv.shape[5] % 32 == 0 and kv.shape[5] <= MAX_NATIVE_HEAD_DIM
    if kernels is not None and kv.device.type == "cpu" and native_dtype and native_head_dim:
        return NativeAttention(kv, kernels)
    return TorchAttention(kv)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer. query [1, heads, rows, head_dim]; key, value with kv_heads.

    `kwargs` carries what the runner passed to the model: `paged` (PagedAttention), `step` (StepTensors) and
    `on_layer` (called with the layer's index once its keys and values are in the blocks).
    """
    paged: PagedAttention = kwargs["paged"]
    step: StepTensors = kwargs["step"]
    on_layer: Callable[[int], None] = kwargs["on_layer"]
    layer = module.layer_idx
    assert isinstance(layer, int)
    paged.store(layer, key, value, step)
    on_layer(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged.attend(layer, query, scale, step), None


def register() -> None:
    """Makes the function known to transformers under `NAME`; to be called once before a model is loaded."""
    AttentionInterface.register(NAME, paged_attention_forward)
