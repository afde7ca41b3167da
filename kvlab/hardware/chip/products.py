"""Sums of products as the tensor cores of an H100 round them, every bit.

One instruction (or one of its k-steps) adds k products to an accumulator. All addends are cut to a multiple of one
small number, which the largest of them sets; their sum is cut to so many digits. Nothing is rounded to nearest.
Found on an H100 (``tests/data/h100_dot.json.gz`` and ``tests/data/hardware/h100_arithmetic.json``); other chips sum
otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.memory import bfloat16, float8_e4m3fn, float8_e5m2, float16

Array = np.ndarray[Any, Any]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]

_EXPONENT = np.uint64(0x7FF0_0000_0000_0000)
_AT_ONCE = 1 << 21  # products


@dataclass(frozen=True)
class SumRule:
    """Rule by which one instruction sums products of a dtype.

    k         products of an output in one step
    fraction  F: addends are cut to multiples of ``2^(e - F)``, e the largest exponent among them
    digits    P: binary digits of the sum that are kept
    least     exponent of a subnormal operand: that of the smallest normal number"""

    k: int
    fraction: int
    digits: int
    least: int


SUMS: dict[np.dtype[Any], SumRule] = {
    bfloat16: SumRule(16, 25, 24, -126),
    float16: SumRule(16, 25, 24, -14),
    float8_e4m3fn: SumRule(32, 13, 14, -6),
    float8_e5m2: SumRule(32, 13, 14, -14),
}
"""By the dtype of both operands: mma.sync m16n8k16 and wgmma k16; wgmma k32 of 8 bits."""


def mma_sum(a: Any, b: Any, c: Any) -> Array:
    """``c + a @ b`` as the tensor cores of an H100 sum it, bit for bit: float32 ``[..., M, N]``.

    a  ``[..., M, K]`` of bfloat16, float16, float8_e4m3fn or float8_e5m2, K a multiple of the instruction's k (16; 32
       for 8 bits), taken in the order of the instructions: ``a[..., :k]`` first
    b  ``[..., K, N]`` of the same dtype
    c  ``[..., M, N]`` float32: the accumulator. Leading axes broadcast

    For each step: products are exact, with the sum of their operands' exponents; all addends are truncated toward zero
    to multiples of ``2^(e - F)``, summed, and the sum is truncated to P digits (:data:`SUMS`). A sum of e4m3 has 14
    digits after every step, whatever is added. Measured: no product of 2^128 or more. An operand that is inf or NaN
    gives what float32 gives. ValueError for other dtypes and shapes.

    >>> import numpy as np
    >>> from kvlab.memory import bfloat16, float8_e4m3fn
    >>> one = np.ones((1, 32))
    >>> c = np.float32([[8193.5]])
    >>> mma_sum(one.astype(bfloat16), one.T.astype(bfloat16), c)
    array([[8225.5]], dtype=float32)
    >>> mma_sum(one.astype(float8_e4m3fn), one.T.astype(float8_e4m3fn), c)  # 8193 + 32 in 14 digits
    array([[8225.]], dtype=float32)
    >>> mma_sum(one[:, :8].astype(bfloat16), one.T[:8].astype(bfloat16), c)
    Traceback (most recent call last):
        ...
    ValueError: a has 8 columns: must be a multiple of 16, what an instruction of bfloat16 sums
    """
    a, b, c = np.asarray(a), np.asarray(b), np.asarray(c)
    rule = _checked(a, b, c)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], c.shape[:-2])
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    left, right, start = (np.broadcast_to(x, shape + x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b, c))
    out = np.empty((len(left), M, N), np.float32)
    rows = max(1, min(M, _AT_ONCE // max(rule.k * N, 1)))
    together = max(1, _AT_ONCE // max(rule.k * rows * N, 1))
    for first in range(0, len(left), together):
        part = slice(first, first + together)
        for top in range(0, M, rows):
            at = part, slice(top, top + rows)
            out[at] = _sum(left[at].astype(np.float64), right[part].astype(np.float64), start[at], K, rule)
    return out.reshape(*shape, M, N)


def _checked(a: Array, b: Array, c: Array) -> SumRule:
    names = ", ".join(dtype.name for dtype in SUMS)
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in SUMS:
            raise ValueError(f"{name} has dtype {operand.dtype}: must be one of {names}")
    if a.dtype != b.dtype:
        raise ValueError(f"b has dtype {b.dtype}: must be that of a, {a.dtype}")
    if c.dtype != np.float32:
        raise ValueError(f"c has dtype {c.dtype}: must be float32")
    if min(a.ndim, b.ndim, c.ndim) < 2 or a.shape[-1] != b.shape[-2] or c.shape[-2:] != (a.shape[-2], b.shape[-1]):
        raise ValueError(f"a {a.shape}, b {b.shape}, c {c.shape}: must be [..., M, K], [..., K, N] and [..., M, N]")
    rule = SUMS[a.dtype]
    if a.shape[-1] % rule.k:
        raise ValueError(
            f"a has {a.shape[-1]} columns: must be a multiple of {rule.k}, what an instruction of {a.dtype} sums"
        )
    return rule


def _sum(a: FloatArray, b: FloatArray, c: Array, K: int, rule: SumRule) -> Array:
    """``[B, M, K]``, ``[B, K, N]``, ``[B, M, N]``: the steps one after the other."""
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all())
    given = None if finite else (a, b, c.astype(np.float64))
    if not finite:
        a, b, c = (np.where(np.isfinite(x), x, x.dtype.type(0)) for x in (a, b, c))
    a, b = a.transpose(2, 0, 1)[..., None], b.transpose(1, 0, 2)[:, :, None, :]  # [K, B, M, 1], [K, B, 1, N]
    power_a, power_b = _power(a, rule.least), _power(b, rule.least)
    for k in range(0, K, rule.k):
        step = slice(k, k + rule.k)
        c = _step(a[step] * b[step], power_a[step] * power_b[step], c, rule)
    if given is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            usual = given[2] + np.matmul(given[0], given[1])
        c = np.where(np.isfinite(usual), c, usual).astype(np.float32)
    return c


def _step(products: FloatArray, powers: FloatArray, c: Array, rule: SumRule) -> Array:
    """One instruction: ``products`` and powers of two of their exponents ``[k, B, M, N]``, the accumulator ``[B, M,
    N]``."""
    wide = c.astype(np.float64)
    top = np.maximum(powers.max(axis=0), _power(wide))
    unit = np.where(top == 0, 1.0, top) * 2.0**-rule.fraction
    inverse = 1 / unit  # powers of two: exact
    np.multiply(products, inverse, out=products)
    np.trunc(products, out=products)
    total: FloatArray = products.sum(axis=0) + np.trunc(wide * inverse)
    kept = (total.view(np.uint64) & np.uint64((1 << 64) - (1 << 53 - rule.digits))).view(np.float64)
    normal = np.trunc(kept * unit * 2.0**149) * 2.0**-149  # no digits below 2^-149
    with np.errstate(over="ignore"):
        return (normal + 0.0).astype(np.float32)  # 0 is +0


def _power(x: FloatArray, least: int = -1022) -> FloatArray:
    """2 to the exponent of each number, that of ``least`` at least; 0 for 0."""
    power = (np.ascontiguousarray(x).view(np.uint64) & _EXPONENT).view(np.float64)
    return np.where(x == 0, 0.0, np.maximum(power, 2.0**least))
