"""Offsets as a grid of rows and columns, computed only where they are looked at: a picture costs what it shows.

What is said of the whole follows from all offsets where they are few, and from shapes and strides where they are many;
where neither tells, nothing is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.layout import ComposedLayout, Layout
from kvlab.layout.algebra.int_tuple import flatten

FEW = 1 << 16
"""So many offsets are looked at one by one."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Leaves:
    """Offsets ``sum(i * stride)`` over ``0 <= i < extent``: what a layout reaches.

    extents, strides    of each leaf, those of extent 1 left out

    >>> Leaves.of(Layout("(4,(2,1)):(2,(1,7))"))
    Leaves(extents=(4, 2), strides=(2, 1))
    """

    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> Leaves:
        """The leaves of a layout, the first one fastest."""
        pairs = [(n, d) for n, d in zip(flatten(layout.shape), flatten(layout.stride), strict=True) if n != 1]
        return cls(tuple(n for n, _ in pairs), tuple(d for _, d in pairs))

    @property
    def step(self) -> int | None:
        """From each offset to the next where that is always the same.

        >>> Leaves((4, 2), (3, 12)).step, Leaves((4, 2), (3, 1)).step
        (3, None)
        """
        if not self.extents:
            return None
        reach = [n * d for n, d in zip(self.extents, self.strides, strict=True)]
        return self.strides[0] if all(a == b for a, b in zip(reach, self.strides[1:], strict=False)) else None

    @property
    def ordered(self) -> list[int] | None:
        """The leaves from the smallest stride to the largest, where each reaches beyond all before it: then every
        offset belongs to one coordinate, and the largest leaf tells first. None otherwise.

        >>> Leaves((4, 8), (8, 1)).ordered, Leaves((4, 8), (2, 1)).ordered
        ([1, 0], None)
        """
        order = sorted(range(len(self.extents)), key=lambda k: abs(self.strides[k]))
        end = 0
        for k in order:
            if abs(self.strides[k]) <= end:
                return None
            end += abs(self.strides[k]) * (self.extents[k] - 1)
        return order

    @property
    def distinct(self) -> int | None:
        """Different offsets, where the strides tell.

        >>> Leaves((4, 8), (0, 1)).distinct
        8
        """
        moving = [k for k, d in enumerate(self.strides) if d]
        left = Leaves(tuple(self.extents[k] for k in moving), tuple(self.strides[k] for k in moving))
        return None if left.ordered is None else math.prod(left.extents)

    def find(self, offset: Int64) -> tuple[list[Int64], npt.NDArray[np.bool_]] | None:
        """The coordinate of each offset in every leaf, and whether it is one of ours; None if offsets do not tell."""
        order = self.ordered
        if order is None:
            return None
        rest = np.asarray(offset, np.int64) - sum(
            (n - 1) * d for n, d in zip(self.extents, self.strides, strict=True) if d < 0
        )
        at: list[Int64] = [np.zeros_like(rest)] * len(self.extents)
        for k in reversed(order):
            steps = np.clip(rest // abs(self.strides[k]), 0, self.extents[k] - 1)
            rest = rest - steps * abs(self.strides[k])
            at[k] = steps if self.strides[k] > 0 else self.extents[k] - 1 - steps
        return at, rest == 0

    def residues(self, first: int, modulus: int) -> set[int]:
        """The offsets modulo ``modulus``, from ``first`` on.

        >>> sorted(Leaves((2**40,), (6,)).residues(1, 9))
        [1, 4, 7]
        """
        found = {first % modulus}
        for n, d in zip(self.extents, self.strides, strict=True):
            found = {(a + d * i) % modulus for a in found for i in range(min(n, modulus // math.gcd(d, modulus)))}
        return found


class OffsetGrid:
    """The offsets of ``source``: a layout, a composed layout, anything else with ``offsets()``, or an integer array.

    Rank 1 is one row; the modes after the first lie side by side, the earlier ones fastest.

    >>> field = OffsetGrid(Layout("(2,(2,2)):(4,(2,1))"))
    >>> field.shape, field.at(np.array([1]), np.array([1, 2])).tolist()
    ((2, 4), [[6, 5]])
    >>> OffsetGrid(Layout.row_major(1 << 20, 1 << 20)).at(np.array([5]), np.array([7])).tolist()
    [[5242887]]
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        if isinstance(source, Layout | ComposedLayout):
            layout = source if isinstance(source, Layout) else source.layout
            modes = layout.modes
            down, *rest = modes if len(modes) > 1 else (Layout(1, 0), *modes)
            self._down, self._across = down, Layout(tuple(m.shape for m in rest), tuple(m.stride for m in rest))
            self.shape = down.size, self._across.size
            self.plain = self.leaves = None
            if isinstance(source, Layout) or source.outer is None:
                self.leaves = Leaves.of(down), Leaves.of(self._across)
        elif isinstance(source, Cells):
            self.plain = self.leaves = None
            self.shape = source.shape
        else:
            self.leaves = None
            array = np.asarray(source.offsets() if hasattr(source, "offsets") else source)
            if not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"layout is {source!r:.200}: must give an integer array of offsets, not {array.dtype}")
            self.plain = array.reshape(1, -1) if array.ndim < 2 else array
            self.shape = self.plain.shape[0], math.prod(self.plain.shape[1:])
        if not self.shape[0] * self.shape[1]:
            raise ValueError(f"layout is {source!r:.200}: must give a non-empty integer array of offsets")

    @property
    def size(self) -> int:
        """Number of offsets."""
        return self.shape[0] * self.shape[1]

    @property
    def name(self) -> str:
        """The layout as text, or the size of the array."""
        return str(self.source) if hasattr(self.source, "offsets") else f"{self.shape[0]} x {self.shape[1]} elements"

    def at(self, rows: Int64, columns: Int64) -> Int64:
        """[rows, columns] the offsets of the cells there."""
        if self.plain is not None:
            index = np.unravel_index(columns, self.plain.shape[1:], order="F")
            return np.asarray(self.plain[(rows[:, None], *index)], np.int64)
        if isinstance(self.source, Cells):
            return np.asarray(self.source.of(rows[:, None], columns[None, :]), np.int64)
        inner = np.add.outer(np.asarray(self._down(rows)), np.asarray(self._across(columns)))
        if isinstance(self.source, Layout):
            return inner
        inner = self.source.offset + inner
        return np.asarray(inner if self.source.outer is None else self.source.outer(inner), np.int64)

    @cached_property
    def every(self) -> Int64 | None:
        """[rows, columns] all offsets, where they are few."""
        return self.at(np.arange(self.shape[0]), np.arange(self.shape[1])) if self.size <= FEW else None

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """From cell to cell along a row and down a column, where that is always the same."""
        if self.every is not None:
            found = (np.diff(self.every, axis=axis) for axis in (1, 0))
            along, down = (int(d.flat[0]) if d.size and (d == d.flat[0]).all() else None for d in found)
            return along, down
        return (self.leaves[1].step, self.leaves[0].step) if self.leaves is not None else (None, None)

    @property
    def distinct(self) -> int | None:
        """Different offsets, where they are known."""
        if self.every is not None:
            return len(np.unique(self.every))
        if self.leaves is None:
            return None
        down, across = self.leaves
        return Leaves(down.extents + across.extents, down.strides + across.strides).distinct

    def first_column(self, base: int, element_bytes: int, banks: int) -> tuple[int, int] | None:
        """(different words of 4 bytes, different banks) of column 0, where they are known; of words, at most FEW."""
        rows = min(self.shape[0], FEW)
        word = (base + self.at(np.arange(rows), np.array([0])) * element_bytes) // 4
        words = len(np.unique(word))
        if rows == self.shape[0]:
            return words, len(np.unique(word % banks))
        if self.leaves is None:
            return None
        (start,) = self.at(np.array([0]), np.array([0])).ravel().tolist()
        down = Leaves(self.leaves[0].extents, tuple(d * element_bytes for d in self.leaves[0].strides))
        return words, len({at // 4 for at in down.residues(base + start * element_bytes, 4 * banks)})

    def find(self, offset: Int64) -> tuple[Int64, Int64, npt.NDArray[np.bool_]] | None:
        """(row, column) of each offset, and whether it is there; None where that cannot be told."""
        if self.every is not None:
            order = np.argsort(self.every, axis=None, kind="stable")
            ordered = self.every.ravel()[order]
            at = np.searchsorted(ordered, offset).clip(max=self.size - 1)
            row, column = np.divmod(order[at], self.shape[1])
            return row, column, ordered[at] == offset
        if self.leaves is None:
            return None
        down, across = self.leaves
        found = Leaves(down.extents + across.extents, down.strides + across.strides).find(
            offset - (self.source.offset if isinstance(self.source, ComposedLayout) else 0)
        )
        if found is None:
            return None
        steps, there = found
        split = len(down.extents)
        return _number(steps[:split], down.extents, there), _number(steps[split:], across.extents, there), there


@dataclass(frozen=True)
class Cells:
    """Values of the cells of a grid, computed where they are looked at; indexed as an array by ``np.ix_``.

    shape      rows and columns
    of         rows [r, 1] and columns [1, c] -> values [r, c]
    subject    the rows and the columns that the picture is about, if not all"""

    shape: tuple[int, int]
    of: Callable[[Int64, Int64], npt.NDArray[Any]]
    subject: tuple[Int64, Int64] | None = None

    def __getitem__(self, grid: tuple[Int64, ...]) -> npt.NDArray[Any]:
        return self.of(*grid)


def _number(at: list[Int64], extents: tuple[int, ...], like: npt.NDArray[Any]) -> Int64:
    """Coordinates counted, the first leaf fastest."""
    total, weight = np.zeros(like.shape, np.int64), 1
    for index, extent in zip(at, extents, strict=True):
        total, weight = total + index * weight, weight * extent
    return total
