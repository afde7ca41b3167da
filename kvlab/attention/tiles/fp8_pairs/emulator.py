"""Pairs of fp8 to float16, in NumPy: the twins of ``kernel``'s helpers."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def narrow(q: Array, top: Array) -> tuple[Array, Array]:
    """(q / unit in float16, unit): ``unit`` ``[rows]`` is the power of two at or below ``top``, from 2^-126 to 2^126.

    >>> narrow(np.array([[3.0, -5.0]], np.float32), np.array([5.0], np.float32))
    (array([[ 0.75, -1.25]], dtype=float16), array([4.], dtype=float32))
    """
    bits = np.ascontiguousarray(top, np.float32).view(np.int32) & 0x7F800000
    bits = np.minimum(np.maximum(bits, 0x00800000), 0x7E800000)
    inverse = (np.int32(0x7F000000) - bits).view(np.float32)
    return (q.astype(np.float32) * inverse[..., None]).astype(np.float16), bits.view(np.float32)
