"""Rows with infinities, NaN and the ends of float32, and what a store makes of them, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from store_cases import Store

from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]
SMALLEST, LARGEST = 2.0**-100, float(np.finfo(np.float32).max)
LIMITS = {"fp8": 448.0, "float8_e5m2": 57344.0}
KINDS = [
    ("fp8", "fp32", "own", None, "fp32"),
    ("fp8", "bf16", "own", 16, "bf16"),
    ("fp8", "fp16", "own", 32, "fp32"),
    ("float8_e5m2", "fp32", "own", 16, "fp32"),
    ("float8_e5m2", "bf16", "own", None, "fp32"),
    ("fp8", "fp32", "number", None, "fp32"),
    ("fp8", "bf16", "heads", None, "fp32"),
    ("fp8", "fp32", None, None, "fp32"),
    ("float8_e5m2", "fp16", "tensor", None, "fp32"),
    ("float8_e5m2", "bf16", None, None, "fp32"),
]
SPECIAL = [
    Store(tokens=12, cache=cache, source=source, scale=scale, granularity=granularity, scale_dtype=kind, skip=False)
    for cache, source, scale, granularity, kind in KINDS
]


def special_rows(x: Array) -> None:
    """Put them into the first tokens of ``x`` ``[T, .., D]``, at both ends and in the middle of a head."""
    most = min(LARGEST, float(np.finfo(x.dtype).max)) if x.dtype.kind == "f" else LARGEST * (1 - 2**-8)
    for token, some in enumerate((
        {0: np.inf}, {-1: -np.inf}, {5: np.nan}, {0: np.inf, 3: np.nan, 20: -np.inf}, {0: most, 7: np.inf},
        {0: -most, 9: np.nan}, {33: np.inf, 40: np.nan},
    )):
        for column, value in some.items():
            x[token, ..., column] = value
    x[7], x[8], x[9, ..., ::2], x[10] = np.inf, np.nan, np.nan, 0
    x[10, ..., 1] = -np.inf


def scales_of(x: Array, blocks: int, limit: float, dtype: Any) -> Array:
    """That of the finite values of each block ``[.., blocks]``."""
    finite = np.where(np.isfinite(x.astype(np.float64)), np.abs(x.astype(np.float64)), 0)
    top = finite.reshape(*x.shape[:-1], blocks, -1).max(-1)
    return (np.maximum(top, SMALLEST) / limit).astype(as_dtype(dtype))


def assert_special(x: Array, stored: Array, scale: Array, limit: float) -> None:
    """``stored`` for ``x`` ``[n, .., D]`` with the scales of its blocks: NaN stays NaN, infinities are the ends of the
    format, finite values are within one rounding of what they were.
    """
    x, got = x.astype(np.float64), stored.astype(np.float64)
    scale = np.repeat(scale.astype(np.float64), x.shape[-1] // scale.shape[-1], -1)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    infinite, finite = np.isinf(x), np.isfinite(x)
    np.testing.assert_array_equal(got[infinite], np.sign(x[infinite]) * limit)
    mantissa, tiny = (3, 2.0**-9) if limit == 448 else (2, 2.0**-16)
    want = np.clip((x / scale)[finite], -limit, limit)
    step = np.maximum(np.abs(want) * 2.0 ** -(mantissa + 1), tiny / 2)
    assert (np.abs(got[finite] - want) <= step * 1.02).all()
