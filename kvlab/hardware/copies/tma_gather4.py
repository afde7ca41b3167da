"""Tiles gathered by row number (sm_100): the image is that of the bulk K-major copy of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.common.checks import count, integers
from kvlab.memory import Memory, as_dtype

from . import tma
from .mbarrier import SharedMemBarrier
from .tensor_map import TensorMapSwizzle, TmaDescriptor
from .tma_tile import TMATensorTile, whole_boxes


def _gather4_box_width(dtype: Any, tile_width: int, swizzle_mode: Any) -> int:
    """Columns of the box of a gather: the swizzle's width in elements, ``tile_width`` without a swizzle.

    As with other tiles, the columns of a swizzled one are whole boxes, or ValueError.

    >>> _gather4_box_width("bf16", 576, "128B"), _gather4_box_width("int64", 72, "none")
    (64, 72)
    >>> _gather4_box_width("bf16", 72, "128B")
    Traceback (most recent call last):
        ...
    ValueError: tile_width 72: rows of 72*2 = 144 B are not a multiple of 128 B, the span of swizzle 128B
    """
    mode = TensorMapSwizzle.of(swizzle_mode)
    whole_boxes(f"tile_width {tile_width}", tile_width, as_dtype(dtype).itemsize, mode)
    return mode.granularity(dtype) if mode else tile_width


def create_tma_tile_gather4(
    array: Any, tile_width: int, swizzle: Any = "none", tile_height: int = 4, l2_promotion: Any = "NONE"
) -> TMAGather4Tile:
    """Rows by number (sm_100): tiles of ``tile_height`` rows of a matrix and its first ``tile_width`` columns.

    >>> create_tma_tile_gather4(np.zeros((64, 576), np.float16), 512, "128B").column_groups
    8
    """
    array = np.asarray(array)
    for name, value in (("tile_width", tile_width), ("tile_height", tile_height)):
        count(name, value)
    if array.ndim != 2 or not 1 <= tile_width <= array.shape[1]:
        raise ValueError(f"tile_width is {tile_width}: must be 1 to the columns of a matrix, not of {array.shape}")
    if tile_height < 4 or tile_height % 4:
        raise ValueError(f"tile_height is {tile_height}: must be a positive multiple of 4")
    width = _gather4_box_width(array.dtype, tile_width, swizzle)
    descriptor = TmaDescriptor.of(array[:, :tile_width], (1, width), swizzle, l2_promotion=l2_promotion)
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
        """The shape is that of one group of columns; where its boxes lie is the gather's matter."""
        four, copies = 4 * self.descriptor.pitch, self.column_groups * self.tile_height // 4
        if copies > 1 and four % 128:
            raise ValueError(
                f"tile_width {self.tile_width}: four rows of a box take {four} bytes, not a multiple of 128: the "
                f"second of {copies} copies could not be made"
            )

    @property
    def tile_height(self) -> int:
        """Rows of the tile."""
        return self.tile_shape[0]

    @property
    def column_groups(self) -> int:
        """Boxes side by side."""
        return self.tile_width // self.descriptor.box[1]

    @property
    def transaction_bytes(self) -> int:
        """Bytes that arrive: all boxes in full."""
        return self.tile_height * self.column_groups * self.descriptor.transaction_bytes

    def async_copy_gather4_tile(
        self, memory: Memory, address: Any, rows: Any, barrier: SharedMemBarrier | None = None
    ) -> None:
        """``rows`` ``[..., tile_height]`` to ``address``: column group after column group, four rows at a time."""
        index = integers("gather4: rows", rows)
        if index.ndim < 1 or index.shape[-1] != self.tile_height:
            raise ValueError(f"rows has shape {index.shape}: must be [..., {self.tile_height}]")
        pitch = self.descriptor.pitch
        groups, quads = np.ogrid[: self.column_groups, : self.tile_height // 4]
        where = integers("gather4: address", address)[..., None, None] + (groups * self.tile_height + 4 * quads) * pitch
        four = index.reshape(*index.shape[:-1], 1, -1, 4)
        four = np.broadcast_to(four, (*index.shape[:-1], *where.shape[-2:], 4))
        column = groups * self.descriptor.box[1] + 0 * quads
        tma.gather4(self.descriptor, four, column, memory, where, barrier)
