"""Linear algebra over F2: a vector is an int, addition is XOR, a matrix is the list of its columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvlab.layout.algebra.int_tuple import IntArray


class Elimination:
    """Gaussian elimination of the columns of a matrix, in their order: every column is a pivot or the sum of earlier
    pivots.

    >>> e = Elimination([0b01, 0b11, 0b10])
    >>> e.rank, e.solve(0b10), e.kernel
    (2, 3, (7,))
    """

    def __init__(self, columns: Iterable[int]) -> None:
        self._pivots: dict[int, tuple[int, int]] = {}
        kernel = []
        for index, column in enumerate(columns):
            rest, mask = self._reduce(column)
            mask ^= 1 << index
            if rest:
                self._pivots[rest.bit_length()] = (rest, mask)
            else:
                kernel.append(mask)
        self.kernel = tuple(kernel)
        """A basis of the sums of columns that are 0, each as a mask of columns."""

    def _reduce(self, vector: int) -> tuple[int, int]:
        rest, mask = vector, 0
        for top in sorted(self._pivots, reverse=True):
            if rest.bit_length() == top:
                pivot, pivot_mask = self._pivots[top]
                rest, mask = rest ^ pivot, mask ^ pivot_mask
        return rest, mask

    @property
    def rank(self) -> int:
        """Dimension of the span of the columns."""
        return len(self._pivots)

    def solve(self, vector: int) -> int | None:
        """A mask of columns whose sum is ``vector``, made of pivots only; None outside the span."""
        rest, mask = self._reduce(vector)
        return None if rest else mask


def rank(vectors: Iterable[int]) -> int:
    """Dimension of the span.

    >>> rank([3, 5, 6])
    2
    """
    return Elimination(vectors).rank


def xor_table(columns: Sequence[int]) -> IntArray:
    """The image of every index: ``table[i]`` is the XOR of the columns at the set bits of i; int64, read-only.

    >>> xor_table([1, 6])
    array([0, 1, 6, 7])
    """
    table = np.zeros(1, np.int64)
    for column in columns:
        table = np.concatenate([table, table ^ column])
    table.setflags(write=False)
    return table
