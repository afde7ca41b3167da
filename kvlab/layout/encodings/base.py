"""Common part of the encodings: names of dimensions, versions, and how a tile of one CTA covers a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from kvlab.common.drawn import Drawn
from kvlab.layout.algebra.int_tuple import MOST_NESTED, as_int, flatten, int_tuple
from kvlab.layout.linear.linear_layout import LinearLayout

NEWEST = "3.9.0"
Ints: TypeAlias = tuple[int, ...]
Matrix: TypeAlias = tuple[Ints, ...]


@dataclass(frozen=True)
class Encoding(Drawn):
    """Spread of a tensor by Triton over registers, lanes and warps, or over shared memory.

    The subclasses have the names and the fields of Gluon's layout classes. ``cga_layout`` lists, one basis vector for
    each bit of the CTA's number in its cluster, where the CTAs lie; empty for one CTA.

    >>> from kvlab.layout.encodings import BlockedLayout
    >>> blocked = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    >>> isinstance(blocked, Encoding), blocked.to_linear_layout((16, 64)).shape
    (True, (16, 64))
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list | tuple):
                value = int_tuple(tuple(_tuples(value)), field.name)
                object.__setattr__(self, field.name, value)
            kind = str(field.type)
            if value is None and "None" in kind:
                continue
            rank = kind.startswith("Ints") + 2 * kind.startswith("Matrix")
            if rank and not _is_nested(value, rank):
                raise ValueError(f"{type(self).__name__}: {field.name} {value!r}: must be {_NESTED[rank]}")
            if kind.startswith("int"):
                object.__setattr__(self, field.name, as_int(value, f"{type(self).__name__}: {field.name}"))
        self.verify()

    def verify(self) -> None:
        """ValueError where the fields contradict each other."""

    def to_linear_layout(self, shape: Sequence[int], *, triton_version: str = NEWEST) -> LinearLayout:
        """The linear layout on a tensor of ``shape`` as this version of Triton (3.6.0 to 3.9.0) defines it.

        ValueError with the reason where the encoding and the shape do not fit, where the compiler aborts or raises."""
        return self._on(self.sizes(shape), triton_version)

    def sizes(self, shape: Sequence[int]) -> Ints:
        """``shape`` as a tuple of positive ints, or ValueError."""
        sizes = int_tuple(tuple(shape), "shape") if isinstance(shape, Sequence) else None
        if sizes is None or not _is_nested(sizes, 1) or any(n < 1 for n in flatten(sizes)):
            raise ValueError(f"{self}: shape {shape!r}: must be a tuple of ints of 1 and more")
        return flatten(sizes)

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        """The linear layout on a tensor of this shape."""
        raise NotImplementedError

    def pattern_shape(self) -> Ints:
        """The smallest tensor that shows the whole pattern: what the picture of the encoding itself is drawn on."""
        raise NotImplementedError


def need(condition: bool, encoding: Encoding, reason: str) -> None:
    """ValueError which repeats the encoding, unless the condition holds."""
    if not condition:
        raise ValueError(f"{encoding}: {reason}")


def is_at_least(triton_version: str, major: int, minor: int) -> bool:
    """Is the version at least ``major.minor``?

    >>> is_at_least("3.7.1", 3, 9)
    False
    """
    match = re.match(r"(\d+)\.(\d+)", triton_version)
    if match is None:
        raise ValueError(f"triton_version is {triton_version!r}: must be text such as '3.6.0'")
    return (int(match[1]), int(match[2])) >= (major, minor)


def dims(rank: int) -> list[str]:
    """The names of the dimensions of a tensor."""
    return [f"dim{axis}" for axis in range(rank)]


def matrix_order(rank: int, row_major: bool = True) -> Ints:
    """The dimensions of a (batch of) matrices, fastest first.

    >>> matrix_order(2), matrix_order(3, row_major=False)
    ((1, 0), (1, 2, 0))
    """
    last = (rank - 1, rank - 2) if row_major else (rank - 2, rank - 1)
    return (*last, *range(rank - 2))


def operand_order(operand_index: int, rank: int) -> Ints:
    """The dimensions of an operand: K, then M or N, then the batch."""
    return matrix_order(rank, row_major=operand_index == 0)


def identity_nd(in_dim: str, shape: Sequence[int], order: Sequence[int]) -> LinearLayout:
    """``in_dim`` counts through ``shape``, the dimensions in this order.

    >>> identity_nd("lane", (2, 4), (1, 0)).bases
    {'lane': [[1, 0], [2, 0], [0, 1]]}
    """
    return broadcast_nd(in_dim, shape, order, None)


def broadcast_nd(in_dim: str, shape: Sequence[int], order: Sequence[int], free: int | None) -> LinearLayout:
    """Map of :func:`identity_nd`, without moving along the dimension ``free``."""
    layout = LinearLayout({in_dim: []}, {f"dim{axis}": 1 for axis in order})
    for axis in order:
        step = LinearLayout.zeros1d if axis == free else LinearLayout.identity1d
        layout *= step(shape[axis], in_dim, f"dim{axis}")
    return layout


def _cga(cga_layout: Matrix, shape: Sequence[int]) -> LinearLayout:
    """Where the CTAs lie: bits of ``block`` -> coordinates, counted in pieces of the tensor."""
    cga = LinearLayout({"block": cga_layout}, dims(len(shape)))
    return cga.fit({name: min(n, size) for (name, n), size in zip(cga.out_dims.items(), shape, strict=True)})


def shape_per_cta(cga_layout: Matrix, shape: Sequence[int]) -> Ints:
    """The shape of the piece of a tensor that one CTA holds.

    >>> shape_per_cta(((0, 1), (0, 0)), (64, 64))
    (64, 32)
    """
    return tuple(max(1, size // n) for size, n in zip(shape, _cga(cga_layout, shape).shape, strict=True))


def cover(tile: LinearLayout, cga_layout: Matrix, shape: Sequence[int]) -> LinearLayout:
    """The layout of a tensor: the tile of a CTA repeated (or cut) to the CTA's piece, then the CTAs."""
    names = dims(len(shape))
    piece = dict(zip(names, shape_per_cta(cga_layout, shape), strict=True))
    return (tile.fit(piece) * _cga(cga_layout, shape)).transpose(*names)


def drop_broadcast_registers(layout: LinearLayout) -> LinearLayout:
    """Without the register bases that are zero."""
    bases = layout.bases
    if "register" in bases:
        bases["register"] = [vector for vector in bases["register"] if any(vector)]
    return LinearLayout(bases, layout.out_dims)


_NESTED = ("", "a list of ints", "a list of lists of ints, all of one length")


def _is_nested(value: Any, rank: int) -> bool:
    """Is it a tuple of ints, or a tuple of such tuples of one length?"""
    if rank == 1:
        return isinstance(value, tuple) and all(isinstance(item, int) for item in value)
    return isinstance(value, tuple) and all(_is_nested(v, 1) for v in value) and len({len(v) for v in value}) <= 1


def _tuples(value: Iterable[Any], depth: int = 0) -> Iterable[Any]:
    if depth == MOST_NESTED:
        raise ValueError(f"nested too deeply: must be at most {MOST_NESTED} lists in one another")
    return (tuple(_tuples(item, depth + 1)) if isinstance(item, list | tuple) else item for item in value)
