"""The kernels are built once, and compute what float64 says, the same bits in every batch."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native_kernels
from engine.native_kernels import KvStoreArguments, NativeKernels

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])


def _random(*sizes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _linear(
    kernels: NativeKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [m, k], weight [n, k], bias [n] float32. The outputs start as NaN: each must be written."""
    (m, k), n = x.shape, weight.shape[0]
    packed = torch.full((-(-n // 32) * k * 32,), torch.nan, dtype=x.dtype)
    out = torch.full((m, n), torch.nan, dtype=x.dtype)
    bias_at = 0 if bias is None else bias.data_ptr()
    if x.dtype == BF16:
        scratch = torch.empty(m, k)
        kernels.pack_bf16(weight.data_ptr(), packed.data_ptr(), n, k)
        pointers = (x.data_ptr(), packed.data_ptr(), out.data_ptr(), bias_at, scratch.data_ptr())
        kernels.linear_bf16(*pointers, m, k, n)
    else:
        kernels.pack_f32(weight.data_ptr(), packed.data_ptr(), n, k)
        kernels.linear_f32(x.data_ptr(), packed.data_ptr(), out.data_ptr(), bias_at, m, k, n)
    return out


def _error_bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exact: torch.Tensor) -> torch.Tensor:
    """k float32 additions (Higham 2002, section 3.1), then one rounding to the output's type."""
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    half_ulp = 2.0**-8 if x.dtype == BF16 else 2.0**-23
    return magnitude * (x.shape[1] + 2) * 2.0**-24 * 1.01 + exact.abs() * half_ulp


class TestLinear:
    @settings(max_examples=120)
    @given(
        rows=st.integers(1, 40),
        k=st.integers(1, 130),
        n=st.integers(1, 130),
        with_bias=st.booleans(),
        dtype=st.sampled_from([BF16, F32]),
        seed=st.integers(0, 2**20),
    )
    def test_is_the_product_up_to_rounding(
        self, kernels: NativeKernels, rows: int, k: int, n: int, with_bias: bool, dtype: torch.dtype, seed: int
    ) -> None:
        x, weight = _random(rows, k, dtype=dtype, seed=seed), _random(n, k, dtype=dtype, seed=seed + 1)
        bias = _random(n, dtype=F32, seed=seed + 2) if with_bias else None
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        error = (_linear(kernels, x, weight, bias).double() - exact).abs()
        assert (error <= _error_bound(x, weight, bias, exact)).all()

    @DTYPES
    @pytest.mark.parametrize("rows", [1, 16, 130], ids=lambda rows: f"{rows} rows")
    def test_sizes_of_a_model(self, kernels: NativeKernels, dtype: torch.dtype, rows: int) -> None:
        x, weight = _random(rows, 1536, dtype=dtype, seed=rows), _random(576, 1536, dtype=dtype, seed=1)
        exact = torch.nn.functional.linear(x.double(), weight.double())
        error = (_linear(kernels, x, weight).double() - exact).abs()
        assert (error <= _error_bound(x, weight, None, exact)).all()

    @DTYPES
    def test_a_row_has_the_same_bits_alone_and_in_any_batch(self, kernels: NativeKernels, dtype: torch.dtype) -> None:
        x, weight, bias = (_random(*s, dtype=dtype, seed=len(s)) for s in ((40, 65), (70, 65), (70,)))
        bias = bias.float()
        alone = torch.cat([_linear(kernels, x[row : row + 1], weight, bias) for row in range(40)])
        for rows in range(1, 41):
            assert torch.equal(_linear(kernels, x[:rows], weight, bias), alone[:rows]), f"{rows} rows"
            assert torch.equal(_linear(kernels, x[40 - rows :], weight, bias), alone[40 - rows :]), f"last {rows} rows"

    @DTYPES
    def test_nan_and_infinity_stay_in_their_row(self, kernels: NativeKernels, dtype: torch.dtype) -> None:
        weight = _random(50, 33, dtype=dtype, seed=1)
        weight[7] = 0
        clean = _random(18, 33, dtype=dtype, seed=2)
        x = clean.clone()
        x[3, 5], x[11, 0], x[12, 32] = torch.nan, torch.inf, -torch.inf
        out, expected = _linear(kernels, x, weight), torch.nn.functional.linear(x.double(), weight.double())
        for row in (3, 11, 12):
            assert torch.equal(out[row].isnan(), expected[row].isnan())
            finite_or_infinite = ~expected[row].isnan()
            assert torch.equal(out[row].double()[finite_or_infinite], expected[row][finite_or_infinite])
        others = [row for row in range(18) if row not in (3, 11, 12)]
        assert torch.equal(out[others], _linear(kernels, clean, weight)[others])

    def test_bfloat16_rounds_to_nearest_even(self, kernels: NativeKernels) -> None:
        """1 + 2^-8 is half-way between 1 and 1 + 2^-7: even is 1. 1 + 3 * 2^-8 goes up to 1 + 2^-6."""
        numbers = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38, -3.4e38, 0.0])
        numbers.view(torch.int32)[5] = 0x7FFFFFFF  # the NaN that rounding up would turn into -0
        numbers = numbers.repeat(8)  # 48 columns: a whole vector and the columns left over
        x, weight = torch.zeros(1, 1, dtype=BF16), torch.zeros(48, 1, dtype=BF16)
        expected = torch.tensor([1, 1 + 2.0**-6, 1 + 2.0**-7, torch.inf, -torch.inf, torch.nan]).repeat(8).to(BF16)
        for n in (48, 47, 6):
            out = _linear(kernels, x, weight[:n], numbers[:n])
            assert torch.equal(out[0].nan_to_num(42.0), expected[:n].nan_to_num(42.0))


@DTYPES
def test_kv_store_copies_bits_to_their_slots_and_nowhere_else(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Random bits, NaN among them, out of strided views as transformers makes them."""
    num_blocks, layers, kv_heads, block_size, head_dim, tokens = 5, 3, 2, 8, 32, 11
    integer = torch.int16 if dtype == BF16 else torch.int32
    generator = torch.Generator().manual_seed(1)

    def bits(*sizes: int) -> torch.Tensor:
        limits = torch.iinfo(integer)
        return torch.randint(limits.min, limits.max, sizes, dtype=integer, generator=generator)

    kv = bits(num_blocks, layers, 2, kv_heads, block_size, head_dim)
    fused = bits(tokens, 2, kv_heads, head_dim)
    key, value = fused[:, 0], bits(kv_heads, tokens, head_dim).transpose(0, 1)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    expected = kv.clone()
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 1, 0, :, slot % block_size] = key[token]
        expected[slot // block_size, 1, 1, :, slot % block_size] = value[token]
    kernels.kv_store(
        KvStoreArguments(
            k=key.data_ptr(),
            v=value.data_ptr(),
            layer_base=kv[0, 1].data_ptr(),
            slots=slots.data_ptr(),
            tokens=tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            block_stride=kv.stride(0),
            k_token_stride=key.stride(0),
            k_head_stride=key.stride(1),
            v_token_stride=value.stride(0),
            v_head_stride=value.stride(1),
            item_bytes=dtype.itemsize,
        )
    )
    assert torch.equal(kv, expected)


class TestLoad:
    @pytest.fixture
    def fake_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        """Puts a `cc` with this shell script in front of the path."""

        def make(script: str) -> None:
            directory = tmp_path / "bin"
            directory.mkdir(exist_ok=True)
            (directory / "cc").write_text(f"#!/bin/sh\n{script}\n")
            (directory / "cc").chmod(0o755)
            monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

        return make

    @pytest.fixture
    def copying_compiler(
        self, tmp_path: Path, kernels: NativeKernels, kernel_cache_dir: Path, fake_compiler: Callable[[str], None]
    ) -> tuple[Callable[[str], None], Path]:
        """A compiler of the given version that outputs what a real one has built, and its log of calls."""
        [built] = kernel_cache_dir.glob("*.so")
        log = tmp_path / "builds"

        def make(version: str) -> None:
            fake_compiler(
                f'test "$1" = --version && echo {version} && exit 0\n'
                f'while test "$1" != -o; do shift; done; echo >>{log}; exec cp {built} "$2"'
            )

        return make, log

    def test_without_a_compiler_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert native_kernels.load(tmp_path / "cache") is None
        assert "no C compiler found (cc, gcc, clang)" in caplog.text

    def test_a_compiler_that_fails_leaves_nothing_and_a_reason(
        self, tmp_path: Path, fake_compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        fake_compiler('test "$1" = --version && exit 0; echo "this processor is unknown to me" >&2; exit 7')
        assert native_kernels.load(tmp_path / "cache") is None
        assert "exit status 7" in caplog.text
        assert "this processor is unknown to me" in caplog.text
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_compiler_that_does_not_even_start_is_a_reason(
        self, tmp_path: Path, fake_compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        fake_compiler("exit 1")
        assert native_kernels.load(tmp_path / "cache") is None
        assert "could not be built" in caplog.text

    def test_a_cache_that_cannot_be_written_is_a_reason(
        self, tmp_path: Path, kernels: NativeKernels, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cache").write_text("a file, not a directory")
        assert native_kernels.load(tmp_path / "cache") is None
        assert "could not be built or loaded" in caplog.text

    def test_built_once_for_each_compiler(
        self, tmp_path: Path, copying_compiler: tuple[Callable[[str], None], Path]
    ) -> None:
        use_version, log = copying_compiler
        cache = tmp_path / "cache"
        use_version("12")
        assert native_kernels.load(cache) is not None
        first = list(cache.iterdir())
        assert native_kernels.load(cache) is not None
        assert (len(log.read_text()), list(cache.iterdir())) == (1, first)
        use_version("13")
        assert native_kernels.load(cache) is not None
        assert (len(log.read_text()), len(list(cache.iterdir()))) == (2, 2)

    def test_several_may_build_at_once(
        self, tmp_path: Path, copying_compiler: tuple[Callable[[str], None], Path]
    ) -> None:
        copying_compiler[0]("12")
        cache = tmp_path / "cache"
        loaded: list[NativeKernels | None] = []
        threads = [threading.Thread(target=lambda: loaded.append(native_kernels.load(cache))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(loaded) == 4
        assert None not in loaded
        assert len(list(cache.iterdir())) == 1
