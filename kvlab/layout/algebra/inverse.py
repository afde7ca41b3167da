"""Inverses of layouts, and what two layouts have in common."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.compositions import compose
from kvlab.layout.algebra.int_tuple import IntArray, flatten
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import coalesce, merged
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.algebra.systems import Rule, check_rule

_Layouts: TypeAlias = Layout | ComposedLayout


def right_inverse(layout: _Layouts, *, rule: Rule = "cute") -> _Layouts:
    """The longest R with ``layout(R(i)) == i``: at which coordinate an offset is found, as far as the offsets from 0 on
    have no gap. ``rule="legacy"`` (MAX): a tuple also where one mode is left.

    A swizzled layout has a swizzled inverse. ValueError where no swizzle of the coordinates is it, and for a composed
    layout that does not start at 0.

    >>> right_inverse(Layout("(4,8):(8,1)")), right_inverse(Layout("4:2"))
    (Layout("(8,4):(4,1)"), Layout("1:0"))
    >>> right_inverse(Layout("(4,8):(1,4)")), right_inverse(Layout("(4,8):(1,4)"), rule="legacy")
    (Layout("32:1"), Layout("(32):(1)"))
    >>> right_inverse(ComposedLayout(Layout("(8,64):(64,1)"), Swizzle(3, 3, 3, "bf16")))
    ComposedLayout("Sw<3,0,-6> (bfloat16) o (64,8):(8,1)")
    """
    need_layouts("right_inverse", layout, composed=True)
    if isinstance(layout, ComposedLayout):
        found = _composed_inverse("right_inverse", layout)
        order = np.arange(found.size)
        return _lawful("right_inverse", layout, found, layout(found(order)), order)
    shapes, strides = [], []
    reach = 1
    for d, s, step in _by_stride(layout):
        if s == 1 or d < reach:
            continue
        if d > reach:
            break
        shapes.append(s)
        strides.append(step)
        reach *= s
    shapes, strides = merged(tuple(shapes), tuple(strides))
    if len(shapes) == 1 and check_rule(rule, "legacy") == "cute":
        return unchecked(shapes[0], strides[0])
    return unchecked(tuple(shapes), tuple(strides))


def left_inverse(layout: _Layouts) -> _Layouts:
    """R with ``layout(R(layout(i))) == layout(i)``: from which coordinate an offset came, the first of them where a
    stride of 0 repeats it; without strides of 0, ``R(layout(i)) == i``. Offsets that the layout leaves out may get any
    coordinate.

    ValueError where no layout is the inverse: when modes interleave, so that offsets repeat, or when a stride is not a
    multiple of the next lower one (or too low to be past its mode). For composed layouts as in :func:`right_inverse`.

    >>> left_inverse(Layout("(4,8):(8,1)")), left_inverse(Layout("4:2")), left_inverse(Layout("(2,2):(1,3)"))
    (Layout("(8,4):(4,1)"), Layout("(2,4):(0,1)"), Layout("(3,2):(1,2)"))
    >>> left_inverse(Layout("(4,3):(0,1)"))
    Layout("3:4")
    >>> left_inverse(ComposedLayout(Layout("(8,32):(64,1)"), Swizzle(1, 3, 3, "bf16")))
    ComposedLayout("Sw<1,0,-6> (bfloat16) o (64,8):(8,1)")
    """
    need_layouts("left_inverse", layout, composed=True)
    if isinstance(layout, ComposedLayout):
        found = _composed_inverse("left_inverse", layout)
        offsets = layout.offsets()
        return _lawful("left_inverse", layout, found, layout(found(offsets)), offsets)
    leaves = []
    reach, extent, step = 1, 1, 0
    for d, s, colex in _by_stride(layout):
        if s == 1 or d == 0:
            continue
        if d < 0 or d % reach or d // reach < extent:
            raise ValueError(
                f"left_inverse of {layout}: stride {d} of shape {s} is not a multiple of {reach * extent}, "
                f"nor of {reach} past shape {extent}; no layout is the inverse"
            )
        leaves.append((d // reach, step))
        reach, extent, step = d, s, colex
    return _from_leaves([*leaves, (extent, step)])


def nullspace(layout: Layout) -> Layout:
    """The coordinates that the strides of 0 leave at offset 0: ``layout(nullspace(i)) == 0``, in ascending order.

    >>> nullspace(Layout("(4,3,2):(1,0,4)")), nullspace(Layout("(4,8):(8,1)")), nullspace(Layout("(4,8,2):(0,1,0)"))
    (Layout("3:4"), Layout("1:0"), Layout("(4,2):(1,32)"))
    """
    need_layouts("nullspace", layout)
    found = sorted((step, s) for d, s, step in _by_stride(layout) if d == 0 and s > 1)
    return _from_leaves([(s, step) for step, s in found] or [(1, 0)])


def max_common_layout(a: _Layouts, b: _Layouts) -> Layout:
    """The longest R with ``a(R(i)) == b(R(i)) == i``: the coordinates at which both have offsets 0, 1, 2, ... What a
    copy from one to the other may move as one vector. Where offsets repeat, the longest modes are taken, at their first
    coordinates.

    Of swizzled layouts the vectors that stay whole count, ``a(R(i)) == a(R(0)) + i``, and all that both have where
    swizzle and offset are the same: then ``a(R(i)) == b(R(i))``.

    >>> max_common_layout(Layout("(4,2,2):(4,1,2)"), Layout("(4,4):(4,1)"))
    Layout("(4,4):(4,1)")
    >>> max_common_layout(Layout("(16,2):(1,32)"), Layout("(4,8):(1,4)"))
    Layout("16:1")
    >>> max_common_layout(Layout("(8,64):(64,1)"), ComposedLayout(Layout("(8,64):(64,1)"), Swizzle(3, 3, 3, "bf16")))
    Layout("8:8")
    """
    need_layouts("max_common_layout", a, b, composed=True)
    if isinstance(a, ComposedLayout) or isinstance(b, ComposedLayout):
        return _common_vectors(a, b)
    extents, others = ({(d, step): s for d, s, step in _by_stride(one) if d > 0 and s > 1} for one in (a, b))
    both = extents.keys() & others.keys()
    reach, leaves = 1, [(1, 0)]
    while steps := [(min(extents[at], others[at]), at) for at in both if at[0] == reach]:
        extent, at = max(steps)
        leaves.append((extent, at[1]))
        if extents[at] != others[at]:
            break
        reach *= extent
    return _from_leaves(leaves)


def max_common_vector(a: _Layouts, b: _Layouts) -> int:
    """Number of elements of :func:`max_common_layout`.

    >>> max_common_vector(Layout("(8,4):(1,8)"), Layout("(8,4):(1,16)"))
    8
    """
    return max_common_layout(a, b).size


def _composed_inverse(operation: str, layout: ComposedLayout) -> _Layouts:
    """The inverse of the outer map, after which that of the layout."""
    if layout.offset:
        raise ValueError(f"{operation} of {layout}: it starts at {layout.offset}, must start at 0; the whole tile's "
                         "inverse gives the coordinates of a part's offsets")  # fmt: skip
    invert = right_inverse if operation == "right_inverse" else left_inverse
    inner, outer = invert(layout.layout), layout.outer
    if outer is None:
        return inner
    try:
        found: _Layouts = compose(inner, invert(outer) if isinstance(outer, Layout) else outer)
    except ValueError as error:
        raise ValueError(f"{operation} of {layout}: no layout is the inverse ({error})") from None
    return found


def _lawful(operation: str, layout: ComposedLayout, found: _Layouts, offsets: IntArray, expected: IntArray) -> _Layouts:
    if not np.array_equal(offsets, expected):
        raise ValueError(f"{operation} of {layout}: no layout is the inverse, {found} leads to other offsets")
    return found


def _common_vectors(a: _Layouts, b: _Layouts) -> Layout:
    """What layouts, of which some are composed, have in common."""
    parts = [(one.layout, one.outer, one.offset) if isinstance(one, ComposedLayout) else (one, None, 0)
             for one in (a, b)]  # fmt: skip
    for one, outer, _ in parts:
        if isinstance(outer, Layout):
            raise ValueError(f"max_common_layout of {one} under {outer}: must have a swizzle as its outer map, or none")
    common = max_common_layout(parts[0][0], parts[1][0])
    if parts[0][1:] == parts[1][1:]:
        return common
    size = common.size
    for _, outer, offset in parts:
        if isinstance(outer, Swizzle) and outer.bits:
            unit = 1 << outer.base
            size = min(size, unit, offset & -offset or unit)
    while size < common.size:
        try:
            shorter: Layout = compose(common, Layout(size, 1))
            return shorter
        except ValueError:  # the vector ends inside a mode
            size -= 1
    return common


def _from_leaves(leaves: list[tuple[int, int]]) -> Layout:
    """A coalesced layout of (shape, stride) leaves."""
    return coalesce(unchecked(tuple(s for s, _ in leaves), tuple(d for _, d in leaves)))


def _by_stride(layout: Layout) -> list[tuple[int, int, int]]:
    """(stride, shape, colexicographic step) of the coalesced leaves, ascending."""
    shapes, strides = merged(flatten(layout.shape), flatten(layout.stride))
    step, leaves = 1, []
    for s, d in zip(shapes, strides, strict=True):
        leaves.append((d, s, step))
        step *= s
    return sorted(leaves)
