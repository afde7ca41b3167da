"""NVIDIA's MMA atoms: mma.sync, wgmma, tcgen05. Each map is one line of the PTX ISA's fragment figures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32

from .atom import MmaAtom

_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": bfloat16, "f16": float16, "tf32": float32, "e4m3": float8_e4m3fn, "e5m2": float8_e5m2,
    "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8), "f64": np.dtype(np.float64),
}
_TF32_IGNORED = 13  # a float32 has 23 bits of mantissa, a tf32 the upper 10
_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_FP8 = tuple(product(("e4m3", "e5m2"), repeat=2))
_INT8 = tuple(product(("s8", "u8"), repeat=2))


def _since(arch: str) -> tuple[str, ...]:
    return _ARCHS[_ARCHS.index(arch) :]


def _kinds(a: str, b: str) -> dict[str, Any]:
    """What the types of A and B decide."""
    integer, double = a in ("s8", "u8"), a == "f64"
    return {
        "dtype": _DTYPES[a],
        "dtype_b": None if a == b else _DTYPES[b],
        "dtype_c": np.dtype(np.int32) if integer else np.dtype(np.float64) if double else float32,
        "ignored_bits": _TF32_IGNORED if a == "tf32" else 0,
    }


def _suffix(a: str, b: str) -> str:
    return a if a == b else f"{a}.{b}"


def _mma_sync(m: int, k: int, a: str, b: str, arch: str) -> MmaAtom:
    """``mma.sync.m<m>n8k<k>``: w elements fill one 32-bit register (of float64: one element fills two)."""
    w = max(1, 4 // _DTYPES[a].itemsize)
    blocks = m // 8
    return MmaAtom(
        f"mma.sync.m{m}n8k{k}.{_suffix(a, b)}", arch, (m, 8, k), 32, archs=_since(arch), **_kinds(a, b),
        a=lambda lane, r: (lane // 4 + 8 * (r // w % blocks), lane % 4 * w + 4 * w * (r // w // blocks) + r % w),
        b=lambda lane, r: (lane % 4 * w + 4 * w * (r // w) + r % w, lane // 4),
        c=lambda lane, r: (lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2),
    )


def _wgmma(n: int, a: str, b: str) -> MmaAtom:
    """``wgmma.mma_async.m64n<n>k<32 bytes>``: warp w has rows 16w .. 16w+15; B is in shared memory, A may be."""
    w = 4 // _DTYPES[a].itemsize
    k = 8 * w
    return MmaAtom(
        f"wgmma.m64n{n}k{k}.{_suffix(a, b)}", "sm_90", (64, n, k), 128, archs=("sm_90",), **_kinds(a, b),
        a=lambda t, r: (t // 32 * 16 + t % 32 // 4 + 8 * (r // w % 2), t % 4 * w + 4 * w * (r // w // 2) + r % w),
        b=None, c=lambda t, r: (t // 32 * 16 + t % 32 // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2),
    )


def _tcgen05(n: int, a: str, b: str) -> MmaAtom:
    """``tcgen05.mma`` of one CTA with M = 128: row m is lane m of tensor memory, column n its column; a warpgroup that
    loads it (``tcgen05.ld.32x32b``) has one row a thread. A and B are in shared memory."""
    k = 32 // _DTYPES[a].itemsize
    return MmaAtom(
        f"tcgen05.m128n{n}k{k}.{_suffix(a, b)}", "sm_100", (128, n, k), 128, archs=("sm_100",), **_kinds(a, b),
        a=None, b=None, c=lambda lane, column: (lane, column),
    )


def nvidia_atoms() -> Iterator[MmaAtom]:
    """All of them. float32 means tf32 here: without tensor cores there is no atom."""
    for name in ("bf16", "f16"):
        yield _mma_sync(16, 16, name, name, "sm_80")
    for name in ("bf16", "f16"):
        yield _mma_sync(16, 8, name, name, "sm_80")
    for k in (4, 8):
        yield _mma_sync(16, k, "tf32", "tf32", "sm_80")
    for a, b in _INT8:
        yield _mma_sync(8, 16, a, b, "sm_80")
        for k in (16, 32):
            yield _mma_sync(16, k, a, b, "sm_80")
    for a, b in _FP8:
        yield _mma_sync(16, 32, a, b, "sm_89")
    yield _mma_sync(8, 4, "f64", "f64", "sm_80")
    for k in (4, 8, 16):
        yield _mma_sync(16, k, "f64", "f64", "sm_90")

    floats = (("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), *_FP8)
    for (a, b), n in product(floats, range(8, 257, 8)):
        yield _wgmma(n, a, b)
    for (a, b), n in product(_INT8, (8, 24, *range(16, 257, 16))):
        yield _wgmma(n, a, b)
    for (a, b), n in product((*floats, *_INT8), range(16, 257, 16)):
        yield _tcgen05(n, a, b)
