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

    tiles       ``"q"``, ``"k"``, ``"v"``, ``"o"`` -> their buffers
    consumers   the warps of each
    producer    its warp

    >>> C = Constants(64, 64, 3, 2, 3, 128, 128, 0, *8 * [False], True, True, 1, False, 160, 32)
    >>> places = places_of(C)
    >>> places.consumers[1], places.producer, len(places.tiles["q"]), places.tiles["k"][1].base
    ((4, 5, 6, 7), (12,), 6, 65536)
    >>> places.rows((4, 5, 6, 7), 1).moved.tolist()
    [0, 0, 0, 0, 2048, 2048, 2048, 2048, 0, 0, 0, 0, 0]
    """

    def __init__(self, C: Constants) -> None:
        sizes = {
            "q": (C.NQ * C.NC, C.BM, C.D), "k": (C.NB, C.BN, C.D), "v": (C.NB, C.BN, C.DV),
            "o": (C.NC, C.BM, C.DV // C.ROUNDS),
        }  # fmt: skip
        self.tiles: dict[str, list[PanelTile]] = {}
        end = 0
        for role, (n, rows, cols) in sizes.items():
            self.tiles[role] = [PanelTile(rows, cols, end + 2 * i * rows * cols) for i in range(n)]
            end += 2 * n * rows * cols
        self._words, self.nbytes = end, end + 4 * WORDS * C.NQ
        self.consumers: list[Warps] = [tuple(range(4 * w, 4 * w + 4)) for w in range(C.NC)]
        self.producer: Warps = (4 * C.NC,)
        self.warps = 4 * C.NC + 1
        self.partitions = {f"consumer {w}": warps for w, warps in enumerate(self.consumers)}
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

    def atoms(self, warps: Warps, i: int, first: int) -> Footprint:
        """The atoms of 8 rows of a V tile from atom ``first`` on: two rows of each for each of the four warps."""
        key = "atoms", i, warps, first
        if key not in self._made:
            place = self.tiles["v"][i]
            row, vector = np.ogrid[8 * first : place.rows, : place.vectors]
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
