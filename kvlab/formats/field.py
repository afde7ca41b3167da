"""Fields of a format: where each of their elements lies, as strides over pieces of the axes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvlab.common.checks import Int64, require
from kvlab.layout import Layout

from .stored import Stored, stored_of

AXES = ("layer", "page", "slot", "head", "dim")
"""The axes of a cache, in the order in which the first difference is looked for."""
REPLICA = "copy"
"""The axis along which equal elements are stored several times."""


class Piece(NamedTuple):
    """Part of an axis: index ``(i // divisor) % size`` of it moves the address by ``stride`` bits.

    >>> from kvlab.formats import Format
    >>> Format.parse("slot/4:2 slot:4 k.bf16").fields[0].of("slot")[1]
    Piece(axis='slot', divisor=4, size=2, stride=64)
    """

    axis: str
    divisor: int
    size: int
    stride: int


@dataclass(frozen=True)
class Field:
    """Elements of one name and type: element ``(layer, page, slot, head, dim)`` lies at ``base`` plus the strides of
    the pieces, in bits from the start of the format.

    A scale that a group of elements shares has no piece of the axis that is finer than the group.

    >>> from kvlab.formats import Format
    >>> k = Format.parse("page:2 slot:4 dim/2:4 dim:2 k.bf16").fields[0]
    >>> k.axes, k.shape, k.address(page=1, slot=2, dim=3) // 8
    (('page', 'slot', 'dim'), (2, 4, 8), 102)
    """

    name: str
    stored: str
    base: int
    pieces: tuple[Piece, ...]

    @cached_property
    def type(self) -> Stored:
        """The element type."""
        return stored_of(self.stored)

    @property
    def part(self) -> str:
        """The values that the field belongs to: ``"k"`` for ``"k"``, ``"k_scale"`` and ``"k_min"``."""
        return self.name.partition("_")[0]

    @property
    def is_value(self) -> bool:
        """Tells whether the field holds values; others hold their scales or minima."""
        return "_" not in self.name

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that the field has, in the order of :data:`AXES`."""
        named = {piece.axis for piece in self.pieces}
        return tuple(axis for axis in AXES if axis in named)

    def of(self, axis: str) -> list[Piece]:
        """The pieces of an axis, the finest first."""
        return self._of.get(axis, [])

    @cached_property
    def _of(self) -> dict[str, list[Piece]]:
        out: dict[str, list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda piece: piece[1:]):
            out.setdefault(piece.axis, []).append(piece)
        return out

    def group(self, axis: str) -> int:
        """Neighbours along the axis that share an element; 0 where the field has no such axis, and all share."""
        return next((piece.divisor for piece in self.of(axis)), 0)

    def extent(self, axis: str) -> int:
        """Indices of the axis; 1 where the field has no such axis."""
        pieces = self.of(axis)
        return pieces[-1].divisor * pieces[-1].size if pieces else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each of :attr:`axes`: a group counts as one."""
        return tuple(self.extent(axis) // self.group(axis) for axis in self.axes)

    def table(self, axis: str, extent: int | None = None) -> Int64:
        """The part of the address that an axis gives, in bits, for each of its indices: ``[extent]``, int64."""
        index = np.arange(self.extent(axis) if extent is None else extent, dtype=np.int64)
        out = np.zeros_like(index)
        for _, divisor, size, stride in self.of(axis):
            out += index // divisor % size * stride
        return out

    def address(self, **where: Any) -> Any:
        """The first bit of the element at ``layer``, ``page``, ``slot``, ``head``, ``dim`` (integers or arrays, 0 where
        left out)."""
        out: Any = self.base
        for axis, divisor, size, stride in self.pieces:
            out = out + np.asarray(where.get(axis, 0)) // divisor % size * stride
        return int(out) if np.ndim(out) == 0 else out

    def addresses(self) -> Int64:
        """The first bit of every element, ``[copies, *shape]``."""
        tables = [self.table(REPLICA), *(self.table(axis)[:: self.group(axis)] for axis in self.axes)]
        out = np.full((), self.base, np.int64)
        for table in tables:
            out = np.add.outer(out, table)
        return out

    def find(self, bits: Any) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], dict[str, Int64]]:
        """Tells whether each of ``bits`` (integers) lies in an element, and its index along each of the axes.

        The index of a group is that of its first member. Void where no element lies.

        >>> from kvlab.formats import Format
        >>> k = Format.parse("slot:4 (dim:8 k.s8, pad:8)").fields[0]
        >>> held, index = k.find([131, 200])
        >>> held, index["slot"].tolist()[0], index["dim"].tolist()[0]
        (array([ True, False]), 1, 0)
        """
        rest = np.asarray(bits, np.int64) - self.base
        index = {axis: np.zeros_like(rest) for axis in (*self.axes, REPLICA)}
        back = sum((piece.size - 1) * piece.stride for piece in self.pieces if piece.stride < 0)
        rest = rest - back
        for axis, divisor, size, stride in sorted(self.pieces, key=lambda piece: -abs(piece.stride)):
            digit = np.clip(rest // abs(stride), 0, size - 1)
            rest = rest - digit * abs(stride)
            index[axis] += (digit if stride > 0 else size - 1 - digit) * divisor
        return (rest >= 0) & (rest < self.type.bits), index

    @property
    def copies(self) -> int:
        """Number of times that each element is stored."""
        return int(np.prod([piece.size for piece in self.of(REPLICA)], dtype=np.int64))

    def layout(self, *axes: str) -> Layout:
        """A layout with a mode for each axis, of the field's own axes where none is given: element number to bits.

        >>> from kvlab.formats import Format
        >>> Format.parse("slot:4 dim/8:2 dim:8 k.bf16").fields[0].layout()
        Layout("(4,(8,2)):(256,(16,128))")
        """
        modes = [self.of(axis) for axis in axes or self.axes]
        shape = [tuple(piece.size for piece in mode) for mode in modes]
        stride = [tuple(piece.stride for piece in mode) for mode in modes]

        def flat(mode: tuple[int, ...]) -> Any:
            return mode[0] if len(mode) == 1 else mode

        return Layout(tuple(map(flat, shape)), tuple(map(flat, stride)))

    def moved(self, bits: int, piece: Piece | None = None) -> Field:
        """The field ``bits`` further on, with one more piece around it."""
        return replace(self, base=self.base + bits, pieces=self.pieces if piece is None else (piece, *self.pieces))

    def window(self, array: np.ndarray[Any, Any], unit: int) -> np.ndarray[Any, Any]:
        """The field's elements in ``array``, of which an item has ``unit`` bits: ``[copies..., pieces..., items]``.

        Pieces are in the order of :attr:`axes`, the coarsest of an axis first. Shares memory.
        """
        order = [piece for axis in (REPLICA, *self.axes) for piece in reversed(self.of(axis))]
        shape = (*(piece.size for piece in order), max(self.type.bits // unit, 1))
        strides = (*(piece.stride // unit * array.itemsize for piece in order), array.itemsize)
        return np.lib.stride_tricks.as_strided(array[self.base // unit :], shape, strides)


def check_chain(field: Field) -> None:
    """ValueError unless the pieces of each axis are its digits: each begins where the finer one ends."""
    for axis in (*field.axes, REPLICA):
        pieces = field.of(axis)
        for finer, piece in pairwise(pieces):
            require(
                piece.divisor == finer.divisor * finer.size,
                f"{field.name} has pieces {axis}/{finer.divisor}:{finer.size} and {axis}/{piece.divisor}:{piece.size}",
                f"pieces that tile the axis: the second begins at {finer.divisor * finer.size}",
            )
        if field.is_value and axis != REPLICA:
            require(
                pieces[0].divisor == 1, f"{field.name} has {axis}/{pieces[0].divisor}:{pieces[0].size} alone",
                f"a piece {axis}:{pieces[0].divisor}, too: values are not shared",
            )
