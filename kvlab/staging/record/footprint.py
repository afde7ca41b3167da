"""Bytes of shared memory that each warp touches in one access, and the partition of the bytes that a set of accesses
makes. Bytes that always occur together share a cell, whose state is kept once."""

from __future__ import annotations

from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

MOST_WARPS = 31


class Footprint:
    """The bytes of one access, warp by warp. Made by :meth:`ByteCells.footprint` and :meth:`ByteCells.region`.

    of      the partition whose cells it covers
    bits    ``[units of the memory]``: bit w is set where warp w touches the unit
    moved   ``[warps]``: bytes that each warp moves; bytes that several lanes touch count for each
    warps   those that touch anything

    >>> at = ByteCells(64, warps=2).footprint(np.array([[[0, 16], [16, 48]]]), 16)
    >>> at.warps, at.moved.tolist(), at.cells.tolist(), at.touches.tolist()
    ((0, 1), [32, 32], [1, 2, 3], [[True, False], [False, True], [True, True]])
    """

    def __init__(self, of: ByteCells, bits: IntArray, moved: IntArray) -> None:
        self.of, self.bits, self.moved = of, bits, moved.astype(np.int64)
        union = int(np.bitwise_or.reduce(bits))
        self.warps = tuple(warp for warp in range(of.warps) if union >> warp & 1)
        self._units = np.flatnonzero(bits)
        self._placed: tuple[int, IntArray, BoolArray] = -1, self._units, np.zeros((0, of.warps), np.bool_)

    @property
    def cells(self) -> IntArray:
        """``[n]``: the cells it covers."""
        return self._place()[1]

    @property
    def touches(self) -> BoolArray:
        """``[n, warps]``: which warps touch them."""
        return self._place()[2]

    def _place(self) -> tuple[int, IntArray, BoolArray]:
        """Found anew when the partition has become finer."""
        if self._placed[0] != len(self.of):
            one = np.zeros(len(self.of), np.int64)
            one[self.of.of_unit[self._units]] = self.bits[self._units]  # all units of a cell have the same bits
            cells = np.flatnonzero(one)
            touches = (one[cells, None] >> np.arange(self.of.warps) & 1).astype(np.bool_)
            self._placed = len(self.of), cells, touches
        return self._placed


class ByteCells:
    """A partition of ``nbytes`` bytes, in units of ``unit`` bytes, refined by every footprint that is added. Several
    records of equal memories may share one.

    >>> cells = ByteCells(64, warps=2)
    >>> rows = np.array([[[0, 16], [32, 48]]])          # [instructions, warps, lanes]: warp 0 the first half
    >>> halves, all_of_it = cells.footprint(rows, 16), cells.region(0, 64, warps=(0, 1))
    >>> len(cells), all_of_it.cells.tolist(), halves.touches.tolist(), all_of_it.touches.tolist()
    (2, [0, 1], [[True, False], [False, True]], [[True, True], [True, True]])
    >>> cells.byte_range(halves.cells[1:])
    (32, 64)
    >>> ByteCells(64, warps=2, unit=16).region(8, 16, warps=(0,))
    Traceback (most recent call last):
        ...
    ValueError: 16 bytes at byte 8: must be whole units of 16 bytes from byte 0 on
    """

    def __init__(self, nbytes: int, warps: int, base: int = 0, unit: int = 1) -> None:
        if not 1 <= warps <= MOST_WARPS:
            raise ValueError(f"warps is {warps}: must be 1 to {MOST_WARPS}")
        if unit < 1 or nbytes % unit:
            raise ValueError(f"unit {unit}: {nbytes} bytes must be whole units")
        self.nbytes, self.warps, self.base, self.unit = nbytes, warps, base, unit
        self.of_unit: IntArray = np.zeros(nbytes // unit, np.int64)
        self.parents: list[IntArray] = []  # of each refinement: the old cell of each new one
        self._count = 1

    def __len__(self) -> int:
        return self._count

    def footprint(self, address: Any, nbytes: int, warp: Any = None) -> Footprint:
        """Of the byte addresses ``[..., warps, lanes]``, ``nbytes`` at each; or ``[...]`` by ``warp`` ``[...]``."""
        at = np.asarray(address, np.int64)
        if warp is None:
            if at.ndim < 2 or at.shape[-2] != self.warps:
                raise ValueError(f"addresses has shape {at.shape}: must be [..., {self.warps} warps, lanes]")
            warp = np.arange(self.warps)[:, None]
        at, by = np.broadcast_arrays(at, np.asarray(warp, np.int64))
        self._check(int(at.min()), int(at.max()) + nbytes)
        units, count = self._units(at, nbytes), len(self.of_unit)
        flags = np.zeros((self.warps, count), np.bool_)
        flags.reshape(-1)[(units + by * count)[..., None] + np.arange(nbytes // self.unit)] = True
        moved = np.bincount(by.reshape(-1), minlength=self.warps) * nbytes
        return self._add(np.left_shift(1, np.arange(self.warps)) @ flags, moved)

    def region(self, start: int, nbytes: int, warps: tuple[int, ...]) -> Footprint:
        """Of ``nbytes`` bytes from ``start`` on, all of which each of ``warps`` touches."""
        if nbytes < 1 or not warps or min(warps) < 0 or max(warps) >= self.warps:
            raise ValueError(f"region({start}, {nbytes}, {warps}): must be bytes and warps 0 to {self.warps - 1}")
        self._check(start, start + nbytes)
        first = int(self._units(np.array(start), nbytes))
        bits = np.zeros(len(self.of_unit), np.int64)
        bits[first : first + nbytes // self.unit] = sum(1 << warp for warp in warps)
        return self._add(bits, nbytes * np.isin(np.arange(self.warps), warps))

    def byte_range(self, cells: IntArray) -> tuple[int, int]:
        """(first, past the last) byte address of the cells."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[cells] = True
        at = np.flatnonzero(chosen[self.of_unit])
        return self.base + int(at[0]) * self.unit, self.base + (int(at[-1]) + 1) * self.unit

    def _units(self, at: IntArray, nbytes: int) -> IntArray:
        """The units that ``nbytes`` bytes at ``at`` begin with."""
        units, within = np.divmod(at - self.base, self.unit)
        if nbytes % self.unit or within.any():
            first = int(at.reshape(-1)[np.argmax(within)])
            raise ValueError(
                f"{nbytes} bytes at byte {first}: must be whole units of {self.unit} bytes from byte {self.base} on"
            )
        return units

    def _check(self, first: int, end: int) -> None:
        if first < self.base or end > self.base + self.nbytes:
            raise ValueError(f"bytes [{first}, {end}) are not inside [{self.base}, {self.base + self.nbytes})")

    def _add(self, bits: IntArray, moved: IntArray) -> Footprint:
        keys, of_unit = _numbered(self.of_unit << self.warps | bits, len(self) << self.warps)
        if len(keys) > len(self):
            self.of_unit = of_unit
            self.parents.append(keys >> self.warps)
            self._count = len(keys)
        return Footprint(self, bits, moved)


def _numbered(keys: IntArray, bound: int) -> tuple[IntArray, IntArray]:
    """The different keys in order, each less than ``bound``, and which of them lies at each place."""
    if bound > 1 << 20:
        different, number = np.unique(keys, return_inverse=True)
        return different, number
    there = np.zeros(bound, np.bool_)
    there[keys] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[keys]
