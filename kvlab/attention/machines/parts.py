"""CTA models of the same threads side by side, each with columns of K, of V or of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.tile_spec import TileCTA

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Accumulator:
    """O in parts, which hold these columns of it (-1: padding); in place of each part the kernel has ``step`` tiles:
    every ``step``-th column, from the first, the second and so on. beside : ``[programs, BM]``, of what all columns
    get.
    """

    parts: tuple[Fragments, ...]
    columns: tuple[IntArray, ...]
    step: int = 1
    beside: Array | None = None

    def members(self) -> tuple[Array, ...]:
        """The tiles ``[programs, BM, columns]`` that the kernel has."""
        tiles = tuple(part.tile()[..., first :: self.step] for part in self.parts for first in range(self.step))
        return tiles if self.beside is None else (*tiles, self.beside[..., None])

    def rescale(self, factor: Array) -> Accumulator:
        """Rows multiplied by ``factor`` ``[programs, BM]``."""
        beside = None if self.beside is None else self.beside * factor
        return self.with_parts(part.times(factor) for part in self.parts).with_beside(beside)

    def with_beside(self, beside: Array | None) -> Accumulator:
        """Something else beside the same parts."""
        return replace(self, beside=beside)

    def normalise(self, factor: Array, sees: Array) -> Accumulator:
        """Rows, with what all columns get, multiplied by ``factor`` ``[programs, BM]``, 0 where not ``sees``."""
        parts = self.parts
        if self.beside is not None:
            parts = tuple(part.with_values(part.values + part.by_row(self.beside)) for part in parts)
        return self.with_parts(
            part.with_values(np.where(part.by_row(sees), part.values * part.by_row(factor), np.float32(0)))
            for part in parts
        ).with_beside(None)

    def with_parts(self, parts: Any) -> Accumulator:
        """Other parts in the same columns."""
        return replace(self, parts=tuple(parts))

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


class Parts:
    """``ctas`` of one class; what rows have in common is the first one's. ``of_v``: those with columns of V."""

    def __init__(self, ctas: Sequence[TileCTA], of_v: Sequence[TileCTA]) -> None:
        self.ctas, self.of_v = list(ctas), list(of_v)

    @property
    def fetches(self) -> bool:
        """Tells whether the models may fetch ahead."""
        return len(self.ctas) == 1 or self.ctas[0].follows_beside

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.ctas[0].row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        return self.ctas[0].row_sum(p)

    def add_values(self, p: Fragments, values: list[tuple[Any, Any, Fragments]], active: Array) -> list[Fragments]:
        """O + P V of (model, V, O), each of columns of its own, and the end of the tile."""
        return type(self.ctas[0]).accumulate_parts(self.ctas, p, values, active)
