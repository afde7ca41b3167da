"""A CTA of the Hopper prefill kernel: shared memory, mbarriers, TMA and wgmma, and what its partitions do with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.attention.hopper.cta import PartitionedCTA, Places, accumulator
from kvlab.attention.hopper.emulator import find_pages
from kvlab.memory import float8_e4m3fn
from kvlab.staging import AsyncBarrier, Fragments
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.record.footprint import Footprint

from .hopper_config import HopperPrefillConstants

Array = np.ndarray[Any, Any]
Warps = tuple[int, ...]


class HopperPrefillCTA(PartitionedCTA):
    """Shared memory as the kernel lays it out, and what is done to it."""

    buffer = "TMA boxes into a ring of swizzled panels; matrix descriptors"
    p_path = "registers"

    def start(self, C: HopperPrefillConstants) -> None:
        """Makes the mbarriers."""
        *self.consumers, self.changer, self.producer = self.places.partitions.values()
        self.q_full = self.barriers("q full", C.NQ * C.NC)
        self.q_free = self.barriers("q free", C.NQ * C.NC, 2 if C.STORED == 1 else 1)
        self.k_full, self.k_free = self.barriers("k full", C.NB), self.barriers("k free", C.NB, C.NC)
        self.v_full, self.v_free = self.barriers("v full", C.NB), self.barriers("v free", C.NB, C.NC)
        self.turn = self.barriers("turn", C.NC if C.TURNS else 0, 4)  # of bar.arrive and bar.sync: every warp arrives
        of_q, of_k, of_v = (self.q_full, self.q_free), (self.k_full, self.k_free), (self.v_full, self.v_free)
        self.loaded = tuple(loaded_roles(C).values())
        raw_k, raw = of_k, of_v
        if C.STORED < C.ITEM:  # the way of K and V from DRAM ends before the changer
            raw_k = self.barriers("raw k full", C.NR), self.barriers("raw k free", C.NR)
        if C.STORED == 1:
            raw = self.barriers("raw full", C.NR), self.barriers("raw free", C.NR)
        self.bars, self.bars_of_producer = (*of_q, *of_k, *of_v), (*of_q, *raw_k, *raw)
        self.changed_bars = *of_k, *of_v

    def send(self, slot: int, *values: int) -> None:
        """Numbers for the other partitions, the first of ``slot``."""
        self.hazards.write(self._words(slot, self.producer), "words write", slot)
        address = self._word(slot, 0) + 4 * np.arange(len(values))
        self.smem.store(address, np.array(values, np.int32)[:, None])

    def tell(
        self, slot: int, batch: int, head: int, row: int, q_first: int, num_q: int, num_keys: int, *unit: int
    ) -> None:
        """Tells the tile in ``slot``, for the other partitions; of ragged sequences where it is, too; of a unit its key
        blocks, and where its partial result goes.
        """
        self.send(slot, batch, head, row, *((q_first, num_q, num_keys) if self.C.RAGGED_Q else ()), *unit)

    def receive(self, me: Warps, slot: int) -> int:
        """The first number of ``slot``."""
        return self._received(me, slot, 0, 1)[0]

    def hear(self, me: Warps, slot: int, max_q: int, max_k: int) -> list[int]:
        """Hears of the tile in ``slot``: its head, its first row, and where its sequence is."""
        if self.C.RAGGED_Q:
            return self._received(me, slot, 1, 5)
        return [*self._received(me, slot, 1, 2), 0, max_q, max_k]

    def hear_unit(self, me: Warps, slot: int) -> list[int]:
        """Hears of the unit in ``slot``."""
        return self._received(me, slot, 6, 3)

    def _received(self, me: Warps, slot: int, first: int, count: int) -> list[int]:
        self.hazards.read(self._words(slot, me), "words read", slot)
        address = self._word(slot, first) + 4 * np.arange(count)
        return [int(word) for word in self.smem.load(address, np.int32)[:, 0]]

    def _word(self, slot: int, i: int) -> int:
        """The address of number ``i`` of a slot."""
        return self.places.behind + 4 * (self.C.WORDS * slot + i)

    def _words(self, slot: int, warps: Warps) -> Footprint:
        """The numbers of a slot."""
        return self.places.region(self._word(slot, 0), 4 * self.C.WORDS, warps)

    def find_pages(self, table: Array | None, batch: int, key: int, num_keys: int) -> Array | int:
        """The page of each box of a block of keys; of those past the end, which are not looked up, one that there is
        not. ``batch`` without a table.
        """
        if table is None:
            return batch
        return find_pages(table, key, num_keys, self.boxes[self.loaded[0]].shape[0], self.C.BN, self.C.BOX, self.C.PAGE)

    def load_rows(
        self, role: str, bar: AsyncBarrier, b: int, pages: Array | int, first: int, head: int, key: int = 0
    ) -> None:
        """A tile: boxes of some rows and one panel of columns, all on one mbarrier, from a page each, or from one
        piece. What lies outside reads as 0.
        """
        place, box = self.places.tiles[role][b], self.boxes[role]
        bar.expect_bytes(place.nbytes, self.producer[0])
        token = key + np.arange(0, place.rows, box.box[1] * box.box[2])
        page, row = np.broadcast_to(pages, len(token)), first + token
        if isinstance(pages, np.ndarray):
            row = token % self.C.PAGE
        panel = np.arange(0, place.cols, box.box[3])[:, None]
        offset = panel // box.box[3] * place.rows * 128 + (token - key) * 128  # [panels, boxes]
        self.load(self.producer, role, role, b, bar, (page, row, head, panel), offset)

    def clean_rows(self, me: Warps, role: str, b: int, first: int, end: int) -> None:
        """Zero the rows of a V tile but ``first`` to ``end - 1``: what no row sees may be anything. Eight rows are read
        and stored anew. Each consumer does it, before it reads the tile, or the changer. Boxes behind the end have come
        as zeros.
        """
        place = self.places.tiles[role][b]
        first, end = (min(max(bound, 0), place.rows) for bound in (first, end))
        until = -(-end // self.C.BOX) * self.C.BOX
        row = np.arange(place.rows)
        row = row[(row < first) | ((row >= end) & (row < until))]
        if len(row):
            written = atoms(self.places, place, me, first, end, until)
            self.hazards.write_equal(written, "v zeros", b, values=(first, end))
            self.zero_rows(place, row)
        self.hazards.fence_async(me)
        self.meet(me)

    def transpose_tile(self, me: Warps, b: int) -> None:
        """V of buffer b with its keys along the rows, in the order in which a lane has them in P."""
        raw, v = self.places.tiles["raw"][b], self.places.tiles["v"][b]
        row, vector = np.ogrid[: raw.rows, : raw.vectors]
        self.hazards.read(columns(self.places, raw, me), "raw read", b)
        values = self.smem.load(raw.address(row, vector), self.dtype, 16).reshape(raw.rows, raw.cols)
        row, vector = np.ogrid[: v.rows, : v.vectors]
        self.hazards.write(self.places.shared(v, me, v.rows // 4), "v write", b)
        self.smem.store(v.address(row, vector), values[key_order(v.cols)].T.reshape(v.rows, v.vectors, 16))
        self.hazards.fence_async(me)
        self.meet(me)
        self.traffic.move("SMEM->SMEM", v.nbytes)

    def widen_tile(self, me: Warps, raw_role: str, role: str, r: int, b: int) -> None:
        """K or V of e4m3 of buffer r to buffer b, in 16 bits, eight columns of a row a lane."""
        raw, wide = self.places.tiles[raw_role][r], self.places.tiles[role][b]
        row, half = np.ogrid[: raw.rows, : raw.cols // 8]
        self.hazards.read(self.places.shared(raw, me, 2), f"{raw_role} read", r)
        stored = self.smem.load(raw.address(row, half // 2) + half % 2 * 8, float8_e4m3fn, 8)
        self.hazards.write(self.places.shared(wide, me, 2), f"{role} write", b)
        self.smem.store(wide.address(row, half), stored.astype(self.dtype))
        self.hazards.fence_async(me)
        self.meet(me)
        self.traffic.move("SMEM->SMEM", wide.nbytes)

    def gather_rows(self, me: Warps, role: str, i: int, values: Array) -> None:
        """``values`` to a tile, four rows a warp in turn, for the tensor cores."""
        self.write(me, self.places.tiles[role][i], values, role, i, together=4)
        self.hazards.fence_async(me)
        self.meet(me)
        self.traffic.move("DRAM->SMEM", values.nbytes)

    def query(self, me: Warps, u: int) -> PanelTile | Array:
        """Q of buffer u, in registers if it is to be there."""
        q_at = self.places.tiles["q"][u]
        if not self.C.Q_REGISTERS:
            return q_at
        self.hazards.read(self.places.shared(q_at, me, 16), "q read", u)
        self.traffic.move("SMEM->registers", q_at.nbytes)
        return self.load_a(q_at)

    def scores(self, me: Warps, q: PanelTile | Array, u: int, b: int) -> Fragments:
        """S = Q K^T of buffer u, or of registers, and stage b: ``[BM, BN]`` float32. Started."""
        C, k_at = self.C, self.places.tiles["k"][b]
        if isinstance(q, PanelTile):
            self.hazards.read_async(self.places.whole("q", u, me), "q wgmma", u, last=False)
            self.traffic.move("SMEM->tensor cores", q.nbytes)
        self.hazards.read_async(self.places.whole("k", b, me), "k wgmma", b)
        s = self.multiply_qk(q, k_at, np.zeros((1, 1, 128, C.BN // 2), np.float32), C.DEPTH)
        self.traffic.move("SMEM->tensor cores", k_at.nbytes)
        return Fragments(s.reshape(1, 128, 1, -1), accumulator(C.BN))

    def round_p(self, e: Fragments) -> Fragments:
        """P as the loop carries it, in the dtype of the product."""
        return e.with_values(e.values.astype(self.dtype))

    def operand_p(self, p: Fragments) -> Fragments:
        """P as wgmma takes it: of e4m3, four keys of a row to a register."""
        if self.C.ITEM == 2:
            return p
        # [32 keys, 16 of them, 8 of them, row, two keys]
        words = p.values.reshape(1, 1, 128, -1, 2, 2, 2, 2).swapaxes(5, 6).reshape(1, 1, 128, -1)
        return Fragments(words, p.map)

    def accumulate(self, me: Warps, p: Fragments, b: int, o: Fragments) -> Fragments:
        """O += P V: P from registers, V from shared memory, transposed by the unit if of 16 bits. Started, as PRODUCTS.
        """
        C, v_at = self.C, self.places.tiles["v"][b]
        for _ in range(C.PRODUCTS):
            self.hazards.read_async(self.places.whole("v", b, me), "v wgmma", b)
        self.traffic.move("SMEM->tensor cores", v_at.rows * C.COLUMNS * 2 if C.PRODUCTS > 1 else v_at.nbytes)
        if self.C.ITEM == 2:
            return self.multiply_pv(p, v_at, o)
        return self.multiply_pv_transposed(p.values, v_at, o)

    def zeros(self) -> Fragments:
        """An output accumulator ``[BM, DV]``."""
        return Fragments.zeros(1, accumulator(self.C.DV))

    def store_tile(self, w: int, values: Array, batch: int, row: int, head: int, me: Warps) -> None:
        """O through buffer ``w`` to DRAM, in ROUNDS parts."""
        for i, part in enumerate(np.split(values, self.C.ROUNDS, axis=1)):
            if i > 0:
                self.wait_store(me)
            self.store_columns(w, part, batch, row, head, i * part.shape[1], me)

    def store_columns(self, w: int, values: Array, batch: int, row: int, head: int, col: int, me: Warps) -> None:
        """``values``, the columns of O from ``col`` on, as far as there are, through buffer ``w``, which no copy reads
        any more.
        """
        place = self.places.tiles["o"][w]
        self.meet(me)
        self.write(me, place, values, "o", w)
        self.hazards.fence_async(me)
        self.hazards.store_bulk(self.places.whole("o", w, self.elect(me)), "o store", w)
        panel = np.arange(0, min(place.cols, self.C.COLUMNS - col), 64)
        self.store("o", (batch, row, head, col + panel), place.base + panel * place.rows * 2)
        self.traffic.move("registers->DRAM", values.nbytes)

    def wait_store(self, me: Warps) -> None:
        """O's buffer has been read; the warps meet, so that those that stored nothing know it, too."""
        self.hazards.wait_store(0, me)
        self.meet(me)


def loaded_roles(C: HopperPrefillConstants) -> dict[str, str]:
    """K and V -> the role of the buffers to which TMA brings them."""
    return {"k": "raw k" if C.STORED < C.ITEM else "k", "v": "raw" if C.STORED == 1 else "v"}


@functools.cache
def places_of(C: HopperPrefillConstants) -> Places:
    """Buffers of Q (NQ) and O for each consumer, of K and V for each stage, of K and V that are changed as they come,
    too (``"raw k"`` and ``"raw"``); then slots of numbers.

    >>> flags = *9 * [False], True, True, 1, False, False, 2, 2
    >>> C = HopperPrefillConstants(64, 64, 64, 64, 3, 2, 3, 3, 128, 128, 0, *flags, 160, 32, 0)
    >>> places = places_of(C)
    >>> places.partitions["consumer 1"], places.partitions["the producer"]
    ((4, 5, 6, 7), (12,))
    >>> len(places.tiles["q"]), places.tiles["k"][1].base
    (6, 65536)
    """
    sizes = {
        "q": (C.NQ * C.NC, C.BM, C.D, C.ITEM), "k": (C.NB, C.BN, C.D, C.ITEM),
        "v": (C.NB, C.DV, C.BN, 1) if C.ITEM == 1 else (C.NB, C.BN, C.DV, 2),
        "o": (C.NC, C.BM, C.DV // C.ROUNDS, 2), "raw": (C.NR if C.STORED == 1 else 0, C.BN, C.DV, 1),
        "raw k": (C.NR if C.STORED < C.ITEM else 0, C.BN, C.D, 1),
    }
    consumers = {f"consumer {w}": 4 for w in range(C.NC)}
    partitions = consumers | {"the changer": 4 if C.STORED == 1 else 0, "the producer": 1}
    return Places(sizes, partitions, more=4 * C.WORDS * C.NQ)


def atoms(places: Places, place: PanelTile, warps: Warps, first: int, end: int, until: int) -> Footprint:
    """The groups of eight rows, two for each warp, that hold others than ``first`` to ``end - 1`` before ``until``."""

    def make() -> Footprint:
        row, vector = np.arange(place.rows)[:, None], np.arange(place.vectors)
        row = row[(row // 8 * 8 < first) | ((row // 8 * 8 + 8 > end) & (row < until)), None]
        return places.cells.footprint(place.address(row, vector), 16, warps[0] + row // 2 % 4)

    return places.once(("atoms", place, warps, first, end, until), make)


def columns(places: Places, place: PanelTile, warps: Warps) -> Footprint:
    """A tile, a quarter of whose columns each of four warps touches."""

    def make() -> Footprint:
        row, vector = np.ogrid[: place.rows, : place.vectors]
        return places.cells.footprint(place.address(row, vector), 16, warps[0] + vector // (place.vectors // 4))

    return places.once(("columns", place, warps), make)


@functools.cache
def key_order(keys: int) -> Array:
    """Key of V at each place of e4m3's operand: of 16, a lane has 2t, 2t + 1, 8 + 2t and 9 + 2t in P.

    >>> key_order(16).tolist()
    [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    """
    order: Array = np.arange(keys).reshape(-1, 2, 4, 2).swapaxes(1, 2).reshape(-1)
    return order
