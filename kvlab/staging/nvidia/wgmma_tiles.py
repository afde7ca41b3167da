"""How Q, K and V of a prefill tile on sm_90 come to where wgmma reads them: see :mod:`.wgmma_cta`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.hardware import cp_async
from kvlab.layout import TileTensor
from kvlab.memory import Memory
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.shared_tile import SharedTile
from kvlab.staging.tile.tile_walk import TileWalk, expect_fetched, is_same

from .pieces_cta import TileView
from .wgmma_plan import PanelTile, WgmmaShape

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


class WgmmaTiles(LaunchedCTA):
    """Shared memory of the CTAs of one launch, and what is in flight there. Until :meth:`follow` is called there is
    nothing to look ahead to: each load meets at a barrier, copies, waits and meets again.
    """

    def __init__(self, shape: WgmmaShape, programs: int, traffic: Traffic, *, beside: bool = False) -> None:
        self.shape = shape
        nbytes = sum(place.nbytes for place in shape.places.values())
        super().__init__(nbytes, shape.warps, "sm_90", programs, traffic, beside=beside)
        everyone = range(shape.warps)
        self._used = {at: self.hazards.region(p.base, p.nbytes, tuple(everyone)) for at, p in shape.places.items()}
        self._filled = {at: self.hazards.footprint(*self._copied_to(at)) for at in shape.places}
        self._copied, self._read = ({"k": 0, "v": 0} for _ in range(2))  # tiles so far
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[TileTensor]] = {"k": [], "v": []}

    @property
    def holds_v(self) -> bool:
        """Whether P V reads a stage of V until it is waited for, with the next tile."""
        shape = self.shape
        return self._walk is not None and shape.v_width > 0 and not (shape.converted["v"] or shape.v_transposed)

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetch ahead along these iterators, of K and V (None: not of this CTA) for one loop after the other; the loads
        take their tiles in turn.
        """
        by_registers = self.shape.v_transposed
        self._walk = TileWalk(*(None if i % 2 and by_registers else one for i, one in enumerate(tiles)))
        self._fetch_first()

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> SharedTile:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, through registers into shared memory; invalid rows
        are 0.
        """
        place, plan, size = self.shape.places["q"], self._copy_plan("q"), self.shape.dtype.itemsize
        source, exists = plan.source(np.where(valid, offset, -1), size)
        values = dram.load(source, np.uint8, 16, mask=exists)
        self.hazards.write(self._filled["q"], "q write")
        self.smem.store(place.address(plan.row, plan.byte // 16)[None], values)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * self.shape.D * size)
        return SharedTile(self.smem, place, self.shape.dtype)

    def load_k(self, tile: TileTensor, active: Array) -> SharedTile:
        """The K tile in its panels, and V's tile as well if they are fetched ahead."""
        self._land("k", tile)
        if self.shape.converted["k"]:
            self._convert("k", active)
        else:
            self.hazards.fence_async()
        return self._tile("k")

    def load_v(self, tile: TileTensor, active: Array) -> SharedTile | TileView:
        """The V tile in its panels."""
        if self.shape.v_transposed:
            return self._transpose(tile, active)
        if self.holds_v and self.shape.BD == 0:  # the wait for S, of another model of these threads
            self.hazards.wait_mma(0)
        self._land("v", tile)
        if self.shape.converted["v"]:
            self._convert("v", active)
        elif self._walk is None or self.shape.BD == 0:
            self.hazards.fence_async()
        return self._tile("v")

    def drain(self) -> None:
        """The last product of a loop, and the copies past its end."""
        if self._walk is not None:
            if self.holds_v:
                self.hazards.wait_mma(0)
            self.hazards.wait_group(0)
            self.hazards.barrier()

    def _land(self, role: str, tile: TileTensor) -> None:
        """The copies of a tile have landed for all warps; those of K and V together, if they are fetched ahead."""
        if self._walk is None:
            self.hazards.barrier()
            self._copy_async(tile, role)
            self.hazards.wait_group(0)
            self.hazards.barrier()
            return
        first = role == self._walk.roles[0]
        if first:
            self._begin_loop(role, tile)
        expect_fetched(self._flying[role], tile, role)
        if first:
            self.hazards.wait_group((self.shape.ahead - 1) * len(self._walk.roles))
            self.hazards.barrier()

    def _begin_loop(self, role: str, tile: TileTensor) -> None:
        """Where a loop is over and the next one begins with ``tile``: drain, and fetch its first tiles."""
        if self._flying[role] and is_same(self._flying[role][0], tile):
            return
        self.drain()
        for each in "kv":
            self._flying[each].clear()
            self._copied[each] = self._read[each] = 0
        self._fetch_first()

    def _fetch_first(self) -> None:
        assert self._walk is not None
        self._fetch(self._walk.next_pair() or {})
        if any(self._flying.values()):
            for _ in range(self.shape.ahead - 1):
                self.fetch()

    def fetch(self) -> None:
        """The next tiles of the loop into the stages that nobody reads."""
        if self._walk is not None:
            self._fetch(self._walk.next_of_loop())

    def _fetch(self, tiles: dict[str, TileTensor]) -> None:
        for role, tile in tiles.items():
            self._copy_async(tile, role)
            self._flying[role].append(tile)

    def _convert(self, role: str, active: Array) -> None:
        """A tile from its plain rows through registers into the panels, in the dtype of the product. The panels of V
        stand where K's were.
        """
        shape, stage = self.shape, self._stage_of(role, self._read[role])
        at, place = self._landing(role, stage), self.shape.panel(f"{role}0")
        self.hazards.read(self._used[at], f"{role} convert", stage)
        rows = SharedTile(self.smem, shape.places[at], shape.dram_dtype).tile()
        values = rows.astype(shape.dtype if role == "k" else shape.p_dtype)
        with self.own():
            if role == "v" and (shape.converted["k"] or shape.BD == 0):
                self.hazards.barrier()
            self.hazards.write(self._filled[f"{role}0"], f"{role} panels")
            self._store_tile(place, values)
            self.hazards.fence_async()
            self.hazards.barrier()
        programs = int(active.sum())
        self.traffic.move("SMEM->registers", programs * rows[0].nbytes)
        self.traffic.move("registers->SMEM", programs * values[0].nbytes)

    def _transpose(self, tile: TileTensor, active: Array) -> TileView:
        """The V tile from DRAM through registers, a byte at a time, into panels of its columns."""
        place, plan = self.shape.panel("v0"), self._v_plan()
        source, valid = plan.source_of(tile)
        values = tile.memory.load(source, np.uint8, 16, mask=valid)  # [programs, vectors, 16]
        if self._walk is None:
            self.hazards.barrier()
        self.hazards.write(self._filled["v0"], "v panels")
        self.smem.store(self._copied_to("v0")[0][None], values[..., None])
        self.hazards.fence_async()
        self.hazards.barrier()
        self._read["v"] += 1
        self.traffic.move("DRAM->registers", int(valid.sum()) * 16)
        self.traffic.move("registers->SMEM", int(active.sum()) * place.nbytes)
        return TileView(SharedTile(self.smem, place, self.shape.p_dtype), lambda keys: keys.swapaxes(1, 2))

    def _v_plan(self) -> TileCopyPlan:
        """Of V's rows, whatever stands in shared memory."""
        shape = self.shape
        return copy_plan(shape.BN, shape.v_width, shape.v_depth, shape.warps)

    def _store_tile(self, place: PanelTile, values: Array) -> None:
        vectors = np.ascontiguousarray(values).reshape(self.programs, place.rows, place.vectors, -1)
        self.smem.store(place.address(np.arange(place.rows)[:, None], np.arange(place.vectors))[None], vectors)

    def _copy_plan(self, at: str) -> TileCopyPlan:
        place, shape = self.shape.places[at], self.shape
        depth = shape.v_depth if at.startswith("v") else shape.D
        return copy_plan(place.rows, 16 * place.vectors, place.itemsize * depth, shape.warps)

    def _copied_to(self, at: str) -> tuple[IntArray, int, IntArray]:
        """Byte address and size of every vector of a place, and the warp that brings it; of every byte of V transposed:
        ``[vectors, 16]``.
        """
        if at == "v0" and self.shape.v_transposed:
            plan, place = self._v_plan(), self.shape.panel(at)
            column = plan.byte[:, None] + np.arange(16)
            address = place.address(column, (plan.row // 16)[:, None]) + (plan.row % 16)[:, None]
            return address, 1, np.broadcast_to(plan.warp[:, None], address.shape)
        plan = self._copy_plan(at)
        return self.shape.places[at].address(plan.row, plan.byte // 16), 16, plan.warp

    def _copy_async(self, tile: TileTensor, role: str) -> None:
        stage = self._stage_of(role, self._copied[role])
        self._copied[role] += 1
        at = self._landing(role, stage)
        plan, (address, nbytes, _) = self._copy_plan(at), self._copied_to(at)
        source, valid = plan.source_of(tile)
        self.hazards.copy_async(self._filled[at], f"{role} copy", stage)
        self.hazards.commit_group()
        cp_async(self.smem, address[None], tile.memory, source, nbytes, valid)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * 16)

    def _tile(self, role: str) -> SharedTile:
        """The next tile of a role, as it came."""
        self._read[role] += 1
        at = self._landing(role, self._stage_of(role, self._read[role] - 1))
        return SharedTile(self.smem, self.shape.places[at], self.shape.dram_dtype)

    def _stage_of(self, role: str, tiles: int) -> int:
        """Of the tile that so many came before."""
        return tiles % self.shape.stages(role)

    def _landing(self, role: str, stage: int) -> str:
        """Where a tile from DRAM lands: in panels, or in plain rows before it is converted."""
        return f"{role} plain{stage}" if self.shape.converted[role] else f"{role}{stage}"

    def _panel(self, role: str) -> int:
        """Which panels hold the tile that was taken last."""
        return 0 if self.shape.converted[role] else self._stage_of(role, self._read[role] - 1)


def end_tiles(ctas: Sequence[WgmmaTiles]) -> None:
    """After the last product of a tile: the next ones, for models of the same threads with operands of their own."""
    if any(cta.holds_v for cta in ctas):
        for cta in ctas:
            cta.hazards.barrier()
    for cta in ctas:
        cta.fetch()
