"""Layouts: ``shape:stride`` maps from coordinates to offsets, in CuTe's algebra and text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import shown
from kvlab.common.drawn import Drawn
from kvlab.layout.algebra.int_tuple import (
    Coord,
    IntArray,
    IntTuple,
    at_once,
    congruent,
    crd2idx,
    flatten,
    format_tree,
    idx2crd,
    int_tuple,
    parse_tree,
    prefix_product,
    product,
)


@dataclass(frozen=True, init=False, repr=False, slots=True)
class Layout(Drawn):
    """A map from coordinates to offsets: the dot product of coordinate and stride.

    Parameters
    ----------
    shape : an int or nested tuples of ints, or the whole layout as CuTe text.
    stride : of the same nesting; column-major (CuTe's default, first mode fastest) when absent.

    An int where a coordinate of several modes is expected counts colexicographically, the first mode fastest, whatever
    the strides are. Coordinates past the shape extrapolate. The unit is what the user counts: scalars, vectors, bytes.

    >>> a = Layout((4, 8), (8, 1))
    >>> a, str(a), a.size, a.rank
    (Layout("(4,8):(8,1)"), '(4,8):(8,1)', 32, 2)
    >>> a(1, 2), a((1, 2)), a(5)
    (10, 10, 9)
    >>> a(np.arange(3), 1)
    array([ 1,  9, 17])
    >>> Layout("(4,(3,2)):(6,(2,1))")(1, (1, 1))
    9
    >>> Layout((4, 8), (1,))
    Traceback (most recent call last):
        ...
    ValueError: stride (1,) is not congruent with shape (4, 8): must be one stride for each int of the shape
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: IntTuple | str, stride: IntTuple | None = None) -> None:
        if isinstance(shape, str):
            if stride is not None:
                raise ValueError(f"Layout({shape!r}, {stride!r}): text holds both: stride must be None")
            shape, _, stride_text = shape.partition(":")
            shape, stride = parse_tree(shape), parse_tree(stride_text) if stride_text else None
        shape = int_tuple(shape, "shape")
        stride = prefix_product(shape) if stride is None else int_tuple(stride, "stride")
        if not congruent(shape, stride):
            raise ValueError(
                f"stride {stride} is not congruent with shape {shape}: must be one stride for each int of the shape"
            )
        if any(extent < 0 for extent in flatten(shape)):
            raise ValueError(f"shape {shape} has a negative extent: must be 0 and more")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    @classmethod
    def row_major(cls, *shape: int) -> Layout:
        """The last mode is contiguous.

        >>> Layout.row_major(4, 8)
        Layout("(4,8):(8,1)")
        """
        extents = _flat_shape(shape)
        return cls(extents, tuple(reversed(flatten(prefix_product(tuple(reversed(extents)))))))

    @classmethod
    def col_major(cls, *shape: int) -> Layout:
        """The first mode is contiguous.

        >>> Layout.col_major(4, 8)
        Layout("(4,8):(1,4)")
        """
        return cls(_flat_shape(shape))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that ``str`` printed; without ``:stride`` it is column-major.

        >>> Layout.parse("((2,2),3):((24,2),8)").stride
        ((24, 2), 8)
        """
        return cls(text)

    def __str__(self) -> str:
        return f"{format_tree(self.shape)}:{format_tree(self.stride)}"

    def __repr__(self) -> str:
        return f'Layout("{self}")'

    @property
    def modes(self) -> tuple[Layout, ...]:
        """Each top-level mode as a layout; a layout with an int shape is its own only mode.

        >>> Layout("(4,(3,2)):(6,(2,1))").modes
        (Layout("4:6"), Layout("(3,2):(2,1)"))
        """
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return (self,)
        return tuple(unchecked(s, d) for s, d in zip(self.shape, self.stride, strict=True))

    @property
    def rank(self) -> int:
        """Number of top-level modes."""
        return 1 if isinstance(self.shape, int) else len(self.shape)

    @property
    def size(self) -> int:
        """Number of coordinates: the product of the shape."""
        return product(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest offset (strides not negative); 0 for an empty layout.

        >>> Layout("(3,5):(9,2)").cosize
        27
        """
        if not self.size:
            return 0
        return 1 + sum((s - 1) * abs(d) for s, d in zip(flatten(self.shape), flatten(self.stride), strict=True))

    @property
    def is_flat(self) -> bool:
        """Has every mode a single int?"""
        return isinstance(self.shape, int) or all(isinstance(item, int) for item in self.shape)

    @property
    def is_row_major(self) -> bool:
        """Flat, dense and last mode fastest; modes of extent 1 may have any stride."""
        return _is_row_major(self)

    @property
    def is_dense(self) -> bool:
        """Does each offset from 0 to ``size - 1`` belong to exactly one coordinate?

        >>> Layout("(4,8):(8,1)").is_dense, Layout("(4,8):(9,1)").is_dense, Layout("(4,8):(0,1)").is_dense
        (True, False, False)
        """
        reach = 1
        for stride, extent in sorted(zip(flatten(self.stride), flatten(self.shape), strict=True)):
            if extent != 1 and stride != reach:
                return not self.size
            reach *= extent
        return True

    def __call__(self, *coord: Any) -> Any:
        """The offset of a coordinate: an int, or an int64 array if any part of the coordinate is an array.

        Accepted: one item for each mode (ints, int arrays that broadcast, tuples for nested modes), as arguments or as
        one tuple; a single int or int array, counted colexicographically; or one item for each leaf of a nested layout.
        """
        crd: tuple[Any, ...] = coord[0] if len(coord) == 1 and isinstance(coord[0], tuple) else coord
        if isinstance(self.shape, tuple) and isinstance(self.stride, tuple):
            if len(crd) == self.rank:
                return crd2idx(crd, self.shape, self.stride)
            if len(crd) == len(flatten(self.shape)):
                return crd2idx(crd, flatten(self.shape), flatten(self.stride))
        if len(crd) == 1:
            return crd2idx(crd[0], self.shape, self.stride)
        raise ValueError(
            f"coordinate {shown(crd)} has {len(crd)} items; {self} accepts 1 or {self.rank}"
            + ("" if self.is_flat else f" or {len(flatten(self.shape))}")
        )

    __iter__ = None  # a slice for each int would never end

    def __getitem__(self, coord: Any) -> Any:
        """A slice: ``:`` (or None) keeps a mode, ``a:b`` a part of one, an int fixes it; tuples reach into nested ones.
        The result is ``offset o layout``, so that ``l[3, :](j) == l(3, j)``; without any ``:`` it is the offset itself.

        >>> Layout("(4,(3,2)):(6,(2,1))")[1, :]
        ComposedLayout("6 o (3,2):(2,1)")
        >>> Layout("(4,8):(8,1)")[2, 5], Layout("(4,8):(8,1)")[1:3, 4].layout
        (21, Layout("2:8"))
        """
        from kvlab.layout.algebra.composed import ComposedLayout
        from kvlab.layout.algebra.slicing import is_point, slice_and_offset

        if is_point(coord):
            return self(*coord) if isinstance(coord, tuple) else self(coord)
        kept, offset = slice_and_offset(coord, self)
        return ComposedLayout(kept, None, offset)

    def offsets(self, *, leaves: bool = False) -> IntArray:
        """All offsets: an int64 array, read-only and computed once, whose axes are the top-level modes, or all leaves.

        >>> Layout("(2,(2,2)):(4,(2,1))").offsets()
        array([[0, 2, 1, 3],
               [4, 6, 5, 7]])
        >>> Layout("(2,(2,2)):(4,(2,1))").offsets(leaves=True).shape
        (2, 2, 2)
        """
        return _offsets(unchecked(flatten(self.shape), flatten(self.stride)) if leaves else self)

    def idx2crd(self, index: Any) -> Coord:
        """The coordinate of an offset, ``(index // stride) % shape`` of each leaf: the inverse of a compact layout.

        >>> a = Layout("(4,(3,2)):(6,(2,1))")
        >>> a.idx2crd(a(3, (2, 1)))
        (3, (2, 1))
        """
        return idx2crd(index, self.shape, self.stride)

    def transpose(self) -> Layout:
        """The top-level modes in reverse order.

        >>> Layout("(4,(3,2)):(6,(2,1))").transpose()
        Layout("((3,2),4):((2,1),6)")
        """
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return self
        return Layout(self.shape[::-1], self.stride[::-1])


def unchecked(shape: IntTuple, stride: IntTuple) -> Layout:
    """The layout of two congruent trees of ints, without looking at them again.

    >>> unchecked((4, 8), (8, 1))
    Layout("(4,8):(8,1)")
    """
    layout = object.__new__(Layout)
    object.__setattr__(layout, "shape", shape)
    object.__setattr__(layout, "stride", stride)
    return layout


def _flat_shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    extents = int_tuple(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape, "shape")
    assert isinstance(extents, tuple)
    flat = tuple(extent for extent in extents if isinstance(extent, int))
    if len(flat) != len(extents):
        raise ValueError(f"shape {extents} is nested: must be ints; Layout(shape, stride) takes trees")
    return flat


@functools.cache
def _is_row_major(layout: Layout) -> bool:
    extents, strides = flatten(layout.shape), flatten(layout.stride)
    dense = flatten(Layout.row_major(*extents).stride)
    return layout.is_flat and all(n == 1 or d == c for n, d, c in zip(extents, strides, dense, strict=True))


@functools.cache
def _offsets(layout: Layout) -> IntArray:
    at_once(layout.size, "offsets")
    total = np.zeros((1,) * layout.rank, np.int64)
    if layout.cosize >> 63:
        raise ValueError(f"offsets up to {shown(layout.cosize - 1)} of {layout}: must have at most 63 bits")
    for axis, mode in enumerate(layout.modes):
        steps = np.asarray(mode(np.arange(mode.size)), np.int64)
        total = total + steps.reshape(-1, *(1,) * (layout.rank - 1 - axis))
    total.setflags(write=False)
    return total
