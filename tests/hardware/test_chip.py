"""The arithmetic of an H100. Rests on the hardware's recorded bits, and for fused operations on exact fractions."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import lzma
from dataclasses import replace
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.hardware import ATOMS, arithmetic, current_arithmetic, get_arch, get_atom
from kvlab.hardware.chip import (
    ARITHMETICS,
    SUMS,
    check_arithmetic,
    div_full,
    ex2_approx,
    ex2_wide,
    expf,
    fma,
    log2f,
    logf,
    mma_sum,
    rcp_approx,
)
from kvlab.memory import as_dtype, bfloat16, float8_e4m3fn, float16

DATA = Path(__file__).parents[1] / "data"
NAMES = {"bf16": "bfloat16", "f16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
DOTS = json.loads(gzip.decompress((DATA / "h100_dot.json.gz").read_bytes()))["cases"]
EVERY = np.arange(1 << 23)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def decoded(case: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """a ``[M, K]``, b ``[N, K]``, c and o ``[M, N]`` of a recorded product."""
    dtype, (M, N, K) = as_dtype(NAMES[case["dtype"]]), (case[name] for name in "MNK")
    kinds = {"a": (dtype, (M, K)), "b": (dtype, (N, K)), "c": (np.float32, (M, N)), "o": (np.float32, (M, N))}
    return tuple(np.frombuffer(base64.b64decode(case[x]), kind).reshape(shape) for x, (kind, shape) in kinds.items())


def as_multiplied(case: dict[str, Any], *operands: np.ndarray) -> tuple[np.ndarray, ...]:
    """8 bits beside mma.sync are converted to float16; a lane has four neighbouring k, two for each instruction."""
    if "mma.sync" not in case["instructions"][0] or operands[0].itemsize > 1:
        return operands
    k = np.arange(case["K"]).reshape(-1, 8, 2, 2).swapaxes(1, 2).ravel()  # [32s of k, instruction, lane, pair]
    return tuple(x.astype(float16)[:, k] for x in operands)


@pytest.mark.parametrize("case", DOTS, ids=lambda c: f"{c['id']}-{c['name']}-{c['dtype']}-K{c['K']}")
def test_products_have_the_recorded_bits(case: dict[str, Any]) -> None:
    a, b, c, o = decoded(case)
    a, b = as_multiplied(case, a, b)
    assert (bits(mma_sum(a, b.T, c)) == bits(o)).all()


def test_records_cover_the_rules() -> None:
    seen = {(case["dtype"], "wgmma" in case["instructions"][0]) for case in DOTS}
    assert seen == {(dtype, unit) for dtype in NAMES for unit in (False, True)}
    assert sum(case["M"] * case["N"] for case in DOTS) > 100_000
    assert {as_dtype(name) for name in NAMES.values()} == set(SUMS)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("field, by", [("fraction", -1), ("fraction", 1), ("digits", -1), ("digits", 1)])
def test_another_rule_misses_the_records(dtype: str, field: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digit more or less is seen in the records: the test above can fail."""
    kind = as_dtype(NAMES[dtype])
    rule = replace(SUMS[kind], **{field: getattr(SUMS[kind], field) + by})
    monkeypatch.setitem(SUMS, kind, rule)
    missed = 0
    for case in DOTS:
        if case["dtype"] == dtype and "wgmma" in case["instructions"][0]:
            a, b, c, o = decoded(case)
            missed += int((bits(mma_sum(a, b.T, c)) != bits(o)).sum())
    assert missed


def test_leading_axes_broadcast_and_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3, 1, 16, 48)).astype(bfloat16)
    b = rng.standard_normal((2, 48, 24)).astype(bfloat16)
    c = rng.standard_normal((1, 1, 16, 24)).astype(np.float32)
    whole = mma_sum(a, b, c)
    assert whole.shape == (3, 2, 16, 24)
    each = [[mma_sum(a[i, 0], b[j], c[0, 0]) for j in range(2)] for i in range(3)]
    assert (bits(whole) == bits(each)).all()
    steps = c
    for k in range(0, 48, 16):
        steps = mma_sum(a[..., k : k + 16], b[:, k : k + 16], steps)
    assert (bits(whole) == bits(steps)).all()
    monkeypatch.setattr("kvlab.hardware.chip.products._AT_ONCE", 5000)
    assert (bits(mma_sum(a, b, c)) == bits(whole)).all()


def test_infinities_and_nan_are_those_of_float32() -> None:
    a, b = np.ones((4, 16), bfloat16), np.ones((16, 3), bfloat16)
    c = np.zeros((4, 3), np.float32)
    a[0, 3], a[1, 5], b[2, 1], c[2, 2], c[3, 0] = np.inf, np.nan, -np.inf, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        usual = a.astype(np.float32) @ b.astype(np.float32) + c
    assert np.array_equal(mma_sum(a, b, c), usual, equal_nan=True)


@pytest.mark.parametrize("wrong, words", [
    (lambda a, b, c: (a.astype(np.float32), b, c), "a has dtype float32: must be one of bfloat16, float16"),
    (lambda a, b, c: (a, b.astype(float16), c), "b has dtype float16: must be that of a, bfloat16"),
    (lambda a, b, c: (a, b, c.astype(np.float64)), "c has dtype float64: must be float32"),
    (lambda a, b, c: (a, b[:16], c), r"a \(4, 32\), b \(16, 3\), c \(4, 3\): must be"),
    (lambda a, b, c: (a, b, c[0]), r"c \(3,\): must be"),
    (lambda a, b, c: (a[:, :24], b[:24], c), "a has 24 columns: must be a multiple of 16"),
])
def test_operands_that_no_instruction_has(wrong: Any, words: str) -> None:
    good = np.ones((4, 32), bfloat16), np.ones((32, 3), bfloat16), np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match=words):
        mma_sum(*wrong(*good))


@pytest.mark.parametrize("name, digest", [
    ("ex2", "5c2be537e7156bebabf28d5b3dfbab242a80051b2d95a43701e91e3d3b9cc293"),
    ("rcp", "862bea101da795bf5fd46df9dfe5142a79c29edd831e2da30aa84385d885e8fe"),
])
def test_tables_are_the_records(name: str, digest: str) -> None:
    """The bytes that were recorded on an H100 80GB HBM3, driver 580.159.04, 2026-11-28."""
    packed = (files("kvlab.hardware.chip") / "tables" / f"{name}.i8.xz").read_bytes()
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() == digest


def test_every_fraction_of_ex2() -> None:
    """All 2^23 fractions by the record and by exponentials of more than double's digits, with exponents and signs."""
    exact = np.exp2(EVERY.astype(np.longdouble) / (1 << 23)) * (1 << 23)
    nearest = np.floor(exact + np.longdouble(0.5)).astype(np.int64)
    packed = (files("kvlab.hardware.chip") / "tables" / "ex2.i8.xz").read_bytes()
    expected = (nearest + np.frombuffer(lzma.decompress(packed), np.int8)).astype(np.float32) / np.float32(1 << 23)
    fraction = (EVERY / (1 << 23)).astype(np.float32)
    assert (bits(ex2_approx(fraction)) == bits(expected)).all()
    below = -fraction[1:]  # 2^-f is cut 2^-23 downward: the fraction of 1 - f, less one step
    assert (bits(ex2_approx(below)) == bits(expected[::-1][: len(below)][np.r_[1 : len(below), 0]] / 2))[:-1].all()


def test_every_mantissa_of_rcp() -> None:
    m = EVERY + (1 << 23)
    nearest = (2 * (1 << 47) // m + 1) // 2  # 2^23 / m times 2^24, to nearest; no mantissa lies halfway
    packed = (files("kvlab.hardware.chip") / "tables" / "rcp.i8.xz").read_bytes()
    expected = (nearest + np.frombuffer(lzma.decompress(packed), np.int8)) / (1 << 24)
    x = (m / (1 << 23)).astype(np.float32)
    assert (bits(rcp_approx(x)) == bits(expected)).all()
    assert (bits(rcp_approx(x * np.float32(2.0**125))) == bits(np.float32(expected) * np.float32(2.0**-125))).all()
    assert (bits(rcp_approx(-x * np.float32(2.0**-126))) == bits(-np.float32(expected) * np.float32(2.0**126))).all()


def test_ends() -> None:
    f32, inf, nan = np.float32, np.float32(np.inf), np.float32(np.nan)
    x = f32([0, -0.0, 1e-40, 127.99999, 128, 1e30, inf, -126, -126.00001, -1e30, -inf, nan, 17, -5])
    y = ex2_approx(x)
    assert y[[0, 1, 2]].tolist() == [1, 1, 1]
    assert y[[4, 5, 6]].tolist() == [inf] * 3
    assert np.isfinite(y[3])
    assert y[[7, 8, 9, 10, 12, 13]].tolist() == [2.0**-126, 0, 0, 0, 2.0**17, 2.0**-5]
    assert np.isnan(y[11])
    r = rcp_approx(f32([0, -0.0, 1e-40, -1e-40, inf, -inf, nan, 2.0**126, 2.0**-126, 3e38]))
    assert r[:6].tolist() == [inf, -inf, inf, -inf, 0, 0]
    assert np.signbit(r[:6]).tolist() == [0, 1, 0, 1, 0, 1]
    assert np.isnan(r[6])
    assert r[7:].tolist() == [2.0**-126, 2.0**126, 0]
    for log in (log2f, logf):
        ends = log(f32([0, -0.0, inf, -1, nan, 1]))
        assert ends[[0, 1, 2, 5]].tolist() == [-inf, -inf, inf, 0]
        assert np.isnan(ends[[3, 4]]).all()


@pytest.mark.parametrize("function, exact, ulps", [
    (log2f, np.log2, 2), (logf, np.log, 2), (expf, np.exp, 90), (ex2_wide, np.exp2, 2),
])
def test_sequences_stay_near_what_they_compute(function: Any, exact: Any, ulps: int) -> None:
    """Within libdevice's bounds, and 2 units of ex2; exp's rounded exponent, up to 115, moves it by 115 ln 2 units."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-80, 80, 200_000).astype(np.float32)
    x = np.abs(x) + np.float32(1e-3) if function in (log2f, logf) else x
    true = exact(x.astype(np.float64))
    least = 0.1 if function in (log2f, logf) else 0.0  # nearer to 0 the absolute error counts
    error = np.abs(function(x) - true) / np.spacing(np.maximum(np.abs(true), least).astype(np.float32))
    assert error.max() <= ulps


def test_fma_rounds_once() -> None:
    """Against exact fractions: random operands, cancellation, ties, results that are subnormal."""
    rng = np.random.default_rng(4)
    n = 4000
    a, b = (rng.standard_normal((2, n)) * 2.0 ** rng.integers(-30, 30, (2, n))).astype(np.float32)
    c = -(a.astype(np.float64) * b).astype(np.float32)  # nearly cancels
    c[::4] = (rng.standard_normal(n // 4) * 2.0 ** rng.integers(-60, 60, n // 4)).astype(np.float32)
    a[1::4], b[1::4] = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    c[1::4] = np.float32(2.0) ** rng.integers(-40, 40, n // 4)
    a[2::4] *= np.float32(2.0**-75)
    b[2::4] *= np.float32(2.0**-60)
    c[2::4] = np.float32(2.0**-149) * rng.integers(-9, 9, n // 4)
    found = fma(a, b, c)
    for x, y, z, got in zip(*(v.tolist() for v in (a, b, c, found)), strict=True):
        true = Fraction(x) * Fraction(y) + Fraction(z)
        here = np.float32(got)
        for other in (np.nextafter(here, np.float32(-np.inf)), np.nextafter(here, np.float32(np.inf))):
            assert abs(Fraction(float(here)) - true) <= abs(Fraction(float(other)) - true)


def test_a_wrong_dtype_is_named() -> None:
    for function in (ex2_approx, rcp_approx, log2f, logf, expf, ex2_wide):
        with pytest.raises(ValueError, match="x has dtype float64: must be float32"):
            function(np.ones(3))
    with pytest.raises(ValueError, match="y has dtype int64"):
        div_full(np.float32(1), np.array([3]))


def test_division_scales_both_ends() -> None:
    """As ptxas writes it: times 2^24 below 2^-126, times 1/4 above 2^126; otherwise x times the reciprocal."""
    f32 = np.float32
    y = f32([3e-39, 1e-38, 2e38, 3.0])
    assert div_full(f32([1e-30, 1e-30, 1e38, 1]), y).tolist() == [
        float(f32(1e-30) * f32(2.0**24) * rcp_approx(y[0] * f32(2.0**24))),
        float(f32(1e-30) * f32(2.0**24) * rcp_approx(y[1] * f32(2.0**24))),
        float(f32(1e38) * f32(0.25) * rcp_approx(y[2] * f32(0.25))),
        float(rcp_approx(y[3])),
    ]


def test_the_context_nests_and_ends() -> None:
    assert current_arithmetic() is ARITHMETICS["float32"]
    with arithmetic("chip") as chip:
        assert current_arithmetic() is chip is ARITHMETICS["chip"]
        with arithmetic("float32"):
            assert not current_arithmetic().exact
        assert current_arithmetic().exact
        with pytest.raises(ValueError, match="arithmetic is 'ieee': must be one of float32, chip"), arithmetic("ieee"):
            pass
        assert current_arithmetic().exact
    assert not current_arithmetic().exact


def test_what_no_chip_has_confirmed_is_provisional() -> None:
    assert "arithmetic" not in get_arch("sm_90").provisional
    assert all("arithmetic" in get_arch(name).provisional for name in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"))
    for bad in ("gfx950", "gfx1100"):
        with pytest.raises(ValueError, match=f"arithmetic 'chip' on {bad}: must be 'float32'"):
            check_arithmetic("chip", bad)
    assert check_arithmetic("float32", "gfx950").name == "float32"


@pytest.mark.parametrize("name", ["mma.sync.m16n8k16.bf16", "wgmma.m64n8k32.e4m3", "wgmma.m64n16k16.f16"])
def test_atoms_sum_as_the_chip_does_inside_the_context(name: str) -> None:
    atom, rng = get_atom(name), np.random.default_rng(5)
    M, N, K = atom.shape
    a, b = (rng.standard_normal(shape).astype(atom.dtype) for shape in ((M, K), (K, N)))
    c = rng.standard_normal((M, N)).astype(np.float32)
    operands = atom.fragment_a(a), b if atom.b is None else atom.fragment_b(b), atom.fragment_c(c)
    with arithmetic("chip"):
        assert (bits(atom.tile_c(atom.mma(*operands))) == bits(mma_sum(a, b, c))).all()
    usual = atom.tile_c(atom.mma(*operands))
    assert np.allclose(usual, mma_sum(a, b, c), atol=1e-2)
    assert (bits(usual) != bits(mma_sum(a, b, c))).any()


def test_atoms_whose_sums_are_unknown_are_refused() -> None:
    unknown = [
        atom for atom in ATOMS.values()
        if atom.dtype not in SUMS or get_arch(atom.arch).vendor == "amd" or atom.dtype_of("b") != atom.dtype
    ]
    assert {"mfma.16x16x16.bf16", "mma.sync.m16n8k8.tf32"} <= {atom.name for atom in unknown}
    for atom in unknown[:: max(1, len(unknown) // 12)]:
        held = {x: (atom.warp_size, getattr(atom, f"regs_{x}")) for x in "abc"}
        zeros = [np.zeros(held[x] if getattr(atom, x) else atom.extent(x), atom.dtype_of(x)) for x in "abc"]
        with arithmetic("chip"), pytest.raises(ValueError, match="is not known; use arithmetic 'float32'"):
            atom.mma(*zeros)


def test_float32_products_are_fused_one_after_another() -> None:
    rng = np.random.default_rng(6)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (7, 3), (5, 3)))
    expected = c
    for k in range(7):
        expected = fma(a[:, k, None], b[k], expected)
    with arithmetic("chip") as chip:
        assert (bits(chip.products(a, b, c)) == bits(expected)).all()
    assert np.allclose(ARITHMETICS["float32"].products(a, b, c), expected, atol=1e-6)
    e4m3 = np.ones((1, 32), float8_e4m3fn)
    assert ARITHMETICS["float32"].products(e4m3, e4m3.T, np.float32([[8193.5]])).item() == 8225.5
