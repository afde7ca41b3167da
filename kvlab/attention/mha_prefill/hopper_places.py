"""Where the Hopper prefill kernel's tiles stand in shared memory, and which bytes of them each warp touches."""

from __future__ import annotations

import functools

import numpy as np

from kvlab.attention.hopper.cta import Places
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.record.footprint import Footprint

from .hopper_config import Constants

Warps = tuple[int, ...]
WORDS = 8  # numbers of a slot


class HopperPlaces(Places):
    """Buffers of Q (NQ) and O for each consumer, of K and V for each stage, all as panels of 128 bytes a row, swizzled;
    then slots of numbers.

    tiles       ``"q"``, ``"k"``, ``"v"``, ``"o"`` -> their buffers; ``"raw"``: V of e4m3
    consumers   the warps of each
    transposer  its warps, where V is of e4m3
    producer    its warp

    >>> C = Constants(64, 64, 3, 2, 3, 128, 128, 0, *11 * [False], True, True, 1, 0, 0, 2, 0, 0, 0, 160, 32, 0)
    >>> places = places_of(C)
    >>> places.consumers[1], places.producer, len(places.tiles["q"]), places.tiles["k"][1].base
    ((4, 5, 6, 7), (12,), 6, 65536)
    >>> places.shared(places.tiles["o"][1], (4, 5, 6, 7), together=16).moved.tolist()
    [0, 0, 0, 0, 2048, 2048, 2048, 2048, 0, 0, 0, 0, 0]
    """

    def __init__(self, C: Constants) -> None:
        sizes = {
            "q": (C.NQ * C.NC, C.BM, C.D, C.ITEM), "k": (C.NB, C.BN, C.D, C.ITEM),
            "v": (C.NB, C.DV, C.BN, 1) if C.ITEM == 1 else (C.NB, C.BN, C.DV, 2),
            "o": (C.NC, C.BM, C.DV // C.ROUNDS, 2), "raw": (C.NB if C.ITEM == 1 else 0, C.BN, C.DV, 1),
        }
        self.tiles: dict[str, list[PanelTile]] = {}
        end = 0
        for role, (n, rows, cols, size) in sizes.items():
            self.tiles[role] = [PanelTile(rows, cols, end + size * i * rows * cols, size) for i in range(n)]
            end += size * n * rows * cols
        self._words = end
        self.consumers: list[Warps] = [tuple(range(4 * w, 4 * w + 4)) for w in range(C.NC)]
        self.transposer: Warps = tuple(range(4 * C.NC, 4 * C.NC + (4 if C.ITEM == 1 else 0)))
        self.producer: Warps = (4 * C.NC + len(self.transposer),)
        partitions = {f"consumer {w}": warps for w, warps in enumerate(self.consumers)}
        partitions |= {"the transposer": self.transposer} if self.transposer else {}
        super().__init__(end + 4 * WORDS * C.NQ, partitions | {"the producer": self.producer})

    def word(self, slot: int, i: int) -> int:
        """The address of number ``i`` of a slot."""
        return self._words + 4 * (WORDS * slot + i)

    def words(self, slot: int, warps: Warps) -> Footprint:
        """The numbers of a slot."""
        return self.region(self.word(slot, 0), 4 * WORDS, warps)

    def atoms(self, place: PanelTile, warps: Warps, first: int, end: int) -> Footprint:
        """The groups of eight rows, two for each warp, that hold others than ``first`` to ``end - 1``."""

        def make() -> Footprint:
            row, vector = np.arange(place.rows)[:, None], np.arange(place.vectors)
            row = row[(row // 8 * 8 < first) | (row // 8 * 8 + 8 > end), None]
            return self.cells.footprint(place.address(row, vector), 16, warps[0] + row // 2 % 4)

        return self.once(("atoms", place, warps, first, end), make)

    def columns(self, place: PanelTile, warps: Warps) -> Footprint:
        """A tile, a quarter of whose columns each of four warps touches."""

        def make() -> Footprint:
            row, vector = np.ogrid[: place.rows, : place.vectors]
            return self.cells.footprint(place.address(row, vector), 16, warps[0] + vector // (place.vectors // 4))

        return self.once(("columns", place, warps), make)

    def whole(self, role: str, i: int, warps: Warps) -> Footprint:
        """A buffer, all of which each of ``warps`` touches: as TMA or wgmma do."""
        place = self.tiles[role][i]
        return self.region(place.base, place.nbytes, warps)


@functools.cache
def places_of(C: Constants) -> HopperPlaces:
    """The places that the constants give."""
    return HopperPlaces(C)
