"""ComposedLayout: a swizzle (or another layout) after an offset after a layout, kept exact through slices and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.layout.algebra.int_tuple import IntArray, as_int_array
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.slicing import is_point, slice_and_offset
from kvlab.layout.algebra.swizzle import Swizzle


@dataclass(frozen=True, init=False, repr=False, slots=True)
class ComposedLayout(Drawn):
    """``f(coord) = outer(offset + layout(coord))``.

    Parameters
    ----------
    layout : offsets in the unit of the swizzle.
    outer : a :class:`Swizzle`, another :class:`Layout` (called with the int, colexicographically), or None.
    offset : where the layout starts, inside the swizzle. An offset added *after* the swizzle would be another function:
        that is why slices and tiles of a swizzled layout keep it here.

    >>> tile = ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16"))
    >>> tile
    ComposedLayout("Sw<3,3,3> (bfloat16) o (8,64):(64,1)")
    >>> row = tile[2, :]
    >>> row, row(0), tile(2, 0)
    (ComposedLayout("Sw<3,3,3> (bfloat16) o 128 o 64:1"), 144, 144)
    >>> ComposedLayout(Layout("(4,3):(3,1)"), Layout("(6,2):(8,2)"))(np.arange(5))
    array([ 0, 24,  2, 26,  8])
    """

    layout: Layout
    outer: Swizzle | Layout | None
    offset: int

    def __init__(self, layout: Layout, outer: Swizzle | Layout | None = None, offset: int = 0) -> None:
        if not isinstance(layout, Layout) or not isinstance(outer, Swizzle | Layout | None):
            raise ValueError(f"ComposedLayout({layout!r}, {outer!r}): a Layout, then a Swizzle, Layout or None")
        start = as_int_array(offset, "offset")
        if not isinstance(start, int):
            raise ValueError(f"offset is {offset!r}: must be an int")
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "offset", start)

    @classmethod
    def parse(cls, text: str) -> ComposedLayout:
        """The composed layout that ``str`` printed.

        >>> ComposedLayout.parse("Sw<3,4,3> (byte) o 128 o (8,128):(128,1)").offset
        128
        """
        *heads, inner = (part.strip() for part in text.split(" o "))
        offset = int(heads.pop()) if heads and heads[-1].isdecimal() else 0
        if len(heads) > 1:
            raise ValueError(f"{text!r} is not 'outer o offset o layout', 'outer o layout' or 'offset o layout'")
        outer: Swizzle | Layout | None = None
        if heads:
            outer = Swizzle.parse(heads[0]) if heads[0].startswith("Sw") else Layout.parse(heads[0])
        return cls(Layout.parse(inner), outer, offset)

    def __str__(self) -> str:
        parts = [str(self.outer)] if self.outer is not None else []
        if self.offset or not parts:
            parts.append(str(self.offset))
        return " o ".join([*parts, str(self.layout)])

    def __repr__(self) -> str:
        return f'ComposedLayout("{self}")'

    @property
    def shape(self) -> Any:
        """The shape of the layout."""
        return self.layout.shape

    @property
    def rank(self) -> int:
        """Number of top-level modes."""
        return self.layout.rank

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.layout.size

    @property
    def cosize(self) -> int:
        """One more than the largest offset; 0 for an empty layout.

        >>> ComposedLayout(Layout("8:1"), Swizzle(3, 0, 3, "byte"), 8).cosize
        16
        """
        return int(self.offsets().max()) + 1 if self.size else 0

    def __call__(self, *coord: Any) -> Any:
        """The offset of a coordinate, in the forms that :class:`Layout` accepts."""
        inner = self.offset + _room(self.layout(*coord), self.offset)
        return inner if self.outer is None else self.outer(inner)

    __iter__ = None

    def __getitem__(self, coord: Any) -> Any:
        """A slice, exact: ``c[3, :](j) == c(3, j)``. See :meth:`Layout.__getitem__`."""
        if is_point(coord):
            return self(*coord) if isinstance(coord, tuple) else self(coord)
        kept, offset = slice_and_offset(coord, self.layout)
        return self.over(kept, offset)

    def over(self, layout: Layout, step: int = 0) -> ComposedLayout:
        """The same outer map over another layout, which starts ``step`` further.

        >>> ComposedLayout(Layout("8:1"), Swizzle(3, 0, 3, "byte"), 8).over(Layout("4:2"), 1)
        ComposedLayout("Sw<3,0,3> (byte) o 9 o 4:2")
        """
        return ComposedLayout(layout, self.outer, self.offset + step)

    def after(self, swizzle: Swizzle) -> ComposedLayout:
        """``swizzle`` after a composed layout without an outer map of its own.

        >>> Layout("(4,8):(8,1)")[1, :].after(Swizzle(2, 0, 3, "byte"))
        ComposedLayout("Sw<2,0,3> (byte) o 8 o 8:1")
        """
        if self.outer is not None:
            raise ValueError(f"{swizzle} after {self}: it has an outer map already")
        return ComposedLayout(self.layout, swizzle, self.offset)

    def offsets(self) -> IntArray:
        """All offsets, as :meth:`Layout.offsets` gives them."""
        inner = _room(self.layout.offsets(), self.offset) + self.offset
        result: IntArray = np.asarray(inner if self.outer is None else self.outer(inner))
        return result


def _room(offsets: Any, start: int) -> Any:
    """The offsets. ValueError where an array has no room for what is ``start`` further."""
    if isinstance(offsets, np.ndarray) and (int(offsets.max(initial=0)) + start) >> 63:
        raise ValueError(f"offset {start} before offsets up to {offsets.max()} of an array: must have at most 63 bits")
    return offsets
