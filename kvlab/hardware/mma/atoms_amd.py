"""AMD's MMA atoms: MFMA of CDNA (wave64) and WMMA of RDNA (wave32). Sources: MAX's public loaders, Triton's layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32

from .atom import MmaAtom

_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": bfloat16, "f16": float16, "f32": float32, "f64": np.dtype(np.float64),
    "fp8": float8_e4m3fn, "bf8": float8_e5m2,
    "fp8fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz), "bf8fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "i8": np.dtype(np.int8), "u8": np.dtype(np.uint8),
}
_CDNA = ("gfx90a", "gfx942", "gfx950")
_OCP = tuple(product(("fp8", "bf8"), repeat=2))
_FNUZ = tuple(product(("fp8fnuz", "bf8fnuz"), repeat=2))
_HALVES = (("bf16", "bf16"), ("f16", "f16"))


def _kinds(a: str, b: str) -> dict[str, Any]:
    """What the types of A and B decide."""
    integer, double = a in ("i8", "u8"), a == "f64"
    return {
        "dtype": _DTYPES[a],
        "dtype_b": None if a == b else _DTYPES[b],
        "dtype_c": np.dtype(np.int32) if integer else np.dtype(np.float64) if double else float32,
    }


def _suffix(a: str, b: str) -> str:
    return a if a == b else f"{a}.{b}"


def _mfma(archs: tuple[str, ...], m: int, k: int, a: str, b: str) -> MmaAtom:
    """``v_mfma_<m>x<m>x<k>``: w consecutive k for each group of m lanes."""
    w = m * k // 64
    return MmaAtom(
        f"mfma.{m}x{m}x{k}.{_suffix(a, b)}", archs[0], (m, m, k), 64, archs=archs, **_kinds(a, b),
        a=lambda lane, r: (lane % m, lane // m * w + r), b=lambda lane, r: (lane // m * w + r, lane % m),
        c=lambda lane, r: (4 * (lane // m) + r // 4 * 4 * (64 // m) + r % 4, lane % m),
    )


def _mfma_two_half(m: int, k: int, a: str, b: str) -> MmaAtom:
    """The f8f6f4 instructions with the k order of two 16-byte halves, as Triton and MAX's loaders deliver it: the lower
    16 registers of all lanes are the lower half of k. The product is that of the canonical order."""
    return MmaAtom(
        f"mfma.{m}x{m}x{k}.{_suffix(a, b)}.two_half", "gfx950", (m, m, k), 64, archs=("gfx950",), **_kinds(a, b),
        a=lambda lane, r: (lane % m, k // 2 * (r // 16) + 16 * (lane // m) + r % 16),
        b=lambda lane, r: (k // 2 * (r // 16) + 16 * (lane // m) + r % 16, lane % m),
        c=lambda lane, r: (4 * (lane // m) + r // 4 * 4 * (64 // m) + r % 4, lane % m),
    )


def _mfma_f64() -> MmaAtom:
    """``v_mfma_f64_16x16x4_f64``: a register of C holds 4 rows, one for each group of 16 lanes."""
    return MmaAtom(
        "mfma.16x16x4.f64", "gfx90a", (16, 16, 4), 64, archs=_CDNA, **_kinds("f64", "f64"),
        a=lambda lane, r: (lane % 16, lane // 16 + r), b=lambda lane, r: (lane // 16 + r, lane % 16),
        c=lambda lane, r: (lane // 16 + 4 * r, lane % 16),
    )


def _wmma_gfx11(a: str, b: str) -> MmaAtom:
    """RDNA3 ``v_wmma_*_16x16x16``: a lane holds a whole row of A (column of B), lanes 16..31 what lanes 0..15 hold."""
    return MmaAtom(
        f"wmma.gfx11.16x16x16.{_suffix(a, b)}", "gfx1100", (16, 16, 16), 32, archs=("gfx1100",), **_kinds(a, b),
        holders=2, a=lambda lane, r: (lane % 16, r), b=lambda lane, r: (r, lane % 16),
        c=lambda lane, r: (2 * r + lane // 16, lane % 16),
    )


def _wmma_gfx12(a: str, b: str) -> MmaAtom:
    """RDNA4 ``v_wmma_*_16x16x16``: each half-wave holds 8 of the 16 k, and 8 consecutive rows of C."""
    return MmaAtom(
        f"wmma.gfx12.16x16x16.{_suffix(a, b)}", "gfx1201", (16, 16, 16), 32, archs=("gfx1201",), **_kinds(a, b),
        a=lambda lane, r: (lane % 16, 8 * (lane // 16) + r), b=lambda lane, r: (8 * (lane // 16) + r, lane % 16),
        c=lambda lane, r: (8 * (lane // 16) + r, lane % 16),
    )


def amd_atoms() -> Iterator[MmaAtom]:
    """All of them. CDNA3 has the FNUZ kinds of fp8, CDNA4 the OCP ones."""
    for (m, k), (a, b) in product(((16, 32), (32, 16)), _HALVES):
        yield _mfma(("gfx950",), m, k, a, b)
    for (m, k), (a, b) in product(((16, 16), (32, 8)), _HALVES):
        yield _mfma(_CDNA, m, k, a, b)
    yield _mfma(_CDNA, 16, 4, "f32", "f32")
    yield _mfma(_CDNA, 32, 2, "f32", "f32")
    yield _mfma_f64()
    for m, k, archs in (
        (16, 16, ("gfx90a",)), (32, 8, ("gfx90a",)), (16, 32, ("gfx942", "gfx950")), (32, 16, ("gfx942", "gfx950")),
        (16, 64, ("gfx950",)), (32, 32, ("gfx950",)),
    ):
        yield _mfma(archs, m, k, "i8", "i8")
    for m, k in ((16, 32), (32, 16)):
        for a, b in _FNUZ:
            yield _mfma(("gfx942",), m, k, a, b)
        for a, b in _OCP:
            yield _mfma(("gfx950",), m, k, a, b)
    for (m, k), (a, b) in product(((16, 128), (32, 64)), _OCP):
        yield _mfma(("gfx950",), m, k, a, b)
        yield _mfma_two_half(m, k, a, b)
    integers = tuple(product(("i8", "u8"), repeat=2))
    for a, b in (*_HALVES, *integers):
        yield _wmma_gfx11(a, b)
    for a, b in (*_HALVES, *integers, *_OCP):
        yield _wmma_gfx12(a, b)
