"""The online softmax of attention kernels and their emulators: base two, masks, weights, and where P is rounded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.hardware.chip import exp2, log2, multiply_add
from kvlab.staging import Fragments

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]

LOG2E = math.log2(math.e)
"""Scores are kept in units of log2: multiplied by this."""

LN2 = math.log(2)
"""An lse is in natural units: that in units of log2 times this."""

LOWEST = -(2.0 - 2.0**-23) * 2.0**127
"""Maximum of no scores, the lowest float32. Finite: hidden scores are -inf, and beside it they weigh exactly 0."""

MASK_VALUE = -(2.0**100)
"""A bias of this or less hides a key."""

# O adds up P V with P rounded once to the storage dtype: where a score differs in its last bit (another order of
# summation), a P next to a rounding boundary may fall on the other side, half a step of bfloat16 of one term.
P_TIE = (2.0**-8, "P is rounded once to the storage dtype; a tie may fall on either side")
"""Lockstep tolerance of what adds up P V, and its reason."""

OUTPUT_TIE = (2.0**-7, P_TIE[1] + ", and the output is rounded again")
"""Lockstep tolerance of the output."""


def weigh(cta: Any, s: Fragments, m: Array, l: Array) -> tuple[Fragments, Array, Array, Array]:
    """(p, alpha, m, l): the weights of scores relative to the new row maxima, what sums until now are multiplied by,
    the new maxima and row sums ``[P, BM]``.
    """
    m_new = np.maximum(m, cta.row_max(s))
    p = s.with_values(exp2((s - s.by_row(m_new)).values))
    alpha = exp2(m - m_new)
    l = multiply_add(l, alpha, cta.row_sum(p))
    return p, alpha, m_new, l


def weigh_kernel(s, m, l):
    """(p, alpha, m, l) of scores ``[BM, BN]``, as of ``weigh``."""
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l


def log_sum(m: Array, l: Array, sees: Array) -> Array:
    """The lse ``[P, BM]`` of rows of these maxima and sums, natural; -inf where not ``sees``."""
    with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
        return np.where(sees, (m + log2(l)) * np.float32(LN2), np.float32(-np.inf))


def log_sum_kernel(m, l, sees):
    """The lse of rows ``[BM]``, as of ``log_sum``."""
    return tl.where(sees, (m + tl.log2(l)) * LN2, -float("inf"))
