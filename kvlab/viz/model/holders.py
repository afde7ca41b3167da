"""Holders of an element: the lowest of several, and of a map that is linear over F2 from its basis vectors alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Preimage:
    """The smallest index that a map sends to each value.

    vectors    where the indices 1, 2, 4, ... go: values whose bits are the coordinates

    >>> held = Preimage((1, 2, 2))
    >>> held.of(np.array([0, 1, 2, 3, 4])).tolist(), held.copies
    ([0, 1, 2, 3, -1], 2)
    """

    vectors: tuple[int, ...]

    @property
    def reduced(self) -> list[tuple[int, int, int]]:
        """(highest bit, value, index) of independent vectors, in the order in which they are taken away.

        A vector that depends on those before it never takes part: so the index is the smallest."""
        found: list[tuple[int, int, int]] = []
        for bit, value in enumerate(self.vectors):
            index = 1 << bit
            for top, other, other_index in found:
                if value >> top & 1:
                    value, index = value ^ other, index ^ other_index
            if value:
                found.append((value.bit_length() - 1, value, index))
                found.sort(reverse=True)
        return found

    @property
    def rank(self) -> int:
        """Independent vectors: ``2 ** rank`` values have an index."""
        return len(self.reduced)

    @property
    def copies(self) -> int:
        """Indices that go to each value that has one."""
        return 1 << (len(self.vectors) - self.rank)

    def of(self, values: npt.ArrayLike) -> Int64:
        """The smallest index of each value, -1 where none goes there."""
        rest = np.array(values, np.int64)
        index = np.zeros_like(rest)
        for top, value, number in self.reduced:
            has = (rest >> top & 1).astype(bool)
            rest = np.where(has, rest ^ value, rest)
            index = np.where(has, index ^ number, index)
        return np.where(rest == 0, index, -1)

    def to(self, index: npt.ArrayLike) -> Int64:
        """Image of each index."""
        return image(self.vectors, index)


def image(vectors: Sequence[int], index: npt.ArrayLike) -> Int64:
    """Image of each index, of the vectors of 1, 2, 4, ...

    >>> image((1, 2, 2), [3, 5]).tolist()
    [3, 3]
    """
    left = np.asarray(index, np.int64)
    out = np.zeros_like(left)
    for bit, value in enumerate(vectors):
        out ^= np.where(left >> bit & 1, value, 0)
    return out


def lowest(shape: tuple[int, ...], place: tuple[Any, ...], number: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[*shape] the lowest of the numbers at each place, -1 where there is none.

    >>> lowest((2, 2), (np.array([0, 0, 1]), np.array([1, 1, 0])), [5, 3, 4]).tolist()
    [[-1, 3], [4, -1]]
    """
    none = np.iinfo(np.int64).max
    out = np.full(shape, none, np.int64)
    np.minimum.at(out, place, np.asarray(number, np.int64))
    return np.where(out == none, -1, out)
