"""A CTA of the Hopper MLA decode kernel: shared memory, mbarriers, TMA and wgmma, and what its partitions do."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from kvlab.attention.call.latent_rows import BLOCK
from kvlab.attention.hopper.cta import PartitionedCTA, Places, accumulator
from kvlab.attention.hopper.turns import Wait
from kvlab.staging import AsyncBarrier, Fragments
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.record.footprint import Footprint

from .hopper_config import HopperMLAConstants

Array = np.ndarray[Any, Any]
Warps = tuple[int, ...]
HALVES = ("left", "right")


class HopperMLACTA(PartitionedCTA):
    """Shared memory as the kernel lays it out, and what is done to it."""

    buffer = "TMA boxes into a ring of swizzled panels; matrix descriptors; V is read from K's"
    p_path = "registers of the leader, shared memory for the follower"

    def start(self, C: HopperMLAConstants) -> None:
        """Makes the mbarriers."""
        self.leader, self.follower, *self.producers = self.places.partitions.values()
        self.producer = self.producers[0]
        self.together = 8 if C.SCALED else 4  # rows of a warp of a producer of four, next to each other
        self.q_full, self.q_free = self.hazards.mbarrier("q full"), self.hazards.mbarrier("q free")
        # Barriers of bar.arrive and bar.sync: every warp arrives.
        self.p_full, self.s_done = self.hazards.mbarrier("p full", 4), self.hazards.mbarrier("s done", 4)
        self.l_full = self.barriers("left full", C.NB, C.LEFT_COPIES + 1)
        self.l_free = self.barriers("left free", C.NB)
        self.r_full = self.barriers("right full", C.NB, C.RIGHT_COPIES or 1)
        self.r_free = self.barriers("right free", C.NB)

    def load_queries(self, batch: int, token: int, head: int) -> None:
        """TB tokens x HB heads, panel by panel, all on one mbarrier."""
        C = self.C
        one = self.elect(self.producer)
        self.q_full.expect_bytes(C.BM * (C.DV + C.DR) * 2, one[0])
        for part, first in (("left", 0), ("right", C.DV // 2), ("rope", C.DV)):
            panel = np.arange(0, self.places.tiles[f"q {part}"][0].cols, 64)
            at = batch, token, head, first + panel
            self.load(one, "q", f"q {part}", 0, self.q_full, at, panel * C.BM * 2)

    def load_keys(self, part: str, b: int, bar: AsyncBarrier, pages: Array, row: int) -> None:
        """Columns of a block's keys into stage b: boxes of BOX keys and one panel."""
        C, role = self.C, f"k {part}"
        panel, box_row = np.arange(0, self.places.tiles[role][b].cols, 64)[:, None], np.arange(0, C.BN, C.BOX)
        box, first = ("rope", 0) if part == "rope" else ("k", HALVES.index(part) * C.DV // 2)
        offset = panel * C.BN * 2 + box_row * 128
        self.load(self.producer, box, role, b, bar, (pages, row, first + panel), offset)

    def gather(self, part: str, b: int, rows: Array, there: Array) -> None:
        """Columns ``rows`` ``[BN, columns]`` of a block into stage b, 16 bytes a thread and copy, ``together`` rows a
        warp in turn. Absent ones arrive as zeros.
        """
        place = self.places.tiles[f"k {part}"][b]
        self.hazards.copy_async(self.places.shared(place, self.producer, self.together), "k copy", b)
        address = place.address(np.arange(place.rows)[:, None], np.arange(place.vectors))
        self.smem.store(address, rows.reshape(*address.shape, -1))
        self.traffic.move("DRAM->SMEM", int(there.sum()) * rows[0].nbytes)

    def load_latents(self, rows: dict[str, Array], there: Array, n: int) -> tuple[Array, Array]:
        """The ``n``-th 128 latents of a block's rows, ``[BN, 128]`` e4m3, and what they are multiplied by."""
        values, by_row = rows["latents"][:, n * BLOCK : (n + 1) * BLOCK], rows["scales"][:, n]
        self.traffic.move("DRAM->registers", int(there.sum()) * (values[0].nbytes + by_row.itemsize))
        return values, by_row

    def put_latents(self, me: Warps, b: int, n: int, latents: tuple[Array, Array]) -> None:
        """Latents times what they are multiplied by, in the dtype of Q, to the ``n``-th 128 columns of stage b."""
        values, by_row = latents
        half = self.places.tiles[f"k {HALVES[n // 2]}"][b]
        place = PanelTile(half.rows, BLOCK, half.base + n % 2 * half.nbytes // 2)
        true = (values.astype(np.float32) * by_row[:, None]).astype(self.dtype)
        self.write(me, place, true, "k", b, self.together)
        self.hazards.fence_async(me)

    def tell(self, b: int, there: Array) -> None:
        """Tells the leader which rows of stage b are there."""
        me, which = self.producer, 2 + b
        start, row = self.places.behind + 256 * which, np.arange(self.C.BN)
        at = self.places.once(
            (start, me),
            lambda: self.places.cells.footprint(start + 4 * row[::4], 16, me[0] + row[::4] // self.together % 4),
        )
        self.hazards.write(at, "rows write", which)
        self.smem.store(start + 4 * row, there.astype(np.float32)[:, None])

    def mask_absent(self, me: Warps, s: Fragments, b: int) -> Fragments:
        """-inf for the keys of stage b that no slot is named for."""
        which = 2 + b
        start = self.places.behind + 256 * which
        self.hazards.read(self.places.region(start, 4 * self.C.BN, me), "rows read", which)
        there = self.smem.load(start + 4 * np.arange(self.C.BN), np.float32)[:, 0]
        return s.with_values(np.where(s.by_column(there[None]) != 0, s.values, np.float32(-np.inf)))

    def start_scores(self, me: Warps, b: int, phase: int) -> Generator[Wait, None, Fragments]:
        """S = Q K^T of stage b, ``[BM, BN]`` float32, started in parts as they arrive: left half, rope, right half."""
        C, s = self.C, np.zeros((1, 1, 128, self.C.BN // 2), np.float32)
        yield self.l_full[b], phase
        if C.LEFT_COPIES > 0:
            self.hazards.fence_async(me)  # rows come by ordinary copies
        s = self._add_scores(me, "rope", b, self._add_scores(me, "left", b, s))
        yield self.r_full[b], phase
        if C.RIGHT_COPIES > 0:
            self.hazards.fence_async(me)
        s = self._add_scores(me, "right", b, s)
        self.traffic.move("SMEM->tensor cores", (C.BM + C.BN) * (C.DV + C.DR) * 2)
        return Fragments(s.reshape(1, 128, 1, -1), accumulator(C.BN))

    def _add_scores(self, me: Warps, part: str, b: int, s: Array) -> Array:
        """S plus the product of some columns of Q and of stage b."""
        self.hazards.read_async(self.places.whole(f"q {part}", 0, me), "q wgmma", last=False)
        self.hazards.read_async(self.places.whole(f"k {part}", b, me), f"k {part} wgmma", b)
        return self.multiply_qk(self.places.tiles[f"q {part}"][0], self.places.tiles[f"k {part}"][b], s)

    def accumulate(self, me: Warps, p: Fragments | None, b: int, half: str, o: Fragments) -> Fragments:
        """O += P V with half the columns of stage b; P in registers, or None: from shared memory. Started."""
        v_at, p_at = self.places.tiles[f"k {half}"][b], self.places.tiles["p"][0]
        if p is None:
            self.hazards.read_async(self.places.whole("p", 0, me), "p wgmma", last=False)
        self.hazards.read_async(self.places.whole(f"k {half}", b, me), f"v {half} wgmma", b)
        self.traffic.move("SMEM->tensor cores", v_at.nbytes + (p_at.nbytes if p is None else 0))
        return self.multiply_pv(p_at if p is None else p, v_at, o)

    def zeros(self) -> Fragments:
        """Half the output accumulator."""
        return Fragments.zeros(1, accumulator(self.C.DV // 2))

    def send(self, me: Warps, p: Fragments, alpha: Array) -> None:
        """P and what O is multiplied by, for the other warpgroup: ordinary stores that its wgmma may then read."""
        self.write(me, self.places.tiles["p"][0], p.tile()[0], "p")
        self.put(me, 0, alpha)
        self.hazards.fence_async(me)
        self.p_full.arrive(me)

    def put(self, me: Warps, which: int, values: Array) -> None:
        """The factor ``which`` of each row, for the other warpgroup."""
        self.hazards.write(self._of_rows(which, me), "rows write", which)
        self.smem.store(self.places.behind + 256 * which + 4 * np.arange(self.C.BM), values[:, None])

    def get(self, me: Warps, which: int) -> Array:
        """The factor ``which`` of each row."""
        self.hazards.read(self._of_rows(which, me), "rows read", which)
        return self.smem.load(self.places.behind + 256 * which + 4 * np.arange(self.C.BM), np.float32)[:, 0]

    def clean_rows(self, me: Warps, b: int, half: str, end: int) -> None:
        """Zero the rows of half a V tile from ``end`` on; the others are stored as they are."""
        place = self.places.tiles[f"k {half}"][b]
        self.hazards.read(self.places.shared(place, me, 4), "v clean", b)
        self.hazards.write(self.places.shared(place, me, 4), "v clean", b)
        self.zero_rows(place, np.arange(end, place.rows))
        self.hazards.fence_async(me)
        self.meet(me)

    def store_half(
        self, me: Warps, o: Array, b: int, half: str, page: int, token: int, head: int, some: bool
    ) -> None:
        """Half the columns of the output, ``some`` or none of them, registers -> shared memory -> DRAM. They pass
        through the place of that half of V in stage b, float32 in two pieces. TMA leaves absent rows alone.
        """
        size, box = o.itemsize, self.boxes["o"]
        at = self.places.tiles[f"k {half}"][b]
        place = PanelTile(at.rows, at.nbytes // size // at.rows, at.base, size)
        panels, col = HALVES.index(half) * at.cols // box.box[4], 0 if some else box.box[4]
        for c, piece in enumerate(np.split(o, size // 2, axis=1)):
            self.meet(me)
            self.write(me, place, piece, "o", b)
            self.hazards.fence_async(me)
            self.hazards.store_bulk(self.places.whole(f"k {half}", b, self.elect(me)), "o store", b)
            self.store("o", (page, panels + c * box.box[1], token, head, col), place.base)
            self.hazards.wait_store(0, me)
            self.meet(me)
        self.traffic.move("registers->DRAM", o.nbytes)

    def _of_rows(self, which: int, warps: Warps) -> Footprint:
        """The factor ``which`` of each row: 16 rows for each of the four warps."""
        start, cells, piece = self.places.behind + 256 * which, self.places.cells, np.arange(16)
        return self.places.once(
            (start, warps), lambda: cells.footprint(start + 16 * piece, 16, warps[0] + piece // 4)
        )


@functools.cache
def places_of(C: HopperMLAConstants) -> Places:
    """Q, NB stages of latent rows and P, then alpha and 1 / l of each row; which rows of a stage are there, if LISTED.

    >>> places = places_of(HopperMLAConstants(1, 64, 64, 64, False))
    >>> places.partitions["the leader"], places.tiles["k right"][1].base, places.tiles["p"][0].base, places.nbytes
    ((0, 1, 2, 3), 172032, 221184, 229888)
    """
    cols = {"left": C.DV // 2, "right": C.DV // 2, "rope": C.DR}
    sizes = {f"{what} {part}": (n, 64, m) for what, n in (("q", 1), ("k", C.NB)) for part, m in cols.items()}
    partitions = {"the leader": 4, "the follower": 4, "the producer": C.WARPS}
    if C.SCALED:
        partitions["the other producer"] = C.WARPS
    numbers = 2 + C.NB if C.LISTED else 2
    return Places(sizes | {"p": (1, C.BM, C.BN)}, partitions, more=numbers * 4 * C.BM)
