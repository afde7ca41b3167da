"""Composition: one layout after another, the operation that all divides and products rest on."""

from __future__ import annotations

from typing import Any

from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.int_tuple import IntTuple, flatten
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import as_layout, make_layout, merged, unwrapped
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.algebra.systems import Rule, check_rule


def compose(a: Any, b: Any, *, rule: Rule = "cute") -> Any:
    """``a`` after ``b``: ``R(i) == A(B(i))``, with the nesting of ``b``.

    ``b`` is a layout, or a tuple of tilers for the modes of ``a`` (an int n stands for n:1, None for the whole mode;
    further modes of ``a`` stay). ``a`` may be a swizzle or a :class:`ComposedLayout`; the result is one then.
    ``rule="legacy"``: a tiler of one mode in a tuple counts as that mode, as in MAX.

    ValueError where no layout of that nesting is this function: a step of ``b`` must divide a mode of ``a`` that it
    walks out of, or be a multiple of it; a run of ``b`` that leaves a mode must fill it a whole number of times; and
    the modes of ``b`` together must stay where each of them goes (no sum may carry into the next mode of ``a``).

    >>> compose(Layout("(6,2):(8,2)"), Layout("(4,3):(3,1)"))
    Layout("((2,2),3):((24,2),8)")
    >>> compose(Layout("(9,(4,8)):(59,(13,1))"), (Layout("3:3"), None))
    Layout("(3,(4,8)):(177,(13,1))")
    >>> compose(Layout("(4,6,8):(2,3,5)"), Layout("6:3"))
    Traceback (most recent call last):
        ...
    ValueError: composition of (4,6,8):(2,3,5) with 6:3: mode 0, shape 4, stride 3: neither divides the other
    """
    if isinstance(a, Swizzle):
        if isinstance(b, ComposedLayout):
            return b.after(a)
        return ComposedLayout(as_layout(b), a)
    if isinstance(a, ComposedLayout):
        return a.over(compose(a.layout, b, rule=rule))
    if isinstance(b, ComposedLayout):
        raise ValueError(f"composition of {a} with {b}: the second is swizzled; use ComposedLayout(layout, {a!r})")
    if not isinstance(a, Layout):
        raise ValueError(f"composition of {a!r}: must be a Layout, a ComposedLayout or a Swizzle")
    check_rule(rule, "legacy")
    if isinstance(b, tuple | list):
        if len(b) > a.rank:
            raise ValueError(f"composition of {a} with {tuple(b)}: {len(b)} tilers for {a.rank} modes")
        parts = [compose(mode, part, rule=rule) for mode, part in zip(a.modes, b, strict=False)]
        return make_layout(*parts, *a.modes[len(parts) :])
    if b is None:
        return a
    b = as_layout(b)
    if rule == "legacy":
        b = unwrapped(b)
    shapes, strides = _walkable(a)
    reach = [0] * len(shapes)
    result = unchecked(*_compose(shapes, strides, reach, b.shape, b.stride, (a, b)))
    for mode in range(len(shapes) - 1):
        if reach[mode] >= shapes[mode] > 0:
            raise ValueError(
                f"composition of {a} with {b}: {_mode_of((a, b), shapes, strides, mode)} has shape {shapes[mode]}; "
                f"the modes of {b} overlap, together they reach {reach[mode]} in it"
            )
    return result


composition = compose
"""MAX's and CuTe's name of :func:`compose`."""


def _walkable(a: Layout) -> tuple[list[int], list[int]]:
    """Coalesced leaves; a last leaf of extent 1 stays, because what goes past the end goes on with its stride."""
    shapes, strides = flatten(a.shape), flatten(a.stride)
    out_shapes, out_strides = merged(shapes, strides)
    if shapes and shapes[-1] == 1:
        last = strides[-1]
        if out_shapes == [1]:
            out_strides[-1] = last
        elif out_shapes[-1] * out_strides[-1] != last:
            out_shapes.append(1)
            out_strides.append(last)
    return out_shapes, out_strides


def _compose(
    shapes: list[int], strides: list[int], reach: list[int], s: IntTuple, d: IntTuple, of: tuple[Layout, Layout]
) -> tuple[IntTuple, IntTuple]:
    """Shape and stride of the composition with one tree; adds to ``reach`` how far its last coordinate goes in each
    mode."""
    if isinstance(s, tuple):
        assert isinstance(d, tuple)
        pairs = [_compose(shapes, strides, reach, x, y, of) for x, y in zip(s, d, strict=True)]
        return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    assert isinstance(d, int)
    if s == 1 or d == 0:
        return s, 0
    if d < 0:
        raise ValueError(f"composition of {of[0]} with {of[1]}: stride {d} is negative, coordinates are not")
    out_shapes, out_strides = [], []
    last = len(shapes) - 1
    for mode, extent in enumerate(shapes):
        stride = strides[mode]
        if mode == last or (s - 1) * d < extent:
            out_shapes.append(s)
            out_strides.append(d * stride)
            reach[mode] += (s - 1) * d
            break
        if d >= extent:
            d, rest = divmod(d, extent or 1)
            if rest:
                raise ValueError(_does_not_divide(of, shapes, strides, mode, d * extent + rest))
            continue
        steps, rest = divmod(extent, d)
        if rest:
            raise ValueError(_does_not_divide(of, shapes, strides, mode, d))
        if s % steps:
            raise ValueError(
                f"composition of {of[0]} with {of[1]}: {_mode_of(of, shapes, strides, mode)} has shape {extent}; "
                f"shape {s} with stride {d} is not a multiple of the {steps} steps in it"
            )
        out_shapes.append(steps)
        out_strides.append(d * stride)
        reach[mode] += extent - d
        s, d = s // steps, 1
    if len(out_shapes) > 1:
        out_shapes, out_strides = merged(tuple(out_shapes), tuple(out_strides))
    if len(out_shapes) == 1:
        return out_shapes[0], out_strides[0]
    return tuple(out_shapes), tuple(out_strides)


def _mode_of(of: tuple[Layout, Layout], shapes: list[int], strides: list[int], mode: int) -> str:
    if tuple(shapes) == flatten(of[0].shape):
        return f"mode {mode}"
    return f"mode {mode} of its coalesced form {unchecked(tuple(shapes), tuple(strides))}"


def _does_not_divide(of: tuple[Layout, Layout], shapes: list[int], strides: list[int], mode: int, d: int) -> str:
    where = f"{_mode_of(of, shapes, strides, mode)}, shape {shapes[mode]}, stride {d}"
    return f"composition of {of[0]} with {of[1]}: {where}: neither divides the other"
