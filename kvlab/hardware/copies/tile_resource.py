"""Tile tensors as loaders take them: of which memory and dtype, and how AMD's buffer loads reach one in DRAM."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.checks import integers, shown
from kvlab.hardware._arrays import IntArray
from kvlab.layout import TileTensor
from kvlab.layout.algebra.int_tuple import flatten
from kvlab.layout.tensor.access import leading
from kvlab.memory import AddressSpace, as_dtype

DRAM = (AddressSpace.GLOBAL, AddressSpace.GENERIC)
LDS = (AddressSpace.SHARED,)
REGISTERS = (AddressSpace.LOCAL,)
FAR = 1 << 40  # a byte offset past the bound of every resource


def check_tile(
    name: str, tile: Any, spaces: tuple[AddressSpace, ...], dtype: Any, shape: tuple[int, ...] | None = None
) -> None:
    """TypeError or ValueError, which begins with the argument's ``name``, unless ``tile`` is a tile tensor of scalars
    in one of the address spaces, of ``dtype`` or one of the same size (loaders move bits), and of that shape; in DRAM
    of rows whose columns are contiguous.

    >>> tile = TileTensor.from_numpy(np.zeros((32, 8), np.float32))
    >>> check_tile("src", tile, DRAM, "fp32", (32, 8))
    >>> check_tile("dst", tile, LDS, "fp32")
    Traceback (most recent call last):
        ...
    ValueError: dst is in global memory: must be in shared memory
    """
    where = " or ".join(space.value for space in spaces)
    if not isinstance(tile, TileTensor):
        raise TypeError(f"{name} is {shown(tile)}: must be a TileTensor in {where} memory")
    if tile.memory.space not in spaces:
        raise ValueError(f"{name} is in {tile.memory.space.value} memory: must be in {where} memory")
    if tile.element_size != 1 or tile.dtype.itemsize != as_dtype(dtype).itemsize:
        vector = "" if tile.element_size == 1 else f" x{tile.element_size}"
        raise ValueError(f"{name} is of {tile.dtype}{vector}: must be of {as_dtype(dtype)}")
    if spaces is DRAM and (not tile.layout.is_flat or tile.rank != 2 or flatten(tile.layout.stride)[1] != 1):
        raise ValueError(f"{name} is {tile.layout}: must be rows x columns, the columns contiguous")
    if shape is not None and tile.shape != tuple(shape):
        raise ValueError(f"{name} is {' x '.join(map(str, tile.shape))}: must be {' x '.join(map(str, shape))}")


def buffer_resource(
    tile: TileTensor, row: Any, col: Any, lead: int = 1, columns: Any = None
) -> tuple[IntArray, IntArray, IntArray]:
    """Byte offsets by which buffer loads reach the elements ``(row, col)``, int arrays ``[...]``, of tiles in DRAM, in
    bytes.

    tile : rows x columns, the columns contiguous. ``lead`` leading axes of its offset are those of many tiles; one more
        is that of the pieces, all of so many rows, that the tile consists of. The bound, ``valid_rows``, is LINEAR:
        a column past the last of an earlier row reads what follows in DRAM.
    columns : that exist, an int or ints ``[lead axes]``; the others are put past the bound.

    Returns the resource's base ``[lead axes, ...]``, voffset ``[...]`` (``[lead axes, ...]`` with ``columns`` of each)
    and num_records ``[lead axes, ...]``.

    >>> from kvlab.layout import Layout
    >>> dram = TileTensor.from_numpy(np.arange(12, dtype=np.float32)).memory
    >>> two_pieces = TileTensor(dram, "fp32", Layout.row_major(2, 2), np.array([[8, 0]]), valid_rows=np.array([[2, 1]]))
    >>> base, voffset, records = buffer_resource(two_pieces, np.arange(4), 0 * np.arange(4))
    >>> (base + voffset).tolist(), (voffset < records).tolist()
    ([[32, 40, 0, 8]], [[True, True, True, False]])
    """
    check_tile("tile", tile, DRAM, tile.dtype)
    return resource_of(tile, integers("row", row), integers("col", col), lead, columns)


def resource_of(
    tile: TileTensor, row: IntArray, col: IntArray, lead: int, columns: Any = None
) -> tuple[IntArray, IntArray, IntArray]:
    """:func:`buffer_resource` of what has been looked at."""
    (rows, cols), (pitch, _) = flatten(tile.layout.shape), flatten(tile.layout.stride)
    first = np.asarray(tile.offset)
    first = first.reshape((*first.shape, *(1,) * (lead - first.ndim)))
    if first.ndim > lead + 1:
        raise ValueError(f"tile is {tile!r}: must be an offset of at most {lead + 1} axes")
    records = (rows - 1) * pitch + cols + 0 * first
    if tile.end is not None:
        records = np.maximum(leading(np.asarray(tile.end), first.ndim) - first, 0)
    size, run = tile.dtype.itemsize, row * 0
    if first.ndim == lead:
        first, records = first[..., None], records[..., None]
    elif first.shape[-1] > 1:
        run = np.minimum(row // rows, first.shape[-1] - 1)
    base, records = tile.memory.base + first * size, records * size
    voffset = ((row - run * rows) * pitch + col) * size
    if columns is not None:
        known = leading(integers("columns", columns), lead)
        voffset = np.where(col < (known if np.ndim(known) == 0 else leading(known, lead + col.ndim)), voffset, FAR)
    if first.shape[-1] > 1:
        return base[..., run], voffset, records[..., run]
    ones = (*first.shape[:lead], *(1,) * row.ndim)
    return base.reshape(ones), voffset, records.reshape(ones)
