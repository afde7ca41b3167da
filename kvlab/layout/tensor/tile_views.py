"""The views of a TileTensor that kernels work with: tiles, vectors, distribution over threads. None moves data."""

from __future__ import annotations

import math
import warnings
from typing import Any, Self

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra import views
from kvlab.layout.algebra.int_tuple import IntArray, IntTuple, as_int_array, flatten, int_tuple
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import VECTOR_BYTES, Swizzle
from kvlab.layout.tensor.access import leading
from kvlab.layout.tensor.tile_base import MOST_BITS, TileBase


class TileViews(TileBase):
    """Views: another layout and offset over the same memory (see ``TileTensor``)."""

    __slots__ = ()

    def tile(self, tile_shape: Any, coord: Any, *, stride_layout: Any = None, legacy: bool = False) -> Self:
        """The tile number ``coord`` of shape ``tile_shape``; one size and one coordinate for each mode.

        Coordinates may be int arrays over the leading axes of the offset. ``stride_layout`` overrides the strides of
        the result only. A tensor with ``valid_rows`` may be tiled past its end: the bound decides what is there.
        ``legacy=True`` (MAX's LayoutTensor) clips the last tile of a mode that the tile does not divide; coordinates
        are ints then.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> from kvlab.common.checks import shown
        >>> t = TileTensor(Memory(512), "fp32", Layout.row_major(8, 16))
        >>> t.tile((4, 8), (1, 1))
        TileTensor(float32, (4,8):(16,1), offset 72, generic)
        >>> t.tile((4, 8), (np.arange(2), 0)).offset
        array([ 0, 64])
        >>> t.tile((3, 8), (2, 0), legacy=True).layout
        Layout("(2,8):(16,1)")
        >>> t.tile((4, 8), (2, 0))
        Traceback (most recent call last):
            ...
        ValueError: tile(4, 8) number (2, 0) of (8,16):(16,1): mode 0 has 2 tiles
        """
        tile, strict = _extents(tile_shape, "tile"), self.end is None and not self.memory.unsafe
        strides = None if stride_layout is None else _extents(stride_layout, "stride_layout")
        coord = tuple(coord) if isinstance(coord, tuple | list) else (coord,)
        layout, steps, counts = views.tiled(self.layout, tile, strides, strict and not legacy)
        if len(coord) != self.rank:
            given, accepted = shown(coord), "must be one coordinate for each mode"
            raise ValueError(f"tile{tile} number {given} of {self.layout}: {accepted}")
        if legacy:
            layout = views.clipped(self.layout, layout, _extents(coord, "tile coordinate"))
            counts = tuple(-(-extent // size) for extent, size in zip(self.shape, tile, strict=True))
        offset = self.offset
        for mode, (item, step, count) in enumerate(zip(coord, steps, counts, strict=True)):
            number = as_int_array(item, "tile coordinate")
            if strict and np.size(number) and np.max(number) >= count:
                raise ValueError(f"tile{tile} number {coord} of {self.layout}: mode {mode} has {count} tiles")
            ndim = max(np.ndim(offset), np.ndim(number))
            if np.size(number) and int(np.max(number)) * abs(step) >> MOST_BITS:
                raise ValueError(f"tile{tile} number {shown(coord)} of {self.layout}: {MOST_BITS} bits from its first")
            offset = leading(offset, ndim) + leading(number * step, ndim)
        known = None
        if self.known is not None:
            lasts = np.cumsum([len(flatten(mode.shape)) for mode in self.layout.modes]) - 1
            kept = (strides is not None) | np.asarray(self.known[1])[lasts]
            known = (True,) * self.rank, tuple(kept.tolist())
        return self._view(layout, offset, self.element_size, known)

    def tile_with_offset(self, tile_shape: Any, coord: Any) -> tuple[Self, tuple[Any, ...], Any]:
        """The tile, its corner (logical elements of this tensor) and how many scalars it starts after this tensor.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> TileTensor(Memory(256), "fp32", Layout.col_major(8, 8)).tile_with_offset((4, 2), (1, 3))
        (TileTensor(float32, (4,2):(1,8), offset 52, generic), (4, 6), 52)
        """
        self._require_flat("tile_with_offset")
        tile = self.tile(tile_shape, coord)
        coord = coord if isinstance(coord, tuple | list) else (coord,)
        corner = tuple(c * n for c, n in zip(coord, _extents(tile_shape, "tile"), strict=True))
        return tile, corner, tile.offset - leading(self.offset, np.ndim(tile.offset))

    def vectorize(self, *vector: int, legacy: bool = False) -> Self:
        """The same elements as vectors of ``vector`` scalars; without arguments 16 bytes of the last mode.

        An access moves contiguous scalars from a vector's first one whatever the vector's shape is; where its scalars
        do not lie side by side that is rarely meant, and a warning says so. ``legacy=True`` (MAX's LayoutTensor)
        gathers the scalars that the vector's shape names: the mode that is contiguous in memory fastest, or mode 0.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> TileTensor(Memory(512), "fp32", Layout.row_major(8, 16)).vectorize(1, 4)
        TileTensor(float32 x4, (8,4):(16,4), offset 0, generic)
        >>> column = TileTensor.from_numpy(np.arange(32).reshape(8, 4)).vectorize(4, 1, legacy=True)
        >>> column.layout, column.load()[0, 1]
        (Layout("(2,4):(16,1)"), array([ 1,  5,  9, 13]))
        """
        if not vector:
            vector = (*(1,) * (self.rank - 1), max(VECTOR_BYTES // self.dtype.itemsize, 1))
        sizes = _extents(vector, "vector")
        if self.element_size != 1:
            raise ValueError(f"vectorize{sizes} of vectors of {self.element_size}: must be a tensor of scalars")
        if legacy:
            layout, element = views.gathering(self.layout, sizes, not self.memory.unsafe)
            view = self._view(layout, self.offset, element.size)
            view.element_layout = element
            return view
        layout = views.vectorized(self.layout, sizes, not self.memory.unsafe)
        if not views.contiguous_vectors(self.layout, sizes):
            warnings.warn(
                f"vectorize{sizes} of {self.layout}: accesses move contiguous scalars, not the strided vector "
                "(legacy=True gathers it)",
                stacklevel=2,
            )
        return self._view(layout, self.offset, math.prod(sizes))

    def distribute(
        self, threads: Layout, lane: Any, swizzle: Swizzle | None = None, *, legacy: bool = False,
        axis: int | None = None, submode_axis: int | None = None,
    ) -> Self:
        """The elements that thread ``lane`` owns when ``threads`` are dealt out cyclically over each mode.

        A scalar lane gives that thread's fragment; an array of lanes appends its axes to the offset. The swizzle
        permutes the offset of a thread's first element from the tile's first, counted in logical elements (its unit is
        converted); the other elements follow linearly: right where the fragment's strides are multiples of its period.

        ``legacy=True`` (MAX's LayoutTensor) takes nested threads and tensors, and ``axis``: the threads are dealt out
        along that mode of theirs only, over the whole tensor; threads that differ on other modes share a fragment.
        ``submode_axis`` is accepted and without effect there, so it warns here.

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> t = TileTensor(Memory(512), "fp32", Layout.row_major(8, 16)).vectorize(1, 4)
        >>> t.distribute(Layout.row_major(4, 4), 5)
        TileTensor(float32 x4, (2,1):(64,16), offset 20, generic)
        >>> t.distribute(Layout.row_major(8, 4), np.arange(8), Swizzle(2, 0, 2, "vector")).offset
        array([ 0,  4,  8, 12, 20, 16, 28, 24])
        >>> bias = TileTensor(Memory(64), "fp32", Layout(16)).distribute(Layout.row_major(4, 2), 5, legacy=True, axis=0)
        >>> bias.layout, bias.offset
        (Layout("4:4"), 2)
        """
        return self._distribute(threads, lane, swizzle, legacy, axis, submode_axis)[0]

    def distribute_with_offset(
        self, threads: Layout, lane: Any, swizzle: Swizzle | None = None
    ) -> tuple[Self, tuple[Any, ...], Any]:
        """The fragment, the thread's coordinate in each mode of ``threads``, and how many scalars the fragment starts
        after this tensor (after the swizzle).

        >>> from kvlab.layout import TileTensor
        >>> from kvlab.memory import Memory
        >>> t = TileTensor(Memory(256), "fp32", Layout.row_major(8, 8))
        >>> t.distribute_with_offset(Layout.row_major(2, 4), 6)[1:]
        ((1, 2), 10)
        """
        fragment, first = self._distribute(threads, lane, swizzle, False, None, None)
        grid = zip(flatten(threads.shape), flatten(threads.stride), strict=True)
        return fragment, tuple(lane // d % s if d else lane * 0 for s, d in grid), first

    def _distribute(
        self, threads: Layout, lane: Any, swizzle: Swizzle | None, legacy: bool, axis: int | None,
        submode_axis: int | None,
    ) -> tuple[Self, int | IntArray]:
        if not isinstance(threads, Layout) or not isinstance(swizzle, Swizzle | None):
            raise ValueError(
                f"distribute over {threads!r} with {swizzle!r}: must be a Layout, and a Swizzle or None"
            )
        unchecked = self.memory.unsafe
        strides, grid = flatten(self.layout.stride), threads
        if legacy:
            if submode_axis is not None:
                warnings.warn(f"submode_axis={submode_axis} has no effect, as in the original", stacklevel=3)
            layout, strides, grid = views.dealt_out(self.layout, threads, axis, not unchecked)
        elif axis is not None or submode_axis is not None:
            raise ValueError(f"axis is {axis}, submode_axis {submode_axis}: must be None unless legacy=True")
        else:
            layout = views.distributed(self.layout, threads, not unchecked)
        table = views.thread_offsets(strides, grid, swizzle, self.element_size, self.dtype.itemsize, not unchecked)
        lane = as_int_array(lane, "lane")
        first = table[lane % table.size]
        offset = leading(self.offset, np.ndim(self.offset) + np.ndim(lane)) + first
        view = self._view(layout, int(offset) if np.ndim(offset) == 0 else offset, self.element_size)
        return view, int(first) if np.ndim(first) == 0 else first


def _extents(sizes: Any, what: str) -> tuple[int, ...]:
    tree: IntTuple = int_tuple(sizes, what)
    if isinstance(tree, int):
        return (tree,)
    if any(not isinstance(item, int) for item in tree):
        raise ValueError(f"{what} {sizes!r} is nested: must be one int for each mode")
    return flatten(tree)
