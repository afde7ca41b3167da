"""Pairs of fp8 e4m3 in 16-bit elements: how NVIDIA's CTAs hold two neighbouring columns of K or V."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.memory import float8_e4m3fn

Array = np.ndarray[Any, Any]

_FLOAT16 = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float16)
"""Of every byte."""


def halves(pairs: Array) -> tuple[Array, Array]:
    """(even, odd) columns in float16 of int16 elements, each two e4m3.

    >>> pair = np.array([1.0, -2.0], float8_e4m3fn).view(np.int16)
    >>> [half.tolist() for half in halves(pair)]
    [[1.0], [-2.0]]
    """
    words = pairs.view(np.uint16)
    return _FLOAT16[words & 0xFF], _FLOAT16[words >> 8]
