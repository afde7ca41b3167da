"""Encodings of shared memory: what is common, and the one with explicit bases."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout.algebra.int_tuple import IntArray, at_once
from kvlab.layout.encodings.base import NEWEST, Encoding, Ints, Matrix, dims, need
from kvlab.layout.linear.linear_layout import LinearLayout


@dataclass(frozen=True)
class SharedEncoding(Encoding):
    """Placement of a tensor by Triton in the shared memory of each CTA.

    The linear layout maps ``offset`` (counted in elements) and ``block`` to coordinates; :meth:`offsets` is its
    inverse."""

    @property
    def alignment_bytes(self) -> int:
        """The alignment of the allocation that the encoding needs, in bytes."""
        return 16

    def offsets(self, shape: Sequence[int], *, triton_version: str = NEWEST) -> IntArray:
        """The offset of every element in the memory of its CTA: int64 of ``shape``, counted in elements, read-only.

        >>> SharedLinearLayout([[1, 0], [0, 1], [2, 1]]).offsets((4, 2)).tolist()
        [[0, 2], [1, 3], [6, 4], [7, 5]]
        """
        return _offsets(self, self.sizes(shape), triton_version)

    def physical(self, offset: IntArray) -> IntArray:
        """Physical place of the element of a linear offset: the offset itself, except in padded encodings."""
        return offset


@functools.cache
def _offsets(encoding: SharedEncoding, shape: tuple[int, ...], triton_version: str) -> IntArray:
    place = encoding.to_linear_layout(shape, triton_version=triton_version).invert()
    at_once(math.prod(shape), "offsets")
    grid = np.ix_(*(np.arange(size) for size in shape))
    offsets = encoding.physical(place(**dict(zip(dims(len(shape)), grid, strict=True)))[0])
    offsets.setflags(write=False)
    return offsets


@dataclass(frozen=True)
class SharedLinearLayout(SharedEncoding):
    """Bases of the offset given outright; their reach is the shape."""

    offset_bases: Matrix
    block_bases: Matrix = ()
    alignment: int = 16

    @classmethod
    def from_offsets(cls, offsets: Any) -> SharedLinearLayout:
        """The encoding that keeps each element of a tile at its offset: integers ``[rows, columns]``, or of another
        rank, counted in elements from 0 on without gaps.

        ValueError unless the offsets are those of a linear layout: XORs of where the powers of two lie.

        >>> SharedLinearLayout.from_offsets([[0, 2], [1, 3], [6, 4], [7, 5]]).offset_bases
        ((1, 0), (0, 1), (2, 1))
        """
        found = np.asarray(offsets)
        order = np.argsort(found, axis=None)
        steps = [1 << bit for bit in range((found.size - 1).bit_length())]
        bases = np.stack(np.unravel_index(order[steps], found.shape), axis=-1)
        layout = cls(tuple(tuple(basis) for basis in bases.tolist()))
        if not np.array_equal(layout.offsets(found.shape), found):
            raise ValueError(f"offsets of shape {found.shape} are not those of a linear layout")
        return layout

    def verify(self) -> None:
        need(bool(self.offset_bases and self.offset_bases[0]), self, "offset_bases must not be empty")
        need(self.alignment > 0 and self.alignment & (self.alignment - 1) == 0, self, "alignment: a power of two")
        need(self._linear().is_surjective, self, "the bases do not reach every coordinate")

    @property
    def alignment_bytes(self) -> int:
        return self.alignment

    def _linear(self) -> LinearLayout:
        return LinearLayout({"offset": self.offset_bases, "block": self.block_bases}, dims(len(self.offset_bases[0])))

    def pattern_shape(self) -> Ints:
        return self._linear().shape

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        layout = self._linear()
        need(layout.shape == tuple(shape), self, f"the bases reach {layout.shape}, not {tuple(shape)}")
        return layout
