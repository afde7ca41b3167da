"""Way of a prefill tile's Q, K and V to wgmma on sm_90: see :mod:`.wgmma_cta`."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.layout import TileTensor
from kvlab.memory import Memory
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.shared_tile import SharedTile, TileView
from kvlab.staging.tile.tile_copies import TileCopies
from kvlab.staging.tile.tile_pipeline import TilePipeline

from .wgmma_plan import WgmmaShape

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


class PanelPipeline(TilePipeline):
    """``holds_v``: P V reads a stage of V until it is waited for, with the next tile. A loop without a key left in any
    program is passed over."""

    holds_v = False

    def drain(self) -> None:
        if self.following and self.holds_v:
            self.hazards.wait_mma(0)
        super().drain()

    def _fetch_first(self) -> None:
        assert self._walk is not None
        if self._walk.to_next_key():
            super()._fetch_first()


class WgmmaTiles(LaunchedCTA):
    """Shared memory of the CTAs of one launch, and what is in flight there. Until :meth:`follow` is called there is
    nothing to look ahead to: each load is a barrier, a copy, a wait and a barrier. ``rope``: Q and K are the rope
    columns beside others, and are called so."""

    follows_beside = True

    def __init__(
        self, shape: WgmmaShape, programs: int, traffic: Traffic, *, beside: bool = False, rope: bool = False
    ) -> None:
        self.shape, self.words = shape, {"q": "q_rope", "k": "rope"} if rope else {"q": "q", "k": "k"}
        nbytes = sum(place.nbytes for place in shape.places.values())
        unit = 1 if shape.v_transposed else 16
        super().__init__(nbytes, shape.warps, "sm_90", programs, traffic, beside=beside, unit=unit)
        everyone = tuple(range(shape.warps))
        self._used = {at: self.hazards.region(p.base, p.nbytes, everyone) for at, p in shape.places.items()}
        self.copies = TileCopies(self.smem, self.hazards, traffic, self._copied_to)
        stages = {role: shape.stages(role) for role in "kv"}
        ways = self._copy_async, self._copy
        self.pipeline = PanelPipeline(*ways, self.hazards, barrier_before="", ahead=shape.ahead, stages=stages)

    @property
    def holds_v(self) -> bool:
        """Tells whether P V reads a stage of V until it is waited for, with the next tile."""
        return self.pipeline.following and self.pipeline.holds_v

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetch ahead along these iterators, of K and V (None: not of this CTA) for one loop after the other; the loads
        take their tiles in turn."""
        shape = self.shape
        self.pipeline.holds_v = shape.v_width > 0 and not (shape.converted["v"] or shape.v_transposed)
        self.pipeline.follow(*(None if i % 2 and shape.v_transposed else one for i, one in enumerate(tiles)))

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> SharedTile:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, through registers into shared memory; invalid rows
        are 0."""
        self.copies.by_registers(self.words["q"], dram, np.where(valid, offset, -1), self.shape.dtype.itemsize, "q")
        return SharedTile(self.smem, self.shape.places["q"], self.shape.dtype)

    def load_k(self, tile: TileTensor, active: Array, by_block: Array | None = None) -> SharedTile:
        """The K tile in its panels, and V's tile as well if they are fetched ahead. Where it is converted it is
        multiplied by ``by_block`` ``[programs, BN, blocks of 128 columns]`` if given.
        """
        self.pipeline.load("k", tile)
        if self.shape.converted["k"]:
            self._convert("k", active, by_block)
        else:
            self.hazards.fence_async()
        return self._shared_k()

    def load_v(self, tile: TileTensor | None, active: Array) -> SharedTile | TileView:
        """The V tile in its panels (None: it is K's, with ``v_in_k``)."""
        if tile is None:
            return self._shared_k()
        if self.shape.v_transposed:
            return self._transpose(tile, active)
        if self.holds_v and self.shape.BD == 0:  # the wait for S, of another model of these threads
            self.hazards.wait_mma(0)
        self.pipeline.load("v", tile)
        if self.shape.converted["v"]:
            self._convert("v", active)
        elif not self.pipeline.following or self.shape.BD == 0:
            self.hazards.fence_async()
        return self._landed("v")

    def drain(self) -> None:
        """The last product of a loop, and the copies past its end."""
        self.pipeline.drain()

    def _copy_async(self, role: str, tile: TileTensor, stage: int) -> None:
        self.copies.by_cp_async(self.words.get(role, role), tile, stage, self._landing(role, stage))

    def _copy(self, role: str, tile: TileTensor, stage: int) -> None:
        self._copy_async(role, tile, stage)
        self.hazards.commit_group()
        self.hazards.wait_group(0)

    def _shared_k(self) -> SharedTile:
        """The K tile that was loaded last: as it came, or as both products have it."""
        if self.shape.v_in_k and self.shape.converted["k"]:
            return SharedTile(self.smem, self.shape.panel("k0"), self.shape.dtype)
        return self._landed("k")

    def _convert(self, role: str, active: Array, by_block: Array | None = None) -> None:
        """A tile from its plain rows through registers into the panels, in the dtype of the product, times ``by_block``
        in float32 if given. The panels of V lie where K's were."""
        shape, at = self.shape, f"{role}0"
        self.hazards.read(self._used[self._landing(role)], f"{role} convert", self.pipeline.stage[role])
        stored = rows = self._landed(role).tile()
        if by_block is not None:
            block = np.minimum(np.arange(rows.shape[2]) // 128, by_block.shape[2] - 1)  # in the padding: of zeros
            rows = rows.astype(np.float32) * by_block[:, :, block]
        values = rows.astype(shape.dtype if role == "k" else shape.p_dtype)
        with self.own():
            if role == "v" and (shape.converted["k"] or shape.BD == 0):
                self.hazards.barrier()
            self.hazards.write(self.copies.filled(at), f"{role} panels")
            SharedTile(self.smem, shape.panel(at), values.dtype).store(values)
            self.hazards.fence_async()
            self.hazards.barrier()
        programs = int(active.sum())
        self.traffic.move("SMEM->registers", programs * stored[0].nbytes)
        self.traffic.move("registers->SMEM", programs * values[0].nbytes)

    def _transpose(self, tile: TileTensor, active: Array) -> TileView:
        """The V tile from DRAM through registers, a byte at a time, into panels of its columns."""
        shape, place = self.shape, self.shape.panel("v0")
        plan = copy_plan(shape.BN, shape.v_width, shape.v_depth, shape.warps)
        column = plan.byte[:, None] + np.arange(16)
        address = place.address(column, (plan.row // 16)[:, None]) + (plan.row % 16)[:, None]  # [vectors, 16]
        source, valid = plan.source_of(tile)
        values = tile.memory.load(source, np.uint8, 16, mask=valid)  # [programs, vectors, 16]
        if not self.pipeline.following:
            self.hazards.barrier()
        self.hazards.write(self.copies.once("v0", address, 1, plan.warp[:, None]), "v panels")
        self.smem.store(address[None], values[..., None])
        self.hazards.fence_async()
        self.hazards.barrier()
        self.traffic.move("DRAM->registers", int(valid.sum()) * 16)
        self.traffic.move("registers->SMEM", int(active.sum()) * place.nbytes)
        return TileView(SharedTile(self.smem, place, shape.p_dtype), lambda keys: keys.swapaxes(1, 2))

    def _copied_to(self, at: str) -> tuple[TileCopyPlan, IntArray]:
        """The plan of the tile of a place, and where each of its vectors lands."""
        place, shape = self.shape.places[at], self.shape
        depth = shape.v_depth if at.startswith("v") else shape.D
        plan = copy_plan(place.rows, 16 * place.vectors, place.itemsize * depth, shape.warps)
        return plan, place.address(plan.row, plan.byte // 16)

    def _landed(self, role: str) -> SharedTile:
        """The tile of a role that was loaded last, as it came."""
        return SharedTile(self.smem, self.shape.places[self._landing(role)], self.shape.dram_dtype)

    def _landing(self, role: str, stage: int | None = None) -> str:
        """Landing place of a stage's tile, or of the one that was loaded last: in panels, or in plain rows before it is
        converted."""
        stage = self.pipeline.stage[role] if stage is None else stage
        return f"{role} plain{stage}" if self.shape.converted[role] else f"{role}{stage}"

    def _panel(self, role: str) -> int:
        """Panels that hold the tile that was loaded last."""
        return 0 if self.shape.converted[role] else self.pipeline.stage[role]
