"""Columns in pieces: the CTA of NVIDIA's decode whose K and V have one or two tiles of columns, powers of two.

Each piece is a CTA model of its own with its own shared memory; they are the same threads, and P goes through the
first. S is the sum over K's pieces, O has V's. Pairs of fp8 (see ``pairs``) give two products a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.memory import Memory
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.pairs import halves

from .decode_cta import operand_p_of
from .fma_cta import FmaCTA
from .mma_sync_cta import MmaSyncCTA

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class TileView:
    """A value of a CTA, and what the kernel has in its place: ``view`` of its tile."""

    value: Any
    view: Callable[[Array], Array]

    def tile(self) -> Array:
        """``[programs, rows, columns]`` as the kernel has it."""
        return self.view(self.value.tile())


@dataclass(frozen=True, eq=False)
class Accumulator:
    """O in parts, which hold these columns of it (-1: padding); in place of each part the kernel has ``step`` tiles:
    every ``step``-th column, from the first, the second and so on.
    """

    parts: tuple[Fragments, ...]
    columns: tuple[IntArray, ...]
    step: int = 1

    def members(self) -> tuple[Array, ...]:
        """The tiles ``[programs, BM, columns]`` that the kernel has."""
        return tuple(part.tile()[..., first :: self.step] for part in self.parts for first in range(self.step))

    def rescale(self, factor: Array) -> Accumulator:
        """Rows multiplied by ``factor`` ``[programs, BM]``."""
        return self.with_parts(part.with_values(part.values * part.by_row(factor)) for part in self.parts)

    def normalise(self, factor: Array, sees: Array) -> Accumulator:
        """Rows multiplied by ``factor`` ``[programs, BM]``, 0 where not ``sees``."""
        return self.with_parts(
            part.with_values(np.where(part.by_row(sees), part.values * part.by_row(factor), np.float32(0)))
            for part in self.parts
        )

    def with_parts(self, parts: Any) -> Accumulator:
        """Other parts in the same columns."""
        return Accumulator(tuple(parts), self.columns, self.step)

    def rows(self) -> Array:
        """All columns ``[programs, BM, D]``."""
        tiles = [part.tile()[..., at >= 0] for part, at in zip(self.parts, self.columns, strict=True)]
        order = np.argsort(np.concatenate([at[at >= 0] for at in self.columns]))
        return np.concatenate(tiles, axis=2)[..., order]


@dataclass(frozen=True)
class PieceColumns:
    """A piece of a row: its first element, elements in DRAM and in shared memory, and columns an element."""

    first: int
    inside: int
    width: int
    each: int

    def positions(self, half: int) -> IntArray:
        """The column of each element's ``half``, -1 in the padding."""
        element = np.arange(self.width)
        return np.where(element < self.inside, (self.first + element) * self.each + half, -1)


def piece_columns(widths: tuple[int, int], columns: int, each: int) -> list[PieceColumns]:
    """The pieces of rows of ``columns``, in elements of ``each`` columns.

    >>> [(p.first, p.inside, p.width) for p in piece_columns((64, 32), 88, 1)]
    [(0, 64, 64), (64, 24, 32)]
    """
    firsts = 0, widths[0]
    return [
        PieceColumns(first, min(columns // each - first, width), width, each)
        for first, width in zip(firsts, widths, strict=True)
        if width
    ]


class PiecesCTA:
    """The CTAs of one launch, side by side.

    ctas : of each piece. k, v : the pieces of K's and V's columns. tiles : (K, V) iterators of each CTA, None where it
    has none. ahead : whether they fetch ahead.
    """

    def __init__(
        self,
        ctas: list[MmaSyncCTA | FmaCTA],
        k: list[PieceColumns],
        v: list[PieceColumns],
        tiles: list[tuple[KVCacheIterator | None, KVCacheIterator | None]],
        *,
        ahead: bool = True,
    ) -> None:
        self.ctas, self.k, self.v, self.tiles = ctas, k, v, tiles
        self.each = k[0].each
        for cta, (k_tiles, v_tiles) in zip(ctas, tiles, strict=True):
            if ahead:
                cta.follow(k_tiles, v_tiles)

    @property
    def q_columns(self) -> IntArray | None:
        """The order in which it takes the columns of Q, None for their own: with pairs the even, then the odd ones of
        each piece.
        """
        if self.each == 1:
            return None
        parts = [piece.positions(half) for piece in self.k for half in range(self.each)]
        return np.concatenate([part[part >= 0] for part in parts])

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> tuple[Any, ...]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram`` with their columns in the order of ``q_columns``; rows
        that are not valid are 0.
        """
        loaded, first = [], 0
        for cta, piece in zip(self.ctas, self.k, strict=False):
            for half in range(self.each):
                role: Any = {} if half == 0 else {"role": "q_odd"}
                loaded.append(cta.load_q(dram, offset + first, valid, **role))
                first += piece.inside
        return tuple(loaded)

    def load_k(self, active: Array) -> tuple[Any, ...]:
        """The next K tile into shared memory, then to the operands of S = Q K^T."""
        return self._load("k", active)

    def load_v(self, active: Array) -> tuple[Any, ...]:
        """The next V tile into shared memory, then to the operands of O += P V."""
        return self._load("v", active)

    def scores(self, q: tuple[Any, ...], k: tuple[Any, ...], active: Array) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: piece after piece, even before odd columns."""
        s: Fragments | None = None
        for i, (cta, operand) in enumerate(zip(self.ctas, k, strict=False)):
            for half, factor in enumerate(self._factors(operand)):
                role: Any = {} if half == 0 else {"role": "q_odd"}
                s = cta.scores(q[i * self.each + half], factor, active, s, **role)
        assert s is not None
        return s

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.ctas[0].row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        return self.ctas[0].row_sum(p)

    def zeros(self) -> Accumulator:
        """The output accumulator."""
        parts, columns = [], []
        for cta, piece in zip(self.ctas, self.v, strict=False):
            for half in range(self.each):
                parts.append(cta.zeros())
                columns.append(piece.positions(half))
        return Accumulator(tuple(parts), tuple(columns))

    def accumulate(self, p: Fragments, v: tuple[Any, ...], o: Accumulator, active: Array) -> Accumulator:
        """O += P V."""
        a = operand_p_of(self.ctas, self.ctas[0], p, active)
        factors = [(cta, b) for cta, operand in zip(self.ctas, v, strict=False) for b in self._factors(operand)]
        return o.with_parts(
            cta.add_values(a, factor, part) for (cta, factor), part in zip(factors, o.parts, strict=True)
        )

    def _load(self, role: str, active: Array) -> tuple[Any, ...]:
        loaded = []
        for cta, pair in zip(self.ctas, self.tiles, strict=True):
            tiles = pair[role == "v"]
            if tiles is not None:
                loaded.append((cta.load_k if role == "k" else cta.load_v)(tiles.next_tile(), active))
        return tuple(loaded)

    def _factors(self, operand: Fragments) -> tuple[Fragments, ...]:
        """What the products take of an operand's registers: two of pairs."""
        if self.each == 1:
            return (operand,)
        return tuple(operand.with_values(half) for half in halves(operand.values))
