"""A logical tile spread over the registers of a CTA, and its way back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.common.regroup import Regroup
from kvlab.hardware.chip import multiply_add


@dataclass(frozen=True, eq=False)
class FragmentMap(Drawn):
    """Elements of a ``rows x cols`` tile in each register.

    ``row`` and ``col`` are int64 ``[threads, registers, elements]`` with ``thread = warp * warp_size + lane``. Several
    registers may hold the same element (a broadcast). Build one per configuration and keep it: the index arrays that
    follow from it are computed once.

    >>> lane = np.arange(4)[:, None, None]
    >>> m = FragmentMap((2, 4), lane // 2, 2 * (lane % 2) + np.arange(2))     # 4 lanes, 1 register of 2 elements
    >>> m.spread(np.arange(8.0).reshape(1, 2, 4))[0, 1].tolist()
    [[2.0, 3.0]]
    >>> m.gather(m.spread(np.arange(8.0).reshape(1, 2, 4))).tolist()
    [[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]]
    """

    shape: tuple[int, int]
    row: np.ndarray[Any, np.dtype[np.int64]]
    col: np.ndarray[Any, np.dtype[np.int64]]
    warp_size: int = 64

    def __post_init__(self) -> None:
        row, col = np.broadcast_arrays(self.row, self.col)
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "col", col)
        rows, cols = self.shape
        if row.min() < 0 or row.max() >= rows or col.min() < 0 or col.max() >= cols:
            raise ValueError(f"a register lies outside the tile {rows} x {cols}")

    @cached_property
    def flat(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row-major position in the tile of each register element."""
        return self.row * self.shape[1] + self.col

    @cached_property
    def _home(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For each element of the tile one register element that holds it."""
        home = np.full(self.shape[0] * self.shape[1], -1, np.int64)
        home[self.flat.reshape(-1)] = np.arange(self.flat.size)
        if (home < 0).any():
            r, c = divmod(int(home.argmin()), self.shape[1])
            raise ValueError(f"no register holds element ({r}, {c}) of the tile {self.shape[0]} x {self.shape[1]}")
        return home

    @cached_property
    def _spread(self) -> Regroup:
        return Regroup(self.flat)

    @cached_property
    def _gather(self) -> Regroup:
        return Regroup(self._home)

    def spread(self, tile: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Registers ``[programs, threads, registers, elements]`` of a tile ``[programs, rows, cols]``."""
        return self._spread(tile.reshape(tile.shape[0], -1))

    def gather(self, registers: Any) -> np.ndarray[Any, Any]:
        """The tile ``[programs, rows, cols]`` that the registers hold: an array, or a tile tensor of each thread."""
        registers = np.asarray(registers)
        return self._gather(registers.reshape(registers.shape[0], -1)).reshape(-1, *self.shape)


@dataclass(frozen=True, eq=False)
class Fragments:
    """Registers of a tile: ``values[programs, threads, registers, elements]`` laid out by ``map``.

    ``x * y`` and ``x - y`` are of values ``y`` as the registers have them. What is subtracted from a product, before
    anything else is done to it, is subtracted in one operation with the multiplication, as in compiled kernels: its
    ``factors`` are kept.

    >>> lane = np.arange(4)[:, None, None]
    >>> layout = FragmentMap((2, 4), lane // 2, 2 * (lane % 2) + np.arange(2))
    >>> f = Fragments(layout.spread(np.arange(8.0).reshape(1, 2, 4)), layout)
    >>> f.with_values(f.values - f.by_row(np.array([[0.0, 4.0]]))).tile().tolist()
    [[[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]]
    """

    values: np.ndarray[Any, Any]
    map: FragmentMap
    factors: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    @classmethod
    def zeros(cls, programs: int, layout: FragmentMap) -> Fragments:
        """An accumulator that nothing was added to: float32."""
        return cls(np.zeros((programs, *layout.row.shape), np.float32), layout)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the tile."""
        return self.map.shape

    def tile(self) -> np.ndarray[Any, Any]:
        """Lanes and registers put back to ``[programs, rows, cols]``."""
        return self.map.gather(self.values)

    def with_values(self, values: np.ndarray[Any, Any]) -> Fragments:
        """The same layout with other values."""
        return Fragments(values, self.map)

    def __mul__(self, factor: np.ndarray[Any, Any]) -> Fragments:
        return Fragments(self.values * factor, self.map, (self.values, factor))

    def __sub__(self, other: np.ndarray[Any, Any]) -> Fragments:
        difference = self.values - other if self.factors is None else multiply_add(*self.factors, -other)
        return Fragments(difference, self.map)

    def only(self, chosen: np.ndarray[Any, Any]) -> Fragments:
        """-inf where not ``chosen``; of a product, too, whatever its factors are.

        >>> x = Fragments(np.array([3.0, 4.0]), None) * np.array([2.0, -2.0])
        >>> (x.only(np.array([True, False])) - np.array([1.0, 1.0])).values.tolist()
        [5.0, -inf]
        """
        values = np.where(chosen, self.values, np.float32(-np.inf))
        if self.factors is None:
            return Fragments(values, self.map)
        one, other = self.factors
        factors = np.where(chosen, one, np.float32(-np.inf)), np.where(chosen, other, np.float32(1))
        return Fragments(values, self.map, factors)

    def times(self, vector: np.ndarray[Any, Any]) -> Fragments:
        """Rows multiplied by ``vector[programs, rows]``."""
        return self * self.by_row(vector)

    def by_row(self, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``vector[programs, rows]`` as each register element sees its row."""
        return np.take(vector, self.map.row, axis=1)

    def by_column(self, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``vector[programs, columns]`` as each register element sees its column."""
        return np.take(vector, self.map.col, axis=1)
