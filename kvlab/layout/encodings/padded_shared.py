"""Padded shared memory: a linear map, then a gap after every interval: affine over the integers, not over F2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlab.layout.algebra.int_tuple import IntArray, flatten, int_tuple
from kvlab.layout.encodings.base import Ints, Matrix, need
from kvlab.layout.encodings.shared import SharedEncoding
from kvlab.layout.linear.linear_layout import LinearLayout


@dataclass(frozen=True)
class PaddedSharedLayout(SharedEncoding):
    """After every ``interval`` elements come ``padding`` empty ones, for each pair: paddings of one place add up.

    interval_padding_pairs : pairs of powers of two, in elements.
    offset_bases, block_bases : the linear part, from the offset before padding to coordinates.

    >>> p = PaddedSharedLayout.with_identity_for([[4, 2]], [2, 4], [1, 0])
    >>> p.offsets((2, 4)).tolist()
    [[0, 1, 2, 3], [6, 7, 8, 9]]
    """

    interval_padding_pairs: Matrix
    offset_bases: Matrix
    block_bases: Matrix = ()
    shape: Ints = ()
    cga_layout: Matrix = ()

    def verify(self) -> None:
        pairs = self.interval_padding_pairs
        need(bool(pairs) and all(len(pair) == 2 for pair in pairs), self, "must be pairs of (interval, padding)")
        need(len({interval for interval, _ in pairs}) == len(pairs), self, "intervals must differ")
        power = all(n > 0 and n & (n - 1) == 0 for pair in pairs for n in pair)
        need(power, self, "intervals and paddings must be powers of two")
        need(
            not (self.block_bases and self.cga_layout), self, "cga_layout is the newer name of block_bases: one of them"
        )
        need(self._linear().is_surjective, self, f"the bases do not reach every coordinate of {self.shape}")

    @classmethod
    def with_identity_for(
        cls, interval_padding_pairs: Sequence[Sequence[int]], shape: Sequence[int], order: Sequence[int]
    ) -> PaddedSharedLayout:
        """Padding of a dense tensor whose dimensions are counted in ``order``, fastest first."""
        trees = [int_tuple(x, "shape, order") for x in (shape, order)]
        sizes, axes = map(flatten, trees)
        if trees != [sizes, axes] or sorted(axes) != list(range(len(sizes))):
            raise ValueError(f"shape {shape!r}, order {order!r}: a size for each dimension, each dimension once")
        bases = [
            tuple((1 << bit) * (axis == other) for other in range(len(sizes)))
            for axis in axes
            for bit in range(sizes[axis].bit_length() - 1)
        ]
        return cls(interval_padding_pairs, tuple(bases), (), sizes)  # type: ignore[arg-type]

    def _linear(self) -> LinearLayout:
        return LinearLayout({"offset": self.offset_bases, "block": self.block_bases or self.cga_layout}, self.shape)

    def pattern_shape(self) -> Ints:
        return self.shape

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        """The part before padding: linear offset -> coordinates."""
        need(tuple(shape) == self.shape, self, f"the shape is {self.shape}, not {tuple(shape)}")
        return self._linear()

    def physical(self, offset: IntArray) -> IntArray:
        """The place of a linear offset, with the paddings before it.

        >>> p = PaddedSharedLayout.with_identity_for([[4, 2], [8, 1]], [16], [0])
        >>> p.physical(np.array([3, 4, 8])).tolist()
        [3, 6, 13]
        """
        gaps = [offset // interval * padding for interval, padding in self.interval_padding_pairs]
        total: IntArray = np.sum([offset, *gaps], axis=0, dtype=np.int64)
        return total

    @property
    def size(self) -> int:
        """Elements that the allocation needs, without a padding after the last."""
        return int(self.physical(np.asarray((1 << len(self.offset_bases)) - 1))) + 1
