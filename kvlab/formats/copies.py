"""Copies of bytes between two formats: planned from strides, joined where neighbours stay neighbours, executed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvlab.common.checks import Int64

from .codec import Bytes, joined, nibbles


@dataclass(frozen=True)
class Copies:
    """Descriptors of copies, sorted by source: ``length`` bits from bit ``source`` to bit ``target``, int64 ``[n]``.

    >>> Copies(np.array([0, 64]), np.array([64, 0]), np.array([64, 64]))
    Copies(2 copies, 16 bytes)
    """

    source: Int64
    target: Int64
    length: Int64

    def __len__(self) -> int:
        return self.source.size

    @property
    def nbytes(self) -> int | float:
        """Bytes that are copied; a half is a 4-bit element."""
        bits = int(self.length.sum())
        return bits // 8 if bits % 8 == 0 else bits / 8

    @property
    def whole(self) -> bool:
        """Tells whether all are of whole bytes."""
        return not ((self.source | self.target | self.length) & 7).any()

    def __repr__(self) -> str:
        return f"Copies({len(self)} copies, {self.nbytes} bytes)"

    def apply(self, source: Bytes, target: Bytes) -> None:
        """Execute the copies between flat uint8 arrays that share no memory."""
        if self.whole:
            _move(source, target, self.source // 8, self.target // 8, self.length // 8)
            return
        halves, out = nibbles(source), nibbles(target)
        _move(halves, out, self.source // 4, self.target // 4, self.length // 4)
        target[:] = joined(out)

    @staticmethod
    def joined(parts: Sequence[Copies]) -> Copies:
        """All copies of several: those that follow each other at both ends become one."""
        source, target, length = (
            np.concatenate([getattr(part, name) for part in parts] or [np.zeros(0, np.int64)])
            for name in ("source", "target", "length")
        )
        order = np.argsort(source, kind="stable")
        source, target, length = source[order], target[order], length[order]
        if not source.size:
            return Copies(source, target, length)
        follows = (source[:-1] + length[:-1] == source[1:]) & (target[:-1] + length[:-1] == target[1:])
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        return Copies(source[first], target[first], np.add.reduceat(length, first))


def _move(source: Bytes, target: Bytes, start: Int64, end: Int64, length: Int64) -> None:
    """Items of ``length`` from ``start`` of one array to ``end`` of the other; one length at a time."""
    given = np.ascontiguousarray(source)
    for size in np.unique(length).tolist():
        mine, item = length == size, np.dtype(f"V{size}")
        out, here = (np.ndarray((array.size - size + 1,), item, array, 0, (1,)) for array in (target, given))
        out[end[mine]] = here[start[mine]]


class Digit(NamedTuple):
    """Digit of a strided copy: index ``i`` of ``size`` moves both ends, by ``i * source`` and ``i * target`` bits.

    >>> Digit(4, 16, 64).joined_by(Digit(2, 64, 256))
    Digit(size=8, source=16, target=64)
    """

    size: int
    source: int
    target: int

    def joined_by(self, coarser: Digit) -> Digit | None:
        """Both as one digit, where ``coarser`` goes on where this one ends at both ends; None elsewhere."""
        follows = coarser[1:] == (self.size * self.source, self.size * self.target)
        return Digit(self.size * coarser.size, self.source, self.target) if follows else None


@dataclass(frozen=True)
class StridedCopy:
    """Copies of ``bits`` bits each from bit ``source`` to bit ``target``, one for each index of each digit.

    digits   strides at both ends, the finest at the target first; none has a size of 1
    table    of what is no sum of common digits: further steps of both ends in bits, int64 ``[2, n]``

    >>> StridedCopy.of((0, 0), [(np.arange(4) * 64, np.arange(4) * 256), (np.arange(8) * 8, np.arange(8) * 8)], 8)
    StridedCopy(64 bits from 0 to 0, 4 times 64 -> 256)
    """

    source: int
    target: int
    bits: int
    digits: tuple[Digit, ...]
    table: Int64

    def __repr__(self) -> str:
        times = "".join(f", {size} times {here} -> {there}" for size, here, there in self.digits)
        table = f", {self.table.shape[1]} of a table" if self.table.shape[1] > 1 else ""
        return f"StridedCopy({self.bits} bits from {self.source} to {self.target}{times}{table})"

    @staticmethod
    def of(base: tuple[int, int], tables: Sequence[tuple[Int64, Int64]], bits: int) -> StridedCopy:
        """The copies of elements of ``bits`` whose addresses are, at each end, ``base`` plus one entry of each table.

        Elements that follow each other at both ends are one copy.
        """
        digits: list[Digit] = []
        table = np.zeros((2, 1), np.int64)
        source, target = base
        for here, there in tables:
            source, target = source + int(here[0]), target + int(there[0])
            for one, other in _digits(here - here[0], there - there[0]):
                digit = Digit(one.size, int(one[1]), int(other[1]))
                if all(np.array_equal(x, np.arange(x.size) * x[1]) for x in (one, other)):
                    digits.append(digit)
                else:
                    table = np.stack([np.add.outer(*pair).ravel() for pair in zip(table, (one, other), strict=True)])
        return StridedCopy(source, target, bits, tuple(digits), table)._plain()

    def _plain(self) -> StridedCopy:
        """Longer runs and fewer digits, where neighbours stay neighbours."""
        digits, bits = [digit for digit in self.digits if digit.size > 1], self.bits
        while found := next((digit for digit in digits if digit[1:] == (bits, bits)), None):
            digits.remove(found)
            bits *= found.size
        digits.sort(key=lambda digit: abs(digit.target))
        joined: list[Digit] = []
        for digit in digits:
            at = next((n for n, finer in enumerate(joined) if finer.joined_by(digit)), None)
            if at is None:
                joined.append(digit)
            else:
                joined[at] = joined[at].joined_by(digit) or digit
        return replace(self, bits=bits, digits=tuple(joined))

    def beside(self, other: StridedCopy) -> StridedCopy | None:
        """One copy of this and a later one: runs that follow each other, or the same copies further on; else None."""
        if self.digits != other.digits or not np.array_equal(self.table, other.table):
            return None
        apart = Digit(2, other.source - self.source, other.target - self.target)
        if apart[1:] == (self.bits, self.bits):
            return replace(self, bits=self.bits + other.bits)._plain()
        return replace(self, digits=(*self.digits, apart))._plain() if self.bits == other.bits else None

    @staticmethod
    def joined(parts: Sequence[StridedCopy]) -> tuple[StridedCopy, ...]:
        """The same copies in as few as possible, by source."""
        left = sorted(parts, key=lambda part: part.source)
        at = 0
        while at < len(left) - 1:
            both = left[at].beside(left[at + 1])
            if both is None:
                at += 1
            else:
                left[at : at + 2] = [both]
                at = max(at - 1, 0)
        return tuple(left)

    @cached_property
    def moves(self) -> bool:
        """Tells whether anything changes its place."""
        apart = any(digit.source != digit.target for digit in self.digits)
        return apart or self.source != self.target or not np.array_equal(*self.table)

    @cached_property
    def times(self) -> int:
        """Number of runs."""
        return math.prod(digit.size for digit in self.digits) * self.table.shape[1]

    @cached_property
    def whole(self) -> bool:
        """Tells whether all are of whole bytes."""
        steps = [step for digit in self.digits for step in digit[1:]]
        return not any(n % 8 for n in (self.source, self.target, self.bits, *steps)) and not (self.table & 7).any()

    def copies(self) -> Copies:
        """The descriptors of all of them."""
        at, to = self.source + self.table[0], self.target + self.table[1]
        for size, here, there in sorted(self.digits, key=lambda digit: -abs(digit.source * (digit.size - 1))):
            at, to = (np.add.outer(x, np.arange(size) * step).ravel() for x, step in ((at, here), (to, there)))
        return Copies(at, to, np.full(at.size, self.bits, np.int64))


def copies_of(base: tuple[int, int], tables: Sequence[tuple[Int64, Int64]], bits: int) -> Copies:
    """Copies of elements of ``bits`` whose addresses are, at each end, ``base`` plus one entry of each table.

    Digits of an axis whose elements follow each other at both ends make one copy longer; the others are enumerated.
    """
    return StridedCopy.of(base, tables, bits).copies()


def _digits(here: Int64, there: Int64) -> list[tuple[Int64, Int64]]:
    """Two tables of an axis as sums over common digits, the finest first; a table that is no such sum stays whole."""
    out: list[tuple[Int64, Int64]] = []
    while here.size > 1:
        steps = np.stack([np.diff(here), np.diff(there)])
        turns = np.flatnonzero((steps != steps[:, :1]).any(0))
        size = int(turns[0]) + 1 if turns.size else here.size
        fits = all(
            np.array_equal(table, np.add.outer(table[::size], table[:size]).ravel()) for table in (here, there)
        )
        if not fits:
            return [*out, (here, there)]
        out.append((here[:size], there[:size]))
        here, there = here[::size], there[::size]
    return out


def spans(copies: Copies, which: Int64) -> list[tuple[int, int, Int64]]:
    """Byte ranges that the copies numbered ``which`` leave to themselves: ``(first, end, which of them)``, the lowest
    first."""
    low = np.minimum(copies.source, copies.target)[which] // 8
    high = -(-(np.maximum(copies.source, copies.target) + copies.length)[which] // 8)
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    cuts = np.flatnonzero(low[order][1:] >= reach[:-1]) + 1
    return [(int(low[p].min()), int(high[p].max()), which[p]) for p in np.split(order, cuts) if p.size]
