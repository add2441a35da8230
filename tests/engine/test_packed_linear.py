"""Packed layers give what `nn.Linear` gives, and take its place everywhere in a model."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.native_kernels import NativeKernels
from engine.packed_linear import NativeLinear, OneDnnLinear, pack_linears

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
TOLERANCE = {BF16: 2.0**-7, F32: 1e-5}


def _random(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def _assert_close(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Block(nn.Module):
    """Linears at several depths, with and without bias, one of them with the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 33)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(33, 70), nn.SiLU(), nn.Linear(70, 33, bias=False))])
        self.norm = nn.LayerNorm(33)
        self.head = nn.Linear(33, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@pytest.fixture(params=["native", "onednn"])
def make_linear(request: pytest.FixtureRequest) -> Callable[[torch.Tensor, torch.Tensor | None], nn.Module]:
    """Makes a packed layer of weight and bias."""
    if request.param == "onednn":
        return OneDnnLinear
    return functools.partial(NativeLinear, request.getfixturevalue("kernels"))


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("leading", [(1,), (5,), (1, 17), (2, 3, 4)], ids=str)
def test_linears_of_any_leading_shape(
    make_linear: Callable[..., nn.Module], dtype: torch.dtype, with_bias: bool, leading: tuple[int, ...]
) -> None:
    weight, bias = _random(50, 33, dtype=dtype), _random(50, dtype=dtype) if with_bias else None
    x = _random(*leading, 33, dtype=dtype)
    exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    _assert_close(make_linear(weight, bias)(x), exact, dtype)


@DTYPES
def test_strided_weights_and_inputs(make_linear: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    weight, x = _random(33, 50, dtype=dtype).T, _random(33, 9, dtype=dtype).T
    exact = nn.functional.linear(x.double(), weight.double())
    _assert_close(make_linear(weight, None)(x), exact, dtype)


def test_inputs_of_another_type_are_refused(kernels: NativeKernels) -> None:
    """Read by pointer they would be other numbers."""
    linear = NativeLinear(kernels, torch.zeros(8, 4, dtype=BF16), None)
    with pytest.raises(TypeError, match=r"torch.float32.*torch.bfloat16"):
        linear(torch.zeros(2, 4))


@DTYPES
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch alone"])
def test_every_linear_is_replaced_and_the_outputs_stay(
    request: pytest.FixtureRequest, dtype: torch.dtype, native: bool
) -> None:
    torch.manual_seed(1)
    model = Block().to(dtype).requires_grad_(False)
    exact_model = copy.deepcopy(model).double()
    pack_linears(model, request.getfixturevalue("kernels") if native else None)
    kinds = [type(module) for module in model.modules()]
    assert nn.Linear not in kinds
    use_onednn = not native or (dtype == BF16 and torch.cpu.get_capabilities().get("amx_bf16", False))
    assert kinds.count(OneDnnLinear if use_onednn else NativeLinear) == 3
    ids = torch.arange(50)
    out, exact = model(ids), exact_model(ids)
    assert (out.double() - exact).abs().max() <= 4 * TOLERANCE[dtype] * exact.abs().max()
