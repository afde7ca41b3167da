"""Copies of bytes between two formats: planned from strides, joined where neighbours stay neighbours, executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def copies_of(base: tuple[int, int], tables: Sequence[tuple[Int64, Int64]], bits: int) -> Copies:
    """Copies of elements of ``bits`` whose addresses are, at each end, ``base`` plus one entry of each table.

    Digits of an axis whose elements follow each other at both ends make one copy longer; the others are enumerated.
    """
    source, target = base
    digits: list[tuple[Int64, Int64]] = []
    for here, there in tables:
        source, target = source + int(here[0]), target + int(there[0])
        digits += _digits(here - here[0], there - there[0])
    grown = True
    while grown:
        grown = False
        for number, (here, there) in enumerate(digits):
            run = bits * np.arange(here.size)
            if np.array_equal(here, run) and np.array_equal(there, run):
                bits *= here.size
                del digits[number]
                grown = True
                break
    at, to = np.array([source]), np.array([target])
    for here, there in sorted(digits, key=lambda one: -int(np.abs(one[0]).max())):
        at, to = np.add.outer(at, here).ravel(), np.add.outer(to, there).ravel()
    return Copies(at, to, np.full(at.size, bits, np.int64))


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
