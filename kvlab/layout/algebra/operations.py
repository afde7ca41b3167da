"""The algebra's core: modes joined, merged and left out. The laws are CuTe's.

A layout is a function on ints (colexicographic coordinates). Every operation here states what it does to that function.
Small trees are handled as plain ints and tuples; nothing is cached."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from kvlab.common.checks import shown
from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.coordinate_layout import CoordinateLayout
from kvlab.layout.algebra.int_tuple import IntTuple, as_int, flatten, int_tuple
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.algebra.systems import Rule, check_rule
from kvlab.layout.algebra.tree_ops import compact_order

AnyLayout = TypeVar("AnyLayout", Layout, ComposedLayout)
Tileable = TypeVar("Tileable", Layout, ComposedLayout, CoordinateLayout)
Tiler: TypeAlias = "Layout | int | tuple[Tiler, ...] | list[Tiler] | None"
"""What layouts are composed with or divided by: a layout, an int (n:1), None (the whole mode), or one for each mode."""


def size(layout: Layout | ComposedLayout) -> int:
    """Number of coordinates.

    >>> size(Layout("(4,8):(8,1)"))
    32
    """
    need_layouts("size", layout, composed=True)
    return layout.size


def cosize(layout: Layout | ComposedLayout, *, rule: Rule = "cute") -> int:
    """One more than the largest offset. ``rule="legacy"``: one more than the *last* offset, and for a swizzled layout
    the period of the swizzle, as MAX answers.

    >>> cosize(Layout("(3,5):(9,2)"))
    27
    >>> s = ComposedLayout(Layout("(4,8):(8,1)"), Swizzle(2, 1, 3, "bf16"), offset=16)
    >>> cosize(s), cosize(s, rule="legacy")
    (48, 64)
    """
    need_layouts("cosize", layout, composed=True)
    if check_rule(rule, "legacy") == "legacy" and layout.size:
        if isinstance(layout, ComposedLayout) and isinstance(layout.outer, Swizzle):
            return layout.outer.period
        return int(layout(layout.size - 1)) + 1
    return layout.cosize


def make_layout(*layouts: Layout) -> Layout:
    """The layouts as the modes of one: ``R(c0, c1, ...) == sum(layouts[i](ci))``.

    >>> make_layout(Layout("(2,3):(3,1)"), Layout("4:6"))
    Layout("((2,3),4):((3,1),6)")
    """
    if not all(isinstance(a, Layout) for a in layouts):
        raise ValueError(f"make_layout of {shown(layouts)}: must be layouts")
    return unchecked(tuple(a.shape for a in layouts), tuple(a.stride for a in layouts))


def make_ordered_layout(shape: IntTuple, order: IntTuple) -> Layout:
    """A dense layout whose leaves vary in ascending ``order``, the lowest fastest.

    >>> make_ordered_layout((2, 3, 4, 5), (1, 4, 3, 2))
    Layout("(2,3,4,5):(1,40,10,2)")
    """
    return Layout(shape, compact_order(Layout(shape).shape, order))


def sublayout(layout: Layout, *modes: int) -> Layout:
    """The named top-level modes.

    >>> sublayout(Layout("(2,3,4):(12,4,1)"), 0, 2)
    Layout("(2,4):(12,1)")
    """
    need_layouts("sublayout", layout)
    if any(not 0 <= as_int(mode, "mode") < layout.rank for mode in modes):
        raise ValueError(f"sublayout{modes} of {layout}: must be modes 0 to {layout.rank - 1}")
    return make_layout(*(layout.modes[mode] for mode in modes))


def zip_modes(a: Layout, b: Layout) -> Layout:
    """Mode i is the pair of the modes i.

    >>> zip_modes(Layout("(2,4):(1,8)"), Layout("(3,5):(2,16)"))
    Layout("((2,3),(4,5)):((1,2),(8,16))")
    """
    need_layouts("zip_modes", a, b)
    if a.rank != b.rank:
        raise ValueError(f"zip_modes of {a} and {b}: must be layouts with equally many modes")
    return make_layout(*(make_layout(x, y) for x, y in zip(a.modes, b.modes, strict=True)))


def coalesce(
    layout: Tileable, *, keep_rank: bool = False, profile: IntTuple | None = None, rule: Rule = "cute"
) -> Tileable:
    """The same function on ints with as few modes as possible: ``R(i) == A(i)``.

    ``keep_rank`` keeps the top-level modes and coalesces each; ``profile``, a tree, keeps its nesting and coalesces
    what lies at its leaves (modes past its end stay as they are). ``rule="new"`` gives a tuple also where one mode is
    left.

    >>> coalesce(Layout("(2,(1,4)):(1,(4,2))")), coalesce(Layout("(1,1):(3,5)"))
    (Layout("8:1"), Layout("1:0"))
    >>> coalesce(Layout("((2,2),(2,4)):((1,2),(8,16))"), keep_rank=True)
    Layout("(4,8):(1,8)")
    """
    need_layouts("coalesce", layout, coordinates=True)
    if not isinstance(layout, Layout):
        return layout.over(coalesce(layout.layout, keep_rank=keep_rank, profile=profile, rule=rule))
    if keep_rank and isinstance(layout.shape, tuple):
        profile = (0,) * layout.rank
    if isinstance(profile, tuple):
        if len(profile) > layout.rank:
            raise ValueError(f"coalesce of {layout} to the profile {profile}: it has only {layout.rank} modes")
        kept = [coalesce(mode, profile=p) for mode, p in zip(layout.modes, profile, strict=False)]
        return make_layout(*kept, *layout.modes[len(kept) :])
    shapes, strides = merged(flatten(layout.shape), flatten(layout.stride))
    if len(shapes) == 1 and check_rule(rule, "new") == "cute":
        return unchecked(shapes[0], strides[0])
    return unchecked(tuple(shapes), tuple(strides))


def merged(shapes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Leaves with extents of 1 dropped and neighbours joined where the second goes on at the end of the first.

    >>> merged((2, 1, 4), (1, 9, 2))
    ([8], [1])
    """
    out_shapes, out_strides = [1], [0]
    for s, d in zip(shapes, strides, strict=True):
        if s == 1:
            continue
        if out_shapes[-1] == 1:
            out_shapes[-1], out_strides[-1] = s, d
        elif out_shapes[-1] * out_strides[-1] == d:
            out_shapes[-1] *= s
        else:
            out_shapes.append(s)
            out_strides.append(d)
    return out_shapes, out_strides


def as_layout(tiler: Layout | int) -> Layout:
    """An int n as the layout n:1.

    >>> as_layout(4)
    Layout("4:1")
    """
    return tiler if isinstance(tiler, Layout) else Layout(tiler)


def unwrapped(layout: Layout) -> Layout:
    """A layout of one mode as that mode.

    >>> unwrapped(Layout("((2,4)):((1,8))"))
    Layout("(2,4):(1,8)")
    """
    while isinstance(layout.shape, tuple) and len(layout.shape) == 1:
        (layout,) = layout.modes
    return layout


def complement(layout: Layout, size: IntTuple = 1) -> Layout:
    """The offsets that ``layout`` leaves out, repeated until about ``size``: no sum of an offset of the layout and an
    offset of the complement occurs twice, and the complement's strides ascend. Where the strides of the layout, in
    ascending order, are multiples of what lies below, the sums are all of ``range(ceil(size / n) * n)``, n the end of
    the layout's pattern; gaps that do not divide (a row of 33 for 32 columns) stay gaps.

    A shape for ``size`` stands for its offsets in column-major order, and is covered mode by mode: what the layout
    spans is taken out of the first modes, the others are left whole.

    ValueError for a layout whose modes interleave, so that offsets repeat or none can be left out in whole blocks.

    >>> complement(Layout("4:2"), 24), complement(Layout("(2,2):(1,6)"), 24)
    (Layout("(2,3):(1,8)"), Layout("(3,2):(2,12)"))
    >>> complement(Layout("4:2"), (5, 6)), complement(Layout("4:2"), 5 * 6)
    (Layout("(2,3):(1,8)"), Layout("(2,4):(1,8)"))
    """
    need_layouts("complement", layout)
    extents = [as_int(extent, "size", 0) for extent in flatten(int_tuple(size, "size"))]
    if not layout.size:
        raise ValueError(f"complement of {layout}: must be a layout with elements, there is nothing to leave out")
    shapes, strides, reach = [], [], 1
    for d, s in sorted(zip(flatten(layout.stride), flatten(layout.shape), strict=True)):
        if s == 1 or d == 0:
            continue
        if d < reach:
            raise ValueError(
                f"complement of {layout}: stride {d} of shape {s} falls inside the {reach} offsets of the modes below"
            )
        shapes.append(d // reach)
        strides.append(reach)
        reach = s * d
    spanned, stride = reach, reach
    for extent in extents:
        left = -(-extent // spanned)
        shapes.append(left)
        strides.append(stride)
        stride *= left
        spanned = -(-spanned // extent) if extent else spanned
    return coalesce(unchecked(tuple(shapes), tuple(strides)))


def is_exact(layout: Layout) -> bool:
    """Does every stride, in ascending order, divide evenly by what lies below it? Then layout and complement fill.

    >>> is_exact(Layout("(2,2):(1,6)")), is_exact(Layout("(2,2):(1,3)"))
    (True, False)
    """
    reach = 1
    for d, s in sorted(zip(flatten(layout.stride), flatten(layout.shape), strict=True)):
        if s != 1 and d:
            if d % reach:
                return False
            reach = s * d
    return True
