"""All programs of a launch side by side: their indices, their rows, and a loop over bounds that differ between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def program_ids(grid: tuple[int, ...]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], ...]:
    """``tl.program_id(axis)`` of every program of a grid, int32 ``[programs]`` an axis; axis 0 runs fastest.

    >>> program_ids((2, 3))
    (array([0, 1, 0, 1, 0, 1], dtype=int32), array([0, 0, 1, 1, 2, 2], dtype=int32))
    """
    index = np.indices(tuple(reversed(grid)), np.int32).reshape(len(grid), -1)
    return tuple(index[::-1])


def ragged_range(lo: np.ndarray[Any, Any], hi: np.ndarray[Any, Any], step: int) -> Iterator[np.ndarray[Any, Any]]:
    """``range(lo, hi, step)`` of every program at once: yields each program's value ``[programs]``.

    It goes on until the last program is done; one whose range is over sees values at or past its ``hi``.

    >>> [start.tolist() for start in ragged_range(np.array([0, 64]), np.array([40, 192]), 64)]
    [[0, 64], [64, 128]]
    """
    if step < 1:
        raise ValueError(f"step is {step}: must be at least 1")
    rounds = int(np.max(-(-(hi - lo) // step), initial=0))
    for i in range(rounds):
        yield lo + np.asarray(i * step, lo.dtype)


def row_offsets(array: Any, index: tuple[Any, ...], valid: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Element offsets of the rows at ``index`` of a strided array, an integer array for each of its leading axes; 0
    where not ``valid``.

    >>> row_offsets(np.zeros((4, 2, 8)), (np.array([3, 9]), np.array([1, 0])), np.array([True, False])).tolist()
    [56, 0]
    """
    at = sum(
        axis.astype(np.int64) * (stride // array.itemsize) for axis, stride in zip(index, array.strides, strict=False)
    )
    return np.where(valid, at, 0)
