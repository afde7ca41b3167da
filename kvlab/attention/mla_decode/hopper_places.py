"""Where the Hopper MLA decode kernel's tiles stand in shared memory, and which bytes of them each warp touches."""

from __future__ import annotations

import functools

import numpy as np

from kvlab.attention.hopper.cta import Places
from kvlab.staging.nvidia.wgmma_plan import PanelTile
from kvlab.staging.record.footprint import Footprint

from .hopper_config import Constants

Warps = tuple[int, ...]


class HopperPlaces(Places):
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
        self.rows = end
        self.leader, self.follower, self.producer = tuple(range(4)), tuple(range(4, 8)), (8,)
        partitions = {"the leader": self.leader, "the follower": self.follower, "the producer": self.producer}
        super().__init__(end + 2 * 4 * C.BM, partitions)

    def whole(self, name: str, warps: Warps) -> Footprint:
        """A tile, all of which each of ``warps`` touches: as TMA or wgmma do."""
        place = self.tiles[name]
        return self.region(place.base, place.nbytes, warps)

    def of_rows(self, which: int, warps: Warps) -> Footprint:
        """The factor ``which`` of each row: 16 rows for each of the four warps."""
        start, piece = self.rows + 256 * which, np.arange(16)
        return self.once((start, warps), lambda: self.cells.footprint(start + 16 * piece, 16, warps[0] + piece // 4))


@functools.cache
def places_of(C: Constants) -> HopperPlaces:
    """The places that the constants give."""
    return HopperPlaces(C)
