"""The special functions of an H100 and what compilers make of them, every bit of float32.

``ex2.approx`` and ``rcp.approx`` are tables: the nearest float32 and a difference of at most one unit in the last
place, recorded for all fractions and all mantissas. Division, log2, exp and log are sequences of these and of exact
fused operations, as LLVM, libdevice and ptxas (CUDA 12.8) write them for Triton's functions."""

from __future__ import annotations

import functools
import lzma
from importlib.resources import files
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Table = np.ndarray[Any, np.dtype[np.int8]]

_FRACTION = 23
_ONE = 1 << _FRACTION
_SMALLEST = np.float32(2.0**-126)  # that is normal


@functools.cache
def table(name: str) -> Table:
    """Units in the last place between the chip's value and the nearest float32, for each of 2^23 inputs: ``"ex2"`` by
    the fraction, ``"rcp"`` by the mantissa. Read once, 0.1 s."""
    packed = (files(__package__) / "tables" / f"{name}.i8.xz").read_bytes()
    return np.frombuffer(lzma.decompress(packed), np.int8)


def ex2_approx(x: Any) -> Array:
    """``ex2.approx.ftz.f32``: 2 to the power of each float32 as an H100's MUFU.EX2 gives it, bit for bit.

    x  float32 of any shape; ValueError for other dtypes

    x is cut to a multiple of 2^-23, negative ones that are no whole numbers downward; results below 2^-126 are 0.
    Recorded for all 2^23 fractions; the law for signs, ends and exponents from 131,072 random inputs.

    >>> import numpy as np
    >>> ex2_approx(np.float32([0, 0.5, -0.5, -1, 3, -126.5, 200])).tolist()[1:]
    [1.4142135381698608, 0.7071067094802856, 0.5, 8.0, 0.0, inf]
    >>> np.exp2(np.float32(-0.5))
    np.float32(0.70710677)
    """
    x = _float32(x, "x")
    q = np.floor(np.fmin(np.abs(x), np.float32(512)).astype(np.float64) * _ONE).astype(np.int64)
    q = np.where(x < 0, np.where(q & (_ONE - 1), ~q, -q), q)
    n, f = q >> _FRACTION, q & (_ONE - 1)
    bits = np.exp2(f / _ONE).astype(np.float32).view(np.int32) + table("ex2")[f]
    scaled = (bits + (np.clip(n, -126, 127) << _FRACTION).astype(np.int32)).view(np.float32)
    result = np.where(n < -126, np.float32(0), np.where(n > 127, np.float32(np.inf), scaled))
    return np.where(np.isnan(x), np.float32(np.nan), result)


def rcp_approx(x: Any) -> Array:
    """``rcp.approx.ftz.f32``: the reciprocal of each float32 as an H100's MUFU.RCP gives it, bit for bit.

    x  float32 of any shape; ValueError for other dtypes

    Subnormal inputs count as 0, subnormal results are 0. Recorded for all 2^23 mantissas.

    >>> import numpy as np
    >>> rcp_approx(np.float32([3, -4, 2.0**127, 1e-40, -np.inf]))
    array([ 0.33333334, -0.25      ,  0.        ,         inf, -0.        ], dtype=float32)
    """
    x = _float32(x, "x")
    bits = x.view(np.int32)
    mantissa, exponent = bits & (_ONE - 1), bits >> _FRACTION & 0xFF
    of_mantissa = np.float32(1) / (mantissa | np.int32(127 << _FRACTION)).view(np.float32)
    found = of_mantissa.view(np.int32) + table("rcp")[mantissa] + (127 - exponent << _FRACTION)
    magnitude = np.where(found < _ONE, np.float32(0), found.astype(np.int32).view(np.float32))
    magnitude = np.where(exponent == 0, np.float32(np.inf), magnitude)
    magnitude = np.where(exponent == 0xFF, np.where(mantissa, np.float32(np.nan), np.float32(0)), magnitude)
    result: Array = np.copysign(magnitude, x)
    return result


def div_full(x: Any, y: Any) -> Array:
    """``div.full.f32``: ``x / y`` of float32 as ptxas writes it for an H100, the division of Triton's ``/``.

    Both are multiplied by 2^-2 where ``|y| > 2^126`` and by 2^24 where it is below 2^-126; then x times
    :func:`rcp_approx` of y.

    >>> import numpy as np
    >>> div_full(np.float32(10), np.float32([3, 7, 1e38]))
    array([3.3333335e+00, 1.4285715e+00, 9.9999999e-38], dtype=float32)
    """
    x, y = _float32(x, "x"), _float32(y, "y")
    size = np.abs(y)
    factor = np.where(size > np.float32(2.0**126), np.float32(0.25), np.float32(1))
    factor = np.where(size < _SMALLEST, np.float32(2.0**24), factor)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x * factor * rcp_approx(y * factor))


def fma(a: Any, b: Any, c: Any) -> Array:
    """``fma.rn.f32``: ``a * b + c`` of float32, rounded once.

    >>> import numpy as np
    >>> x = np.float32(1 + 2**-12)
    >>> float(fma(x, x, np.float32(-1))), float(x * x - np.float32(1))
    (0.0004883408546447754, 0.00048828125)
    """
    a, b, c = (_float32(x, name).astype(np.float64) for x, name in ((a, "a"), (b, "b"), (c, "c")))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = a * b  # exact: 48 digits
        total = np.asarray(product + c)
        part = total - product
        lost = (product - (total - part)) + (c - part)  # what the sum of 53 digits does not hold
        bits = total.view(np.int64)
        toward = np.where((lost > 0) == (total > 0), 1, -1)
        odd = np.where((lost != 0) & (bits & 1 == 0) & np.isfinite(total), bits + toward, bits)  # rounded to odd
        return odd.view(np.float64).astype(np.float32)


def ex2_wide(x: Any) -> Array:
    """``ex2.approx.f32`` without ``.ftz``: below -126 the square of :func:`ex2_approx` of half of x, so that results
    may be subnormal.

    >>> import numpy as np
    >>> ex2_wide(np.float32([-0.5, -127, -149]))
    array([7.071067e-01, 5.877470e-39, 1.401298e-45], dtype=float32)
    """
    x = _float32(x, "x")
    low = x < np.float32(-126)
    result = ex2_approx(np.where(low, x * np.float32(0.5), x))
    with np.errstate(over="ignore", under="ignore"):
        return np.where(low, result * result, result)


_LOG2_SERIES = (0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4, 0xBE763C8B, 0x3E93BF99, 0xBEB8AA49,
                0x3EF6384A, 0xBF38AA3B)
_LOG_SERIES = (0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78,
               0xBF000000)
"""Coefficients of the polynomials, the highest first, as float32 bits."""
_LN2, _LOG2E = np.float32(0.6931471805599453), np.float32(1.4426950408889634)


def log2f(x: Any) -> Array:
    """libdevice's ``__nv_log2f``, which is Triton's ``tl.math.log2``: a polynomial of exact fused operations.

    >>> import numpy as np
    >>> log2f(np.float32([8, 10, 0, np.inf])), np.log2(np.float32(10))
    (array([3.      , 3.321928, -inf, inf], dtype=float32), np.float32(3.321928))
    """
    exponent, m, x = _split(x, 0x3F3504F3)
    series = _horner(_LOG2_SERIES, m)
    return _ends(exponent + fma(m, _LOG2E, m * (m * series)), x)


def logf(x: Any) -> Array:
    """libdevice's ``__nv_logf``, which is Triton's ``tl.log``.

    >>> import numpy as np
    >>> logf(np.float32([1, 10, 0]))
    array([0.       , 2.3025851,      -inf], dtype=float32)
    """
    exponent, m, x = _split(x, 0x3F2AAAAB)
    series = m * _horner(_LOG_SERIES, m)
    return _ends(fma(exponent, _LN2, fma(series, m, m)), x)


def expf(x: Any) -> Array:
    """Triton's ``tl.exp``: :func:`ex2_wide` of x times log2(e), rounded.

    >>> import numpy as np
    >>> expf(np.float32([0, 1, -100]))
    array([1.0000000e+00, 2.7182817e+00, 3.7835059e-44], dtype=float32)
    """
    with np.errstate(over="ignore"):
        return ex2_wide(_float32(x, "x") * _LOG2E)


def _split(x: Any, middle: int) -> tuple[Array, Array, Array]:
    """(exponent, m, x): ``x = 2^exponent (1 + m)``, 1 + m from the number with the bits ``middle`` on; subnormal x
    times 2^23."""
    x = _float32(x, "x")
    small = x < _SMALLEST
    with np.errstate(under="ignore"):
        x = np.where(small, x * np.float32(_ONE), x)
    bits = x.view(np.int32)
    with np.errstate(over="ignore"):
        whole = bits - np.int32(middle) & np.int32(-_ONE)
    start = np.where(small, np.float32(-_FRACTION), np.float32(0))
    exponent = fma(whole.astype(np.float32), np.float32(1 / _ONE), start)
    with np.errstate(invalid="ignore", over="ignore"):
        return exponent, (bits - whole).view(np.float32) - np.float32(1), x


def _horner(coefficients: tuple[int, ...], m: Array) -> Array:
    first, *rest = (np.uint32(bits).view(np.float32) for bits in coefficients)
    value: Array = np.broadcast_to(first, m.shape)
    for coefficient in rest:
        value = fma(value, m, coefficient)
    return value


def _ends(value: Array, x: Array) -> Array:
    """The logarithm of 0, infinity, NaN and negative numbers."""
    value = np.where(x == 0, np.float32(-np.inf), value)
    value = np.where(x == np.inf, x, value)
    return np.where((x < 0) | np.isnan(x), np.float32(np.nan), value)


def _float32(x: Any, name: str) -> Array:
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise ValueError(f"{name} has dtype {array.dtype}: must be float32")
    return array
