"""The tiles that the loops of a kernel take, one loop after the other, for a machine that fetches ahead."""

from __future__ import annotations

import copy

import numpy as np

from kvlab.layout import TileTensor

from .iterator import KVCacheIterator


class TileWalk:
    """K and V tiles in turn, beginning with those that the iterators give next; the iterators stay where they are.

    ``iterators``: for each loop one of K and one of V, or None for what the machine does not fetch.

    >>> from kvlab.cache import PagedKVCache
    >>> cache = PagedKVCache(np.zeros((2, 32, 1, 8), np.float16), [63], [[0, 1]], 1, 64)
    >>> full, rest = (KVCacheIterator(cache, 32, 0, 0, end=end) for end in (32, 50))
    >>> rest.tile_start_row = 32
    >>> walk = TileWalk(full, full, rest, rest)
    >>> [pair["k"].valid_rows.tolist() for pair in iter(walk.next_pair, None)], walk.loop
    ([[32], [18]], 1)
    """

    def __init__(self, *iterators: KVCacheIterator | None) -> None:
        if not iterators or len(iterators) % 2:
            raise ValueError(f"{len(iterators)} iterators: must be one of K and one of V for each loop")
        self._loops = [
            {role: copy.copy(one) for role, one in zip("kv", pair, strict=True) if one is not None}
            for pair in zip(iterators[::2], iterators[1::2], strict=True)
        ]
        self.roles = list(self._loops[0])
        self.loop = 0  # of the tiles that were given last

    @property
    def more(self) -> bool:
        """Tells whether any program has a key left in any of the loops."""
        return any(_left(loop) for loop in self._loops[self.loop :])

    @property
    def last(self) -> bool:
        """Tells whether no loop follows."""
        return self.loop + 1 == len(self._loops)

    def to_next_key(self) -> bool:
        """Pass over loops without a key left in any program; False if there is no other."""
        while self.more and not _left(self._loops[self.loop]):
            self.loop += 1
        return self.more

    def next_pair(self) -> dict[str, TileTensor] | None:
        """The next tiles, of K (``"k"``) and of V; None past the last one."""
        return {role: self.next_of(role) for role in self.roles} if self.to_next_key() else None

    def next_of(self, role: str) -> TileTensor:
        """The next of one role alone in the same loop; past its end there are no valid rows."""
        return self._loops[self.loop][role].next_tile()


def _left(loop: dict[str, KVCacheIterator]) -> bool:
    """Tells whether any program has a key left."""
    return any(bool((one.tile_start_row < one.end).any()) for one in loop.values())


def expect_fetched(flying: list[TileTensor], tile: TileTensor, role: str) -> None:
    """Take the oldest of the tiles in flight; ValueError unless it is ``tile``."""
    if not flying or not is_same(flying[0], tile):
        raise ValueError(f"the {role.upper()} tile is not the one that was fetched ahead: the next of its iterator")
    del flying[0]


def is_same(a: TileTensor, b: TileTensor) -> bool:
    """Tells whether both are the same rows."""
    same = (a.memory is b.memory, a.layout == b.layout, np.array_equal(a.offset, b.offset))
    return all(same) and np.array_equal(np.asarray(a.end), np.asarray(b.end))
