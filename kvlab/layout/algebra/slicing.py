"""Slices of layouts: some coordinates fixed, the others kept."""

from __future__ import annotations

from typing import Any

from kvlab.common.checks import shown
from kvlab.layout.algebra.int_tuple import MOST_NESTED, IntTuple, as_int, crd2idx, format_tree
from kvlab.layout.algebra.layout import Layout, unchecked


def is_point(coord: Any) -> bool:
    """Does a coordinate fix everything?

    >>> is_point((1, (2, 3))), is_point((1, None)), is_point(slice(None))
    (True, False, False)
    """
    return _is_point(coord, 0)


def _is_point(coord: Any, depth: int) -> bool:
    if isinstance(coord, tuple):
        if depth == MOST_NESTED:
            raise ValueError(f"nested too deeply: must be at most {MOST_NESTED} tuples in one another")
        return all(_is_point(item, depth + 1) for item in coord)
    return coord is not None and not isinstance(coord, slice)


def slice_and_offset(coord: Any, layout: Layout) -> tuple[Layout, int]:
    """The modes that ``coord`` keeps, and the offset of those it fixes (CuTe's ``slice_and_offset``).

    ``coord`` has one item for each mode: ``None`` or ``:`` keeps the mode, ``a:b`` keeps a part of a mode with an int
    extent, an int (colexicographic in a nested mode) fixes it, a tuple does the same to the sub-modes, whose kept ones
    become modes of the result. One kept mode is the result itself.

    >>> slice_and_offset((1, None), Layout("(4,(3,2)):(6,(2,1))"))
    (Layout("(3,2):(2,1)"), 6)
    >>> slice_and_offset((None, (1, None)), Layout("(4,(3,2)):(6,(2,1))"))
    (Layout("(4,2):(6,1)"), 2)
    >>> slice_and_offset((4, None), Layout("(4,8):(8,1)"))
    Traceback (most recent call last):
        ...
    ValueError: slice (4, None) of (4,8):(8,1): index is 4: must be in 0:4
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"slice of {layout!r}: must be a Layout")
    if not isinstance(coord, tuple) and isinstance(layout.shape, tuple):
        coord = (coord,)
    shapes: list[IntTuple] = []
    strides: list[IntTuple] = []
    try:
        offset = _slice(coord, layout.shape, layout.stride, shapes, strides)
    except ValueError as error:
        raise ValueError(f"slice {shown(coord)} of {layout}: {error}") from None
    if len(shapes) == 1:
        return unchecked(shapes[0], strides[0]), offset
    return unchecked(tuple(shapes), tuple(strides)), offset


def _slice(coord: Any, shape: IntTuple, stride: IntTuple, shapes: list[IntTuple], strides: list[IntTuple]) -> int:
    if coord is None or (isinstance(coord, slice) and coord == slice(None)):
        shapes.append(shape)
        strides.append(stride)
        return 0
    if isinstance(coord, tuple):
        if isinstance(shape, int) or isinstance(stride, int) or len(coord) != len(shape):
            raise ValueError(f"must be one item for each mode of {format_tree(shape)}")
        return sum(_slice(c, s, d, shapes, strides) for c, s, d in zip(coord, shape, stride, strict=True))
    if isinstance(coord, slice):
        if isinstance(shape, tuple) or isinstance(stride, tuple):
            raise ValueError(f"a part {coord.start}:{coord.stop} of the nested mode {format_tree(shape)}")
        if coord.step not in (None, 1):
            raise ValueError(f"step is {coord.step}: must be 1")
        start = 0 if coord.start is None else as_int(coord.start, "start")
        stop = shape if coord.stop is None else as_int(coord.stop, "stop")
        if not 0 <= start <= stop <= shape:
            raise ValueError(f"{start}:{stop} must be in 0:{shape}")
        shapes.append(stop - start)
        strides.append(stride)
        return int(start * stride)
    extent = Layout(shape, stride).size
    if not 0 <= as_int(coord, "index") < extent:
        raise ValueError(f"index is {coord}: must be in 0:{extent}")
    return int(crd2idx(coord, shape, stride))
