"""Conversion of the bytes of one format into those of another, without looking at values."""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import Any

import numpy as np

from kvlab.common.arrays import on_gpu, overlaps, to_numpy, to_torch
from kvlab.common.checks import Int64, count, require
from kvlab.common.torch_here import is_torch

from .copies import Copies, StridedCopy, spans
from .field import AXES, REPLICA, Field
from .format import Format, check_formats


class Conversion:
    """Plan of :func:`convert`: which bytes go where.

    strided   the copies as strides, for each run of bytes: what a kernel executes

    >>> plan = convert(Format.parse("head:2 slot:4 dim:8 k.s8"), Format.parse("slot:4 head:2 dim:8 k.s8"))
    >>> len(plan.copies), plan.moved
    (8, 48)
    >>> plan.strided
    (StridedCopy(64 bits from 0 to 0, 2 times 256 -> 64, 4 times 64 -> 128),)
    """

    def __init__(self, source: Format, target: Format, strided: tuple[StridedCopy, ...]) -> None:
        self.source, self.target, self.strided = source, target, strided

    @cached_property
    def copies(self) -> Copies:
        """The descriptors, joined where neighbours stay neighbours."""
        return Copies.joined([one.copies() for one in self.strided])

    def __repr__(self) -> str:
        return f"Conversion({len(self.copies)} copies, {self.copies.nbytes} bytes, {self.moved} of them move)"

    @property
    def moved(self) -> int | float:
        """Bytes that change their place."""
        bits = int(self.copies.length[self.copies.source != self.copies.target].sum())
        return bits // 8 if bits % 8 == 0 else bits / 8

    def apply(self, buffer: Any, *, fill: int = 0, out: Any = None) -> Any:
        """The bytes of the target, uint8 ``[nbytes]``; ``buffer`` stays as it is.

        A new array of the library and the device of ``buffer``, whose padding holds ``fill``; or ``out``, whose padding
        stays. Tensors on a GPU are copied by a Triton kernel. ValueError for a buffer or an ``out`` of another size,
        and where both have memory in common; nothing is written then.
        """
        self._check_buffer(buffer)
        require(0 <= count("fill", fill) < 256, f"fill is {fill}", "a byte, 0 to 255")
        if out is not None:
            check_flat(out, "out", self.target.nbytes)
            same = is_torch(out) == is_torch(buffer) and (not is_torch(out) or out.device == buffer.device)
            require(same, "out is in another place than buffer", "of one library and device")
        flat = buffer if on_gpu(buffer) else self.source.bytes_of(buffer)
        held = buffer if hasattr(buffer, "shape") else flat
        require(out is None or not overlaps(out, held), "out shares memory with buffer", "apart; see apply_in_place")
        if on_gpu(buffer):
            return _on_gpu().converted(self, buffer, fill, out)
        made = np.full(self.target.nbytes, fill, np.uint8) if out is None else to_numpy(out, "out")
        self.copies.apply(flat, made)
        return out if out is not None else to_torch(made) if is_torch(buffer) else made

    def _check_buffer(self, buffer: Any) -> None:
        """ValueError for a tensor of another size; what is in CPU memory is looked at where it is read."""
        if on_gpu(buffer):
            held, size = buffer.numel() * buffer.element_size(), self.source.nbytes
            require(held == size, f"buffer has {held} bytes", f"{size}, as the format has")

    @cached_property
    def _ranges(self) -> list[tuple[int, int, Int64]]:
        """Byte ranges inside which all copies stay that move something."""
        return spans(self.copies, np.flatnonzero(self.copies.source != self.copies.target))

    @property
    def scratch(self) -> int:
        """Bytes that a conversion in place needs besides the buffer: the largest range that keeps to itself."""
        return max((end - first for first, end, _ in self._ranges), default=0)

    def apply_in_place(self, buffer: Any) -> None:
        """Convert ``buffer``, uint8 and as large as the larger format, range by range.

        ValueError where the bytes of the whole buffer change places with each other, and for a buffer of another size;
        nothing is written then. On a GPU, where a program holds what changes places with each other, ValueError where
        that is more than 64 KiB, in pieces of 16 bytes at most, or part of it goes to bytes that held none of it.
        """
        size = max(self.source.nbytes, self.target.nbytes)
        check_flat(buffer, "buffer", size)
        if on_gpu(buffer):
            _on_gpu().convert_in_place(self, buffer)
            return
        require(
            len(self._ranges) != 1 or 2 * self.scratch <= size,
            f"buffer has {size} bytes of which {self.scratch} change places with each other",
            "converted by apply: no part of it keeps to itself",
        )
        held = to_numpy(buffer, "buffer")
        for first, end, which in self._ranges:
            old = held[first:end].copy()
            one = Copies(*(getattr(self.copies, name)[which] for name in ("source", "target", "length")))
            Copies(one.source - 8 * first, one.target - 8 * first, one.length).apply(old, held[first:end])


def check_flat(buffer: Any, name: str, size: int) -> None:
    """ValueError unless a buffer is flat and of so many bytes."""
    known = is_torch(buffer) or isinstance(buffer, np.ndarray)
    flat = known and str(buffer.dtype).removeprefix("torch.") == "uint8" and buffer.ndim == 1
    contiguous = flat and (buffer.is_contiguous() if is_torch(buffer) else buffer.flags.c_contiguous)
    said = f"has shape {tuple(buffer.shape)} and dtype {buffer.dtype}" if known else f"is a {type(buffer).__name__}"
    require(contiguous and buffer.shape[0] == size, f"{name} {said}", f"contiguous uint8 [{size}]")
    require(is_torch(buffer) or buffer.flags.writeable, f"{name} is read-only", "writeable")


def _on_gpu() -> Any:
    """The room of the kernel, which is imported when there is a tensor for it."""
    return importlib.import_module("kvlab.attention.strided_copy.kernel")


def convert(source: Format, target: Format) -> Conversion:
    """A plan of byte copies from ``source`` to ``target``: the same codes at other places.

    Pages may be of another size where both formats hold as many tokens: token ``t`` is slot ``t % page_size`` of page
    ``t // page_size`` in each. ValueError that names the field where bytes would be lost or invented: another element
    type, another extent, scales of other groups, a field that one of both lacks.

    >>> nhd, hnd = (Format.parse(f"page:2 kv:2 {axes} dim:64 kv.bf16") for axes in ("slot:16 head:4", "head:4 slot:16"))
    >>> plan = convert(nhd, hnd)
    >>> plan
    Conversion(253 copies, 32768 bytes, 30720 of them move)
    >>> x = np.arange(2 * 2 * 16 * 4 * 64).reshape(2, 2, 16, 4, 64).astype(np.uint16)
    >>> np.array_equal(plan.apply(x).view(np.uint16), x.swapaxes(2, 3).ravel()), plan.scratch
    (True, 7936)
    >>> convert(Format.parse("page:2 kv:2 slot:8 dim:64 kv.bf16"), Format.parse("page:4 kv:2 slot:4 dim:64 kv.bf16"))
    Conversion(7 copies, 4096 bytes, 2048 of them move)
    """
    check_formats(source=source, target=target)
    ours, theirs = ({one.name: one for one in made.fields} for made in (source, target))
    for name in [*ours, *theirs]:
        side = "target" if name in ours else "source"
        fate = "are lost" if name in ours else "come from nowhere"
        require(name in ours and name in theirs, f"{side} has no field {name}", f"one that has it: its bytes {fate}")
    pages = [tuple(made.sizes.get(axis, 1) for axis in ("page", "slot")) for made in (source, target)]
    anew = pages[0] != pages[1] and np.prod(pages[0]) == np.prod(pages[1])
    parts: list[StridedCopy] = []
    for name, mine in ours.items():
        other, part = theirs[name], ours[mine.part]
        check_same(mine, other, part, theirs[mine.part], without=("page", "slot") if anew else ())
        tables = [
            (mine.table(axis, part.extent(axis))[::step], other.table(axis, part.extent(axis))[::step])
            for axis in AXES if not (anew and axis in ("page", "slot"))
            and (step := max(mine.group(axis), other.group(axis)))
        ]
        if anew:
            tables += _tokens((mine, other), pages)
        again = other.table(REPLICA)
        tables.append((np.zeros_like(again), again))
        parts.append(StridedCopy.of((mine.base, other.base), tables, mine.type.bits))
    return Conversion(source, target, StridedCopy.joined(parts))


def _tokens(fields: tuple[Field, Field], pages: list[tuple[int, ...]]) -> list[tuple[Int64, Int64]]:
    """Steps of a field along the tokens of all pages, which are of two sizes; none of a field that all tokens share."""
    shared = [field.group("slot") or pages[end][1] for end, field in enumerate(fields)]
    if all(not {"page", "slot"} & set(field.axes) for field in fields):
        return []
    require(
        shared[0] == shared[1], f"{fields[0].name} is one for {shared[1]} along slot in target",
        f"one for {shared[0]}, as in source",
    )
    for field, (number, _), side in zip(fields, pages, ("source", "target"), strict=True):
        require(field.extent("page") == number, f"{field.name} is one for all pages in {side}", "one for each page")
    steps = [
        np.add.outer(field.table("page", number), field.table("slot", slots)[:: shared[0]]).ravel()
        for field, (number, slots) in zip(fields, pages, strict=True)
    ]
    return [(steps[0], steps[1])]


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
