"""Elements of arrays under a mask, as ``tl.load`` and ``tl.store`` access them: for the emulators."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.memory import Memory

Array = np.ndarray[Any, Any]


def load(array: Array, index: tuple[Any, ...], *, mask: Any, other: Any = 0) -> Array:
    """``array[index]`` where ``mask`` is set and ``other`` elsewhere, whatever the index there. Index and mask are
    broadcast.

    >>> load(np.array([5, 6, 7]), (np.array([0, 2, 9]),), mask=np.array([True, True, False]), other=-1).tolist()
    [5, 7, -1]
    """
    *at, mask = np.broadcast_arrays(*index, mask)
    value = np.full(mask.shape, other, array.dtype)
    value[mask] = array[tuple(one[mask] for one in at)]
    return value


def store(array: Array, index: tuple[Any, ...], value: Any, *, mask: Any) -> None:
    """Write ``value``, rounded to the dtype of ``array``, to ``array[index]`` where ``mask`` is set; broadcast as
    in :func:`load`. Further axes of ``value`` are those of the rows ``array[index]``.

    >>> array = np.zeros(3, np.int32)
    >>> store(array, (np.array([0, 2, 9]),), 4, mask=np.array([True, True, False]))
    >>> array.tolist()
    [4, 0, 4]
    """
    *at, mask = np.broadcast_arrays(*index, mask)
    value = np.asarray(value)
    value = np.broadcast_to(value, (*mask.shape, *value.shape[mask.ndim :]))
    array[tuple(one[mask] for one in at)] = value[mask].astype(array.dtype)


def load_elements(array: Array, at: Array, *, mask: Array) -> Array:
    """The elements of ``array`` at the offsets ``at``, in elements of any strides; 0 where not ``mask``."""
    found: Array = Memory.over(array, name="x").load(at * array.itemsize, array.dtype, mask=mask).reshape(at.shape)
    return found
