"""Layouts of coordinates: strides are steps along the dimensions of a tensor, ``2@1``, as those of TMA tensors are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra.int_tuple import (
    IntArray,
    IntTuple,
    as_int,
    at_once,
    check_nesting,
    flatten,
    int_tuple,
    parse_tree,
)
from kvlab.layout.algebra.layout import Layout, unchecked
from kvlab.layout.algebra.slicing import is_point, slice_and_offset

_BITS = 64
_MOST = 1 << 31
"""What a step along a dimension may be, and a coordinate that a layout starts at: TMA's coordinates have 32 bits."""
Path: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ScaledBasis:
    """A step of ``value`` along the dimension that ``path`` names: (1,) is dimension 1, (1, 0) the first part of it.
    :func:`E` makes one.

    >>> print(2 * E(1), E(1, 0))
    2@1 1@0@1
    """

    value: int
    path: Path

    def __post_init__(self) -> None:
        if abs(as_int(self.value, "value")) > _MOST:
            raise ValueError(f"value is {shown(self.value)}: must be at most {_MOST}")
        object.__setattr__(self, "path", tuple(as_int(index, "path", 0) for index in self.path))
        if not self.path or max(self.path) >= 64:
            raise ValueError(f"path is {shown(self.path)}: must name a dimension, 0 to 63")

    def __rmul__(self, factor: int) -> ScaledBasis:
        return ScaledBasis(self.value * as_int(factor, "factor"), self.path)

    __mul__ = __rmul__

    def __str__(self) -> str:
        return "@".join(map(str, (self.value, *reversed(self.path))))


def E(*path: int) -> ScaledBasis:
    """A step of one along a dimension, CuTe's ``E<path>``.

    >>> print(E(0))
    1@0
    """
    return ScaledBasis(1, path)


@dataclass(frozen=True, init=False, repr=False, slots=True)
class CoordinateLayout:
    """A map from coordinates to coordinates of another tensor: ``offset`` and the sum of coordinate times stride, each
    along the dimension that the stride names. The tiles of a TMA tensor are such (CuTe's identity and TMA tensors).

    Parameters
    ----------
    shape : an int or nested tuples of ints, or the whole layout as text, ``"(8,64):(1@0,1@1)"``, ``"(4,16) o .."``.
    stride : of the same nesting, with ``E(0)``, ``2 * E(1)``, ... or the int 0 as leaves.
    offset : the coordinate at which the layout starts; zeros when absent.

    Calls, slices, :func:`compose`, :func:`coalesce` and the divides work as on any layout. ValueError where a dimension
    is both a number and divided into parts, and for steps and offsets past 2**31.

    >>> from kvlab.layout import zipped_divide
    >>> tensor = CoordinateLayout((8, 64), (E(0), E(1)))
    >>> tensor(3, 5), tensor(77)
    ((3, 5), (5, 9))
    >>> tiles = zipped_divide(tensor, (4, 16))
    >>> tiles, tiles[:, (1, 2)]
    (CoordinateLayout("((4,16),(2,4)):((1@0,1@1),(4@0,16@1))"), CoordinateLayout("(4,32) o (4,16):(1@0,1@1)"))
    """

    layout: Layout
    profile: IntTuple
    start: int

    def __init__(self, shape: Any, stride: Any = None, offset: Any = None) -> None:
        if isinstance(shape, str):
            if stride is not None or offset is not None:
                raise ValueError(f"{shown(shape)} holds the stride and the offset: stride and offset must be None")
            shape, stride, offset = _parsed(shape)
        shape = int_tuple(shape, "shape")
        check_nesting(stride, "stride")
        steps = _leaves(stride)
        paths = {step.path for step in steps if isinstance(step, ScaledBasis)}
        if offset is not None:
            offset = int_tuple(offset, "offset")
            paths |= set(_paths(offset))
        profile, slots = _profile(paths)
        numbers = iter([0 if step == 0 else step.value << _BITS * slots[step.path] for step in steps])
        packed = Layout(shape, _like(stride, numbers))
        start = 0
        if offset is not None:
            if max(map(abs, flatten(offset)), default=0) > _MOST:
                raise ValueError(f"offset is {shown(offset)}: must be coordinates of at most {_MOST}")
            for path, number in _paths(offset).items():
                start += number << _BITS * slots[path]
        object.__setattr__(self, "layout", packed)
        object.__setattr__(self, "profile", profile)
        object.__setattr__(self, "start", start)
        if any(part.cosize >> 62 for part in self._parts()):
            raise ValueError(f"shape is {shown(shape)}: must lead to coordinates of at most 62 bits")

    @classmethod
    def identity(cls, shape: IntTuple) -> CoordinateLayout:
        """The layout that maps each coordinate to itself (CuTe's ``make_identity_layout``).

        >>> CoordinateLayout.identity(((8, 2), 64))
        CoordinateLayout("((8,2),64):((1@0@0,1@1@0),1@1)")
        """
        shape = int_tuple(shape, "shape")
        if isinstance(shape, int):
            return cls(shape, E(0))
        return cls(shape, _like(shape, iter([ScaledBasis(1, path) for path in _paths(shape)])))

    @classmethod
    def parse(cls, text: str) -> CoordinateLayout:
        """The layout that ``str`` printed.

        >>> CoordinateLayout.parse("(3,0) o 64:1@1").offset
        (3, 0)
        """
        return cls(text)

    @property
    def shape(self) -> IntTuple:
        """The shape."""
        return self.layout.shape

    @property
    def stride(self) -> Any:
        """The steps, nested as the shape; 0 where a mode does not move."""
        paths = _paths(self.profile)
        by_slot = {slot: path for path, slot in paths.items()}
        steps: list[Any] = []
        for number in flatten(self.layout.stride):
            moved = [(value, slot) for slot, value in enumerate(self._unpacked(number)) if value]
            steps.append(ScaledBasis(moved[0][0], by_slot[moved[0][1]]) if moved else 0)
        return _like(self.layout.stride, iter(steps))

    @property
    def offset(self) -> Any:
        """The coordinate at which the layout starts."""
        return _like(self.profile, iter(self._unpacked(self.start)))

    @property
    def rank(self) -> int:
        """Number of top-level modes."""
        return self.layout.rank

    @property
    def size(self) -> int:
        """Number of coordinates that are mapped."""
        return self.layout.size

    def __str__(self) -> str:
        text = f"{_text(self.shape)}:{_text(self.stride)}"
        seen = _profile({step.path for step in _leaves(self.stride) if isinstance(step, ScaledBasis)})[0]
        return text if not self.start and seen == self.profile else f"{_text(self.offset)} o {text}"

    def __repr__(self) -> str:
        return f'CoordinateLayout("{self}")'

    __iter__ = None

    def __call__(self, *coord: Any) -> Any:
        """The coordinate, nested as :attr:`offset`; arguments as those of a :class:`Layout`, arrays among them."""
        starts = self._unpacked(self.start)
        found = [start + part(*coord) for start, part in zip(starts, self._parts(), strict=True)]
        return _like(self.profile, iter(found))

    def __getitem__(self, coord: Any) -> Any:
        """A slice, ``c[3, :](j) == c(3, j)``. See :meth:`Layout.__getitem__`."""
        if is_point(coord):
            return self(*coord) if isinstance(coord, tuple) else self(coord)
        kept, step = slice_and_offset(coord, self.layout)
        return self.over(kept, step)

    def over(self, layout: Layout, step: int = 0) -> CoordinateLayout:
        """The same dimensions under another layout of packed steps, which starts ``step`` further."""
        made = object.__new__(CoordinateLayout)
        object.__setattr__(made, "layout", layout)
        object.__setattr__(made, "profile", self.profile)
        object.__setattr__(made, "start", self.start + step)
        return made

    def coordinates(self) -> IntArray:
        """All coordinates: int64 ``[each mode.., each int of a coordinate]``.

        >>> CoordinateLayout.identity((2, 2)).coordinates().tolist()
        [[[0, 0], [0, 1]], [[1, 0], [1, 1]]]
        """
        at_once(self.size * len(self._parts()), "coordinates")
        starts = self._unpacked(self.start)
        return np.stack([start + part.offsets() for start, part in zip(starts, self._parts(), strict=True)], axis=-1)

    def _unpacked(self, number: int) -> list[int]:
        """The ints of a coordinate: signed digits of 64 bits."""
        found = []
        for _ in flatten(self.profile):
            digit = number & ((1 << _BITS) - 1)
            digit -= (digit >> (_BITS - 1)) << _BITS
            found.append(digit)
            number = (number - digit) >> _BITS
        return found

    def _parts(self) -> list[Layout]:
        """A layout of each int of a coordinate."""
        digits = [self._unpacked(number) for number in flatten(self.layout.stride)]
        return [
            unchecked(self.shape, _like(self.layout.stride, iter([digit[slot] for digit in digits])))
            for slot in range(len(flatten(self.profile)))
        ]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in _leaves(item)]
    if isinstance(tree, ScaledBasis) or (isinstance(tree, int) and not isinstance(tree, bool) and tree == 0):
        return [tree]
    raise ValueError(f"stride is {shown(tree)}: must be E(dimension), times an int, or 0")


def _like(tree: Any, leaves: Any) -> Any:
    """A tree of the same nesting with these leaves."""
    return tuple(_like(item, leaves) for item in tree) if isinstance(tree, tuple | list) else next(leaves)


def _paths(tree: IntTuple, path: Path = ()) -> dict[Path, int]:
    """The leaves by the way to them; of an int alone, which is the only dimension, (0,)."""
    if isinstance(tree, tuple):
        return {at: n for i, item in enumerate(tree) for at, n in _paths(item, (*path, i)).items()}
    return {path or (0,): tree}


def _profile(paths: set[Path]) -> tuple[IntTuple, dict[Path, int]]:
    """The nesting of the coordinates that have these parts, its leaves their places in order, and the places."""
    slots: dict[Path, int] = {}

    def tree(prefix: Path) -> IntTuple:
        inner = {path[len(prefix)] for path in paths if path[: len(prefix)] == prefix and path != prefix}
        if inner and prefix in paths:
            raise ValueError(f"dimension {'@'.join(map(str, reversed(prefix)))} is divided, and has steps of its own: "
                             "must be one of both")  # fmt: skip
        if inner or not prefix:
            return tuple(tree((*prefix, i)) for i in range(max(inner, default=0) + 1))
        slots[prefix] = len(slots)
        return slots[prefix]

    return tree(()), slots


def _text(tree: Any) -> str:
    return f"({','.join(map(_text, tree))})" if isinstance(tree, tuple) else str(tree)


_STEP = re.compile(r"_?(-?\d+)((?:@\d+)+)")


def _parsed(text: str) -> tuple[IntTuple, Any, IntTuple | None]:
    """Shape, stride and offset of a text."""
    *first, last = text.split(" o ")
    shape, colon, stride = last.partition(":")
    try:
        if len(first) > 1 or not colon:
            raise ValueError(text)
        steps: list[Any] = []

        def number(match: re.Match[str]) -> str:
            steps.append(ScaledBasis(int(match[1]), tuple(int(n) for n in reversed(match[2][1:].split("@")))))
            return str(len(steps))

        tree = parse_tree(_STEP.sub(number, stride))
        offset = parse_tree(first[0].strip().removeprefix("ArithTuple")) if first else None
        named = iter([steps[n - 1] if n else 0 for n in flatten(tree)])
        return parse_tree(shape), _like(tree, named), offset
    except (ValueError, IndexError):
        raise ValueError(
            f"{shown(text)} is no layout of coordinates: must be '(8,64):(1@0,1@1)' or '(4,16) o (4,8):(1@0,1@1)'"
        ) from None
