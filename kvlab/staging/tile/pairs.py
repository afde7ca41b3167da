"""Columns of fp8 or 4 bits in 16-bit elements: how NVIDIA's CTAs hold two or four neighbouring columns of K or V."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.formats.stored import STORED
from kvlab.memory import float8_e4m3fn

Array = np.ndarray[Any, Any]

_FLOAT16 = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float16)
"""Of every byte."""
_E2M1, _INT4, _LESS8 = (STORED[name].numbers(np.arange(16, dtype=np.uint8)) for name in ("e2m1", "s4", "b4"))


def halves(pairs: Array) -> tuple[Array, Array]:
    """(even, odd) columns in float16 of int16 elements, each two e4m3.

    >>> pair = np.array([1.0, -2.0], float8_e4m3fn).view(np.int16)
    >>> [half.tolist() for half in halves(pair)]
    [[1.0], [-2.0]]
    """
    words = pairs.view(np.uint16)
    return _FLOAT16[words & 0xFF], _FLOAT16[words >> 8]


def quarters(quads: Array, scale: Array | None = None, *, unsigned: bool = False) -> tuple[Array, ...]:
    """The columns 4 n, 4 n + 1, 4 n + 2 and 4 n + 3 in float16 of int16 elements, each four integers of 4 bits
    (``unsigned`` ones less 8), or with ``scale`` of each element four e2m1 times 2^-14 of it.

    >>> quad = np.array([0xF821], np.uint16).view(np.int16)
    >>> [quarter.tolist() for quarter in quarters(quad)]
    [[1.0], [2.0], [-8.0], [-1.0]]
    >>> [quarter.tolist() for quarter in quarters(quad, np.array([256.0], np.float32))]
    [[0.0078125], [0.015625], [-0.0], [-0.09375]]
    """
    codes = [quads.view(np.uint16) >> shift & 15 for shift in (0, 4, 8, 12)]
    if scale is None:
        numbers = _LESS8 if unsigned else _INT4
        return tuple(numbers[code].astype(np.float16) for code in codes)
    return tuple((_E2M1[code] * (scale * np.float32(2**-14))).astype(np.float16) for code in codes)
