"""The order in which the compiled decode loop copies, waits and reads: tile i + 1 is in flight while tile i ends.

Read from the TTGIR and PTX of our Triton kernel for sm_80 and sm_90 (``num_stages`` 2 and 3: the additional stage of
3 holds page numbers only). K and V have one buffer each::

    copy K, commit, copy V, commit                                             before the loop
    loop: wait_group(0), barrier, read K, ..., write P, barrier, read P, read V,
          copy the next K, commit, barrier, copy the next V, commit
    wait_group(0), barrier                                                     behind it

K's buffer is free before V is read, since the barriers around P lie between; V's needs one more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from .hazards import Hazards
from .iterator import KVCacheIterator, KVTile
from .tile_walk import expect_fetched

__all__ = ["TilePipeline"]


class TilePipeline:
    """Calls ``copy_async(role, tile)`` and states commits, waits and barriers.

    Until :meth:`follow` is called there is nothing to look ahead to: each load copies, waits and meets at a barrier.
    """

    def __init__(self, copy_async: Callable[[str, KVTile], None], hazards: Hazards) -> None:
        self.copy_async, self.hazards = copy_async, hazards
        self._tiles: dict[str, KVCacheIterator] = {}
        self._flying: dict[str, list[KVTile]] = {"k": [], "v": []}

    @property
    def following(self) -> bool:
        """Whether tiles are fetched ahead."""
        return bool(self._tiles)

    def follow(self, k_tiles: KVCacheIterator | None, v_tiles: KVCacheIterator | None) -> None:
        """Fetch ahead along these iterators (None: there are no such tiles), beginning with the tiles that they give
        next.
        """
        given = {"k": k_tiles, "v": v_tiles}
        self._tiles = {role: tiles for role, tiles in given.items() if tiles is not None}
        self._fetch("k")
        self._fetch("v")

    def load(self, role: str, tile: KVTile) -> None:
        """Make sure that the tile of ``"k"`` or ``"v"`` has landed. ValueError if another tile was fetched ahead."""
        if not self.following:
            self.hazards.barrier()
            self.copy_async(role, tile)
            self.hazards.commit_group()
        else:
            expect_fetched(self._flying[role], tile, role)
        if not self.following or role == next(iter(self._tiles)):
            self.hazards.wait_group(0)
            self.hazards.barrier()

    def refill(self) -> None:
        """After the last reads of the tile: the next ones."""
        if self.following:
            self._fetch("k")
            self.hazards.barrier()
            self._fetch("v")

    def drain(self) -> None:
        """Behind the loop: wait for the copies past its end, which bring zeros."""
        if self.following:
            self.hazards.wait_group(0)
            self.hazards.barrier()

    def _fetch(self, role: str) -> None:
        if role not in self._tiles:
            return
        tile = copy.copy(self._tiles[role]).next_tile()
        self.copy_async(role, tile)
        self.hazards.commit_group()
        self._flying[role].append(tile)
