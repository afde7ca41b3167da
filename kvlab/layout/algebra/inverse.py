"""Inverses of layouts."""

from __future__ import annotations

from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.int_tuple import flatten
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import merged
from kvlab.layout.algebra.systems import Rule, check_rule


def right_inverse(layout: Layout, *, rule: Rule = "cute") -> Layout:
    """The longest R with ``layout(R(i)) == i``: at which coordinate an offset is found, as far as the offsets from 0 on
    have no gap. ``rule="legacy"`` (MAX): a tuple also where one mode is left.

    >>> right_inverse(Layout("(4,8):(8,1)")), right_inverse(Layout("4:2"))
    (Layout("(8,4):(4,1)"), Layout("1:0"))
    >>> right_inverse(Layout("(4,8):(1,4)")), right_inverse(Layout("(4,8):(1,4)"), rule="legacy")
    (Layout("32:1"), Layout("(32):(1)"))
    """
    need_layouts("right_inverse", layout)
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


def left_inverse(layout: Layout) -> Layout:
    """R with ``R(layout(i)) == i``: from which coordinate an offset came. Offsets that the layout leaves out may get
    any coordinate.

    ValueError where no layout is the inverse: when offsets repeat, or when a stride is not a multiple of the next lower
    one (or too low to be past its mode).

    >>> left_inverse(Layout("(4,8):(8,1)")), left_inverse(Layout("4:2")), left_inverse(Layout("(2,2):(1,3)"))
    (Layout("(8,4):(4,1)"), Layout("(2,4):(0,1)"), Layout("(3,2):(1,2)"))
    """
    need_layouts("left_inverse", layout)
    shapes, strides = [], []
    reach, extent, step = 1, 1, 0
    for d, s, colex in _by_stride(layout):
        if s == 1:
            continue
        if d <= 0 or d % reach or d // reach < extent:
            raise ValueError(
                f"left_inverse of {layout}: stride {d} of shape {s} is not a multiple of {reach * extent}, "
                f"nor of {reach} past shape {extent}; no layout is the inverse"
            )
        shapes.append(d // reach)
        strides.append(step)
        reach, extent, step = d, s, colex
    shapes, strides = merged((*shapes, extent), (*strides, step))
    return unchecked(shapes[0], strides[0]) if len(shapes) == 1 else unchecked(tuple(shapes), tuple(strides))


def _by_stride(layout: Layout) -> list[tuple[int, int, int]]:
    """(stride, shape, colexicographic step) of the coalesced leaves, ascending."""
    shapes, strides = merged(flatten(layout.shape), flatten(layout.stride))
    step, leaves = 1, []
    for s, d in zip(shapes, strides, strict=True):
        leaves.append((d, s, step))
        step *= s
    return sorted(leaves)
