"""One CTA of MLA decode over lists of slots on sm_100: rows by TMA gather4, ldmatrix, mma.sync.

The products are those of our decode tile of 16 or 32 query rows, which compiles to mma.sync on sm_100, too. K comes as
the descriptors of :mod:`kvlab.cache` have it: four rows an instruction, 64 of their columns, latent and rope part
alike, into panels of 128 bytes a row, swizzled by TMA; a row that a list does not name is one outside of the tensor,
which arrives as zeros. One thread issues the copies of a tile, whose bytes an mbarrier expects::

    write Q, barrier, expect, gather                                           before the loop
    loop: wait for the mbarrier, read K, ..., write P, barrier, read P, read V, barrier, expect, gather the next
    wait for the mbarrier                                                      behind it

The portable kernel has cp.async in their place; V is read from K's tile in both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvlab.cache.row_indices import FILL_ROW
from kvlab.hardware import TMAGather4Tile
from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import Memory
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import key_offsets
from kvlab.staging.tile.shared_tile import SharedTile, TileView
from kvlab.staging.tile.tile_pipeline import TilePipeline
from kvlab.staging.tile.tile_spec import KVRows, TileSpec
from kvlab.staging.tile.tile_walk import expect_fetched

from .mma_sync_cta import MmaSyncCTA
from .mma_sync_plan import MmaSyncShape
from .swizzled_tile import SwizzledTile
from .wgmma_plan import PanelTile

Array = np.ndarray[Any, Any]
ISSUER = 0
"""The warp whose thread issues copies."""


class PanelRows(SwizzledTile):
    """Rows of 16 bits as panels of 128 bytes a row, swizzled as TMA does."""

    def address(self, row: Any, vector: Any) -> Any:
        """Byte address of 16-byte ``vector`` of ``row``."""
        return PanelTile(self.rows, self.row_bytes // 2, self.base).address(row, vector)


@dataclass(frozen=True)
class GatheredShape(MmaSyncShape):
    """Sizes of the tile: K and Q lie in panels, all columns of a row; V is read from K's."""

    def place(self, role: str) -> SwizzledTile:
        return _places(self)[0][role]

    @property
    def shared_bytes(self) -> int:
        return _places(self)[1]


@functools.cache
def _places(shape: GatheredShape) -> tuple[dict[str, SwizzledTile], int]:
    """Stages of K, Q, and P in shared memory, and the bytes in all."""
    plain, base = Swizzle.identity("vector"), 0
    places: dict[str, SwizzledTile] = {}
    stages = [f"k{stage or ''}" for stage in range(shape.stages)]
    for role, rows in (*((name, shape.BN) for name in stages), ("q", shape.BM)):
        places[role] = PanelRows(rows, 2 * shape.BD, base, plain)
        base += places[role].nbytes
    places["v"], places["p"] = places["k"], SwizzledTile(shape.BM, 2 * shape.BN, base)
    return places, base + places["p"].nbytes


class GatherPipeline(TilePipeline):
    """Copies whose bytes mbarriers expect: ``wait(stage)`` waits for those of a stage."""

    def __init__(self, copy: Any, wait: Callable[[int], None], hazards: Any, *, ahead: int) -> None:
        super().__init__(copy, copy, hazards, barrier_before="k", ahead=ahead)
        self.wait = wait

    def load(self, role: str, tile: TileTensor) -> None:
        if self.following:
            expect_fetched(self._flying[role], tile, role)
            self.wait(self._next_stage(role))
        else:
            super().load(role, tile)
            self.wait(self.stage[role])

    def drain(self) -> None:
        for _ in self._flying["k"]:
            self.wait(self._next_stage("k"))
        self._flying["k"].clear()

    def _end_group(self) -> None:
        """Copies are in no group: mbarriers count their bytes."""


class Gather4CTA(MmaSyncCTA):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers."""

    buffer = "TMA gather4 into swizzled panels; ldmatrix"
    whole_rows = dense_rows = True
    gather: TMAGather4Tile

    def __init__(self, shape: MmaSyncShape, programs: int, traffic: Traffic, **options: Any) -> None:
        super().__init__(shape, programs, traffic, **options)
        self.full = [self.hazards.mbarrier(f"k full[{stage}]") for stage in range(self.stages)]
        self.pipeline = GatherPipeline(self._gather, self._wait, self.hazards, ahead=self.stages)

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self:
        """The model for a tile of whole rows, those of ``rows.k`` by their number."""
        made = super().of(tile, rows, traffic, beside=beside)
        made.gather = rows.k.create_gather4_tma_tile(
            tile_height=tile.BN, tile_width=tile.k[0], swizzle_mode="128B"
        )
        return made

    @classmethod
    def shape_of(cls, tile: TileSpec) -> GatheredShape:
        """The sizes of the model for a tile."""
        return GatheredShape(
            tile.BM, tile.BN, *tile.k, tile.dtype, tile.arch, v_in_k=True, v_columns=tile.v, warps=tile.warps,
            stages=max(tile.ahead, 1),
        )

    def load_q(self, dram: Memory, offset: Array, valid: Array, role: str = "q") -> SharedTile:
        """Q rows through registers into shared memory, and a barrier: an mbarrier of K tells nothing of Q."""
        q = super().load_q(dram, offset, valid, role)
        self.hazards.barrier()
        return q

    def split_q(self, q: SharedTile) -> tuple[TileView, TileView]:
        """Q, whose columns lie side by side, as its latent and its rope part."""
        return self._split(q)

    def split_k(self, k: Fragments) -> tuple[TileView, TileView]:
        """K likewise."""
        return self._split(k)

    def scores(
        self, q: Any, k: Any, active: Array, s: Fragments | None = None, role: str = "q"
    ) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: of all columns at once, to which those of the rope part add nothing."""
        return super().scores(q.value, k.value, active, s, role) if s is None else s

    def _split(self, x: Any) -> tuple[TileView, TileView]:
        latent = self.shape.columns("v")[0]
        return TileView(x, lambda tile: tile[..., :latent]), TileView(x, lambda tile: tile[..., latent:])

    def _gather(self, role: str, tile: TileTensor, stage: int) -> None:
        """The rows of a tile into a stage, in flight until its mbarrier has been waited for."""
        place, bar, box = self.shape.place(f"{role}{stage or ''}"), self.full[stage], self.gather
        offset = key_offsets(tile)
        rows = np.where(offset >= 0, offset // self.shape.D, FILL_ROW)
        into = self.hazards.region(place.base, place.nbytes, (ISSUER,))
        bar.expect_bytes(box.transaction_bytes, warp=ISSUER)
        self.hazards.copy_bulk(into, bar, box.transaction_bytes, f"{role} copy", stage)
        box.async_copy_gather4_tile(self.smem, place.base, rows)
        brings = rows < FILL_ROW
        moved, issued = np.zeros((2, self.shape.warps), np.int64)
        moved[ISSUER] = int(brings.sum()) * self.shape.D * self.shape.dtype.itemsize
        issued[ISSUER] = int(brings.any(1).sum()) * box.column_groups * box.tile_height // 4
        self.traffic.move("DRAM->SMEM", moved)
        self.traffic.issue(f"{role} gather4", issued)

    def _wait(self, stage: int) -> None:
        """All warps wait for the bytes of a stage."""
        bar = self.full[stage]
        bar.wait((bar.phases - 1) % 2, tuple(range(self.shape.warps)))
