"""Pointers into a memory, one or one for every program of a launch: MAX's ``UnsafePointer``, checked here."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout import Layout, TileTensor
from kvlab.memory import Memory, OutOfBounds, as_dtype


@dataclass(frozen=True, eq=False)
class UnsafePointer:
    """The element ``offset`` of ``memory`` seen as ``dtype``, or an array of such pointers.

    offset : in elements of ``dtype`` from the first byte of the memory; an int, or an int64 array of any shape (one
        pointer for each program). It may be anything from 0 to one past the end, as in C; else :class:`OutOfBounds`.
        What is read or written through it must lie inside the allocation.

    >>> p = UnsafePointer(Memory.over(np.arange(12, dtype=np.float32), name="dram"), np.array([0, 8]), np.float32)
    >>> (p + 1).load(2)
    array([[ 1.,  2.],
           [ 9., 10.]], dtype=float32)
    >>> p.byte_address
    array([ 0, 32])
    >>> p + 5
    Traceback (most recent call last):
        ...
    kvlab.memory.OutOfBounds: dram: pointer to element 13 (float32) is outside [0, 12]
    """

    memory: Memory
    offset: Any
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        whole = np.asarray(self.offset)
        if whole.dtype.kind not in "iu":
            raise ValueError(f"offset is {self.offset!r}: must be an integer or an array of integers")
        object.__setattr__(self, "offset", operator.index(whole[()]) if whole.ndim == 0 else whole.astype(np.int64))
        elements = self.memory.nbytes // self.dtype.itemsize
        if whole.size and not 0 <= whole.min() <= whole.max() <= elements:
            bad = int(whole.min() if whole.min() < 0 else whole.max())
            raise OutOfBounds(f"{self.memory.name}: pointer to element {bad} ({self.dtype}) is outside [0, {elements}]")

    def __bool__(self) -> bool:
        """Tells whether it points into memory: False for the null pointer."""
        return self.memory.nbytes > 0

    @property
    def byte_address(self) -> Any:
        """The byte address: int, or int64 array of the shape of ``offset``."""
        return self.memory.base + self.offset * self.dtype.itemsize

    def __add__(self, elements: Any) -> UnsafePointer:
        """The pointer moved by ``elements`` (int or an array that broadcasts against ``offset``)."""
        return UnsafePointer(self.memory, self.offset + np.asarray(elements, np.int64), self.dtype)

    def load(self, width: int = 1) -> np.ndarray[Any, Any]:
        """``width`` contiguous elements from each pointer: ``[*offset.shape, width]``."""
        return self.memory.load(self.byte_address, self.dtype, width)

    def store(self, value: Any) -> None:
        """Write ``value[*offset.shape, width]``, which must have the pointer's dtype (ValueError)."""
        value = np.asarray(value)
        if value.dtype != self.dtype:
            raise ValueError(f"value has dtype {value.dtype}, the pointer {self.dtype}: convert with .astype")
        self.memory.store(self.byte_address, value)

    def tile_tensor(self, layout: Layout, valid_rows: Any = None) -> TileTensor:
        """The memory from here on as a tile of that layout (strides in elements), one for each program.

        valid_rows : rows that exist, an int or one for each program; see :class:`TileTensor`."""
        return TileTensor(self.memory, self.dtype, layout, self.offset, valid_rows=valid_rows)


def null(dtype: Any) -> UnsafePointer:
    """The null pointer, for what a cache does not have: it is false, and nothing can be read or written through it.

    >>> bool(null(np.float32))
    False
    >>> null(np.float32).load()
    Traceback (most recent call last):
        ...
    kvlab.memory.OutOfBounds: null: access of 4 bytes at address 0 is outside [0, 0)
    """
    return UnsafePointer(Memory(0, name="null"), 0, dtype)
