"""The largest score and the sum of each row, where the warps of a CTA have a part of every row each."""

from __future__ import annotations

from typing import Any

import numpy as np

from .fragments import Fragments
from .launched_cta import LaunchedCTA

Array = np.ndarray[Any, Any]


def in_turn(combine: np.ufunc, x: Array) -> Array:
    """Registers of a lane, the last axis, combined one after the other.

    >>> in_turn(np.add, np.array([[1.0, 2, 4]])).tolist()
    [7.0]
    """
    found: Array = combine.accumulate(x, axis=-1)[..., -1]
    return found


def butterfly(combine: np.ufunc, x: Array) -> Array:
    """Lanes or warps, the last axis, a power of two, combined by shuffles: each with the one half of them away, then a
    quarter, and so on. Their order tells which sums are rounded.

    >>> butterfly(np.add, np.array([[1.0, 2, 4, 8]])).tolist()
    [15.0]
    """
    while x.shape[-1] > 1:
        x = combine(*np.split(x, 2, axis=-1))
    return x[..., 0]


class RowsOverWarps(LaunchedCTA):
    """A subclass reduces the registers in ``_by_row``; the results of its warps come together in scratch memory."""

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``: in the lane, over the row's four lanes, over the warps."""
        self._row_barriers()
        return self._by_row(s, np.maximum)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware: in the lane, over four lanes, over the warps."""
        self._row_barriers()
        return self._by_row(p, np.add)

    def _row_barriers(self) -> None:
        """Warps exchange rows through scratch memory: written, combined, read; two barriers."""
        self.hazards.barrier()
        self.hazards.barrier()

    def _by_row(self, x: Fragments, combine: np.ufunc) -> Array:
        raise NotImplementedError


class QuarterRows(RowsOverWarps):
    """Sixteen rows in the accumulators of four warps of gfx950: a row is four lanes of each."""

    def _by_row(self, x: Fragments, combine: np.ufunc) -> Array:
        parts = x.values.reshape(self.programs, 4, 4, 16, -1, 4)
        lanes = combine.reduce(combine.reduce(parts, axis=(4, 5)), axis=2)
        rows: Array = combine.reduce(lanes, axis=1)  # [programs, 16 rows]
        return rows
