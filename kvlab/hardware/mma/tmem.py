"""Tensor memory of Blackwell (sm_100): 128 lanes x 512 columns of 32 bits, where tcgen05 accumulates.

Sources: PTX ISA, tensor memory. No chip has confirmed it here."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.checks import count, integers, shown
from kvlab.hardware._arrays import Array
from kvlab.layout import Layout
from kvlab.memory import AddressSpace, Memory, as_dtype

TMEM_LANES, TMEM_COLUMNS = 128, 512


def tmem_address(lane: Any, column: Any) -> Any:
    """The 32-bit address of a cell: the lane in the upper 16 bits, the column in the lower.

    >>> hex(tmem_address(32, 5))
    '0x200005'
    """
    for name, value in (("lane", lane), ("column", column)):
        if not np.size(integers(name, value)):
            raise ValueError(f"{name} is {value!r}: must be at least one")
    if np.any((np.asarray(lane) < 0) | (np.asarray(lane) >= TMEM_LANES)):
        raise ValueError(f"lane is {lane}: must be 0 to {TMEM_LANES - 1}")
    if np.any((np.asarray(column) < 0) | (np.asarray(column) >= TMEM_COLUMNS)):
        raise ValueError(f"column is {column}: must be 0 to {TMEM_COLUMNS - 1}")
    return lane << 16 | column


def tmem_layout(columns: int = TMEM_COLUMNS) -> Layout:
    """(lane, column) -> cell of an allocation of ``columns`` columns: a power of two from 32 to 512.

    >>> tmem_layout(64)
    Layout("(128,64):(1,128)")
    """
    if columns not in (32, 64, 128, 256, 512):
        raise ValueError(f"columns {shown(columns)} of tensor memory are not 32, 64, 128, 256 or 512")
    return Layout((TMEM_LANES, columns), (1, TMEM_LANES))


class TensorMemory:
    """An allocation of tensor memory: no pointers, only copies between its lanes and the registers of a warp.

    >>> tmem = TensorMemory(32)
    >>> tmem.store(1, 4, np.arange(64, dtype=np.float32).reshape(32, 2))  # warp 1: lanes 32 to 63
    >>> tmem.load(1, 5, 1)[:3, 0].tolist()
    [1.0, 3.0, 5.0]
    """

    def __init__(self, columns: int = TMEM_COLUMNS) -> None:
        self.layout = tmem_layout(columns)
        self.columns = columns
        self.memory = Memory(4 * self.layout.size, space=AddressSpace.LOCAL, name="tensor memory")

    def load(self, warp: int, column: int, repeat: int, dtype: Any = np.float32) -> Array:
        """``tcgen05.ld.32x32b.x<repeat>``: thread t of warp ``warp`` (0 to 3) gets columns ``column ..`` of lane ``32 *
        warp + t``: ``[32, repeat]`` of a 32-bit dtype."""
        return self.memory.load(self._cells(warp, column, repeat), _word(dtype))[..., 0]

    def store(self, warp: int, column: int, value: Any) -> None:
        """``tcgen05.st.32x32b``: the inverse of :meth:`load`; ``value`` ``[32, repeat]`` of a 32-bit dtype."""
        value = np.asarray(value)
        if value.ndim != 2 or value.shape[0] != 32:
            raise ValueError(f"value has shape {value.shape}: must be [32, repeat], a row for each thread of the warp")
        cells = self._cells(warp, column, value.shape[1])
        self.memory.store(cells, value.astype(_word(value.dtype))[..., None])

    def _cells(self, warp: int, column: int, repeat: int) -> Any:
        if warp not in (0, 1, 2, 3):
            raise ValueError(f"warp {shown(warp)} of the warpgroup is not 0 to 3; each reaches its own 32 lanes only")
        if repeat not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(f"repeat is {shown(repeat)}: must be a power of two from 1 to 128")
        if not 0 <= count("column", column) <= self.columns - repeat:
            raise ValueError(f"columns {column} to {column + repeat - 1} are not 0 to {self.columns - 1}")
        return 4 * self.layout(32 * warp + np.arange(32)[:, None], column + np.arange(repeat))


def _word(dtype: Any) -> np.dtype[Any]:
    word = as_dtype(dtype)
    if word.itemsize != 4:
        raise ValueError(f"tensor memory holds 32-bit cells, not {word}")
    return word
