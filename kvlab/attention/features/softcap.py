"""Softcap: scores bounded by ``c tanh(s / c)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.checks import finite_number
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.common.checks import require
from kvlab.hardware.chip import divide, exp2, multiply_add
from kvlab.staging import Fragments

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]
DOCUMENTATION = "0, or c of ``c tanh(scores / c)``"
QUARTER_LN2_SQUARED = 0.25 / LOG2E**2


def resolve_softcap(softcap: Any) -> float:
    """``softcap`` as a float. ValueError for what bounds nothing."""
    number = finite_number(softcap, "softcap", "a finite number that float32 holds")
    require(number >= 0, f"softcap is {number}", "0 or more")
    require(number == 0 or 2**-126 <= number <= 2**126, f"softcap is {number}", "0, or 2^-126 to 2^126")
    return number


def cap_terms(scale: float, softcap: float) -> tuple[float, float]:
    """(inner, outer): scores in units of log2 are products times outer, or with a softcap ``tanh(products * inner)``
    times outer.

    >>> cap_terms(0.5, 0.0) == (0.0, 0.5 * LOG2E), cap_terms(0.5, 8.0) == (0.0625, 8 * LOG2E)
    (True, True)
    """
    return (scale / softcap, softcap * LOG2E) if softcap else (0.0, scale * LOG2E)


def cap_exactly(s: Array, softcap: float) -> Array:
    """Scores of any shape in float64, natural units."""
    return softcap * np.tanh(s / softcap) if softcap else s


def cap(s: Fragments, softcap: float) -> Fragments:
    """``softcap * tanh(s / softcap)`` in units of log2; it saturates, it does not overflow. Small scores go by the
    series of tanh, as 1 less something near 1 has no digits of them left.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        x = s.values * np.float32(2.0 / softcap)
        y = x * x * np.float32(QUARTER_LN2_SQUARED)
        inner = multiply_add(y, multiply_add(y, np.float32(-17 / 315), np.float32(2 / 15)), np.float32(-1 / 3))
        series = s.values * multiply_add(y, inner, np.float32(1))
        small = np.abs(x) < 0.5
        bounded = np.float32(softcap * LOG2E) * (np.float32(1) - divide(np.float32(2), exp2(x) + np.float32(1)))
        return s.with_values(np.where(small, series, bounded))


def bound(s: Fragments, inner: Any) -> Fragments:
    """``tanh(s * inner)``; see ``cap_terms``."""
    return s.with_values(np.tanh(s.values * inner))


def cap_kernel(s, softcap):
    """``softcap * tanh(s / softcap)`` as of ``cap``."""
    x = s * (2.0 / softcap)
    y = x * x * QUARTER_LN2_SQUARED
    inner = -1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0))
    series = s * (1.0 + y * inner)
    small = tl.abs(x) < 0.5  # known before the exponentials: fewer registers
    bounded = softcap * LOG2E * (1.0 - 2.0 / (tl.math.exp2(x) + 1.0))
    return tl.where(small, series, bounded)


def bound_kernel(s, inner):
    """``tanh(s * inner)`` by the exp unit, relative error 2^-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [s * inner], dtype=tl.float32, is_pure=True, pack=1
    )
