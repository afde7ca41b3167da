"""What one TMA copy does, for its picture: every box in the tensor, and what lies in each slot of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .shared_memory import ZEROS

__all__ = ["Box", "TmaCopy"]

SLOT = 16


@dataclass(frozen=True)
class Box:
    """One hardware copy: where it starts in the tensor, in bytes from the tile's first, and in the tile.

    coords        slowest dimension first
    row, vector   of the tile: of each of the box's rows [rows], and of its first 16 bytes
    """

    coords: tuple[int, ...]
    offset: int
    row: npt.NDArray[np.int64]
    vector: int


@dataclass(frozen=True)
class TmaCopy:
    """All boxes of a copy that goes to ``address``."""

    descriptor: Any
    boxes: tuple[Box, ...]
    address: int
    extent: tuple[int, ...]

    @classmethod
    def of(cls, tile: Any, coords: Sequence[int] | None, address: int, rows: Sequence[int] | None) -> TmaCopy:
        """From a descriptor, a tile of several boxes, or a tile gathered by ``rows``."""
        descriptor = getattr(tile, "descriptor", tile)
        size = descriptor.dtype.itemsize
        if address % 128 or address < 0:
            raise ValueError(f"address {address} is not a multiple of 128 bytes: the copy would fault")
        if hasattr(tile, "column_groups"):
            boxes = _gathered(tile, rows)
            return cls(descriptor, boxes, address, (tile.tile_height, tile.tile_width))
        start = (0,) * descriptor.rank if coords is None else tuple(int(x) for x in coords)
        if len(start) != descriptor.rank or start[-1] * size % 16:
            raise ValueError(
                f"coords {start} must be {descriptor.rank}, slowest first, the last times {size} bytes a multiple of 16"
            )
        if not hasattr(tile, "corners"):
            count = int(np.prod(descriptor.smem_box[:-1]))
            return cls(descriptor, (Box(start, 0, np.arange(count), 0),), address, descriptor.smem_box)
        boxes = tuple(
            Box(
                tuple(a + b for a, b in zip(start, corner, strict=True)), offset * size,
                _rows(corner, descriptor.smem_box, tile.tile_shape), corner[-1] * size // SLOT,
            )
            for corner, offset in zip(tile.corners.tolist(), tile.offsets.tolist(), strict=True)
        )  # fmt: skip
        return cls(descriptor, boxes, address, tile.tile_shape)

    @property
    def end(self) -> int:
        """The byte address past the image."""
        return self.address + max(box.offset for box in self.boxes) + int(self.descriptor.image_bytes)

    def inside(self, box: Box) -> npt.NDArray[np.bool_]:
        """[rows, vectors] of a box: does anything of the 16 bytes lie in the tensor?"""
        d = self.descriptor
        index = np.indices(d.smem_box[:-1]).reshape(d.rank - 1, int(np.prod(d.smem_box[:-1])))
        good = np.ones(index.shape[1], bool)
        for at, start, step, extent in zip(index, box.coords, d.element_strides, d.shape, strict=False):
            good &= (start + at * step >= 0) & (start + at * step < extent)
        width = SLOT // d.dtype.itemsize
        first = box.coords[-1] + np.arange(0, d.box[-1], width)
        return good[:, None] & (first + width > 0) & (first < d.shape[-1])

    def slots(self) -> npt.NDArray[np.int64]:
        """[slots, 2] the (row, vector) of the tile in every 16 bytes from ``address`` on; -1 untouched, -3 zeros."""
        d = self.descriptor
        out = np.full(((self.end - self.address) // SLOT, 2), -1, np.int64)
        for box in self.boxes:
            inside = self.inside(box)
            where = d.image(self.address + box.offset).reshape(-1, d.box[-1])[:, :: SLOT // d.dtype.itemsize]
            vector = box.vector + np.arange(where.shape[1])
            pair = np.stack(np.broadcast_arrays(box.row[:, None], vector), axis=-1)
            out[(where - self.address) // SLOT] = np.where(inside[..., None], pair, ZEROS)
        return out


def _rows(corner: list[int], box: tuple[int, ...], tile: tuple[int, ...]) -> npt.NDArray[np.int64]:
    index = np.indices(box[:-1]).reshape(len(box) - 1, -1)
    at = [np.minimum(i + c, n - 1) for i, c, n in zip(index, corner, tile, strict=False)]
    return np.asarray(np.ravel_multi_index(at, tile[:-1]), np.int64)


def _gathered(tile: Any, rows: Sequence[int] | None) -> tuple[Box, ...]:
    d = tile.descriptor
    numbers = list(range(tile.tile_height)) if rows is None else [int(r) for r in rows]
    if len(numbers) != tile.tile_height:
        raise ValueError(f"rows {numbers} are {len(numbers)}, the tile has {tile.tile_height}")
    wide = d.box[1]
    return tuple(
        Box((number, group * wide), (group * tile.tile_height + i) * d.pitch, np.array([i]),
            group * wide * d.dtype.itemsize // SLOT)
        for group in range(tile.column_groups) for i, number in enumerate(numbers)
    )  # fmt: skip
