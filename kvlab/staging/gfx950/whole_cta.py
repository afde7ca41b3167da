"""Columns in one piece: a CTA model of gfx950 as the decode emulator sees it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.memory import Memory
from kvlab.staging.nvidia.pieces_cta import Accumulator, TileView
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import KVCacheIterator

Array = np.ndarray[Any, Any]


class WholeCTA:
    """``cta`` with the tiles of K and V that it loads in turn. The kernel holds ``each`` columns as one element: it has
    the even columns of Q and O apart, and those of K and V as int16.
    """

    q_columns = None

    def __init__(self, cta: Any, tiles: tuple[KVCacheIterator, KVCacheIterator], each: int) -> None:
        self.cta, self.each = cta, each
        self.k_tiles, self.v_tiles = tiles
        cta.follow(*tiles)

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[TileView, ...]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``; rows that are not valid are 0."""
        q = self.cta.load_q(dram, offset, valid)
        return tuple(TileView(q, functools.partial(self._every, first)) for first in range(self.each))

    def load_k(self, active: Array) -> tuple[TileView]:
        """The next K tile."""
        return (TileView(self.cta.load_k(self.k_tiles.next_tile(), active), self._elements),)

    def load_v(self, active: Array) -> tuple[TileView]:
        """The next V tile."""
        return (TileView(self.cta.load_v(self.v_tiles.next_tile(), active), self._elements),)

    def scores(self, q: tuple[TileView, ...], k: tuple[TileView], active: Array) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``."""
        s: Fragments = self.cta.scores(q[0].value, k[0].value, active)
        return s

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        rows: Array = self.cta.row_max(s)
        return rows

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        rows: Array = self.cta.row_sum(p)
        return rows

    def zeros(self) -> Accumulator:
        """The output accumulator."""
        o = self.cta.zeros()
        return Accumulator((o,), (np.arange(o.map.shape[1]),), self.each)

    def accumulate(self, p: Fragments, v: tuple[TileView], o: Accumulator, active: Array) -> Accumulator:
        """O += P V."""
        return o.with_parts([self.cta.accumulate(p, v[0].value, o.parts[0], active)])

    def _every(self, first: int, tile: Array) -> Array:
        return tile[..., first :: self.each]

    def _elements(self, tile: Array) -> Array:
        return tile if self.each == 1 else np.ascontiguousarray(tile).view(np.int16)
