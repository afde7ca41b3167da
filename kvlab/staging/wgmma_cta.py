"""One CTA of the prefill kernel on sm_90, storage of 16 or 8 bits: cp.async, swizzled panels, wgmma.

What Triton compiles our prefill tile to (read from its TTGIR): Q, K and V stand in shared memory as panels of at most
128 bytes a row, swizzled as TMA would (``NVMMASharedLayout``). Both products are wgmma of 64 rows a warpgroup: Q K^T
takes both operands from shared memory, through descriptors; P V takes P from the registers where the scores stood, and
V along its contiguous dimension (MN-major). Warp w owns the rows ``16 w ...`` of every ``16 * warps``; where there are
more warps than rows, warpgroups share out the columns, and P passes through shared memory.

K and V have two stages. Every access, wait and barrier is stated to ``hazards``, in the order of the PTX::

    copy K, commit, copy V, commit                                              before each of the two loops
    loop: wait_group(0), barrier, fence.proxy.async, wgmma S = Q K^T, wgmma.wait_group(0), softmax, wgmma O += P V,
          barrier, copy the next K, commit, copy the next V, commit             (P V is still in flight)
    wgmma.wait_group(0), wait_group(0), barrier                                 after each

e4m3 K and V that meet a 16-bit operand are converted in registers on their way from plain rows to the panels, and have
one stage. wgmma takes 8-bit operands only along the contracted dimension: V of e4m3 that meets e4m3 comes from DRAM to
registers, 16 bytes a thread, and goes byte by byte to the panels, in which its keys stand along the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom, cp_async
from kvlab.memory import Memory

from .copy_plan import CopyPlan, copy_plan
from .fragments import Fragments
from .iterator import KVCacheIterator, KVTile
from .launched_cta import LaunchedCTA
from .pieces_cta import Shown
from .shared_tile import SharedTile
from .tile_walk import TileWalk, expect_fetched, is_same
from .traffic import Traffic
from .wgmma_plan import (
    K_BYTES,
    STAGES,
    PanelTile,
    WgmmaShape,
    accumulator_map,
    k_addresses,
    q_addresses,
    v_addresses,
)

__all__ = ["PanelTile", "WgmmaCTA", "WgmmaShape"]

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


class WgmmaCTA(LaunchedCTA):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers. Until :meth:`follow` is
    called there is nothing to look ahead to: each load meets at a barrier, copies, waits and meets again.
    """

    def __init__(self, shape: WgmmaShape, programs: int, traffic: Traffic) -> None:
        self.shape = shape
        nbytes = sum(place.nbytes for place in shape.places.values())
        super().__init__(nbytes, shape.warps, "sm_90", programs, traffic)
        everyone = range(shape.warps)
        self._used = {at: self.hazards.region(p.base, p.nbytes, tuple(everyone)) for at, p in shape.places.items()}
        self._filled = {at: self.hazards.footprint(*self._copied_to(at)) for at in shape.places}
        self._copied, self._read = ({"k": 0, "v": 0} for _ in range(2))  # tiles so far
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[KVTile]] = {"k": [], "v": []}

    def follow(self, *tiles: KVCacheIterator) -> None:
        """Fetch ahead along these iterators, of K and V for one loop after the other; the loads take their tiles in
        turn. Nothing where a tile is converted or transposed.
        """
        if any(self.shape.stages(role) < STAGES for role in "kv"):
            return
        self._walk = TileWalk(*tiles)
        self._fetch(self._walk.next_pair())

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

    def load_k(self, tile: KVTile, active: Array) -> SharedTile:
        """The K tile in its panels, and V's tile as well if they are fetched ahead."""
        if self._walk is not None:
            self._begin_loop(tile)
            expect_fetched(self._flying["k"], tile, "k")
        else:
            self._copy_now(tile, "k")
        self._land("k", active)
        return self._tile("k")

    def load_v(self, tile: KVTile, active: Array) -> SharedTile | Shown:
        """The V tile in its panels."""
        if self._walk is not None:
            expect_fetched(self._flying["v"], tile, "v")
        elif self.shape.v_transposed:
            return self._transpose(tile, active)
        else:
            self._copy_now(tile, "v")
            self._land("v", active)
        return self._tile("v")

    def scores(self, q: SharedTile, k: SharedTile, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: both operands from shared memory; added to ``s`` if given."""
        shape, atom, stage = self.shape, self.shape.atom(self.shape.BN), self._stage("k")
        self.hazards.read_async(self._used["q"], "q wgmma", last=False)
        self.hazards.read_async(self._used[f"k{stage}"], "k wgmma", stage)
        a, b = q_addresses(shape), k_addresses(shape, stage)
        c = self._blocks((self._zeros(shape.BN) if s is None else s).values)
        for step in range(len(a)):
            q_step = self.smem.load(a[step][None], shape.dtype)[..., 0]  # [programs, row blocks, 64, k]
            k_step = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, groups, BN / groups, k]
            c = atom.mma(atom.fragment_a(q_step)[:, :, None], k_step.swapaxes(2, 3)[:, None], c)
        self.hazards.wait_mma(0)
        blocks = shape.BM // 64
        self._count(active, (blocks * 64 + blocks * shape.BN) * shape.BD * shape.dtype.itemsize)
        return self._fragments(c, shape.BN)

    def accumulate(self, p: Fragments, v: SharedTile, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to its dtype in registers; V from shared memory, transposed by the unit if of 16 bits."""
        shape, atom, stage = self.shape, self.shape.atom(self.shape.v_width, self.shape.p_dtype), self._stage("v")
        a = self._p_fragments(p, atom)
        self.hazards.read_async(self._used[f"v{stage}"], "v wgmma", stage)
        b = v_addresses(shape, stage)
        c, regs = self._blocks(o.values), a.shape[-1] // len(b)
        for step in range(len(b)):
            v_step = self.smem.load(b[step][None], shape.p_dtype)[..., 0]  # [programs, groups, BDV / groups, k]
            c = atom.mma(a[..., regs * step : regs * (step + 1)], v_step.swapaxes(2, 3)[:, None], c)
        if self._walk is None:
            self.hazards.wait_mma(0)
        else:
            self.hazards.barrier()
            self._fetch(self._walk.next_of_loop())
        self._count(active, shape.BM // 64 * shape.BN * shape.v_width * shape.p_dtype.itemsize)
        return self._fragments(c, shape.v_width)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BDV]``."""
        return self._zeros(self.shape.v_width)

    def drain(self) -> None:
        """The last product of a loop, and the copies past its end."""
        if self._walk is not None:
            self.hazards.wait_mma(0)
            self.hazards.wait_group(0)
            self.hazards.barrier()

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``: in the lane, over its quad, over the warpgroups of a row."""
        return self._by_row(s, np.max)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]``: in the lane, over its quad, over the warpgroups of a row."""
        return self._by_row(p, np.sum)

    def _by_row(self, x: Fragments, reduce: Any) -> Array:
        groups, shape = self.shape.groups_n, self.shape
        if groups > 1:  # through scratch memory: written, combined, read
            self.hazards.barrier()
            self.hazards.barrier()
        parts = x.values.reshape(self.programs, groups, shape.warps // groups, 8, 4, x.values.shape[2], -1, 2, 2)
        rows = reduce(reduce(reduce(parts, axis=(6, 8)), axis=4), axis=1)  # [programs, warps, 8 rows, repeats, halves]
        return rows.transpose(0, 3, 1, 4, 2).reshape(self.programs, shape.BM)

    def _begin_loop(self, tile: KVTile) -> None:
        """Where a loop is over and the next one begins with ``tile``: drain, and fetch its first tiles."""
        assert self._walk is not None
        if self._flying["k"] and is_same(self._flying["k"][0], tile):
            return
        self.drain()
        for role in "kv":
            self._flying[role].clear()
            self._copied[role] = self._read[role] = 0
        self._fetch(self._walk.next_pair())

    def _fetch(self, pair: tuple[KVTile, KVTile] | None) -> None:
        """K and V into the stages that no product reads."""
        for role, tile in zip("kv", pair or (), strict=False):
            self._copy_async(tile, role)
            self._flying[role].append(tile)

    def _copy_now(self, tile: KVTile, role: str) -> None:
        self.hazards.barrier()
        self._copy_async(tile, role)

    def _land(self, role: str, active: Array) -> None:
        """All copies have landed for all warps, are converted if need be, and wgmma may see them."""
        self.hazards.wait_group(0)
        self.hazards.barrier()
        if self.shape.converted[role]:
            self._convert(role, active)
            self.hazards.barrier()
        self.hazards.fence_async()

    def _convert(self, role: str, active: Array) -> None:
        """A tile from its plain rows through registers into the panels, in the dtype of the product."""
        shape, plain, place = self.shape, self.shape.places[f"{role} plain"], self.shape.panel(f"{role}0")
        self.hazards.read(self._used[f"{role} plain"], f"{role} convert")
        rows = SharedTile(self.smem, plain, shape.dram_dtype).tile()
        values = rows.astype(shape.dtype if role == "k" else shape.p_dtype)
        self.hazards.write(self._filled[f"{role}0"], f"{role} convert")
        self._store_tile(place, values)
        programs = int(active.sum())
        self.traffic.move("SMEM->registers", programs * rows[0].nbytes)
        self.traffic.move("registers->SMEM", programs * values[0].nbytes)

    def _transpose(self, tile: KVTile, active: Array) -> Shown:
        """The V tile from DRAM through registers, a byte at a time, into panels of its columns."""
        place, plan = self.shape.panel("v0"), self._v_plan()
        source, valid = plan.source_of(tile)
        values = tile.memory.load(source, np.uint8, 16, mask=valid)  # [programs, vectors, 16]
        self.hazards.barrier()
        self.hazards.write(self._filled["v0"], "v write")
        self.smem.store(self._copied_to("v0")[0][None], values[..., None])
        self.hazards.fence_async()
        self.hazards.barrier()
        self._read["v"] += 1
        self.traffic.move("DRAM->registers", int(valid.sum()) * 16)
        self.traffic.move("registers->SMEM", int(active.sum()) * place.nbytes)
        return Shown(SharedTile(self.smem, place, self.shape.p_dtype), lambda keys: keys.swapaxes(1, 2))

    def _v_plan(self) -> CopyPlan:
        """Of V's rows, whatever stands in shared memory."""
        shape = self.shape
        return copy_plan(shape.BN, shape.v_width, shape.v_depth, shape.warps)

    def _store_tile(self, place: PanelTile, values: Array) -> None:
        vectors = np.ascontiguousarray(values).reshape(self.programs, place.rows, place.vectors, -1)
        self.smem.store(place.address(np.arange(place.rows)[:, None], np.arange(place.vectors))[None], vectors)

    def _p_fragments(self, p: Fragments, atom: MmaAtom) -> Array:
        """P as the A operand ``[programs, row blocks, 1, 128, registers]``, k step after k step."""
        shape = self.shape
        values = p.values.astype(shape.p_dtype)
        if shape.groups_n == 1 and shape.p_dtype.itemsize == 2:  # where it stands
            return self._blocks(values)
        tile = p.with_values(values).tile()
        if shape.groups_n > 1:  # a warpgroup needs the columns of the others
            self.hazards.barrier()
            self.hazards.write(self._filled["p"], "p write")
            self._store_tile(shape.panel("p"), tile)
            self.hazards.barrier()
            self.hazards.read(self._used["p"], "p read")
            tile = SharedTile(self.smem, shape.panel("p"), shape.p_dtype).tile()
        k = K_BYTES // shape.p_dtype.itemsize
        steps = tile.reshape(self.programs, shape.BM // 64, 64, -1, k).swapaxes(2, 3)  # [P, blocks, steps, 64, k]
        fragments = atom.fragment_a(steps)  # [P, blocks, steps, 128, registers]
        return np.moveaxis(fragments, 2, 3).reshape(self.programs, shape.BM // 64, 1, 128, -1)

    def _copy_plan(self, at: str) -> CopyPlan:
        place, shape = self.shape.places[at], self.shape
        depth = shape.v_depth if at.startswith("v") else shape.D
        if at == "p":
            depth = shape.BN
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

    def _copy_async(self, tile: KVTile, role: str) -> None:
        stage = self._stage_of(role, self._copied[role])
        self._copied[role] += 1
        at = f"{role} plain" if self.shape.converted[role] else f"{role}{stage}"
        plan, (address, nbytes, _) = self._copy_plan(at), self._copied_to(at)
        source, valid = plan.source_of(tile)
        self.hazards.copy_async(self._filled[at], f"{role} copy", stage)
        self.hazards.commit_group()
        cp_async(self.smem, address[None], tile.memory, source, nbytes, valid)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * 16)

    def _tile(self, role: str) -> SharedTile:
        """The next tile of a role, as it came."""
        self._read[role] += 1
        converted = self.shape.converted[role]
        at = f"{role} plain" if converted else f"{role}{self._stage(role)}"
        dtype = self.shape.dtype if role == "k" else self.shape.p_dtype
        return SharedTile(self.smem, self.shape.places[at], self.shape.dram_dtype if converted else dtype)

    def _stage_of(self, role: str, tiles: int) -> int:
        """Of the tile that so many came before."""
        return tiles % self.shape.stages(role)

    def _stage(self, role: str) -> int:
        """Where the tile stands that was taken last."""
        return self._stage_of(role, self._read[role] - 1)

    def _count(self, active: Array, nbytes: int) -> None:
        self.traffic.move("SMEM->tensor cores", int(active.sum()) * nbytes)

    def _zeros(self, columns: int) -> Fragments:
        return Fragments.zeros(self.programs, accumulator_map(self.shape, columns))

    def _blocks(self, values: Array) -> Array:
        """``[P, threads, repeats, regs]`` -> ``[P, blocks of 64 rows, column groups, 128, regs]``, in the order of the
        rows.
        """
        P, threads, repeats, regs = values.shape
        n = self.shape.groups_n
        split = values.reshape(P, n, threads // (128 * n), 128, repeats, regs)  # of the threads: columns, rows
        return split.transpose(0, 4, 2, 1, 3, 5).reshape(P, -1, n, 128, regs)

    def _fragments(self, c: Array, columns: int) -> Fragments:
        layout, n = accumulator_map(self.shape, columns), self.shape.groups_n
        P, _, _, _, regs = c.shape
        split = c.reshape(P, -1, self.shape.warps // (4 * n), n, 128, regs)
        return Fragments(split.transpose(0, 3, 2, 4, 1, 5).reshape(P, *layout.row.shape), layout)
