"""DMA of a CTA from DRAM to shared memory on gfx950: which wave moves what, one warp tile of 32 rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import SubTileLoaderLDS

from .params import KVBufferParams

__all__ = ["DmaPlan", "warp_tiles"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class DmaPlan:
    """``buffer_load ... lds`` instructions, 16 bytes a lane: the wave of each ``[n]``, its LDS offset ``[n]`` in
    elements, and the element of the tile that each lane fetches, ``row`` and ``col`` ``[n, 64]``."""

    wave: IntArray
    offset: IntArray
    row: IntArray
    col: IntArray

    def by_warp(self, count: Any, num_warps: int) -> IntArray:
        """``count`` ``[n]`` (or 1 for each instruction), summed for each wave: ``[warps]``."""
        weights = np.broadcast_to(np.asarray(count, np.int64), self.wave.shape)
        return np.bincount(self.wave, weights, minlength=num_warps).astype(np.int64)


def warp_tiles(p: KVBufferParams, wave: IntArray, tile_row: IntArray, block: IntArray, width: int) -> DmaPlan:
    """The instructions that move warp tiles: of each its wave, its group of 32 rows and its block, ``[tiles]``.

    Block b of shared memory is ``BN x width``, row-major, and holds columns ``[b * width, (b + 1) * width)``; a row of
    it has 64 or 128 bytes.
    """
    rows = p.warp_tile_rows
    sub = SubTileLoaderLDS(p.dtype, p.swizzle).plan(rows, width)
    first, column = tile_row[:, None] * rows, block[:, None] * width  # [tiles, 1]
    instructions = (len(wave) * len(sub.offset), -1)
    return DmaPlan(
        wave=np.repeat(wave, len(sub.offset)),
        offset=(block[:, None] * p.BN * width + first * width + sub.offset).reshape(-1),
        row=(first[..., None] + sub.row).reshape(instructions),
        col=(column[..., None] + sub.col).reshape(instructions),
    )
