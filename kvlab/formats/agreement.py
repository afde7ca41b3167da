"""Agreement of a writer's and a reader's format, decided from their strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvlab.common.drawn import Drawn

from .field import AXES, REPLICA, Field
from .format import Format, check_formats


@dataclasses.dataclass(frozen=True, repr=False)
class Agreement(Drawn):
    """Answer of :func:`agree`: true where both formats put every element at the same place.

    kind         of the first difference: ``field``, ``type``, ``extent``, ``group``, ``copies``, ``place`` or ""
    name         its field
    index        layer, page, slot, head and dim of the first element that differs, of those that it has
    writer_at    first bit of that element to the writer, ``reader_at`` to the reader, -1 where there is none
    words        the difference in a sentence

    >>> one = agree(Format.parse("slot:2 head:2 dim:4 k.s8"), Format.parse("head:2 slot:2 dim:4 k.s8"))
    >>> bool(one), one.kind, one.index
    (False, 'place', {'slot': 0, 'head': 1, 'dim': 0})
    """

    writer: Format
    reader: Format
    kind: str = ""
    name: str = ""
    index: Mapping[str, int] = dataclasses.field(default_factory=dict)
    writer_at: int = -1
    reader_at: int = -1
    words: str = "every element lies at the same place"

    def __bool__(self) -> bool:
        return not self.kind

    def __repr__(self) -> str:
        return f"Agreement({self.words})"


def agree(writer: Format, reader: Format) -> Agreement:
    """Tells whether what ``writer`` writes is what ``reader`` reads, and names the first difference.

    An address is a sum of one table for each axis, so that the tables are compared, and no elements: the answer holds
    for all of them. The first difference is that of the smallest (layer, page, slot, head, dim). Padding, names and the
    writing of an axis in pieces do not count.

    >>> linear = Format.parse("page:2 slot:8 (dim:64 k.e2m1, dim/16:4 k_scale.e4m3)")
    >>> turned = Format.parse("page:2 slot:8 (dim:64 k.e2m1, dim/16:2 dim/32:2 k_scale.e4m3)")
    >>> agree(linear, turned)
    Agreement(k_scale of page 0, slot 0, dim 16: written to byte 33, read from byte 34)
    >>> agree(Format.parse("page:2 slot:8 dim:64 k.bf16"), Format.parse("page:2 slot:8 dim/8:8 dim:8 k.bf16"))
    Agreement(every element lies at the same place)
    >>> agree(Format.parse("slot:8 dim/2:4 dim:2 k.s4"), Format.parse("slot:8 dim/2:4 -dim:2 k.s4"))
    Agreement(k of slot 0, dim 0: written to the low half of byte 0, read from the high half of byte 0)
    """
    check_formats(writer=writer, reader=reader)
    ours, theirs = ({one.name: one for one in made.fields} for made in (writer, reader))
    for name in [*ours, *theirs]:
        if (name in ours) != (name in theirs):
            side = "writer" if name in ours else "reader"
            return Agreement(writer, reader, "field", name, words=f"{name} is a field of the {side} alone")
    for name, mine in ours.items():
        difference = _shapes(mine, theirs[name], ours[mine.part], theirs[mine.part])
        if difference:
            kind, words = difference
            return Agreement(writer, reader, kind, name, words=f"{name}: {words}")
    found = [(order, name) for name, mine in ours.items() if (order := _first(mine, theirs[name], ours[mine.part]))]
    if not found:
        return Agreement(writer, reader)
    order, name = min(found, key=lambda one: one[0])
    axes = ours[ours[name].part].axes
    index = {axis: at for axis, at in zip(AXES, order[:-1], strict=True) if axis in axes}
    here, there = (
        one.address(**index) + one.table(REPLICA)[order[-1]] for one in (ours[name], theirs[name])
    )
    half = ours[name].type.bits < 8
    where = ", ".join(f"{axis} {at}" for axis, at in index.items())
    again = f", copy {order[-1]}" if order[-1] else ""
    words = f"{name} of {where}{again}: written to {_place(here, half)}, read from {_place(there, half)}"
    return Agreement(writer, reader, "place", name, index, int(here), int(there), words)


def _place(bits: int, half: bool) -> str:
    return f"{'the high half of ' if bits % 8 else 'the low half of ' if half else ''}byte {bits // 8}"


def _shapes(ours: Field, theirs: Field, part: Field, other: Field) -> tuple[str, str] | None:
    """The first difference of two fields in anything but place: its kind and its words."""
    if ours.stored != theirs.stored:
        return "type", f"written as {ours.stored}, read as {theirs.stored}"
    for axis in AXES:
        if part.extent(axis) != other.extent(axis):
            return "extent", f"{axis} is {part.extent(axis)} to the writer, {other.extent(axis)} to the reader"
        shared = [one.group(axis) or part.extent(axis) for one in (ours, theirs)]
        if shared[0] != shared[1]:
            return "group", f"one for {shared[0]} along {axis} to the writer, one for {shared[1]} to the reader"
    if ours.copies != theirs.copies:
        return "copies", f"stored {ours.copies} times by the writer, {theirs.copies} times by the reader"
    return None


def _first(ours: Field, theirs: Field, part: Field) -> tuple[int, ...] | None:
    """Index along each of AXES, and of the copy, of the first element whose places differ."""
    order = [0] * (len(AXES) + 1)
    if ours.base != theirs.base:
        return tuple(order)
    for number, axis in reversed([*enumerate((*AXES, REPLICA))]):
        extent = ours.copies if axis == REPLICA else part.extent(axis)
        apart = np.flatnonzero(ours.table(axis, extent) != theirs.table(axis, extent))
        if apart.size:
            order[number] = int(apart[0])
            return tuple(order)
    return None
