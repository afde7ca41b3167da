"""The same memory in another unit: layouts of larger or smaller elements, modes refined alike."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.int_tuple import IntTuple, as_int, product
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import make_layout
from kvlab.layout.algebra.systems import Rule, check_rule
from kvlab.layout.algebra.tree_ops import shape_div


def upcast(layout: Layout, factor: int) -> Layout:
    """The layout counted in elements ``factor`` times as large: the mode that is contiguous gets shorter, the strides
    of the others too. Offsets of the first scalars of the large elements, divided by ``factor``.

    ValueError where a large element would straddle.

    >>> upcast(Layout("(4,8):(8,1)"), 4), upcast(Layout("(4,8):(1,4)"), 2)
    (Layout("(4,2):(2,1)"), Layout("(2,8):(1,2)"))
    """
    need_layouts("upcast", layout)
    as_int(factor, f"upcast of {layout} by", 1)
    return _leaf_by_leaf(layout, lambda s, d: _upcast(layout, s, d, factor))


def downcast(layout: Layout, factor: int, *, rule: Rule = "cute") -> Layout:
    """The layout counted in elements ``factor`` times smaller: every small element of the contiguous mode is named, the
    other strides grow; ``upcast`` undoes it. ``rule="legacy"`` (MAX): only the first small element of each is named.

    >>> downcast(Layout("(4,8):(8,1)"), 2), downcast(Layout("(4,8):(8,1)"), 2, rule="legacy")
    (Layout("(4,16):(16,1)"), Layout("(4,8):(16,2)"))
    """
    need_layouts("downcast", layout)
    as_int(factor, f"downcast of {layout} by", 1)
    whole = check_rule(rule, "legacy") == "legacy"
    return _leaf_by_leaf(layout, lambda s, d: (s * factor, d) if abs(d) == 1 and not whole else (s, d * factor))


def expand_modes_alike(a: Layout, b: Layout) -> tuple[Layout, Layout]:
    """Both layouts with one nesting: an int against a tuple of the same size is split as the tuple is.

    >>> expand_modes_alike(Layout("(6,4):(1,6)"), Layout("((2,3),4):((1,8),2)"))
    (Layout("((2,3),4):((1,2),6)"), Layout("((2,3),4):((1,8),2)"))
    """
    need_layouts("expand_modes_alike", a, b)
    try:
        (s, d), (t, e) = _alike(a.shape, a.stride, b.shape, b.stride)
    except ValueError as error:
        raise ValueError(f"expand_modes_alike of {a} and {b}: {error}") from None
    return unchecked(s, d), unchecked(t, e)


def _alike(
    s: IntTuple, d: IntTuple, t: IntTuple, e: IntTuple
) -> tuple[tuple[IntTuple, IntTuple], tuple[IntTuple, IntTuple]]:
    if product(s) != product(t):
        raise ValueError(f"{s} and {t} differ in size")
    if isinstance(s, tuple) and isinstance(t, tuple) and isinstance(d, tuple) and isinstance(e, tuple):
        if len(s) != len(t):
            raise ValueError(f"{s} and {t} have not equally many modes")
        pairs = [_alike(*leaf) for leaf in zip(s, d, t, e, strict=True)]
        first, second = zip(*pairs, strict=True) if pairs else ((), ())
        return (
            (tuple(x for x, _ in first), tuple(y for _, y in first)),
            (tuple(x for x, _ in second), tuple(y for _, y in second)),
        )
    if isinstance(t, tuple) and isinstance(d, int):
        return (t, _running(t, d)[0]), (t, e)
    if isinstance(s, tuple) and isinstance(e, int):
        return (s, d), (s, _running(s, e)[0])
    return (s, d), (t, e)


def _running(shape: IntTuple, stride: int) -> tuple[IntTuple, int]:
    if isinstance(shape, int):
        return stride, stride * shape
    strides = []
    for item in shape:
        inner, stride = _running(item, stride)
        strides.append(inner)
    return tuple(strides), stride


def _upcast(layout: Layout, s: int, d: int, factor: int) -> tuple[int, int]:
    if d == 0:
        return s, 0
    try:
        stride, step = shape_div(d, factor), shape_div(factor, abs(d))
        shape = shape_div(s, step)
    except ValueError as error:
        raise ValueError(f"upcast of {layout} by {factor}: shape {s} with stride {d}; {error}") from None
    assert isinstance(shape, int)
    assert isinstance(stride, int)
    return shape, stride


def _leaf_by_leaf(layout: Layout, change: Callable[[int, int], tuple[int, int]]) -> Layout:
    if isinstance(layout.shape, int) and isinstance(layout.stride, int):
        return unchecked(*change(layout.shape, layout.stride))
    return make_layout(*(_leaf_by_leaf(mode, change) for mode in layout.modes))
