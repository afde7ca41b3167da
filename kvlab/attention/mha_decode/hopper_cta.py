"""A CTA of the Hopper decode kernel: a ring in shared memory, TMA, ldmatrix, and warps with keys of their own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.attention.hopper.cta import PartitionedCTA, Places
from kvlab.hardware import TmaDescriptor, current_arithmetic, get_atom, ldmatrix
from kvlab.staging import Fragments
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.rows_over_warps import butterfly, in_turn

from .hopper_config import AT_ONCE, PANEL, HopperDecodeConstants

Array = np.ndarray[Any, Any]


@functools.cache
def places_of(C: HopperDecodeConstants, more: int = 0) -> Places:
    """NB stages of K, then of V, then ``more`` bytes, where the sums of the warps come to lie; without these in the
    stages of K.

    >>> places = places_of(HopperDecodeConstants(4, 4, 1, 128, 16, 16, 16, 2, False, 0, 0))
    >>> places.tiles["k"][1].base, places.tiles["v"][0].base, places.nbytes
    (16384, 32768, 65536)
    """
    ring = C.NB, C.BN, C.W
    return Places({"k": ring, "v": ring}, {"the consumers": C.ROWS // 4, "the producer": 1}, more)


def boxes_of(k_cache: Array, v_cache: Array, C: HopperDecodeConstants) -> dict[str, TmaDescriptor]:
    """Boxes that TMA copies: BOX tokens of HEADS heads of K and V, pairs as int16, as wide as the swizzle."""
    columns = min(C.W, PANEL)
    return {
        name: TmaDescriptor.of(x.view(np.int16) if C.PAIRS else x, (1, C.BOX, C.HEADS, columns), f"{2 * columns}B")
        for name, x in (("k", k_cache), ("v", v_cache))
    }


class HopperDecodeCTA(PartitionedCTA):
    """Shared memory as the kernel lays it out, and what is done to it. Of the consumers' warps, each has a quarter of a
    block's keys and 16 rows: the rows of one quarter are neighbours.

    dtype : of the products.
    """

    buffer = "TMA boxes into a ring of swizzled rows; ldmatrix"
    p_path = "registers"

    def start(self, C: HopperDecodeConstants) -> None:
        """Makes the mbarriers."""
        self.keys, self.rows, self.across = C.BN // 4, C.ROWS, C.ROWS // 16
        self.consumers, self.producer = self.places.partitions.values()
        self.full, self.free = self.barriers("full", C.NB), self.barriers("free", C.NB)

    def load_block(self, b: int, pages: Array, key: int, kv_head: int) -> None:
        """A block of K and of V into stage b: boxes of BOX tokens, HEADS heads and one panel, all on one mbarrier."""
        C, bar = self.C, self.full[b]
        bar.expect_bytes(C.BN * C.W * 4, self.producer[0])
        columns = min(C.W, PANEL)
        panel, box = np.arange(C.W // columns)[:, None], np.arange(C.BT // C.BOX)
        row = (key + box * C.BOX) % C.PAGE
        offset = 2 * columns * (panel * C.BN + box * (C.BOX * C.HEADS))
        for role in "kv":
            self.load(self.producer, role, role, b, bar, (pages, row, kv_head, panel * columns), offset)

    def read(self, role: str, b: int) -> Fragments:
        """The B operand of every warp, its keys of K or of V: ``[BN, W]``, pairs as int16; of warps with the same keys
        that of the first.
        """
        place, trans = self.places.tiles[role][b], role == "v"
        self.hazards.read(self.places.once((place, "keys"), lambda: self._keys_of_warps(place)), f"{role} read", b)
        row, vector, layout = _operand(self.C, trans)
        kind = np.dtype(np.int16) if self.C.PAIRS else self.dtype
        words = ldmatrix(self.smem, place.address(row, vector), 4, trans=trans, dtype=kind)  # [instructions, 4, 32, 8]
        self.traffic.move("SMEM->registers", place.nbytes * self.across)
        return Fragments(np.moveaxis(words, 0, 2).reshape(1, *layout.row.shape), layout)

    def _keys_of_warps(self, place: PanelTile) -> Footprint:
        """The footprint of all warps' keys in a stage."""
        row, vector, other = np.ogrid[: place.rows, : place.vectors, : self.across]
        return self.places.cells.footprint(place.address(row, vector), 16, row // self.keys * self.across + other)

    def multiply_rows(self, q: Array, k: Fragments, s: Fragments) -> Fragments:
        """S + Q K^T of every warp's keys; q ``[4, ROWS, W]``."""
        return self._add_products(q, self._of_warps(k).swapaxes(1, 2), s)  # of [4, ROWS, keys]

    def accumulate(self, p: Fragments, v: Fragments, o: Fragments) -> Fragments:
        """O + P V of every warp's keys; P stays in the registers of its scores."""
        return self._add_products(p.tile().astype(self.dtype).reshape(4, self.rows, -1), self._of_warps(v), o)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[1, 4 * ROWS]`` of every warp's keys: in the lane, over its quad."""
        lanes = p.tile().reshape(4 * self.rows, -1, 4, 2).swapaxes(1, 2).reshape(1, 4 * self.rows, 4, -1)
        return butterfly(np.add, in_turn(np.add, lanes))

    def leave(self, o: Fragments, *of_rows: Array) -> None:
        """Leaves each warp's results, for the others, where nobody reads any more: o in K's ring, 16 bytes of row r at
        ``16 (r % 8)`` exclusive or their place in a row, and ``of_rows``, a number a row each, in V's; or all behind
        the rings.
        """
        address, tops = self._sums_and_tops(len(of_rows))
        quarter, row, _ = np.ogrid[:4, : self.rows, :1]
        self._write("sums", address, 16, quarter * self.across + row // 16)
        self.smem.store(address, o.tile().reshape(4, self.rows, -1, 4))
        quarter, other = np.ogrid[:4, : self.across]
        for at, x in zip(tops, of_rows, strict=True):
            self._write("tops", at[:, None] + 64 * other, 64, quarter * self.across + other)
            self.smem.store(at, x.reshape(4, self.rows))

    def left(self, of_rows: int = 0) -> tuple[Array, ...]:
        """Results that all warps have left: o ``[4, ROWS, W]``, and as many times ``[4, ROWS]``."""
        address, tops = self._sums_and_tops(of_rows)
        self.hazards.read(self.places.region(int(address.min()), address.size * 16, self.consumers), "sums read")
        for at in tops:
            self.hazards.read(self.places.region(int(at[0]), 16 * self.rows, self.consumers), "tops read")
        sums = self.smem.load(address, np.float32, 4).reshape(4, self.rows, -1)
        return sums, *(self.smem.load(at, np.float32, self.rows) for at in tops)

    def _sums_and_tops(self, of_rows: int) -> tuple[Array, Array]:
        """Byte addresses ``[4, ROWS, columns / 4]`` of 16 bytes, and ``[of_rows, 4]`` of a float for each row."""
        vectors = min(self.C.W, AT_ONCE) // 4
        quarter, row, vector = np.ogrid[:4, : self.rows, :vectors]
        address = ((quarter * self.rows + row) * vectors + (vector ^ row % 8)) * 16
        at, tops = 0, self.places.tiles["v"][0].base
        if self.places.nbytes > self.places.behind:
            at, tops = self.places.behind, self.places.behind + address.size * 16
        return address + at, tops + np.arange(4 * of_rows).reshape(-1, 4) * self.rows * 4

    def _write(self, name: str, address: Array, nbytes: int, warp: Array) -> None:
        """``nbytes`` at each address, written by a warp."""
        key = name, int(address.flat[0])
        region = self.places.once(key, lambda: self.places.cells.footprint(address, nbytes, warp))
        self.hazards.write(region, f"{name} write")

    def zeros(self, columns: int) -> Fragments:
        """An accumulator: 16 rows of each warp."""
        return Fragments.zeros(1, accumulator(columns, self.rows))

    def _of_warps(self, x: Fragments) -> Array:
        """``[4, keys, W]`` of a B operand."""
        return x.tile().reshape(4, self.keys, -1)

    def _add_products(self, a: Array, b: Array, c: Fragments) -> Fragments:
        """C + A B of every warp."""
        total = current_arithmetic().products(a, b, c.tile().reshape(4, self.rows, -1))
        return c.with_values(c.map.spread(total.reshape(1, 4 * self.rows, -1)))


@functools.cache
def accumulator(columns: int, rows: int) -> FragmentMap:
    """Of 16 rows of each warp, ``[4 rows, columns]``: warp w has the rows ``16 w ...``.

    >>> accumulator(16, 16).row[:, 0, 0].reshape(4, 32)[:, 0].tolist()
    [0, 16, 32, 48]
    """
    atom = get_atom("mma.sync.m16n8k16.bf16")
    thread, tile, r = np.ogrid[: 8 * rows, : columns // 8, :4]
    row, col = atom.c(thread % 32, r)
    return FragmentMap((4 * rows, columns), thread // 32 * 16 + row, 8 * tile + col, warp_size=32)


@functools.cache
def _operand(C: HopperDecodeConstants, trans: bool) -> tuple[Array, Array, FragmentMap]:
    """Row and vector ``[instructions, 4 warps, 32]`` that ldmatrix.x4 reads, of the warps of the first rows, and what
    the registers then hold.

    K: 8 keys x 32 columns an instruction; V, transposed: 16 keys x 16 columns.
    """
    keys = C.BN // 4
    across, together = (C.W // 16, 16) if trans else (C.W // 32, 8)
    n, j, warp, lane = np.ogrid[: keys // together, :across, :4, :32]
    if trans:
        row, vector = keys * warp + 16 * n + lane % 16, 2 * j + lane // 16
    else:
        row, vector = keys * warp + 8 * n + lane % 8, 4 * j + lane // 8
    row, vector = (x.reshape(-1, 4, 32) for x in np.broadcast_arrays(row + 0 * j, vector + 0 * warp + 0 * n))
    thread, n, j, m, e = np.ogrid[:128, : keys // together, :across, :4, :2]
    lane = thread % 32
    if trans:
        key, col = 16 * n + 8 * (m % 2) + 2 * (lane % 4) + e, 16 * j + 8 * (m // 2) + lane // 4
    else:
        key, col = 8 * n + lane // 4, 32 * j + 8 * m + 2 * (lane % 4) + e
    at, of = (x.reshape(128, -1, 8) for x in np.broadcast_arrays(keys * (thread // 32) + key, col + 0 * n))
    return row, vector, FragmentMap((C.BN, C.W), at, of, warp_size=32)
