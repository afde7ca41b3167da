"""Where the Hopper MLA decode kernel's tiles stand in shared memory, and which bytes of them each warp touches."""

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


class HopperPlaces:
    """Q, NB stages of latent rows and P as panels of 128 bytes a row, swizzled; then alpha and 1 / l of each row.

    tiles    ``"q left"``, ``"q right"``, ``"q rope"``, ``"p"``, and of each stage ``"k left 0"``, ``"k right 0"``,
             ``"k rope 0"``, ...
    leader, follower, producer   their warps

    >>> places = places_of(Constants(1, 64, 64, 64, False))
    >>> places.leader, places.tiles["k right 1"].base, places.tiles["p"].base, places.nbytes
    ((0, 1, 2, 3), 180224, 221184, 229888)
    """

    def __init__(self, C: Constants) -> None:
        cols = {"left": C.DV // 2, "right": C.DV // 2, "rope": C.DR}
        sizes = {f"q {part}": n for part, n in cols.items()}
        sizes |= {f"k {part} {b}": n for b in range(C.NB) for part, n in cols.items()} | {"p": C.BN}
        self.tiles: dict[str, PanelTile] = {}
        end = 0
        for name, n in sizes.items():
            self.tiles[name] = PanelTile(64, n, end)
            end += self.tiles[name].nbytes
        self.rows, self.nbytes = end, end + 2 * 4 * C.BM
        self.leader, self.follower, self.producer = tuple(range(4)), tuple(range(4, 8)), (8,)
        self.warps = 9
        self.partitions = {"the leader": self.leader, "the follower": self.follower, "the producer": self.producer}
        self.cells = Cells(self.nbytes, self.warps, unit=UNIT)
        self._made: dict[tuple[Any, ...], Footprint] = {}

    def whole(self, name: str, warps: Warps) -> Footprint:
        """A tile, all of which each of ``warps`` touches: as TMA or wgmma do."""
        if (name, warps) not in self._made:
            place = self.tiles[name]
            self._made[name, warps] = self.cells.region(place.base, place.nbytes, warps)
        return self._made[name, warps]

    def shared(self, name: str, warps: Warps, together: int) -> Footprint:
        """A tile whose rows four warps share out, ``together`` of them in turn."""
        key = name, warps, together
        if key not in self._made:
            place = self.tiles[name]
            row, vector = np.ogrid[: place.rows, : place.vectors]
            warp = warps[0] + row // together % 4
            self._made[key] = self.cells.footprint(place.address(row, vector), 16, warp)
        return self._made[key]

    def of_rows(self, which: int, warps: Warps) -> Footprint:
        """The factor ``which`` of each row: 16 rows for each of the four warps."""
        key = "rows", which, warps
        if key not in self._made:
            piece = np.arange(16)
            address = self.rows + 256 * which + 16 * piece
            self._made[key] = self.cells.footprint(address, 16, warps[0] + piece // 4)
        return self._made[key]


@functools.cache
def places_of(C: Constants) -> HopperPlaces:
    """The places that the constants give."""
    return HopperPlaces(C)
