"""DMA of a CTA from DRAM to shared memory on gfx950: which wave moves what, one warp tile of 32 rows at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import DmaPlan, SubTileLoaderLDS
from kvlab.layout import Layout, TileTensor
from kvlab.staging.tile.iterator import sub_tiles

from .params import KVBufferParams

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class CTADmaPlan:
    """The warp tiles of a load, ``shape`` 32 rows x columns: of each its wave, its group of 32 rows and its block,
    ``[tiles]``. The loader moves them by ``buffer_load ... lds`` instructions, 16 bytes a lane, those of a tile one
    after the other; of all instructions ``[n]``: ``wave``, the LDS ``offset`` in elements, and the element of the tile
    that each lane fetches, ``row`` and ``col`` ``[n, 64]``."""

    loader: SubTileLoaderLDS
    shape: tuple[int, int]
    BN: int
    tile_wave: IntArray
    tile_row: IntArray
    block: IntArray

    @functools.cached_property
    def _lanes(self) -> DmaPlan:
        return self.loader.plan(*self.shape)

    @functools.cached_property
    def wave(self) -> IntArray:
        return np.repeat(self.tile_wave, len(self._lanes.offset))

    @functools.cached_property
    def offset(self) -> IntArray:
        rows, width = self.shape
        first = self.block * self.BN * width + self.tile_row * rows * width
        return (first[:, None] + self._lanes.offset).reshape(-1)

    @functools.cached_property
    def row(self) -> IntArray:
        return (self.tile_row[:, None, None] * self.shape[0] + self._lanes.row).reshape(len(self.wave), -1)

    @functools.cached_property
    def col(self) -> IntArray:
        return (self.block[:, None, None] * self.shape[1] + self._lanes.col).reshape(len(self.wave), -1)

    def places(self, parent: TileTensor, block: int = 0) -> TileTensor:
        """Places where the loader puts the warp tiles ``[1, tiles]``: in ``parent``, blocks of ``BN x columns`` side by
        side, from ``block`` on."""
        rows, width = self.shape
        over, row = np.divmod(self.tile_row, self.BN // rows)
        to = block + self.block + over  # rows past a block are those of the next, as for MAX's warps without a guard
        if to.max() >= parent.shape[1] // width:
            layout = Layout((self.BN, (int(to.max()) + 1) * width), parent.layout.stride)
            parent = TileTensor(parent.memory, parent.dtype, layout, parent.offset)
        return parent.tile(self.shape, (row[None], to[None]), stride_layout=(width, 1))

    def sources(
        self, gmem_tile: TileTensor, strip: int = 0, columns: int | None = None
    ) -> tuple[TileTensor, IntArray | None]:
        """Sources of the loader: sub-tiles of ``gmem_tile``, ``strip`` blocks further right; and how many columns of
        each exist, where ``gmem_tile`` ends after ``columns``."""
        block = strip + self.block
        src = sub_tiles(gmem_tile, self.shape, self.tile_row, block)
        return src, None if columns is None else (columns - block * self.shape[1])[None]

    def by_warp(self, count: Any, num_warps: int) -> IntArray:
        """``count`` ``[n]`` (or 1 for each instruction), summed for each wave: ``[warps]``."""
        weights = np.broadcast_to(np.asarray(count, np.int64), self.wave.shape)
        return np.bincount(self.wave, weights, minlength=num_warps).astype(np.int64)


def warp_tiles(p: KVBufferParams, wave: IntArray, tile_row: IntArray, block: IntArray, width: int) -> CTADmaPlan:
    """The plan of warp tiles: of each its wave, its group of 32 rows and its block, ``[tiles]``.

    Block b of shared memory is ``BN x width``, row-major, and holds columns ``[b * width, (b + 1) * width)``; a row of
    it has 64 or 128 bytes."""
    loader = SubTileLoaderLDS(p.dtype, p.swizzle)
    loader.plan(p.warp_tile_rows, width)  # which refuses what it cannot move
    return CTADmaPlan(loader, (p.warp_tile_rows, width), p.BN, wave, tile_row, block)
