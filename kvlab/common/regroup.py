"""Many elements put in another order at once, neighbours that stay together in one piece."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
PIECE = 32  # bytes that move at once, at most


class Regroup:
    """``np.take(values, index, axis=-1)`` for an index that is used often: runs of elements that are neighbours before
    and after move as one piece, which is faster. Make it once and keep it.

    >>> pairs = Regroup(np.array([[2, 3, 0, 1], [4, 5, 6, 7]]))
    >>> pairs.run, pairs(np.arange(8) * 10).tolist()
    (2, [[20, 30, 0, 10], [40, 50, 60, 70]])
    """

    def __init__(self, index: IntArray) -> None:
        self.index = index
        self._least, self._most = (int(index.min()), int(index.max())) if index.size else (0, -1)
        self.run = 1  # elements that stay together, aligned: a power of two
        while index.size and index.shape[-1] % (2 * self.run) == 0 and _together(index, 2 * self.run):
            self.run *= 2

    def __call__(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``values`` ``[..., n]`` -> ``[..., *index.shape]``."""
        size = values.dtype.itemsize
        run = self.run
        while run > 1 and (run * size > PIECE or values.shape[-1] % run):
            run //= 2
        if self._least < 0 or self._most >= values.shape[-1]:
            raise IndexError(f"indices {self._least} to {self._most} of {values.shape[-1]} elements")
        if run > 1:
            values, dtype = np.ascontiguousarray(values), values.dtype
            pieces = values.view(_CARRIER.get(run * size, f"V{run * size}"))
            return np.take(pieces, self._pieces(run), axis=-1, mode="clip").view(dtype)
        out: np.ndarray[Any, Any] = np.take(values, self.index, axis=-1, mode="wrap")  # the fastest: all are inside
        return out

    @functools.cached_property
    def _found(self) -> dict[int, IntArray]:
        return {}

    def _pieces(self, run: int) -> IntArray:
        if run not in self._found:
            self._found[run] = np.ascontiguousarray(self.index[..., ::run] // run)
        return self._found[run]


_CARRIER = {2: "u2", 4: "u4", 8: "u8"}


def _together(index: IntArray, run: int) -> bool:
    first = index[..., ::run]
    steps = index.reshape(*first.shape, run) - first[..., None]
    return bool((first % run == 0).all() and (steps == np.arange(run)).all())
