"""Layouts of a TileTensor's views: tiling, vectors, distribution over threads.

Each function answers for a layout alone and once (results are cached); a TileTensor adds its own offset.
``exact=False`` gives what an unchecked kernel would do where the pieces do not divide the whole."""

from __future__ import annotations

import functools
import math

import numpy as np

from kvlab.layout.algebra.divide import zipped_divide
from kvlab.layout.algebra.int_tuple import IntArray, IntTuple, as_int, at_once, flatten
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.operations import coalesce
from kvlab.layout.algebra.swizzle import Swizzle


def strides_of(layout: Layout) -> tuple[IntTuple, ...]:
    """The stride of each top-level mode, as a tuple also where the layout has an int shape."""
    return layout.stride if isinstance(layout.stride, tuple) else (layout.stride,)


def _shapes(layout: Layout) -> tuple[IntTuple, ...]:
    return layout.shape if isinstance(layout.shape, tuple) else (layout.shape,)


def _flat(layout: Layout, view: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not layout.is_flat:
        raise ValueError(f"{view} of {layout}: nested modes: must be a layout with one int for each mode")
    return flatten(layout.shape), flatten(layout.stride)


def _one_for_each_mode(layout: Layout, view: str, sizes: tuple[int, ...]) -> None:
    if len(sizes) != layout.rank:
        raise ValueError(f"{view} of {layout}: {len(sizes)} sizes: must be one for each of the {layout.rank} modes")
    if any(size < 1 for size in sizes):
        raise ValueError(f"{view} of {layout}: must be sizes of 1 and more")


@functools.cache
def tiled(
    layout: Layout, tile: tuple[int, ...], stride_layout: tuple[int, ...] | None, exact: bool
) -> tuple[Layout, tuple[int, ...], tuple[int, ...]]:
    """A tile's layout, how far one step of the tile coordinate goes in each mode, and how many tiles a mode has.

    A mode with nested stride ``(outer, ..., inner)`` steps by its outer stride and keeps the inner one.

    >>> tiled(Layout("(8,16):(16,1)"), (4, 8), None, True)
    (Layout("(4,8):(16,1)"), (64, 8), (2, 2))
    """
    view = f"tile{tile}"
    _one_for_each_mode(layout, view, tile)
    if stride_layout is not None and len(stride_layout) != layout.rank:
        raise ValueError(f"{view} of {layout}: stride_layout {stride_layout} needs {layout.rank} strides")
    strides, steps, counts = [], [], []
    for mode, (size, extents, stride) in enumerate(zip(tile, _shapes(layout), strides_of(layout), strict=True)):
        if isinstance(stride, int):
            extent = math.prod(flatten(extents))
            steps.append(size * stride)
            strides.append(stride)
            counts.append(extent // size)
        else:
            extent = flatten(extents)[-1]
            steps.append(flatten(stride)[0])
            strides.append(flatten(stride)[-1])
            counts.append(flatten(extents)[0])
        if exact and extent % size:
            raise ValueError(f"{view} of {layout}: {size} does not divide {extent}, the extent of mode {mode}")
    return Layout(tile, tuple(strides) if stride_layout is None else stride_layout), tuple(steps), tuple(counts)


@functools.cache
def vectorized(layout: Layout, vector: tuple[int, ...], exact: bool) -> Layout:
    """Every mode counted in vectors.

    >>> vectorized(Layout("(8,16):(16,1)"), (1, 4), True)
    Layout("(8,4):(16,4)")
    """
    view = f"vectorize{vector}"
    extents, strides = _flat(layout, view)
    _one_for_each_mode(layout, view, vector)
    for mode, (extent, size) in enumerate(zip(extents, vector, strict=True)):
        if exact and extent % size:
            raise ValueError(f"{view} of {layout}: {size} does not divide {extent}, the extent of mode {mode}")
    return Layout(
        tuple(-(-extent // size) for extent, size in zip(extents, vector, strict=True)),
        tuple(stride * size for stride, size in zip(strides, vector, strict=True)),
    )


@functools.cache
def contiguous_vectors(layout: Layout, vector: tuple[int, ...]) -> bool:
    """Do the scalars of a logical vector lie side by side in memory? A load reads contiguous scalars in any case.

    >>> a = Layout("(8,16):(16,1)")
    >>> contiguous_vectors(a, (1, 4)), contiguous_vectors(a, (4, 1))
    (True, False)
    """
    reach = 1
    for stride, size in sorted(zip(flatten(layout.stride), vector, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


@functools.cache
def distributed(layout: Layout, threads: Layout, exact: bool) -> Layout:
    """The fragment of one thread of a cyclic distribution: thread t owns elements t, t + S, t + 2S, ... of each mode.

    >>> distributed(Layout("(8,4):(16,4)"), Layout.row_major(4, 4), True)
    Layout("(2,1):(64,16)")
    """
    view = f"distribute over {threads}"
    extents, strides = _flat(layout, view)
    grid, _ = _flat(threads, "distribute over threads")
    _one_for_each_mode(layout, view, grid)
    for mode, (extent, size) in enumerate(zip(extents, grid, strict=True)):
        if exact and extent % size:
            raise ValueError(
                f"{view} of {layout}: {size} threads do not divide {extent}, the extent of mode {mode}; "
                "the tail would belong to nobody"
            )
    return Layout(
        tuple(extent // size for extent, size in zip(extents, grid, strict=True)),
        tuple(stride * size for stride, size in zip(strides, grid, strict=True)),
    )


@functools.cache
def thread_offsets(
    strides: tuple[int, ...], threads: Layout, swizzle: Swizzle | None, element_size: int, scalar_bytes: int,
    exact: bool,
) -> IntArray:
    """Scalars from the tile's first to the first element of each thread; threads past the end wrap around.

    The swizzle permutes these offsets counted in logical elements of ``element_size`` scalars, relative to the tile.

    >>> offsets = thread_offsets((16, 4), Layout.row_major(4, 4), None, 4, 2, True)
    >>> offsets[[0, 1, 5]]
    array([ 0,  4, 20])
    """
    grid = [(s, d) for s, d in zip(flatten(threads.shape), flatten(threads.stride), strict=True)]
    thread = np.arange(at_once(math.lcm(*(s * d for s, d in grid if d)), "threads"))
    offset = np.zeros_like(thread)
    for (size, step), stride in zip(grid, strides, strict=True):
        offset = offset + (thread // step % size * stride if step else 0)
    if swizzle is not None:
        if exact and (offset % element_size).any():
            raise ValueError(
                f"distribute over {threads} with {swizzle}: a thread starts inside a vector of {element_size} scalars"
            )
        offset = swizzle.apply(offset // element_size, element_size * scalar_bytes) * element_size
    offset.setflags(write=False)
    return offset


@functools.cache
def check_linear(
    fragment: Layout, strides: tuple[int, ...], threads: Layout, swizzle: Swizzle, element_size: int, scalar_bytes: int
) -> None:
    """ValueError unless a swizzle that moves the first element of each thread, the others of its ``fragment`` following
    linearly, puts each element where it would put it by itself. Arguments as of :func:`thread_offsets`.

    >>> check_linear(Layout("2:8"), (1,), Layout(8), Swizzle(1, 0, 2, "fp32"), 1, 4)
    >>> check_linear(Layout("2:4"), (1,), Layout(4), Swizzle(1, 0, 2, "fp32"), 1, 4)
    Traceback (most recent call last):
        ...
    ValueError: Sw<1,0,2> (float32) of the first elements of threads 4:1: it puts the others elsewhere than 4 scalars \
behind: must be multiples of its period, 8 scalars
    """
    period = swizzle.period * swizzle.unit_bytes // scalar_bytes  # of scalars
    apart = tuple(d for n, d in zip(flatten(fragment.shape), flatten(fragment.stride), strict=True) if n > 1)
    if not any(d % max(period, 1) for d in apart):
        return
    first = thread_offsets(strides, threads, None, element_size, scalar_bytes, True)[:, None]
    rest = fragment(np.arange(at_once(fragment.size, "elements")))
    vector, inside = np.divmod(first + rest, element_size)
    alone = swizzle.apply(vector, element_size * scalar_bytes) * element_size + inside
    moved = thread_offsets(strides, threads, swizzle, element_size, scalar_bytes, True)[:, None]
    if (moved + rest != alone).any():
        raise ValueError(
            f"{swizzle} of the first elements of threads {threads}: it puts the others elsewhere than "
            f"{' and '.join(map(str, apart))} scalars behind: must be multiples of its period, {period} scalars"
        )


def clipped(layout: Layout, tile: Layout, coord: tuple[int, ...]) -> Layout:
    """A tile without what lies past the end of the layout.

    >>> clipped(Layout("(8,16):(16,1)"), Layout("(3,8):(16,1)"), (2, 1))
    Layout("(2,8):(16,1)")
    """
    extents, sizes = _flat(layout, "a legacy tile")[0], flatten(tile.shape)
    shape = tuple(max(0, min(n, s - c * n)) for n, s, c in zip(sizes, extents, coord, strict=True))
    return Layout(shape, tile.stride)


@functools.cache
def gathering(layout: Layout, vector: tuple[int, ...], exact: bool) -> tuple[Layout, Layout]:
    """The layout counted in vectors, and the layout of the scalars of one vector: MAX's legacy rule.

    >>> gathering(Layout("(8,4):(4,1)"), (4, 1), True)
    (Layout("(2,4):(16,1)"), Layout("(4,1):(4,0)"))
    """
    view = f"vectorize{vector}"
    _one_for_each_mode(layout, view, vector)
    for mode, (part, n) in enumerate(zip(layout.modes, vector, strict=True)):
        if exact and part.size % n:
            raise ValueError(f"{view} of {layout}: {n} does not divide {part.size}, the extent of mode {mode}")
    element, rest = zipped_divide(layout, vector if layout.rank > 1 else vector[0], rule="legacy").modes
    return coalesce(rest, keep_rank=True), coalesce(element, keep_rank=True)


@functools.cache
def gathered(element: Layout) -> IntArray:
    """Scalars from a vector's first to each of its scalars, in MAX's legacy order: the mode that is contiguous in
    memory fastest, or mode 0.

    >>> gathered(Layout("(2,2):(8,1)")), gathered(Layout("(2,2):(8,3)"))
    (array([0, 1, 8, 9]), array([ 0,  8,  3, 11]))
    """
    places, strides = element.offsets(), strides_of(element)
    last_fastest = element.rank == 2 and coalesce(element).rank == 2 and strides[0] != 1 and strides[1] == 1
    return (places if last_fastest else places.T).reshape(-1)


@functools.cache
def dealt_out(layout: Layout, threads: Layout, axis: int | None, exact: bool) -> tuple[Layout, tuple[int, ...], Layout]:
    """MAX's legacy distribution: one thread's fragment, and the steps of the threads with their flat grid.

    >>> dealt_out(Layout("(8,8):(8,1)"), Layout("(4,2):(2,1)"), None, True)
    (Layout("(2,4):(32,2)"), (8, 1), Layout("(4,2):(2,1)"))
    """
    view = f"distribute over {threads}"
    if axis is not None and not 0 <= as_int(axis, "axis") < threads.rank:
        raise ValueError(f"{view} along axis {axis}: must be 0 to {threads.rank - 1}")
    modes = threads.modes if axis is None else threads.modes[axis : axis + 1]
    wholes = layout.modes if axis is None else (layout,)
    if len(modes) != len(wholes):
        raise ValueError(f"{view} of {layout}: must be one mode of threads for each of the {layout.rank} modes")
    for mode, (whole, part) in enumerate(zip(wholes, modes, strict=True)):
        if not part.size or (exact and whole.size % part.size):
            raise ValueError(f"{view} of {layout}: {part.size} threads do not divide {whole.size}, mode {mode}")
    tiler = tuple(Layout(mode.shape) for mode in modes)
    zipped = zipped_divide(layout, tiler if axis is None and layout.rank > 1 else tiler[0], rule="legacy")
    shapes = tuple(leaf for mode in modes for leaf in flatten(mode.shape))
    strides = tuple(leaf for mode in modes for leaf in flatten(mode.stride))
    steps = flatten(zipped.modes[0].stride)
    if len(steps) != len(shapes):
        raise ValueError(f"{view} of {layout}: the threads of a mode step over parts of a nested mode")
    return zipped.modes[1], steps, Layout(shapes, strides)
