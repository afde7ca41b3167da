"""Plan by which the threads of a CTA copy a tile to shared memory, 16 bytes each, row after row."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout import TileTensor

from .iterator import key_offsets

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class TileCopyPlan:
    """The 16-byte vectors of a tile in row-major order, all ``[n]``: vector i is that of thread ``i % threads``.

    row     of the tile
    byte    in the row
    inside  whether the vector lies in the row's data, or in its padding
    warp    that moves it"""

    row: IntArray
    byte: IntArray
    inside: BoolArray
    warp: IntArray
    warps: int

    def source(self, offset: IntArray, size: int) -> tuple[IntArray, BoolArray]:
        """Byte address of each vector ``[programs, n]`` of rows at element ``offset`` ``[programs, rows]``, negative
        where there is none; and which vectors exist."""
        first = offset[:, self.row]
        valid = (first >= 0) & self.inside
        return np.where(valid, first * size + self.byte, 0), valid

    def source_of(self, tile: TileTensor) -> tuple[IntArray, BoolArray]:
        """:meth:`source` of a K or V tile."""
        return self.source(key_offsets(tile), tile.dtype.itemsize)

    def bytes_by_warp(self, valid: BoolArray) -> IntArray:
        """Bytes that each warp brings of the vectors ``valid`` ``[programs, n]``: ``[warps]``."""
        moved = np.bincount(self.warp, valid.sum(axis=0), minlength=self.warps)
        return 16 * moved.astype(np.int64)


@functools.cache
def copy_plan(rows: int, row_bytes: int, valid_bytes: int, warps: int) -> TileCopyPlan:
    """The plan of a tile of ``rows`` rows of ``row_bytes``, of which ``valid_bytes`` are data.

    >>> plan = copy_plan(rows=16, row_bytes=256, valid_bytes=192, warps=4)
    >>> plan.row[:18].tolist(), plan.warp[[0, 31, 32, 128]].tolist(), plan.inside[:16].tolist().index(False)
    ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 0], 12)
    """
    vectors = row_bytes // 16
    index = np.arange(rows * vectors)
    row, vector = np.divmod(index, vectors)
    return TileCopyPlan(row, 16 * vector, 16 * vector < valid_bytes, index % (32 * warps) // 32, warps)
