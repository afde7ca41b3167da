"""The order in which the compiled loops of mma.sync copy, wait and read: tile i + 1 is in flight while tile i ends.

Read from the TTGIR and PTX of our Triton kernels for sm_80 and sm_90 (``num_stages`` 2 and 3: the additional stage of
3 holds page numbers only). K and V have one buffer each::

    copy K, commit, copy V, commit                                             before the loop
    loop: wait_group(0), barrier, read K, ..., write P, barrier, read P, read V,
          copy the next K, commit, barrier, copy the next V, commit
    wait_group(0), barrier                                                     behind it

With more stages so many tiles are fetched before the loop, and the wait leaves the groups of the later ones in flight.

K's buffer is free before V is read, since the barriers around P lie between; V's needs one more, unless V is read
before P is written (pairs of e4m3). Where P stays in registers, or V is K's tile (MLA), one barrier lets go of both::

    loop: wait_group(0), barrier, read K, ..., read V, barrier, copy the next K, commit, copy the next V, commit

After a loop that another follows: wait_group(0), barrier."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.layout import TileTensor
from kvlab.staging.record.hazards import Hazards

from .iterator import KVCacheIterator
from .tile_walk import TileWalk, expect_fetched, is_same


class TilePipeline:
    """Calls ``copy_async(role, tile, stage)`` and states commits, waits and barriers.

    store : ``store(role, tile, stage)`` brings a tile that nothing was fetched ahead of.
    barrier_before : the copy of a next tile that a barrier of all warps precedes: ``"k"`` (both buffers are free then),
        ``"v"`` or ``""``.
    ahead : tiles of each role in flight before the loop. stages : buffers of each role, ``ahead`` unless given.

    Until :meth:`follow` is called there is nothing to look ahead to: each load is a barrier, a store and a barrier, as
    with one stage in all (``num_stages`` 1)."""

    def __init__(
        self, copy_async: Callable[[str, TileTensor, int], None], store: Callable[[str, TileTensor, int], None],
        hazards: Hazards, *, barrier_before: str = "v", ahead: int = 1, stages: dict[str, int] | None = None,
    ) -> None:
        self.copy_async, self.store, self.hazards = copy_async, store, hazards
        self.barrier_before, self.ahead = barrier_before, ahead
        self.stages = stages or {"k": ahead, "v": ahead}
        self.stage = {"k": 0, "v": 0}  # where the tile stands that was loaded last
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[TileTensor]] = {"k": [], "v": []}
        self._fetched, self._loaded = ({"k": 0, "v": 0} for _ in range(2))  # tiles so far

    @property
    def following(self) -> bool:
        """Tells whether tiles are fetched ahead."""
        return self._walk is not None

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetch ahead along these iterators, one of K and one of V (None: there are no such tiles) for one loop after
        the other, beginning with the tiles that they give next; the iterators stay where they are."""
        self._walk = TileWalk(*tiles)
        self._fetch_first()

    def load(self, role: str, tile: TileTensor) -> None:
        """Make sure that the tile of ``"k"`` or ``"v"`` has landed. ValueError if another tile was fetched ahead."""
        if self._walk is None:
            self.hazards.barrier()
            self.store(role, tile, self._next_stage(role))
            self.hazards.barrier()
            return
        flying, roles = self._flying[role], self._walk.roles
        if role == roles[0] and not self._walk.last and flying and not is_same(flying[0], tile):
            self._next_loop()
        expect_fetched(flying, tile, role)
        self._next_stage(role)
        if role == roles[0]:
            self.hazards.wait_group((self.ahead - 1) * len(roles))
            self.hazards.barrier()

    def refill(self, role: str) -> None:
        """After the last reads of the tile: the next one of K, then that of V."""
        if self._walk is not None:
            if self.barrier_before == role and (role == "k" or role in self._walk.roles):
                self.hazards.barrier()
            self._fetch(role)

    def drain(self) -> None:
        """Behind the loop: wait for the copies past its end, which bring zeros."""
        if self.following:
            self.hazards.wait_group(0)
            self.hazards.barrier()

    def _next_stage(self, role: str) -> int:
        """Of the tile that is loaded now."""
        self.stage[role] = self._loaded[role] % self.stages[role]
        self._loaded[role] += 1
        return self.stage[role]

    def _next_loop(self) -> None:
        """Lands the tiles that were fetched past the end of a loop, and fetches the first tiles of the next."""
        assert self._walk is not None
        self.drain()
        for role in "kv":
            self._flying[role].clear()
            self._fetched[role] = self._loaded[role] = 0
        self._walk.loop += 1
        self._fetch_first()

    def _fetch_first(self) -> None:
        for _ in range(self.ahead):
            self._fetch("k")
            self._fetch("v")

    def _fetch(self, role: str) -> None:
        if self._walk is None or role not in self._walk.roles:
            return
        tile = self._walk.next_of(role)
        self.copy_async(role, tile, self._fetched[role] % self.stages[role])
        self._fetched[role] += 1
        self._end_group()
        self._flying[role].append(tile)

    def _end_group(self) -> None:
        """The copies so far are a group to wait for."""
        self.hazards.commit_group()
