"""One CTA of 16-bit storage by mma.sync: decode on sm_80 and sm_90, prefill on sm_80. cp.async, ldmatrix, mma.sync.

What Triton compiles our decode tile to (16 or 32 query rows, read from its TTGIR and SASS): four or eight warps along
the keys for Q K^T and along the depth for P V; K and V by cp.async into swizzled rows, a tile ahead; K by ldmatrix, V
by ldmatrix.trans; Q and P through shared memory and ldmatrix, since every warp needs all of them. The mask, the online
softmax and the scale work on the accumulator registers. Every access and every barrier is stated to ``hazards``.

Prefill on sm_80 has eight warps. Where a tile has at least as many query rows as the last product has columns, the
compiler puts the warps along the rows (``along_rows``): each reads its own rows of Q and all of K and V, a row is in
four lanes of one warp, and P goes from the accumulator to the next product in its registers. So does decode whose last
product is narrow.

Decode of 8 rows over 4 bits has one warp, to which K and V^T are the first operand, Q^T and P^T the second
(``turned``): a row is in eight lanes, and P goes from the accumulator to its operand by shuffles."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.common.regroup import Regroup
from kvlab.hardware import current_arithmetic
from kvlab.layout import TileTensor
from kvlab.memory import Memory
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.rows_over_warps import butterfly, in_turn
from kvlab.staging.tile.shared_tile import SharedTile
from kvlab.staging.tile.tile_spec import TileSpec

from .decode_cta import NvidiaDecodeCTA
from .mma_sync_plan import MmaSyncShape

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class MmaSyncCTA(NvidiaDecodeCTA[MmaSyncShape]):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers.

    hazards : what is in flight, and who waited; checks every access."""

    buffer = "cp.async into swizzled rows; ldmatrix"
    p_path = "shared memory; registers if the last product is no wider than the rows, or these are 8"

    @classmethod
    def shape_of(cls, tile: TileSpec) -> MmaSyncShape:
        """The sizes of the model for a tile."""
        return MmaSyncShape(
            tile.BM, tile.BN, *tile.k, tile.dtype, tile.arch, tile.v_in_k, tile.v, tile.each, tile.warps,
            tile.along_rows, max(tile.ahead, 1),
        )

    @property
    def p_in_registers(self) -> bool:
        """See :class:`MmaSyncShape`."""
        return self.shape.p_in_registers

    @property
    def v_before_p(self) -> bool:
        """Tells whether V is read before P is written: it is converted in its registers."""
        return self.shape.each > 1 and not self.p_in_registers

    @property
    def stages(self) -> int:
        """Tiles of K that shared memory holds."""
        return self.shape.stages

    def load_q(self, dram: Memory, offset: IntArray, valid: BoolArray, role: str = "q") -> SharedTile:
        """Q rows (elements ``offset[programs, BM]`` of ``dram``) through registers into shared memory, or zeros. Their
        other columns of elements have the other ``Q_ROLES``."""
        self.copies.by_registers(role, dram, np.where(valid, offset, -1), self.shape.dtype.itemsize)
        return SharedTile(self.smem, self.shape.place(role), self.shape.dtype)

    def load_k(self, tile: TileTensor, active: BoolArray, by_block: Any = None) -> Fragments:
        """K tile of these pages into shared memory, then to the B fragments of S = Q K^T. Of a narrower dtype, it is
        converted on its way, times ``by_block`` ``[programs, BN, blocks of 128 columns]`` if given; of another of the
        same size, where it is multiplied."""
        own = None if self._load("k", tile, by_block) or self.shape.each > 1 else tile.dtype
        self._state_read("k")
        return self._read("k", active, own)

    def load_v(self, tile: TileTensor | None, active: BoolArray) -> Fragments:
        """V tile into shared memory (None: it lies there, with ``v_in_k``), then transposed to the B fragments of
        O += P V; converted as K.

        In a pipeline the warps issue these reads after those of P: :meth:`accumulate` states them; of pairs, here."""
        if tile is not None:
            self._load("v", tile)
        if not self.pipeline.following or self.v_before_p:
            self._state_read("v")
        return self._read("v", active)

    def _load(self, role: str, tile: TileTensor, by_block: Any = None) -> bool:
        """A tile into its place; whether it was converted on its way."""
        converted = self.shape.each == 1 and tile.dtype.itemsize < self.shape.dtype.itemsize
        if converted:
            self.hazards.barrier()
            self.copies.by_conversion(role, tile, self.shape.dtype, by_block)
            self.hazards.barrier()
        else:
            self.pipeline.load(role, tile)
        return converted

    def scores(
        self, q: SharedTile, k: Fragments, active: BoolArray, s: Fragments | None = None, role: str = "q"
    ) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``; added to ``s`` if given. ``role`` as in :meth:`load_q`."""
        self._state_read(role)
        a, k = self._read(role, active), k.with_values(k.values.astype(self.shape.dtype, copy=False))
        return self._multiply("qk", a, k, self._zeros(self.shape.BN) if s is None else s)

    def operand_p(self, p: Fragments, active: BoolArray) -> Fragments:
        """The A fragments of P: rounded to the dtype of the product, through shared memory and ldmatrix; or where they
        lie: two neighbouring accumulators are one operand. ``turned``, the B fragments of P^T, by shuffles."""
        if self.shape.turned:
            layout = self.shape.fragment_map("p")
            return Fragments(layout.spread(p.tile().astype(self.shape.dtype)), layout)
        if self.shape.along_rows:
            layout = self.shape.fragment_map("p")
            return Fragments(p.values.astype(self.shape.dtype).reshape(-1, *layout.row.shape), layout)
        self.hazards.barrier()
        return super().operand_p(p, active)

    def p_barriers(self) -> None:
        """The barriers of :meth:`operand_p` where P goes through another CTA's model of the same threads."""
        if not self.p_in_registers:
            self.hazards.barrier()
            self.hazards.barrier()

    def add_values(self, p: Fragments, v: Fragments, o: Fragments) -> Fragments:
        """O += P V of A and B fragments."""
        return self._multiply("pv", p, v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BD]``."""
        return self._zeros(self.shape.columns("v")[1])

    def _row_barriers(self) -> None:
        if not self.p_in_registers:
            super()._row_barriers()

    def _by_row(self, x: Fragments, combine: np.ufunc) -> np.ndarray[Any, Any]:
        shape, (rows, columns) = self.shape, x.map.shape
        if shape.turned:
            keys = x.values.reshape(self.programs, 8, 4, -1, 2, 2).transpose(0, 2, 5, 1, 3, 4)
            lane = in_turn(combine, keys.reshape(*keys.shape[:4], -1))
            return butterfly(combine, lane).reshape(self.programs, rows)
        warps_m, warps_n = min(shape.warps_m, rows // 16), min(shape.warps_n, columns // 8)  # that hold other parts
        parts = x.values.reshape(self.programs, shape.warps, 8, 4, -(-rows // (16 * shape.warps_m)), -1, 2, 2)
        parts = parts[:, : warps_m * warps_n]
        lane = in_turn(combine, parts.swapaxes(5, 6).reshape(*parts.shape[:5], 2, -1))
        quad = butterfly(combine, np.moveaxis(lane, 3, -1))  # [programs, warps, 8 rows, m-tiles, halves]
        warps = quad.reshape(self.programs, warps_m, warps_n, 8, -1, 2)
        found = butterfly(combine, np.moveaxis(warps, 2, -1))  # [programs, warps_m, 8, m-tiles, halves]
        return found.transpose(0, 3, 1, 4, 2).reshape(self.programs, rows)

    def _zeros(self, cols: int) -> Fragments:
        return Fragments.zeros(self.programs, self.shape.output_map(cols))

    def _copied_to(self, role: str) -> tuple[TileCopyPlan, IntArray]:
        """The plan of a role's tile, and where each of its vectors lands."""
        place = self.shape.place(role)
        columns, _ = self.shape.columns(role)
        plan = copy_plan(place.rows, place.row_bytes, columns * self.shape.dtype.itemsize, self.shape.warps)
        return plan, place.address(plan.row, plan.byte // 16)

    def _shift(self, role: str) -> int:
        stage = self._stage(role)
        return self.shape.place(f"k{stage}").base - self.shape.place("k").base if stage else 0

    def _multiply(self, roles: str, a: Fragments, b: Fragments, c: Fragments) -> Fragments:
        """C += A B, each warp its columns, in float32. The sums over all steps of 16 are those of one matrix product,
        in its order; hardware, and the chip's arithmetic, go step by step. ``turned``, C^T += B^T A^T has the same."""
        if self.shape.turned:
            right = b.tile().swapaxes(1, 2) if roles == "qk" else b.tile()
            total = current_arithmetic().products(a.tile()[:, None], right[:, None], c.tile()[:, None])
            return c.with_values(c.map.spread(total[:, 0]))
        tile_a, tile_b = (_warp_tile(self.shape, role, x.values) for role, x in zip(roles, (a, b), strict=True))
        start = _warp_tile(self.shape, roles, c.values)  # [programs, warps, BM, columns of the warp]
        total = current_arithmetic().products(tile_a, tile_b.swapaxes(2, 3), start)
        registers = _warp_order(self.shape, roles)[0](total.reshape(self.programs, self.shape.warps, -1))
        return c.with_values(registers.reshape(c.values.shape))


def _warp_tile(shape: MmaSyncShape, role: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The matrix that each warp's registers hold: ``[P, warps, BM, k]`` of Q or P, ``[P, warps, columns, k]`` of K or
    V^T, ``[P, warps, BM, columns]`` of their product."""
    _, together, extent = _warp_order(shape, role)
    return together(values.reshape(len(values), shape.warps, -1)).reshape(len(values), shape.warps, *extent)


@functools.cache
def _warp_order(shape: MmaSyncShape, role: str) -> tuple[Regroup, Regroup, tuple[int, int]]:
    """From a warp's matrix, row-major, to its registers; the way back; and the matrix's extent. ``role`` is that of an
    operand, or two for their product. The same for all warps, whose columns (keys of K) are ``8 (warps_n n + w) +
    0..7`` and whose rows ``16 (warps_m m + w) + 0..15``."""
    products = {"qk": shape.BN, "pv": shape.columns("v")[1]}
    layout = shape.output_map(products[role]) if role in products else shape.fragment_map(role)
    threads = slice(0, 32)
    row, col = layout.row[threads], layout.col[threads]
    if role in ("k", "v"):  # its columns, by what is contracted
        row, col = (row, col) if role == "k" else (col, row)
        row = row // (8 * shape.warps_n) * 8 + row % 8
    else:
        row = row // (16 * shape.warps_m) * 16 + row % 16
    if role in products:
        col = col // (8 * shape.warps_n) * 8 + col % 8
    extent = int(row.max()) + 1, int(col.max()) + 1
    position = row * extent[1] + col
    home = np.empty(extent[0] * extent[1], np.int64)
    home[position.reshape(-1)] = np.arange(position.size)
    return Regroup(position.reshape(-1)), Regroup(home), extent
