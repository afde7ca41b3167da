"""Accesses of a TileTensor: scalar indices to byte addresses, the linear bound, the order of copied elements.

Leading axes (programs, lanes) align from the front: ``[P]`` fits ``[P, lanes, rows, columns]`` as ``[P, 1, 1, 1]``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.layout.algebra.int_tuple import IntArray, flatten
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import VECTOR_BYTES
from kvlab.memory import Memory


def leading(value: Any, ndim: int) -> Any:
    """An array with axes of 1 appended up to ``ndim``; an int stays.

    >>> leading(np.zeros((2, 3)), 4).shape
    (2, 3, 1, 1)
    """
    missing = ndim - np.ndim(value)
    return value.reshape(*value.shape, *(1,) * missing) if missing and np.ndim(value) else value


def bound_records(layout: Layout, element_size: int, valid_rows: IntArray) -> IntArray:
    """The linear bound of an AMD buffer resource: scalars from the first of a tile to the end of its last valid row.

    >>> bound_records(Layout("(3,5):(9,2)"), 1, np.array([3, 1, 0, -2]))
    array([27,  9,  0,  0])
    """
    first, *others = layout.modes
    row = sum(mode.cosize - 1 for mode in others) + element_size
    empty = (valid_rows <= 0) | (layout.size == 0)
    return np.where(empty, 0, (valid_rows - 1) * flatten(first.stride)[0] + row)


def read(memory: Memory, dtype: np.dtype[Any], index: IntArray, width: int, end: Any, mask: Any = None) -> NDArray[Any]:
    """``width`` scalars from each index (in scalars): ``[*index.shape, width]``; zeros at and past ``end``, and where
    ``mask`` (broadcast with the indices) is False."""
    place, step, mask = _lanes(index, width, end, mask)
    address = place * dtype.itemsize
    address = address + memory.base if memory.base else address
    value = memory.load(address, dtype, step, mask=mask, alignment=alignment(step * dtype.itemsize))
    return value if place is index else value[..., 0]


def write(memory: Memory, index: IntArray, value: NDArray[Any], end: Any, mask: Any = None) -> None:
    """Write ``value[..., width]`` at each index; nothing at and past ``end``, nor where ``mask`` is False."""
    place, step, mask = _lanes(index, value.shape[-1], end, mask)
    address = place * value.itemsize + memory.base
    value = value if place is index else value[..., None]
    memory.store(address, value, mask=mask, alignment=alignment(step * value.itemsize))


def _lanes(index: IntArray, width: int, end: Any, on: Any) -> tuple[IntArray, int, Any]:
    """Places, scalars at each, and mask of an access: by vector, or by scalar where the bound cuts a vector."""
    if end is None:
        return index, width, on
    limit = leading(end, index.ndim)
    mask = index + (width - 1) < limit if width > 1 else index < limit
    if width == 1 or mask.all() or np.array_equal(mask, index < limit):
        return index, width, mask if on is None else mask & on
    index = index[..., None] + np.arange(width)
    mask = index < leading(end, index.ndim)
    return index, 1, mask if on is None else mask & on[..., None]


def alignment(nbytes: int) -> int:
    """A vector is aligned to its own size, at most to 16 bytes."""
    return min(nbytes & -nbytes, VECTOR_BYTES)


def fitting(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: object) -> NDArray[Any]:
    """``value`` stretched to ``shape``; ValueError where its dtype or shape is another."""
    if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
        return value
    if not isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value).astype(dtype)
    if value.dtype != dtype:
        raise ValueError(f"a value of {value.dtype} stored into {where!r}: cast it to {dtype} first")
    if value.ndim not in (0, len(shape)) or any(n not in (1, m) for n, m in zip(value.shape, shape, strict=False)):
        raise ValueError(f"a value of shape {value.shape} stored into {where!r}: must be {shape}")
    return np.broadcast_to(value, shape)


def copied(value: NDArray[Any], source: Layout, target: Layout, width: int, order: str | None = None) -> NDArray[Any]:
    """``value[*lead, *source modes, element]`` put into the modes of ``target``: element i to element i.

    i counts colexicographically (the first mode fastest), except between dense row-major layouts of scalars whose count
    ``width`` divides: those are copied in memory order, as the original does with vectors of ``width``. ``order``
    ("colex" or "memory", the last mode fastest) decides instead."""
    lead, (element,) = value.shape[: value.ndim - source.rank - 1], value.shape[-1:]
    shape = tuple(mode.size for mode in target.modes)
    if value.shape[len(lead) : -1] == shape:
        return value
    if order not in (None, "colex", "memory"):
        raise ValueError(f"order is {order!r}: must be 'colex', 'memory' or None")
    dense = element == 1 and source.is_row_major and target.is_row_major and target.size % width == 0
    if order == "memory" or (order is None and dense):
        return value.reshape(*lead, *shape, element)
    return _reversed(_reversed(value, source.rank).reshape(*lead, *shape[::-1], element), target.rank)


def _reversed(value: NDArray[Any], rank: int) -> NDArray[Any]:
    lead = value.ndim - rank - 1
    return value.transpose(*range(lead), *reversed(range(lead, lead + rank)), value.ndim - 1)
