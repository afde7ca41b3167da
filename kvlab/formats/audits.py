"""Audit of a paged cache: what its bytes, its table and its lengths say against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvlab.common.arrays import dtype_of, to_numpy
from kvlab.common.checks import integers, require
from kvlab.common.drawn import Drawn
from kvlab.memory import POISON

from .codec import Bytes, as_bytes
from .field import Field, Piece
from .format import Format
from .stored import STORED

SHOWN = 20
"""Findings of a kind that are listed; all are counted."""
CHUNK = 1 << 20
"""Elements that are looked at together: few enough for a cache of the CPU."""
_NOT_FINITE = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "e4m3": 0x7F, "e5m2": 0x7C, "e8m0": 0xFF}
"""The least code, without its sign, that is no finite number."""
KEPT = ("layer", "page", "slot")
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclasses.dataclass(frozen=True)
class Flaw:
    """One thing that is wrong.

    kind     ``length``, ``page``, ``tail`` or ``owners`` of the table; ``unwritten``, ``poison``, ``nan``, ``inf`` or
             ``scale`` of values; ``stray`` of a slot without a token
    words    the thing in a sentence
    index    where: layer, page, slot, head and dim of a value, sequence and column of the table
    field    the field of a value

    >>> (flaw,) = audit(np.ones((4, 2, 1, 8), np.float16), [[1, 7]], [4]).flaws
    >>> flaw.kind, flaw.words
    ('page', 'table[0, 1] is 7, none of the 4 pages, and has tokens')
    """

    kind: str
    words: str
    index: Mapping[str, int]
    field: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


@dataclasses.dataclass(frozen=True, repr=False)
class Audit(Drawn):
    """Answer of :func:`audit`: true where nothing is wrong.

    flaws     the first of each kind
    counts    how many there are of each kind
    used      slots that hold a token: bool ``[pages, slots]``; ``owners``: how many sequences have each page

    >>> found = audit(np.ones((4, 2, 1, 8), np.float16), [[1, 3]], [3])
    >>> bool(found), found.used.sum(1).tolist()
    (True, [0, 2, 0, 1])
    """

    flaws: tuple[Flaw, ...]
    counts: Mapping[str, int]
    used: _Mask
    owners: np.ndarray[Any, np.dtype[np.int64]]

    def __bool__(self) -> bool:
        return not self.flaws

    def __repr__(self) -> str:
        said = ", ".join(f"{kind} {number}" for kind, number in self.counts.items())
        return f"Audit({said or 'nothing is wrong'}; {int(self.used.sum())} of {self.used.size} slots hold tokens)"

    def report(self) -> str:
        """All sentences, one a line, with the number of those that are not listed."""
        lines = [str(flaw) for flaw in self.flaws]
        listed = {kind: sum(flaw.kind == kind for flaw in self.flaws) for kind in self.counts}
        lines += [f"{kind}: {self.counts[kind] - n} more" for kind, n in listed.items() if self.counts[kind] > n]
        return "\n".join(lines) or "nothing is wrong"


class _Found:
    """Flaws so far."""

    def __init__(self) -> None:
        self.flaws: list[Flaw] = []
        self.counts: dict[str, int] = {}

    def add(self, kind: str, words: str, index: Mapping[str, int], field: str = "", number: int = 1) -> None:
        """Count a flaw, and list it if it is among the first of its kind."""
        self.counts[kind] = self.counts.get(kind, 0) + number
        if sum(flaw.kind == kind for flaw in self.flaws) < SHOWN:
            self.flaws.append(Flaw(kind, words, {axis: int(at) for axis, at in index.items()}, field))


def audit(
    cache: Any, table: Any, lengths: Any, *, format: Format | None = None, shared_prefix: bool = False,
    padding: int | None = None, scale_range: tuple[float, float] = (0.0, 65504.0), poisoned: Any = False,
) -> Audit:
    """Looks at a paged cache of any engine, NumPy or torch, in the memory of the CPU.

    cache            the bytes of ``format``; without one: ``[pages, page, heads, D]``, ``[pages, 2, page, heads, D]``,
                     ``[2, pages, page, heads, D]`` or MAX's ``[pages, 2, layers, page, heads, D]``
    table            page of each page-sized part of each sequence: integers ``[sequences, columns]``
    lengths          tokens of each sequence: integers ``[sequences]``
    shared_prefix    sequences may share full pages with which they begin
    padding          the entry that the engine puts behind a sequence's pages, if it is a page number
    scale_range      magnitudes of scales; 0 is always allowed
    poisoned         unused slots hold poison, and what is written there is a flaw; or a mask ``[pages, slots]`` of them

    Finds tokens without a page, pages of two owners, stale entries behind a sequence's pages, lengths beyond the table,
    slots that nobody has written (all bytes 0xFF), NaN, infinity and poison in values, and scales out of range.

    >>> pages = np.ones((4, 2, 1, 8), np.float16)
    >>> pages[2, 1, 0, 5] = np.nan
    >>> found = audit(pages, [[0, 2], [3, 0]], [4, 2])
    >>> print(found.report())
    tail: table[1, 1] is 0, behind the pages of 2 tokens: sequence 0 has page 0
    nan: k of page 2, slot 1, head 0, dim 5
    """
    made = _format_of(cache) if format is None else format
    flat = as_bytes(cache, "cache")
    require(flat.size == made.nbytes, f"cache has {flat.size} bytes", f"{made.nbytes}, as the format has")
    pages, slots = made.sizes.get("page", 1), made.sizes.get("slot", 1)
    found = _Found()
    used, owners = _look_at_table(found, table, lengths, pages, slots, shared_prefix, padding)
    for field in made.fields:
        _look_at_field(found, field, flat, used, scale_range)
    empty = ~used & (np.asarray(poisoned, np.bool_) if np.ndim(poisoned) else bool(poisoned))
    if empty.any():
        _look_for_strays(found, made, flat, empty)
    return Audit(tuple(found.flaws), found.counts, used, owners)


def _format_of(cache: Any) -> Format:
    """The format of a tensor of one of the usual shapes."""
    shape, dtype = tuple(getattr(cache, "shape", ())), dtype_of(cache, "cache")
    stored = next((one.name for one in STORED.values() if one.bits >= 8 and np.dtype(one.dtype) == dtype), None)
    axes = {
        4: ("page", "slot", "head", "dim"), 5: ("page", "kv", "slot", "head", "dim"),
        6: ("page", "kv", "layer", "slot", "head", "dim"),
    }.get(len(shape), ())
    if len(shape) == 5 and shape[0] == 2 != shape[1]:
        axes = ("kv", "page", "slot", "head", "dim")
    fits = stored and axes and ("kv" not in axes or shape[axes.index("kv")] == 2)
    require(
        fits, f"cache has shape {shape} and dtype {dtype}",
        "given with its format, or have [pages, page, heads, D] with 2 for K and V in front, or MAX's six axes",
    )
    text = " ".join(f"{axis}:{size}" for axis, size in zip(axes, shape, strict=True))
    return Format.parse(f"{text} {'kv' if 'kv' in axes else 'k'}.{stored}")


def _look_at_table(
    found: _Found, table: Any, lengths: Any, pages: int, slots: int, shared_prefix: bool, padding: int | None
) -> tuple[_Mask, np.ndarray[Any, np.dtype[np.int64]]]:
    """Check table and lengths; the slots in use, and how many sequences have each page."""
    entries = integers("table", to_numpy(table, "table") if hasattr(table, "shape") else table)
    tokens = integers("lengths", to_numpy(lengths, "lengths") if hasattr(lengths, "shape") else lengths)
    fits = entries.ndim == 2 and tokens.shape == entries.shape[:1]
    require(fits, f"table has shape {entries.shape}, lengths {tokens.shape}", "[sequences, columns] and [sequences]")
    most = entries.shape[1] * slots
    for row in np.flatnonzero((tokens < 0) | (tokens > most)).tolist():
        words = f"lengths[{row}] is {tokens[row]}: the table has pages for {most} tokens"
        found.add("length", words, {"sequence": row})
    tokens = np.clip(tokens, 0, most)
    column = np.arange(entries.shape[1])
    mine = column < -(-tokens[:, None] // slots)
    exists = (entries >= 0) & (entries < pages)
    for row, at in np.argwhere(mine & ~exists).tolist():
        words = f"table[{row}, {at}] is {entries[row, at]}, none of the {pages} pages, and has tokens"
        found.add("page", words, {"sequence": row, "column": at})
    owned = np.argwhere(mine & exists)
    holds = entries[mine & exists]
    owners = np.bincount(holds, minlength=pages)
    full = (column + 1) * slots <= tokens[:, None]
    for page in np.flatnonzero(owners > 1).tolist():
        who = owned[holds == page].tolist()
        same = all(
            full[row, at] and at == who[0][1] and np.array_equal(entries[row, :at], entries[who[0][0], :at])
            for row, at in who
        )
        if not (shared_prefix and same):
            said = " and ".join(f"table[{row}, {at}]" for row, at in who[:4]) + (" and others" if len(who) > 4 else "")
            found.add("owners", f"page {page} has {len(who)} owners: {said}", {"page": page})
    first = {page: owned[holds == page][0, 0] for page in np.unique(holds).tolist()}
    stale = ~mine & exists & (entries != (-1 if padding is None else padding))
    for row, at in np.argwhere(stale).tolist():
        page = int(entries[row, at])
        whose = f"sequence {first[page]} has page {page}" if page in first else f"nobody has page {page}"
        words = f"table[{row}, {at}] is {page}, behind the pages of {tokens[row]} tokens: {whose}"
        found.add("tail", words, {"sequence": row, "column": at, "page": page})
    used = np.zeros((pages, slots), np.bool_)
    inside = np.minimum(tokens[owned[:, 0]] - owned[:, 1] * slots, slots)
    np.logical_or.at(used, holds, np.arange(slots) < inside[:, None])
    return used, owners


def _bytewise(field: Field) -> Field:
    """A field of half bytes as one of the bytes that they share; another one as it is."""
    if field.type.bits >= 8:
        return field
    halved = [
        piece if abs(piece.stride) != 4 else Piece(piece.axis, 2 * piece.divisor, piece.size // 2, 2 * piece.stride)
        for piece in field.pieces
    ]
    first = field.base + sum(piece.stride * (piece.size - 1) for piece in field.pieces if piece.stride < 0)
    back = sum(piece.stride * (piece.size - 1) for piece in halved if piece.stride < 0)
    return Field(field.name, "u8", first // 8 * 8 - back, tuple(halved))


def _views(field: Field, flat: Bytes, bits: int, wanted: _Mask) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Codes of ``bits`` of the field as ``[layers, pages, slots, rest...]``, some pages at a time: the first page, and
    the view. Chunks of which no slot is wanted are left out."""
    order = [[(piece.size, piece.stride // 8) for piece in reversed(field.of(axis))] or [(1, 0)] for axis in KEPT]
    rest = [(piece.size, piece.stride // 8) for axis in ("head", "dim") for piece in reversed(field.of(axis))]
    axes = [axis for group in order for axis in group] + _merged([*rest, (field.type.bits // bits, bits // 8)])
    shape, strides = tuple(size for size, _ in axes), tuple(stride for _, stride in axes)
    whole = np.ndarray(shape, f"<u{bits // 8}", flat, field.base // 8, strides)
    if len(order[1]) > 1:  # pages in pieces: all at once
        yield 0, whole
        return
    pages = order[1][0][0]
    each = max(1, CHUNK * pages // max(whole.size, 1))
    for page in range(0, pages, each):
        if wanted[page : page + each].any():
            yield page, whole[(slice(None),) * len(order[0]) + (slice(page, page + each),)]


def _merged(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Axes of (size, stride) with neighbours joined that are one run, and without those of one index."""
    out: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return out or [(1, 1)]


def _reduced(field: Field, view: np.ndarray[Any, Any], how: Any) -> np.ndarray[Any, Any]:
    """``how`` of heads and dims: ``[layers, pages of the view, slots]``."""
    kept = sum(max(len(field.of(axis)), 1) for axis in KEPT)
    layers, slots = (field.extent(axis) // max(field.group(axis), 1) for axis in ("layer", "slot"))
    return how(view, axis=tuple(range(kept, view.ndim))).reshape(layers, -1, slots)


def _look_at_field(
    found: _Found, field: Field, flat: Bytes, used: _Mask, scale_range: tuple[float, float]
) -> None:
    """Check one field: unwritten slots, values that are not finite, scales out of range."""
    limit = _NOT_FINITE.get(field.stored)
    plain, wanted = _bytewise(field), _slots_of(field, used)
    bits = field.type.bits if limit is not None else 8
    sign = (1 << (bits - 1)) - 1 if field.stored != "e8m0" else 255
    scratch = np.empty(0, f"<u{bits // 8}")
    for page, view in _views(plain, flat, bits, wanted):
        if limit is None:
            doubt = _reduced(plain, view, np.min) == POISON
        else:
            if scratch.size < view.size:
                scratch = np.empty(view.size, scratch.dtype)
            codes = np.bitwise_and(view, scratch.dtype.type(sign), out=scratch[: view.size].reshape(view.shape))
            doubt = _reduced(plain, codes, np.max) >= limit
        doubt &= wanted[page : page + doubt.shape[1]]
        for layer, at, slot in np.argwhere(doubt).tolist():
            _name(found, field, flat, (layer, page + at, slot))
    if field.name.endswith("_scale") and field.stored != "e8m0":
        _look_at_scales(found, field, flat, wanted, scale_range)


def _slots_of(field: Field, used: _Mask) -> _Mask:
    """Used slots in the groups of slots that the field has: ``[pages or 1, groups or 1]``."""
    out = used if "page" in field.axes else used.any(0, keepdims=True)
    group = field.group("slot") if "slot" in field.axes else out.shape[1]
    return np.asarray(out.reshape(out.shape[0], -1, group).any(2))


def _name(found: _Found, field: Field, flat: Bytes, where: tuple[int, int, int]) -> None:
    """Name what is wrong in a slot of a field."""
    codes, index = _codes_at(field, flat, where)
    place = ", ".join(f"{axis} {at}" for axis, at in index.items())
    raw = codes.reshape(-1).view(np.uint8)
    if raw.size and (raw == (POISON if field.type.bits >= 8 else 15)).all():
        found.add("unwritten", f"{field.name} of {place}: all bytes are {POISON:#x}", index, field.name)
        return
    if field.stored not in _NOT_FINITE:
        return
    value = field.type.numbers(codes)
    bad = np.argwhere(~np.isfinite(value))
    ones = codes == np.iinfo(codes.dtype).max
    kind = "poison" if ones[tuple(bad[0])] else "inf" if np.isinf(value[tuple(bad[0])]) else "nan"
    axes = [axis for axis in ("head", "dim") if axis in field.axes]
    index.update({axis: int(at) * field.group(axis) for axis, at in zip(axes, bad[0], strict=True)})
    place = ", ".join(f"{axis} {at}" for axis, at in index.items())
    more = f", and {len(bad) - 1} more of the slot" if len(bad) > 1 else ""
    found.add(kind, f"{field.name} of {place}{more}", index, field.name, len(bad))


def _codes_at(field: Field, flat: Bytes, where: tuple[int, int, int]) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
    """Codes of a slot ``[heads, dims]``, of the axes that the field has, and where it is."""
    at = np.full((), field.base, np.int64)
    index: dict[str, int] = {}
    for axis, number in zip(KEPT, where, strict=True):
        if axis in field.axes:
            index[axis] = number * field.group(axis)
            at = at + field.table(axis)[index[axis]]
    for axis in ("head", "dim"):
        if axis in field.axes:
            at = np.add.outer(at, field.table(axis)[:: field.group(axis)])
    if field.type.bits < 8:
        return (flat[at // 8] >> (at % 8).astype(np.uint8)) & 15, index
    size = field.type.bits // 8
    return flat[at[..., None] // 8 + np.arange(size)].view(f"<u{size}")[..., 0], index


def _look_at_scales(found: _Found, field: Field, flat: Bytes, wanted: _Mask, limits: tuple[float, float]) -> None:
    """Check the magnitudes of scales."""
    low, high = limits
    for page, view in _views(field, flat, field.type.bits, wanted):
        value = np.abs(field.type.numbers(np.ascontiguousarray(view)))
        bad = np.isfinite(value) & ((value > high) | ((value < low) & (value > 0)))
        doubt = _reduced(field, bad, np.any)
        doubt &= wanted[page : page + doubt.shape[1]]
        for layer, at, slot in np.argwhere(doubt).tolist():
            codes, index = _codes_at(field, flat, (layer, page + at, slot))
            number = np.abs(field.type.numbers(codes)).reshape(-1)
            wrong = (number > high) | ((number < low) & (number > 0))
            place = ", ".join(f"{axis} {i}" for axis, i in index.items())
            words = f"{field.name} of {place} is {number[wrong][0]:g}, outside {low:g} to {high:g}"
            found.add("scale", words, index, field.name, int(wrong.sum()))


def _look_for_strays(found: _Found, made: Format, flat: Bytes, empty: _Mask) -> None:
    """Name slots that hold no token and yet were written."""
    for field in made.fields:
        if "slot" not in field.axes or field.group("slot") != 1:
            continue
        plain = _bytewise(field)
        wanted = _slots_of(field, empty)
        for page, view in _views(plain, flat, 8, wanted):
            written = _reduced(plain, view, np.min) != POISON
            written &= wanted[page : page + written.shape[1]]
            for layer, at, slot in np.argwhere(written).tolist():
                where = zip(KEPT, (layer, page + at, slot), strict=True)
                index = {axis: number for axis, number in where if axis in field.axes}
                place = ", ".join(f"{axis} {i}" for axis, i in index.items())
                found.add("stray", f"{field.name} of {place} was written, and holds no token", index, field.name)


class AuditFailure(AssertionError):
    """Flaws that a :class:`Watch` has found; the message is the report."""


class Watch:
    """A cache whose unused slots are poisoned, looked at after each step of an engine.

    cache, table, lengths, how    as of :func:`audit`; ``cache`` is writable and contiguous, and shared

    Slots that are freed are poisoned at the next :meth:`step`, so that a late reader gets NaN. 4-bit fields whose
    slots share a byte are left alone. :attr:`last` are table and lengths of the last step that was right.

    >>> pages = np.zeros((4, 2, 1, 8), np.float16)
    >>> watch = Watch(pages, [[1, -1]], [1])
    >>> pages[1, 1] = 1.0                  # the token of the next step
    >>> watch.step([[1, -1]], [2])
    Audit(nothing is wrong; 2 of 8 slots hold tokens)
    >>> pages[3, 0, 0, 2] = 5.0
    >>> watch.step([[1, -1]], [2])
    Traceback (most recent call last):
        ...
    kvlab.formats.audits.AuditFailure: stray: k of page 3, slot 0 was written, and holds no token
    """

    def __init__(self, cache: Any, table: Any, lengths: Any, **how: Any) -> None:
        self.format: Format = how.pop("format", None) or _format_of(cache)
        self._flat, self._how, self._cache = self._shared(cache), how, cache
        first = audit(cache, table, lengths, format=self.format, **how)
        self._empty = np.zeros_like(first.used)
        self.last = (np.array(table), np.array(lengths))
        self._free(first.used)

    def _shared(self, cache: Any) -> Bytes:
        array = to_numpy(cache, "cache")
        require(
            array.flags.c_contiguous and array.flags.writeable, "cache is not contiguous, or read-only",
            "contiguous and writable: unused slots are poisoned in it",
        )
        return array.reshape(-1).view(np.uint8)

    def step(self, table: Any, lengths: Any) -> Audit:
        """The audit after a step. Raises :class:`AuditFailure` with the report where something is wrong."""
        found = audit(self._cache, table, lengths, format=self.format, poisoned=self._empty, **self._how)
        if not found:
            raise AuditFailure(found.report())
        self.last = (np.array(table), np.array(lengths))
        self._free(found.used)
        return found

    def _free(self, used: _Mask) -> None:
        """Poison the slots that are newly without a token."""
        page, slot = np.nonzero(~used & ~self._empty)
        self._empty = ~used
        for field in self.format.fields:
            if "slot" not in field.axes or field.group("slot") != 1:
                continue
            plain = _bytewise(field)
            at = plain.base + plain.table("page", used.shape[0])[page] + plain.table("slot", used.shape[1])[slot]
            for axis in ("copy", "layer", "head", "dim"):
                at = np.add.outer(at, plain.table(axis)[:: max(plain.group(axis), 1)]).ravel()
            self._flat[(at[:, None] // 8 + np.arange(plain.type.bits // 8)).ravel()] = POISON
