"""Composition: one layout after another, the operation that all divides and products rest on."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.coordinate_layout import CoordinateLayout
from kvlab.layout.algebra.int_tuple import IntTuple, at_once, flatten
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.operations import as_layout, make_layout, merged, unwrapped
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.algebra.systems import Rule, check_rule


def compose(a: Any, b: Any, *, rule: Rule = "cute") -> Any:
    """``a`` after ``b``: ``R(i) == A(B(i))``, with the nesting of ``b``.

    ``b`` is a layout, or a tuple of tilers for the modes of ``a`` (an int n stands for n:1, None for the whole mode;
    further modes of ``a`` stay). ``a`` may be a swizzle, a :class:`ComposedLayout` or a :class:`CoordinateLayout`; the
    result is one then. ``b`` may be swizzled or a swizzle, too: a layout that takes the bits which the swizzle reads
    and changes to bits of its offsets is followed by the swizzle of those, and two swizzles with one shift are one.
    ``rule="legacy"``: a tiler of one mode in a tuple counts as that mode, as in MAX.

    ValueError where no layout of that nesting is this function: a step of ``b`` must divide a mode of ``a`` that it
    walks out of, or be a multiple of it; a run of ``b`` that leaves a mode must fill it a whole number of times; and
    the modes of ``b`` together must stay where each of them goes (no sum may carry into the next mode of ``a``).

    >>> compose(Layout("(6,2):(8,2)"), Layout("(4,3):(3,1)"))
    Layout("((2,2),3):((24,2),8)")
    >>> compose(Layout("(9,(4,8)):(59,(13,1))"), (Layout("3:3"), None))
    Layout("(3,(4,8)):(177,(13,1))")
    >>> compose(Layout("(64,8):(8,1)"), Swizzle(3, 3, 3, "bf16"))
    ComposedLayout("Sw<3,0,-6> (bfloat16) o (64,8):(8,1)")
    >>> compose(Layout("(4,6,8):(2,3,5)"), Layout("6:3"))
    Traceback (most recent call last):
        ...
    ValueError: composition of (4,6,8):(2,3,5) with 6:3: mode 0, shape 4, stride 3: neither divides the other
    """
    if isinstance(a, Swizzle):
        if isinstance(b, Swizzle):
            return _one_swizzle(a, b)
        return _after(a, 0, b if isinstance(b, ComposedLayout) else ComposedLayout(as_layout(b)))
    if isinstance(a, ComposedLayout):
        inner = compose(a.layout, b, rule=rule)
        return _after(a.outer, a.offset, inner) if isinstance(inner, ComposedLayout) else a.over(inner)
    if isinstance(a, CoordinateLayout) and not isinstance(b, ComposedLayout | Swizzle):
        return a.over(compose(a.layout, b, rule=rule))
    if not isinstance(a, Layout):
        raise ValueError(f"composition of {a!r} with {b!r}: must be a Layout, a ComposedLayout or a Swizzle first, and "
                         "after coordinates a Layout")  # fmt: skip
    if isinstance(b, ComposedLayout | Swizzle):
        return _swizzled(a, b)
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


def _after(outer: Swizzle | Layout | None, offset: int, inner: ComposedLayout) -> ComposedLayout:
    """``outer(offset + inner)``."""
    if inner.outer is None:
        return ComposedLayout(inner.layout, outer, offset + inner.offset)
    if offset == 0 and outer is None:
        return inner
    if offset == 0 and isinstance(outer, Layout):
        found: ComposedLayout = compose(outer, inner)
        return found
    if offset == 0 and isinstance(outer, Swizzle) and isinstance(inner.outer, Swizzle):
        return ComposedLayout(inner.layout, _one_swizzle(outer, inner.outer), inner.offset)
    after = ComposedLayout(Layout(1), outer, offset)
    raise ValueError(f"composition of {after} with {inner}: it has an outer map already")


def _one_swizzle(a: Swizzle, b: Swizzle) -> Swizzle:
    """The swizzle that is ``a`` after ``b``, in the unit of ``a``."""
    b = b.to(a.unit)
    if not a.bits or not b.bits:
        return a if a.bits else b
    reads = a.yyy_mask ^ b.yyy_mask  # what both read is moved twice, so not at all
    low, bits = (reads & -reads).bit_length() - 1, reads.bit_count()
    if a.shift == b.shift and reads == ((1 << bits) - 1) << max(low, 0):
        return Swizzle(bits, low - max(a.shift, 0), a.shift, a.unit) if bits else Swizzle.identity(a.unit)
    raise ValueError(f"composition of {a} with {b}: must have one shift, and bits that are one run, to be one swizzle")


def _swizzled(a: Layout, b: ComposedLayout | Swizzle) -> ComposedLayout:
    """``a`` after a swizzle, or after a composed layout."""
    if isinstance(b, ComposedLayout) and b.outer is None and not b.offset:
        return ComposedLayout(compose(a, b.layout))
    if isinstance(b, ComposedLayout) and not isinstance(b.outer, Swizzle):
        return ComposedLayout(b.layout, a if b.outer is None else compose(a, b.outer), b.offset)
    swizzle = b if isinstance(b, Swizzle) else b.outer
    assert isinstance(swizzle, Swizzle)
    if isinstance(b, Swizzle):
        found, expected = ComposedLayout(a, _moved(a, swizzle)), a(b(np.arange(at_once(a.size, "offsets"))))
    else:
        found = ComposedLayout(compose(a, b.layout), _moved(a, swizzle), a(b.offset))
        expected = a(b.offsets())
    if not np.array_equal(found(np.arange(found.size)), expected.reshape(-1, order="F")):
        raise ValueError(f"composition of {a} with {b}: offsets carry out of the bits of their swizzle {found.outer}")
    return found


def _moved(a: Layout, swizzle: Swizzle) -> Swizzle:
    """The swizzle of the offsets of ``a`` that moves the bits to which ``a`` takes those of ``swizzle``."""
    reads, writes = swizzle.yyy_mask, swizzle.zzz_mask
    pairs = [
        (a(1 << y), a(1 << z)) for y, z in zip(_bits(reads), _bits(writes), strict=True) if 1 << y < a.size
    ]
    if not pairs:
        return Swizzle.identity(swizzle.unit)
    if all(n > 0 and n & (n - 1) == 0 for pair in pairs for n in pair):
        places = [(y.bit_length() - 1, z.bit_length() - 1) for y, z in pairs]
        (y, z), shift = places[0], places[0][0] - places[0][1]
        if places == [(y + k, z + k) for k in range(len(places))] and abs(shift) >= len(places):
            return Swizzle(len(places), min(y, z), shift, swizzle.unit)
    raise ValueError(
        f"composition of {a} with {swizzle}: the bits that it reads and changes lead to the offsets {pairs}: must be "
        "powers of two that double, to be those of a swizzle"
    )


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


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
