"""Tiles gathered by row number (sm_100): the image is that of the bulk K-major copy of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.memory import Memory

from . import tma
from ._arrays import integers, whole
from .mbarrier import SharedMemBarrier
from .tensor_map import TensorMapSwizzle, TmaDescriptor
from .tma_tile import TMATensorTile

__all__ = ["TMAGather4Tile", "create_tma_tile_gather4", "gather4_box_width"]


def gather4_box_width(dtype: Any, tile_width: int, swizzle_mode: Any) -> int:
    """Columns of the box of a gather: the swizzle's width in elements, ``tile_width`` without a swizzle.

    >>> gather4_box_width("bf16", 576, "128B"), gather4_box_width("int64", 72, "none")
    (64, 72)
    """
    mode = TensorMapSwizzle.of(swizzle_mode)
    return mode.granularity(dtype) if mode else tile_width


def create_tma_tile_gather4(
    array: Any,
    tile_width: int,
    swizzle: Any = "none",
    tile_height: int = 4,
    tile_stride: int | None = None,
    l2_promotion: Any = "NONE",
) -> TMAGather4Tile:
    """Rows by number (sm_100): tiles of ``tile_height`` rows of a matrix and ``tile_width`` of its columns.

    ``tile_stride``: columns of the tensor that exist for the copy, ``tile_width`` by default; a last group of columns
    that hangs over ``tile_width`` brings real columns up to it.

    >>> create_tma_tile_gather4(np.zeros((64, 128), np.float16), 72, "128B", tile_stride=128).column_groups
    2
    """
    array = np.asarray(array)
    mode = TensorMapSwizzle.of(swizzle)
    stride = tile_width if tile_stride is None else tile_stride
    for name, value in (("tile_width", tile_width), ("tile_stride", stride), ("tile_height", tile_height)):
        whole(value, name)
    if array.ndim != 2 or tile_width < 1 or stride < tile_width or stride > array.shape[1]:
        raise ValueError(
            f"tile_width {tile_width} must be positive, tile_stride {stride} not less, and both fit the columns of "
            f"a matrix, not {array.shape}"
        )
    if tile_height < 4 or tile_height % 4:
        raise ValueError(f"tile_height {tile_height} is not a positive multiple of 4")
    width = gather4_box_width(array.dtype, tile_width, mode)
    descriptor = TmaDescriptor.of(array[:, :stride], (1, width), mode, l2_promotion=l2_promotion)
    return TMAGather4Tile(descriptor, (tile_height, width), tile_width=tile_width)


@dataclass(frozen=True, eq=False)
class TMAGather4Tile(TMATensorTile):
    """See :func:`create_tma_tile_gather4`; the image is that of the bulk K-major copy of the same rows.

    >>> tensor = np.arange(32 * 16, dtype=np.int32).reshape(32, 16)
    >>> tile, smem = create_tma_tile_gather4(tensor, 8, tile_height=8), Memory(256)
    >>> tile.async_copy_gather4_tile(smem, 0, [3, 1, 4, 1, 5, 9, 2, 6])
    >>> (smem.image(np.int32).reshape(8, 8)[:, 0] // 16).tolist()
    [3, 1, 4, 1, 5, 9, 2, 6]
    """

    tile_width: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """The shape is that of one group of columns; where its boxes stand is the gather's matter."""

    @property
    def tile_height(self) -> int:
        """Rows of the tile."""
        return self.tile_shape[0]

    @property
    def column_groups(self) -> int:
        """Boxes side by side."""
        return -(-self.tile_width // self.descriptor.box[1])

    @property
    def transaction_bytes(self) -> int:
        """What arrives: the true bytes of the boxes, overhang included (MAX's ``gather4_tile_bytes`` leaves it out)."""
        return self.tile_height * self.column_groups * self.descriptor.transaction_bytes

    def async_copy_gather4_tile(
        self, memory: Memory, address: Any, rows: Any, barrier: SharedMemBarrier | None = None
    ) -> None:
        """``rows`` ``[..., tile_height]`` to ``address``: column group after column group, four rows at a time."""
        index = integers(rows, "gather4: rows")
        if index.ndim < 1 or index.shape[-1] != self.tile_height:
            raise ValueError(f"rows of shape {index.shape} are not [..., {self.tile_height}]")
        pitch = self.descriptor.pitch
        groups, quads = np.ogrid[: self.column_groups, : self.tile_height // 4]
        where = integers(address, "gather4: address")[..., None, None] + (groups * self.tile_height + 4 * quads) * pitch
        four = index.reshape(*index.shape[:-1], 1, -1, 4)
        four = np.broadcast_to(four, (*index.shape[:-1], *where.shape[-2:], 4))
        column = groups * self.descriptor.box[1] + 0 * quads
        tma.gather4(self.descriptor, four, column, memory, where, barrier)
