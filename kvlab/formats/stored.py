"""Element types of a format: how many bits a code has, and the number that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvlab.common.checks import require, shown


@dataclass(frozen=True)
class Stored:
    """Element type of ``bits`` bits.

    largest   the largest magnitude that encoding gives: what a scale maps the largest value of a group to
    dtype     the NumPy dtype of the numbers; of 4-bit codes and integers the one that they are computed in
    offset    what a code exceeds its number by: 8 where the code 0 is -8

    >>> STORED["b4"].codes(np.array([-8.0, 0.0, 7.0]))
    array([ 0,  8, 15], dtype=uint8)
    >>> STORED["e2m1"].numbers(np.array([1, 2, 15], np.uint8))
    array([ 0.5,  1. , -6. ], dtype=float32)
    """

    name: str
    bits: int
    largest: float
    dtype: Any
    offset: int = 0

    @property
    def whole(self) -> bool:
        """Tells whether the numbers are integers."""
        return np.dtype(self.dtype).kind in "iu"

    def codes(self, values: npt.ArrayLike) -> np.ndarray[Any, Any]:
        """The code of the nearest number for each of ``values``, clipped to the largest; unsigned integers.

        Integers are rounded half away from zero, offset ones half up, floats half to even.
        """
        x = np.asarray(values, np.float32)
        if self.whole:
            signed = np.dtype(self.dtype).kind == "i"
            least = -self.offset if self.offset else -self.largest if signed else 0.0
            most = 15.0 - self.offset if self.offset else self.largest
            near = np.floor(x + 0.5) if self.offset else np.copysign(np.floor(np.abs(x) + 0.5), x)
            whole = np.clip(np.nan_to_num(near), least, most).astype(np.int16) + self.offset
            return (whole & ((1 << self.bits) - 1)).astype(np.uint8)
        if self.bits <= 8:
            x = np.clip(x, -self.largest, self.largest)
        return x.astype(self.dtype).view(f"u{max(self.bits // 8, 1)}")

    def numbers(self, codes: npt.ArrayLike) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The number of each code, float32."""
        code = np.asarray(codes)
        if self.whole:
            whole = code.astype(np.int16)
            if np.dtype(self.dtype).kind == "i" and not self.offset:
                whole = (whole ^ (1 << (self.bits - 1))) - (1 << (self.bits - 1))
            return (whole - self.offset).astype(np.float32)
        return np.ascontiguousarray(code).view(self.dtype).astype(np.float32)


STORED: dict[str, Stored] = {
    stored.name: stored
    for stored in (
        Stored("f32", 32, 3.4e38, np.float32),
        Stored("f16", 16, 65504.0, np.float16),
        Stored("bf16", 16, 3.38e38, ml_dtypes.bfloat16),
        Stored("e4m3", 8, 448.0, ml_dtypes.float8_e4m3fn),
        Stored("e5m2", 8, 57344.0, ml_dtypes.float8_e5m2),
        Stored("e8m0", 8, 2.0**127, ml_dtypes.float8_e8m0fnu),
        Stored("e2m1", 4, 6.0, ml_dtypes.float4_e2m1fn),
        Stored("s8", 8, 127.0, np.int8),
        Stored("u8", 8, 255.0, np.uint8),
        Stored("s4", 4, 7.0, np.int8),
        Stored("u4", 4, 15.0, np.uint8),
        Stored("b4", 4, 8.0, np.int8, offset=8),
    )
}
"""The element types by their names in the text of a format."""


def stored_of(name: str) -> Stored:
    """The element type of a name in the text of a format; ValueError for another name."""
    require(name in STORED, f"element type is {shown(name)}", f"one of {', '.join(STORED)}")
    return STORED[name]
