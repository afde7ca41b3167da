"""Where the Hopper prefill kernel's tiles stand in shared memory, and which bytes of them each warp touches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.staging.footprint import Cells, Footprint
from kvlab.staging.wgmma_cta import PanelTile

from .hopper_config import Constants

__all__ = ["HopperPlaces", "places_of"]

Warps = tuple[int, ...]
UNIT = 16  # bytes: what is known of shared memory is known by vectors
WORDS = 8  # numbers of a slot


class HopperPlaces:
    """Buffers of Q (NQ) and O for each consumer, of K and V for each stage, all as panels of 128 bytes a row, swizzled;
    then slots of numbers. All CTAs of all launches with these constants share the footprints.

    tiles       ``"q"``, ``"k"``, ``"v"``, ``"o"`` -> their buffers; ``"raw"``: V of e4m3
    consumers   the warps of each
    widener     its warps, where V is of e4m3
    producer    its warp

    >>> C = Constants(64, 64, 3, 2, 3, 128, 128, 0, *10 * [False], True, True, 1, False, 2, *3 * [False], 160, 32, 0)
    >>> places = places_of(C)
    >>> places.consumers[1], places.producer, len(places.tiles["q"]), places.tiles["k"][1].base
    ((4, 5, 6, 7), (12,), 6, 65536)
    >>> places.rows((4, 5, 6, 7), 1).moved.tolist()
    [0, 0, 0, 0, 2048, 2048, 2048, 2048, 0, 0, 0, 0, 0]
    """

    def __init__(self, C: Constants) -> None:
        sizes = {
            "q": (C.NQ * C.NC, C.BM, C.D, C.ITEM), "k": (C.NB, C.BN, C.D, C.ITEM), "v": (C.NB, C.BN, C.DV, 2),
            "o": (C.NC, C.BM, C.DV // C.ROUNDS, 2), "raw": (C.NB if C.ITEM == 1 else 0, C.BN, C.DV, 1),
        }  # fmt: skip
        self.tiles: dict[str, list[PanelTile]] = {}
        end = 0
        for role, (n, rows, cols, size) in sizes.items():
            self.tiles[role] = [PanelTile(rows, cols, end + size * i * rows * cols, size) for i in range(n)]
            end += size * n * rows * cols
        self._words, self.nbytes = end, end + 4 * WORDS * C.NQ
        self.consumers: list[Warps] = [tuple(range(4 * w, 4 * w + 4)) for w in range(C.NC)]
        self.widener: Warps = tuple(range(4 * C.NC, 4 * C.NC + (4 if C.ITEM == 1 else 0)))
        self.producer: Warps = (4 * C.NC + len(self.widener),)
        self.warps = self.producer[0] + 1
        self.partitions = {f"consumer {w}": warps for w, warps in enumerate(self.consumers)}
        if self.widener:
            self.partitions["the widener"] = self.widener
        self.partitions["the producer"] = self.producer
        self.cells = Cells(self.nbytes, self.warps, unit=UNIT)
        self._made: dict[tuple[Any, ...], Footprint] = {}

    def word(self, slot: int, i: int) -> int:
        """The address of number ``i`` of a slot."""
        return self._words + 4 * (WORDS * slot + i)

    def words(self, slot: int, warps: Warps) -> Footprint:
        """The numbers of a slot."""
        return self._region("words", slot, self.word(slot, 0), 4 * WORDS, warps)

    def whole(self, role: str, i: int, warps: Warps) -> Footprint:
        """A buffer, all of which each of ``warps`` touches: as TMA or wgmma do."""
        place = self.tiles[role][i]
        return self._region(role, i, place.base, place.nbytes, warps)

    def rows(self, warps: Warps, i: int) -> Footprint:
        """A buffer of O: 16 rows for each of the four warps."""
        key = "rows", i, warps
        if key not in self._made:
            place = self.tiles["o"][i]
            row, vector = np.ogrid[: place.rows, : place.vectors]
            warp = warps[0] + row // 16
            self._made[key] = self.cells.footprint(place.address(row, vector), 16, warp)
        return self._made[key]

    def atoms(self, role: str, warps: Warps, i: int, first: int, end: int) -> Footprint:
        """The atoms of 8 rows of a tile from ``first`` to ``end - 1``: two rows of each for each of the four warps."""
        key = "atoms", role, i, warps, first, end
        if key not in self._made:
            place = self.tiles[role][i]
            row, vector = np.ogrid[8 * first : 8 * end, : place.vectors]
            warp = warps[0] + row % 8 // 2
            self._made[key] = self.cells.footprint(place.address(row, vector), 16, warp)
        return self._made[key]

    def _region(self, role: str, i: int, start: int, nbytes: int, warps: Warps) -> Footprint:
        key = role, i, warps
        if key not in self._made:
            self._made[key] = self.cells.region(start, nbytes, warps)
        return self._made[key]


@functools.cache
def places_of(C: Constants) -> HopperPlaces:
    """The places that the constants give."""
    return HopperPlaces(C)
