"""Distance of two tensors: absolute, relative to the tensor's largest magnitude, and in ULPs of that.

An ULP here is one of the whole tensor: the distance between neighbouring values of its dtype at its largest magnitude
(:func:`ulp_of`). A sum that cancels to nearly zero then differs by a few ULPs of what was summed, not by the millions
of floats that lie between two tiny numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

#: A value that is identical on both sides, at least this large, and this many times larger than any that differs is a
#: mask's constant (-2**100, -10000): no measure of how far the others may be apart.
_MASK_MAGNITUDE, _MASK_RATIO = 4096.0, 100.0


@dataclass(frozen=True)
class Tolerance:
    """Elements agree that differ by at most ``relative`` times the tensor's largest magnitude, or that have fewer than
    ``ulps`` values of their dtype between them (1: they are equal or neighbours)."""

    relative: float
    ulps: int
    reason: str

    @classmethod
    def default(cls, dtype: np.dtype[Any]) -> Tolerance:
        """The tolerance of a storage dtype.

        >>> Tolerance.default(np.dtype(np.float32))
        Tolerance(relative=1e-05, ulps=0, reason='float32 sums in another order')
        """
        if not is_float(dtype):
            return cls(0.0, 0, "integers and truth values are exact")
        if dtype == np.float64:
            return cls(1e-12, 0, "float64 sums in another order")
        if dtype == np.float32:
            return cls(1e-5, 0, "float32 sums in another order")
        return cls(1e-5, 1, f"float32 sums in another order, rounded once to {dtype.name}")


@dataclass(frozen=True)
class Apart:
    """Distances of each program [n]: ``relative`` and ``ulps`` are ``absolute`` over its tensor's largest magnitude and
    over :func:`ulp_of` that; ``worst`` is the index of the element that decides it, one tuple per program."""

    absolute: np.ndarray
    relative: np.ndarray
    ulps: np.ndarray
    ok: np.ndarray
    worst: list[tuple[int, ...]]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tells whether a dtype is a float, the ml-dtypes ones included."""
    return dtype.kind == "f" or (dtype.kind == "V" and hasattr(ml_dtypes, dtype.name))


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of the elements of two float arrays of one dtype, in representable values; +0 and -0 are one place.

    >>> ulp_distance(np.float32([1, -1e-45]), np.float32([1 + 2**-22, 1e-45]))
    array([2., 2.])
    """
    return np.abs(_place(a) - _place(b))


def ulp_of(magnitude: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The distance from a magnitude to the next value of a float dtype, in float64; for 0, the smallest value there is.

    >>> (ulp_of(np.array([1.0, 3.5, 0.0]), np.dtype(np.float16)) * 2**24).tolist()
    [16384.0, 32768.0, 1.0]
    """
    facts = ml_dtypes.finfo(dtype)
    exponent = np.frexp(magnitude)[1] - 1
    above = np.ldexp(float(facts.eps), np.where(magnitude > 0, exponent, -2000))
    return np.maximum(above, float(facts.smallest_subnormal))


def _place(a: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(a).view(f"i{a.itemsize}").astype(np.int64)
    magnitude = bits & ((1 << (8 * a.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude).astype(np.float64)


def apart(kernel: np.ndarray, emulator: np.ndarray, tolerance: Tolerance) -> Apart:
    """Compare two arrays ``[n, ...]`` of the same shape and dtype, program by program.

    NaN and infinity must lie in the same places on both sides; where they do not, the distance is infinite."""
    programs, shape = len(kernel), kernel.shape[1:]
    floating = is_float(kernel.dtype)
    wide = np.float64 if floating or kernel.dtype.kind == "b" or kernel.itemsize < 8 else np.longdouble
    a: Any = kernel.reshape(programs, -1).astype(wide)
    b: Any = emulator.reshape(programs, -1).astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        finite = np.isfinite(a) & np.isfinite(b)
        difference = np.where(same, 0, np.where(finite, np.abs(a - b), np.inf)).astype(np.float64)
        magnitude = np.where(finite, np.maximum(np.abs(a), np.abs(b)), 0).astype(np.float64)
        differing = np.where(same, 0, magnitude).max(axis=1, initial=0)
        masked = same & (magnitude >= _MASK_MAGNITUDE) & (magnitude > _MASK_RATIO * differing[:, None])
        counted = np.where(masked, 0, magnitude)
        scale = counted.max(axis=1, initial=0)
        relative = np.where(difference == 0, 0, difference / np.where(scale > 0, scale, 1)[:, None])
    if floating:
        flat = [x.reshape(programs, -1) for x in (kernel, emulator)]
        near = ulp_distance(*flat) <= tolerance.ulps
        ulps = difference / ulp_of(scale, kernel.dtype)[:, None]
    else:
        near, ulps = same, np.where(same, 0, np.inf)  # integers have no last place to be near in
    within = same | (finite & ((relative <= tolerance.relative) | near))
    decisive = np.where(within, relative, 2 + difference)
    worst = decisive.argmax(axis=1) if decisive.size else np.zeros(programs, np.intp)
    return Apart(
        difference.max(axis=1, initial=0), relative.max(axis=1, initial=0), ulps.max(axis=1, initial=0),
        within.all(axis=1),
        [tuple(int(i) for i in np.unravel_index(w, shape)) if shape and decisive.size else () for w in worst],
    )
