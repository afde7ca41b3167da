"""Model of one TMA copy for its picture: every box in the tensor, and the contents of each slot of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .lanes import UNTOUCHED, ZEROS

SLOT = 16
MOST = 64


@dataclass(frozen=True)
class Box:
    """One hardware copy: where it starts in the tensor, in bytes from the tile's first, and in the tile.

    coords        slowest dimension first
    row, vector   of the tile: of each of the box's rows [rows], and of its first 16 bytes"""

    coords: tuple[int, ...]
    offset: int
    row: npt.NDArray[np.int64]
    vector: int


@dataclass(frozen=True)
class TmaCopy:
    """The boxes of a copy that goes to ``address``: all ``count``, or the first and the last of very many.

    size    bytes of shared memory from ``address`` on
    gathered    whether a box is a row of its own, four of which one copy takes"""

    descriptor: Any
    boxes: tuple[Box, ...]
    address: int
    extent: tuple[int, ...]
    count: int
    size: int
    gathered: bool = False

    @classmethod
    def of(cls, tile: Any, coords: Sequence[int] | None, address: int, rows: Sequence[int] | None) -> TmaCopy:
        """From a descriptor, a tile of several boxes, or a tile gathered by ``rows``."""
        descriptor = getattr(tile, "descriptor", tile)
        size = descriptor.dtype.itemsize
        if address % 128 or address < 0:
            raise ValueError(f"address is {address}: must be a multiple of 128 bytes, or the copy faults")
        if hasattr(tile, "column_groups"):
            count = tile.column_groups * tile.tile_height
            size_of_all = count * descriptor.pitch
            extent = tile.tile_height, tile.tile_width
            return cls(descriptor, _gathered(tile, rows), address, extent, count, size_of_all, True)
        start = (0,) * descriptor.rank if coords is None else tuple(int(x) for x in coords)
        if len(start) != descriptor.rank or start[-1] * size % 16:
            raise ValueError(
                f"coords is {start}: must be {descriptor.rank}, slowest first, the last times {size} B a multiple of 16"
            )
        if not hasattr(tile, "corners"):
            count = int(np.prod(descriptor.smem_box[:-1]))
            box = Box(start, 0, np.arange(count), 0)
            return cls(descriptor, (box,), address, descriptor.smem_box, 1, int(descriptor.image_bytes))
        boxes = tuple(
            Box(
                tuple(a + b for a, b in zip(start, corner, strict=True)), offset * size,
                _rows(corner, descriptor.smem_box, tile.tile_shape), corner[-1] * size // SLOT,
            )
            for corner, offset in ((tile.corners[k].tolist(), int(tile.offsets[k])) for k in _some(len(tile.corners)))
        )
        end = int(tile.offsets.max()) * size + int(descriptor.image_bytes)
        return cls(descriptor, boxes, address, tile.tile_shape, len(tile.corners), end)

    @property
    def whole(self) -> bool:
        """Tells whether all boxes are known."""
        return len(self.boxes) == self.count

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

    def at(self, slot: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[slots, 2] the (row, vector) of the tile in some of the 16-byte slots from ``address`` on; -1 untouched, -3
        zeros."""
        d = self.descriptor
        out = np.full((*slot.shape, 2), UNTOUCHED, np.int64)
        for box in self.boxes:
            place = SLOT * slot - box.offset
            here = (place >= 0) & (place < d.image_bytes)
            if not here.any():
                continue
            where = d.image(self.address + box.offset).reshape(-1, d.box[-1])[:, :: SLOT // d.dtype.itemsize]
            vector = box.vector + np.arange(where.shape[1])
            pair = np.stack(np.broadcast_arrays(box.row[:, None], vector), axis=-1)
            held = np.full((d.image_bytes // SLOT, 2), UNTOUCHED, np.int64)
            held[(where - self.address - box.offset) // SLOT] = np.where(self.inside(box)[..., None], pair, ZEROS)
            found = held[place[here] // SLOT]
            out[here] = np.where(found == UNTOUCHED, out[here], found)
        return out


def _some(count: int) -> list[int]:
    """The boxes that are looked at."""
    return [*range(count)] if count <= MOST else [*range(MOST - 1), count - 1]


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
    which = (divmod(k, tile.tile_height) for k in _some(tile.column_groups * tile.tile_height))
    return tuple(
        Box((numbers[i], group * wide), (group * tile.tile_height + i) * d.pitch, np.array([i]),
            group * wide * d.dtype.itemsize // SLOT)
        for group, i in which
    )
