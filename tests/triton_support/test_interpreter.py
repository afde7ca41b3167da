"""The corrected interpreter against torch on the CPU: every bit pattern where there are 2^16, thousands of others.

What is compared rests on torch's own casts and arithmetic (an independent implementation of IEEE rounding); fp8
overflow on ``cvt.rn.satfinite`` of the PTX manual; products and sums on float64; some casts on a record of an H100.
Every kernel here runs in the child; test_interpreter_gpu.py compares with compiled ones.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.triton_support.child import run

pytestmark = pytest.mark.interpreter

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def call(name, *args):
    return run(f"interpreted_kernels:{name}", *args)


def every(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16- or 8-bit format."""
    if dtype.itemsize == 2:
        return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return torch.arange(2**8, dtype=torch.int32).to(torch.uint8).view(dtype)


def floats(n: int = 8192, seed: int = 0) -> torch.Tensor:
    """float32: random bit patterns (NaN, infinity, subnormals among them), ordinary values, ties of every format."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32)
    ordinary = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 5, n)).astype(np.float32)
    # ties of bf16, fp16, e4m3 and e5m2, and the values next to them
    halves = [every(t).to(torch.float32).numpy() for t in (BF16, torch.float16, E4M3, E5M2)]
    with np.errstate(all="ignore"):
        ties = np.concatenate([(h[:-1] / 2 + h[1:] / 2) for h in halves])
        ties = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    edges = np.float32(
        [0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 480, 57344, 61440, 61441, 65504, 65520, 3.4e38, 1e-45]
    )
    return torch.from_numpy(np.concatenate([bits.view(np.float32), ordinary, ties.astype(np.float32), edges]))


def pairs(dtype: torch.dtype, n: int = 16384, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors of random bit patterns of ``dtype``, equal in places, near each other in others. NaNs are quiet ones:
    what fmax makes of a signalling NaN differs between the C libraries that NumPy and torch use."""
    rng = np.random.default_rng(seed)
    kind = {4: np.uint32, 2: np.uint16, 1: np.uint8}[dtype.itemsize]
    a = rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True)
    b = rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True)
    b[::7] = a[::7]
    b[1::7] = a[1::7] + kind(1)
    x, y = torch.from_numpy(a).view(dtype), torch.from_numpy(b).view(dtype)
    return torch.where(x.isnan(), float("nan"), x), torch.where(y.isnan(), float("nan"), y)


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(torch.float32).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype) if dtype in LARGEST else x.to(dtype)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, signed_zero: bool = True) -> None:
    """Equal bit by bit; any NaN equals any NaN."""
    assert ours.dtype == theirs.dtype
    a, b = ours.to(torch.float64), theirs.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    if signed_zero and ours.dtype.is_floating_point:
        same &= a.isnan() | (a.signbit() == b.signbit())
    bad = torch.nonzero(~same.flatten())[:5].flatten()
    assert not len(bad), f"{len(torch.nonzero(~same))} differ, at {bad}: {a.flatten()[bad]} is not {b.flatten()[bad]}"


def test_the_child_has_the_installed_triton_corrected():
    import importlib.metadata

    assert call("version") == (importlib.metadata.version("triton"), True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3, E5M2], ids=str)
def test_float32_is_rounded_to_nearest_even(dtype):
    x = floats()
    assert_same(call("cast", x, str(dtype)[6:]), saturated(x, dtype))
    assert_same(call("cast", x, str(dtype)[6:], "rtne"), saturated(x, dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_float32_is_truncated_on_request(dtype):
    """Rests on the definition: the largest value of the format that is not farther from zero."""
    x = floats()
    near = x.to(dtype)
    away = near.double().abs() > x.double().abs()
    chopped = torch.where(away, near.view(torch.int16) - 1, near.view(torch.int16)).view(dtype)
    assert_same(call("cast", x, str(dtype)[6:], "rtz"), chopped)


@pytest.mark.parametrize(
    "source, target",
    [
        (a, b)
        for a in (BF16, torch.float16, E4M3, E5M2)
        for b in (torch.float32, BF16, torch.float16, E4M3, E5M2)
        if a != b
    ],
    ids=str,
)
def test_all_patterns_of_small_formats_are_cast(source, target):
    x = every(source)
    assert_same(call("cast", x, str(target)[6:]), saturated(x, target))


def test_the_nan_codes_of_e4m3_are_nan():
    x = torch.tensor([0x7F, 0xFF, 0x7E], dtype=torch.uint8).view(E4M3)
    assert call("cast", x, "float32").isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("integer", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_integers_and_bfloat16(integer):
    """To bf16 as torch does it (through float32); back, values that fit."""
    rng = np.random.default_rng(3)
    info = torch.iinfo(integer)
    x = torch.from_numpy(rng.integers(info.min, info.max, 8192, dtype=np.int64, endpoint=True)).to(integer)
    x[:512] = torch.arange(512).to(integer)
    assert_same(call("cast", x, "bfloat16"), x.to(BF16))
    y = torch.from_numpy(rng.uniform(max(info.min, -30000), min(info.max, 30000), 4096)).to(BF16)
    y = y[(y >= info.min) & (y <= info.max)].contiguous()
    assert_same(call("cast", y, str(integer)[6:]), y.to(integer))


OPERATIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": lambda a, b: 0 - a,  # as Triton lowers it
    "abs": lambda a, b: a.abs(),
    "where": lambda a, b: torch.where(a > b, a, b),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "scale": lambda a, b: a * torch.tensor(0.3, dtype=a.dtype),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_arithmetic(op, dtype):
    a, b = pairs(dtype)
    # the sign of a zero that max, min or 0 - x gives is the machine's choice
    assert_same(call("binary", op, a, b), OPERATIONS[op](a, b), signed_zero=op in ("add", "sub", "mul", "div"))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["lt", "ge", "eq", "ne"])
def test_comparison(op, dtype):
    a, b = pairs(dtype)
    assert torch.equal(call("binary", op, a, b, "int32"), getattr(torch, op)(a, b).to(torch.int32))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_comparison_is_a_truth_value(dtype):
    a, b = pairs(dtype)
    assert torch.equal(call("binary", "mask_to_float", a, b, "bfloat16"), (a < b).to(BF16))


def test_clamp_prefers_numbers():
    a = torch.tensor([float("nan"), 0.0, 1.0, 9.0, float("inf"), -float("inf")])
    assert call("binary", "clamp", a, torch.zeros(6)).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 0.5]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_fma_rounds_once(dtype):
    """Rests on rational numbers: no neighbour of a result is nearer to a * b + a, and the even one wins a tie."""
    a, b = pairs(dtype, 3000)
    mine = call("binary", "fma", a, b)
    keep = (a.isfinite() & b.isfinite() & mine.isfinite()).nonzero().flatten()
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    bits = mine.view(integer)
    up, down = (bits + 1).view(dtype).double().tolist(), (bits - 1).view(dtype).double().tolist()
    x, y, z = a.double().tolist(), b.double().tolist(), mine.double().tolist()
    assert len(keep) > 500
    for n in keep.tolist():
        exact = Fraction(x[n]) * Fraction(y[n]) + Fraction(x[n])
        error = abs(Fraction(z[n]) - exact)
        for neighbour in (up[n], down[n]):
            if math.isfinite(neighbour) and z[n] != 0:
                other = abs(Fraction(neighbour) - exact)
                assert error < other or (error == other and bits[n] % 2 == 0), (x[n], y[n], z[n])


def recorded(name: str, dtype: torch.dtype) -> torch.Tensor:
    record = json.loads((Path(__file__).parents[1] / "data/hardware/h100_casts.json").read_text())
    return torch.frombuffer(bytearray.fromhex(record[name]), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("cast", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bfloat16 rtz", "float16 rtz"])
def test_casts_equal_those_of_the_h100(cast):
    """Rests on hardware: the same kernel, compiled by Triton 3.6.0, on an H100 (whose NaNs have one code)."""
    name, *rounding = cast.split()
    measured = recorded(cast, getattr(torch, name))
    assert_same(call("cast", recorded("float32", torch.float32), name, *rounding), measured)


def test_integers_become_the_bfloat16_of_the_h100():
    """Rests on hardware."""
    assert_same(call("cast", recorded("int32", torch.int32), "bfloat16"), recorded("int32 bfloat16", BF16))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_sum_is_exact_where_float32_is(dtype):
    """Multiples of 1/8 whose sums float32 holds exactly: one rounding at the end, whatever the order."""
    x = (torch.from_numpy(np.random.default_rng(5).integers(-99, 100, (32, 256))) / 8).to(dtype)
    expected = x.double().sum(1).to(torch.float32).to(dtype)
    assert_same(call("reduce", "sum", x), expected, signed_zero=False)
    assert_same(call("total", x.flatten()[:1024].contiguous()), x.flatten()[:1024].double().sum().float().to(dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_ignore_nan(op, dtype):
    a, _ = pairs(dtype, 64 * 128)
    a = a.view(64, 128)
    worst = -float("inf") if op == "max" else float("inf")
    filled = torch.where(a.isnan(), worst, a)
    assert_same(call("reduce", op, a), getattr(filled, f"a{op}")(1), signed_zero=False)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_the_first_of_equals_is_found(op, dtype):
    x = torch.from_numpy(np.random.default_rng(7).integers(-40, 40, (32, 128)) / 4).to(dtype)
    expected = getattr(x.double().numpy(), op)(1)
    assert call("reduce", op, x, "int32").tolist() == expected.tolist()


@pytest.mark.parametrize("acc", [False, True], ids=["dot", "acc"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, E4M3, E5M2], ids=str)
def test_dot(dtype, acc):
    """Against float64 on the stored values: within the rounding of a float32 sum of K terms."""
    rng = np.random.default_rng(11)
    a, b = (torch.from_numpy(rng.standard_normal(s)).to(dtype) for s in [(32, 64), (64, 16)])
    exact = a.double() @ b.double() + acc
    bound = 64 * 2**-24 * (a.double().abs() @ b.double().abs() + 1)
    assert ((call("dot", a, b, "float32", acc).double() - exact).abs() <= bound).all()


def test_dot_takes_nan_codes_for_nan():
    a = torch.full((16, 32), 0.5).to(E4M3)
    a[3, 5] = float("nan")
    out = call("dot", a, torch.ones(32, 16).to(E4M3))
    assert out.isnan().all(1).tolist() == [row == 3 for row in range(16)]
    assert (out[0] == 16).all()


def test_dot_with_float16_result():
    rng = np.random.default_rng(12)
    a, b = (torch.from_numpy(rng.integers(-8, 9, s)).to(torch.float16) for s in [(16, 32), (32, 16)])
    assert torch.equal(call("dot", a, b, "float16"), (a.double() @ b.double()).to(torch.float16))


def test_dot_of_integers():
    rng = np.random.default_rng(13)
    a, b = (torch.from_numpy(rng.integers(-128, 128, s)).to(torch.int8) for s in [(16, 32), (32, 16)])
    assert torch.equal(call("dot", a, b, "int32"), a.int() @ b.int())


@pytest.mark.parametrize("plain", [True, False], ids=["range", "tl.range"])
def test_loaded_values_bound_loops(plain):
    lo, hi = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([4, 9, 5], dtype=torch.int32)
    expected = [sum(range(a, b, 1 if plain else 2)) for a, b in [(0, 4), (3, 9), (5, 5)]]
    assert call("bounds", lo, hi, plain).tolist() == expected


def test_constants_and_scalars_of_bfloat16():
    x = torch.linspace(2.1, 3, 16, dtype=BF16)
    out = call("constants", x)
    assert torch.equal(out[0], torch.full((16,), 0.3, dtype=BF16))
    assert torch.equal(out[1], torch.zeros(16, dtype=BF16))
    assert torch.equal(out[2], torch.cat([x[:1], torch.full((15,), -1.7, dtype=BF16)]))
    assert torch.equal(out[3], x[:1].expand(16))


def test_bitcast_keeps_every_pattern():
    assert torch.equal(call("bitcast", every(BF16), "int16"), every(BF16).view(torch.int16))
    assert torch.equal(call("bitcast", every(torch.int16), "bfloat16").view(torch.int16), every(torch.int16))
    assert torch.equal(call("bitcast", every(E4M3), "int8"), every(E4M3).view(torch.int8))


def test_sort_and_cumsum_of_bfloat16():
    x = (torch.from_numpy(np.random.default_rng(17).integers(-40, 40, (8, 32))) / 4).to(BF16)
    ordered, sums = call("sort_and_cumsum", x)
    assert torch.equal(ordered, x.sort(1).values)
    assert torch.equal(sums, x.double().cumsum(1).to(BF16))
