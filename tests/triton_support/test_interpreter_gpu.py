"""The corrected interpreter against the same kernels, compiled, on this machine's GPU: bit by bit, any NaN is as good.

`python -m pytest -m gpu tests/triton_support/test_interpreter_gpu.py`
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.triton_support.child import run

pytestmark = pytest.mark.gpu


def both(name, *args):
    """What the compiled and what the interpreted kernel give."""
    import interpreted_kernels

    moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    return getattr(interpreted_kernels, name)(*moved).cpu(), run(f"interpreted_kernels:{name}", *args)


def assert_same(compiled, interpreted, signed_zero=True):
    a, b = compiled.double(), interpreted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if signed_zero:
        same &= a.isnan() | (a.signbit() == b.signbit())
    assert same.all(), f"{(~same).sum()} differ: {a[~same][:5]} compiled, {b[~same][:5]} interpreted"


def patterns(dtype, n=1 << 16, seed=0):
    """Random bit patterns; every one where there are 2^16. NaNs are quiet."""
    if dtype.itemsize == 2:
        x = torch.arange(n, dtype=torch.int32).to(torch.uint16).view(dtype)
    else:
        x = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)).view(dtype)
        small = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 2.0 ** torch.arange(n).remainder(
            40
        ).sub(20)
        x = torch.cat([x, small, small.bfloat16().float() * (1 + 2**-8), small.half().float() * (1 + 2**-11)])
    return torch.where(x.isnan(), float("nan"), x)


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_casts(source, target):
    assert_same(*both("cast", patterns(source), target))


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_truncation(target):
    assert_same(*both("cast", patterns(torch.float32), target, "rtz"))


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_fp8_decodes(source, target):
    """All codes, but e5m2's infinities and NaNs not to bf16: compiled for sm_90 they become 65536 ... 114688."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(source)
    if source == torch.float8_e5m2 and target == "bfloat16":
        codes = codes[codes.float().isfinite()].contiguous()
    assert_same(*both("cast", codes, target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "op", ["add", "sub", "mul", "neg", "abs", "where", "fmax", "fmin", "maximum", "minimum", "scale"]
)
def test_arithmetic(op, dtype):
    a = patterns(dtype, seed=1)
    b = a[torch.randperm(len(a), generator=torch.Generator().manual_seed(2))].contiguous()
    assert_same(*both("binary", op, a, b), signed_zero=op in ("add", "sub", "mul", "scale"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dot_of_small_integers_is_exact(dtype):
    rng = np.random.default_rng(3)
    a, b = (torch.from_numpy(rng.integers(-4, 5, s)).to(dtype) for s in [(64, 64), (64, 32)])
    assert_same(*both("dot", a, b), signed_zero=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fma(dtype):
    a = patterns(dtype)
    b = a[torch.randperm(len(a), generator=torch.Generator().manual_seed(4))].contiguous()
    assert_same(*both("binary", "fma", a, b), signed_zero=False)


@pytest.mark.parametrize("op", ["max", "min", "argmax"])
def test_reductions(op):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert_same(*both("reduce", op, x, "int32" if op == "argmax" else None), signed_zero=False)
