"""One CTA of prefill, or of MLA decode with 64 rows, on sm_90, 16 or 8 bits: cp.async, swizzled panels, wgmma.

What Triton compiles our prefill tile to (read from its TTGIR): Q, K and V lie in shared memory as panels of at most
128 bytes a row, swizzled as TMA would (``NVMMASharedLayout``). Both products are wgmma of 64 rows a warpgroup: Q K^T
takes both operands from shared memory, through descriptors; P V takes P from the registers where the scores stood, and
V along its contiguous dimension (MN-major). Warp w owns the rows ``16 w ...`` of every ``16 * warps``. Where two
warpgroups have 64 rows, both work out all of S, in two instructions of half of the keys each, and share out V's
columns.

K and V come ``shape.ahead`` tiles ahead, into one stage more. Every access, wait and barrier is stated to ``hazards``,
in the order of the PTX::

    copy K, commit, copy V, commit                                              before each of the two loops
    loop: wait_group(0), barrier, fence.proxy.async, wgmma S = Q K^T, wgmma.wait_group(0), softmax, wgmma O += P V,
          barrier, copy the next K, commit, copy the next V, commit             (P V is still in flight)
    wgmma.wait_group(0), wait_group(0), barrier                                 after each

e4m3 K and V beside a 16-bit operand are converted in registers on their way from plain rows, which have one stage
less, to the panels, of which there is one::

    loop: wait_group(0), barrier, read K, write its panels, fence.proxy.async, barrier, wgmma S = Q K^T,
          wgmma.wait_group(0), softmax, read V, barrier, write its panels, fence.proxy.async, barrier, wgmma O += P V,
          wgmma.wait_group(0), copy the next K, commit, copy the next V, commit

wgmma takes 8-bit operands only along the contracted dimension: V of e4m3 beside e4m3 comes from DRAM to registers,
16 bytes a thread, and goes byte by byte to the panels, in which its keys lie along the rows, between a fence and a
barrier of its own; K is copied ahead as ever.

MLA decode with 64 query rows has a model for the latent columns, whose K tile is read again as V (``v_in_k``), and one
for the rope columns beside it::

    loop: wait_group(0), barrier, fence.proxy.async, wgmma of the latents, wgmma.wait_group(0), wgmma of the rope part,
          wgmma.wait_group(0), softmax, wgmma O += P V, barrier, copy the next latents, commit, copy the next rope,
          commit                                                                (P V is still in flight)

e4m3 latents beside a scale of each 128 are converted on their way as K of prefill, and both products read the one place
in which they are of 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from kvlab.hardware import MmaAtom
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.rows_over_warps import butterfly, in_turn
from kvlab.staging.tile.shared_tile import SharedTile
from kvlab.staging.tile.tile_spec import KVRows, TileSpec

from .wgmma_plan import (
    K_BYTES,
    WgmmaShape,
    accumulator_map,
    k_addresses,
    q_addresses,
    scores_map,
    v_addresses,
)
from .wgmma_tiles import WgmmaTiles

Array = np.ndarray[Any, Any]


class WgmmaCTA(WgmmaTiles):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers."""

    buffer = "cp.async into swizzled panels; matrix descriptors"
    p_path = "registers"

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self:
        """The model for a tile, or for a part of one ``beside`` another's."""
        shape = WgmmaShape(
            tile.BM, tile.BN, *tile.k, tile.dtype, tile.warps, *tile.v, tile.stored, tile.weights, max(tile.ahead, 1),
            tile.v_in_k,
        )
        return cls(shape, len(rows.batch_idx), traffic, beside=beside, rope=tile.rope)

    def scores(self, q: SharedTile, k: SharedTile, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: both operands from shared memory; added to ``s`` if given."""
        shape, atom, stage = self.shape, self.shape.atom(self.shape.BN), self._panel("k")
        self.hazards.read_async(self._used["q"], f"{self.words['q']} wgmma", last=False)
        self.hazards.read_async(self._used[f"k{stage}"], f"{self.words['k']} wgmma", stage)
        a, b = q_addresses(shape), k_addresses(shape, stage)
        start = Fragments.zeros(self.programs, scores_map(shape)) if s is None else s
        c = self._scores_blocks(start.values)
        for step in range(len(a)):
            q_step = self.smem.load(a[step][None], shape.dtype)[..., 0]  # [programs, row blocks, 64, k]
            k_step = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, instructions, keys of each, k]
            c = atom.mma(atom.fragment_a(q_step)[:, :, None], k_step.swapaxes(2, 3)[:, None], c)
        self.hazards.wait_mma(0)
        blocks, n = shape.BM // 64, shape.groups_n
        self._count("qk", n * len(a), blocks * n * (n * 64 + shape.BN) * shape.BD * shape.dtype.itemsize, active)
        return start.with_values(self._scores_registers(c))

    def accumulate(self, p: Fragments, v: SharedTile, o: Fragments, active: Array) -> Fragments:
        """O += P V, and the end of the tile."""
        (o,) = self.accumulate_parts([self], p, [(self, v, o)], active)
        return o

    @classmethod
    def accumulate_parts(
        cls, ctas: Sequence[WgmmaTiles], p: Fragments, values: Sequence[tuple[WgmmaCTA, Any, Fragments]], active: Array
    ) -> list[Fragments]:
        """See :meth:`LaunchedCTA.accumulate_parts`: the next tiles come behind the products of all."""
        found = [cta.add_values(p, v, o, active) for cta, v, o in values]
        if any(cta.holds_v for cta in ctas):
            for cta in ctas:
                cta.hazards.barrier()
        for cta in ctas:
            for role in "kv":
                cta.pipeline.refill(role)
        return found

    def add_values(self, p: Fragments, v: SharedTile, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to its dtype in registers; V from shared memory, transposed by the unit if of 16 bits."""
        shape, atom = self.shape, self.shape.atom(self.shape.v_width, self.shape.p_dtype)
        role, what = ("k", "k wgmma of P V") if shape.v_in_k else ("v", "v wgmma")
        stage = self._panel(role)
        a = self._p_fragments(p, atom)
        self.hazards.read_async(self._used[f"{role}{stage}"], what, stage)
        b = v_addresses(shape, stage)
        c, regs = self._blocks(o.values), a.shape[-1] // len(b)
        for step in range(len(b)):
            v_step = self.smem.load(b[step][None], shape.p_dtype)[..., 0]  # [programs, groups, BDV / groups, k]
            c = atom.mma(a[..., regs * step : regs * (step + 1)], v_step.swapaxes(2, 3)[:, None], c)
        if not self.holds_v:
            self.hazards.wait_mma(0)
        self._count("pv", len(b), shape.BM // 64 * shape.BN * shape.v_width * shape.p_dtype.itemsize, active)
        return self._fragments(c, shape.v_width)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BDV]``."""
        return Fragments.zeros(self.programs, accumulator_map(self.shape, self.shape.v_width))

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``: in the lane, over its quad."""
        return self._by_row(s, np.maximum)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]``: in the lane, over its quad."""
        return self._by_row(p, np.add)

    def _by_row(self, x: Fragments, combine: np.ufunc) -> Array:
        warps = self.shape.warps // self.shape.groups_n  # that hold different rows
        parts = x.values[:, : 32 * warps].reshape(self.programs, warps, 8, 4, x.values.shape[2], -1, 2, 2)
        lane = in_turn(combine, parts.swapaxes(5, 6).reshape(*parts.shape[:5], 2, -1))
        rows = butterfly(combine, np.moveaxis(lane, 3, -1))  # [programs, warps, 8 rows, repeats, halves]
        return rows.transpose(0, 3, 1, 4, 2).reshape(self.programs, self.shape.BM)

    def _p_fragments(self, p: Fragments, atom: MmaAtom) -> Array:
        """P as the A operand ``[programs, row blocks, 1, 128, registers]``, k step after k step."""
        shape = self.shape
        values = p.values.astype(shape.p_dtype)
        if shape.p_dtype.itemsize == 2:  # where it stands
            if shape.groups_n == 1:
                return self._blocks(values)
            return values[:, :128].reshape(self.programs, 1, 1, 128, -1)
        k = K_BYTES // shape.p_dtype.itemsize
        tile = p.with_values(values).tile()
        steps = tile.reshape(self.programs, shape.BM // 64, 64, -1, k).swapaxes(2, 3)  # [P, blocks, steps, 64, k]
        fragments = atom.fragment_a(steps)  # [P, blocks, steps, 128, registers]
        return np.moveaxis(fragments, 2, 3).reshape(self.programs, shape.BM // 64, 1, 128, -1)

    def _count(self, product: str, instructions: int, nbytes: int, active: Array) -> None:
        """Instructions of a warp for each of its blocks of rows; bytes of shared memory that all of them take."""
        shape, programs = self.shape, int(active.sum())
        repeats = shape.BM * shape.groups_n // (16 * shape.warps)
        self.traffic.issue(f"{product} wgmma", np.full(shape.warps, instructions * repeats * programs))
        self.traffic.move("SMEM->tensor cores", programs * nbytes)

    def _scores_blocks(self, values: Array) -> Array:
        """S as its instructions have it, ``[P, row blocks, of a block, 128, registers]``; where two warpgroups find the
        same, it is found once."""
        if self.shape.groups_n == 1:
            return self._blocks(values)
        parts = values[:, :128].reshape(self.programs, 128, self.shape.groups_n, -1)
        return parts.swapaxes(1, 2)[:, None]

    def _scores_registers(self, c: Array) -> Array:
        if self.shape.groups_n == 1:
            return self._fragments(c, self.shape.BN).values
        return np.tile(c[:, 0].swapaxes(1, 2).reshape(self.programs, 128, 1, -1), (1, self.shape.groups_n, 1, 1))

    def _blocks(self, values: Array) -> Array:
        """``[P, threads, repeats, regs]`` -> ``[P, blocks of 64 rows, column groups, 128, regs]``, in the order of the
        rows."""
        P, threads, repeats, regs = values.shape
        n = self.shape.groups_n
        split = values.reshape(P, n, threads // (128 * n), 128, repeats, regs)  # of the threads: columns, rows
        return split.transpose(0, 4, 2, 1, 3, 5).reshape(P, -1, n, 128, regs)

    def _fragments(self, c: Array, columns: int) -> Fragments:
        layout, n = accumulator_map(self.shape, columns), self.shape.groups_n
        P, _, _, _, regs = c.shape
        split = c.reshape(P, -1, self.shape.warps // (4 * n), n, 128, regs)
        return Fragments(split.transpose(0, 3, 2, 4, 1, 5).reshape(P, *layout.row.shape), layout)
