"""Conversion of the bytes of one format into those of another, without looking at values."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kvlab.common.checks import require

from .codec import Bytes
from .copies import Copies, copies_of, spans
from .field import AXES, REPLICA, Field
from .format import Format


class Conversion:
    """Plan of :func:`convert`: which bytes go where.

    copies    the descriptors, joined where neighbours stay neighbours

    >>> plan = convert(Format.parse("head:2 slot:4 dim:8 k.s8"), Format.parse("slot:4 head:2 dim:8 k.s8"))
    >>> len(plan.copies), plan.moved
    (8, 48)
    """

    def __init__(self, source: Format, target: Format, copies: Copies) -> None:
        self.source, self.target, self.copies = source, target, copies

    def __repr__(self) -> str:
        return f"Conversion({len(self.copies)} copies, {self.copies.nbytes} bytes, {self.moved} of them move)"

    @property
    def moved(self) -> int | float:
        """Bytes that change their place."""
        bits = int(self.copies.length[self.copies.source != self.copies.target].sum())
        return bits // 8 if bits % 8 == 0 else bits / 8

    def apply(self, buffer: Any, *, fill: int = 0) -> Bytes:
        """A new buffer of the target, uint8 ``[nbytes]``; padding holds ``fill``. ``buffer`` stays as it is."""
        flat = self.source.bytes_of(buffer)
        out = np.full(self.target.nbytes, fill, np.uint8)
        self.copies.apply(flat, out)
        return out

    @cached_property
    def _ranges(self) -> list[tuple[int, int, Any]]:
        """Byte ranges inside which all copies stay that move something."""
        return spans(self.copies, np.flatnonzero(self.copies.source != self.copies.target))

    @property
    def scratch(self) -> int:
        """Bytes that a conversion in place needs besides the buffer: the largest range that keeps to itself."""
        return max((end - first for first, end, _ in self._ranges), default=0)

    def apply_in_place(self, buffer: Bytes) -> None:
        """Convert ``buffer``, uint8 and as large as the larger format, range by range.

        ValueError where the bytes of the whole buffer change places with each other, and for a buffer of another size;
        nothing is written then.
        """
        size = max(self.source.nbytes, self.target.nbytes)
        flat = isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1
        require(flat and buffer.size == size and buffer.flags.c_contiguous, "buffer", f"contiguous uint8 [{size}]")
        require(
            len(self._ranges) != 1 or 2 * self.scratch <= size,
            f"buffer has {size} bytes of which {self.scratch} change places with each other",
            "converted by apply: no part of it keeps to itself",
        )
        for first, end, which in self._ranges:
            old = buffer[first:end].copy()
            one = Copies(*(getattr(self.copies, name)[which] for name in ("source", "target", "length")))
            Copies(one.source - 8 * first, one.target - 8 * first, one.length).apply(old, buffer[first:end])


def convert(source: Format, target: Format) -> Conversion:
    """A plan of byte copies from ``source`` to ``target``: the same codes at other places.

    ValueError that names the field where bytes would be lost or invented: another element type, another extent, scales
    of other groups, a field that one of both lacks.

    >>> nhd, hnd = (Format.parse(f"page:2 kv:2 {axes} dim:64 kv.bf16") for axes in ("slot:16 head:4", "head:4 slot:16"))
    >>> plan = convert(nhd, hnd)
    >>> plan
    Conversion(253 copies, 32768 bytes, 30720 of them move)
    >>> x = np.arange(2 * 2 * 16 * 4 * 64).reshape(2, 2, 16, 4, 64).astype(np.uint16)
    >>> np.array_equal(plan.apply(x).view(np.uint16), x.swapaxes(2, 3).ravel()), plan.scratch
    (True, 7936)
    """
    ours, theirs = ({one.name: one for one in made.fields} for made in (source, target))
    for name in [*ours, *theirs]:
        side = "target" if name in ours else "source"
        fate = "are lost" if name in ours else "come from nowhere"
        require(name in ours and name in theirs, f"{side} has no field {name}", f"one that has it: its bytes {fate}")
    parts: list[Copies] = []
    for name, mine in ours.items():
        other = theirs[name]
        check_same(mine, other, ours[mine.part], theirs[mine.part])
        extent = {axis: ours[mine.part].extent(axis) for axis in AXES}
        tables = [
            (mine.table(axis, extent[axis])[::step], other.table(axis, extent[axis])[::step])
            for axis in AXES if (step := max(mine.group(axis), other.group(axis)))
        ]
        for again in other.table(REPLICA).tolist():
            parts.append(copies_of((mine.base, other.base + again), tables, mine.type.bits))
    return Conversion(source, target, Copies.joined(parts))


def check_same(ours: Field, theirs: Field, part: Field, other: Field, *, without: tuple[str, ...] = ()) -> None:
    """ValueError unless two fields hold the same codes: type, extents and groups are equal."""
    name = ours.name
    require(
        ours.stored == theirs.stored, f"{name} is {theirs.stored} in target",
        f"{ours.stored}, as in source: bytes are copied, values are not; decode and encode instead",
    )
    for axis in AXES:
        if axis in without:
            continue
        mine, its = part.extent(axis), other.extent(axis)
        require(mine == its, f"{axis} of {name} is {its} in target", f"{mine}, as in source")
        shared, its = (one.group(axis) or mine for one in (ours, theirs))
        require(
            shared == its, f"{name} is one for {its} along {axis} in target", f"one for {shared}, as in source",
        )
