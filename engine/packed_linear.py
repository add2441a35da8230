"""Linear layers whose weights are laid out once for the processor's caches."""

import torch
from torch import nn

from engine.native_kernels import NativeKernels

PANEL_COLUMNS = 32  # as in cpu_kernels.c


class NativeLinear(nn.Module):
    """y = x W^T + b by the native kernels: bfloat16 or float32, float32 accumulation.

    The order of the additions does not depend on the number of rows, so a row's result is the same alone and in
    a batch. Reaches the memory bandwidth for few rows and the float32 peak for many, also on processors without
    matrix instructions, where oneDNN's bfloat16 kernels take two to three times as long at 16 rows.
    """

    def __init__(self, kernels: NativeKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out_features, in_features], bfloat16 or float32; `bias` [out_features] or None."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.is_bf16 = weight.dtype == torch.bfloat16
        panels = -(-self.out_features // PANEL_COLUMNS)
        self.packed = torch.empty(panels * self.in_features * PANEL_COLUMNS, dtype=weight.dtype)
        pack = kernels.pack_bf16 if self.is_bf16 else kernels.pack_f32
        weight = weight.contiguous()  # kept alive by its name: the kernel sees an address only
        pack(weight.data_ptr(), self.packed.data_ptr(), self.out_features, self.in_features)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in_features] -> [..., out_features], same dtype. Raises TypeError if that is not the weights'."""
        if x.dtype != self.packed.dtype:
            raise TypeError(f"the input is {x.dtype}, the weights are {self.packed.dtype}: load the model in one type")
        x = x.contiguous()
        rows = x.numel() // self.in_features
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        sizes = (rows, self.in_features, self.out_features)
        if self.is_bf16:
            scratch = torch.empty(rows * self.in_features, dtype=torch.float32)
            pointers = (x.data_ptr(), self.packed.data_ptr(), out.data_ptr(), bias, scratch.data_ptr())
            self.kernels.linear_bf16(*pointers, *sizes)
        else:
            self.kernels.linear_f32(x.data_ptr(), self.packed.data_ptr(), out.data_ptr(), bias, *sizes)
        return out


class OneDnnLinear(nn.Module):
    """y = x W^T + b with weights reordered once for oneDNN: at the limit where it has matrix instructions (AMX)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out_features, in_features], bfloat16 or float32; `bias` [out_features] or None."""
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())  # noqa: SLF001 - operators that Inductor calls too
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in_features] -> [..., out_features], same dtype."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # noqa: SLF001
        return y


def pack_linears(model: nn.Module, kernels: NativeKernels | None) -> None:
    """Replaces every `nn.Linear` of `model` (CPU, bfloat16 or float32) by a packed one, in place.

    bfloat16 goes to oneDNN where it has AMX or there are no native kernels, and otherwise to the native kernels.
    """
    use_onednn = kernels is None or (
        _dtype(model) == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16", False)
    )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            weight, bias = child.weight.detach(), None if child.bias is None else child.bias.detach()
            if use_onednn or kernels is None:
                setattr(parent, name, OneDnnLinear(weight, bias))
            else:
                setattr(parent, name, NativeLinear(kernels, weight, bias))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
