"""Audit of a paged cache: what its bytes, its table and its lengths say against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from kvlab.common.arrays import dtype_of, in_cpu_memory, to_numpy
from kvlab.common.checks import flag, integers, is_integer, require, shown
from kvlab.common.drawn import Drawn
from kvlab.memory import POISON

from .codec import Bytes, as_bytes
from .field import Field, Piece
from .format import Format, check_formats
from .stored import STORED

SHOWN = 20
"""Findings of a kind that are listed; all are counted."""
CHUNK = 1 << 20
"""Elements that are looked at together: few enough for a cache of the CPU."""
_NOT_FINITE = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "e4m3": 0x7F, "e5m2": 0x7C, "e8m0": 0xFF}
"""The least code, without its sign, that is no finite number."""
_NO_INFINITY = ("e4m3", "e8m0")
KEPT = ("layer", "page", "slot")
Mask = np.ndarray[Any, np.dtype[np.bool_]]


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
    counts    how many there are of each kind; of values the slots of a field that have some
    used      slots that hold a token: bool ``[pages, slots]``; ``owners``: how many sequences have each page

    >>> found = audit(np.ones((4, 2, 1, 8), np.float16), [[1, 3]], [3])
    >>> bool(found), found.used.sum(1).tolist()
    (True, [0, 2, 0, 1])
    """

    flaws: tuple[Flaw, ...]
    counts: Mapping[str, int]
    used: Mask
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

    def add(self, kind: str, places: np.ndarray[Any, Any], name: Callable[..., tuple[str, Mapping[str, int]]],
            field: str = "") -> None:
        """Count the flaws at ``places`` ``[n, axes]``, and list the first of a kind: ``name`` gives words and index."""
        if len(places):
            self.counts[kind] = self.counts.get(kind, 0) + len(places)
            room = SHOWN - sum(flaw.kind == kind for flaw in self.flaws)
            for place in places[: max(room, 0)].tolist():
                words, index = name(*place)
                self.flaws.append(Flaw(kind, words, {axis: int(at) for axis, at in index.items()}, field))


def audit(
    cache: Any, table: Any, lengths: Any, *, format: Format | None = None, shared_prefix: bool = False,
    padding: int | None = None, scale_range: tuple[float, float] = (0.0, 65504.0), poisoned: Any = False,
) -> Audit:
    """Looks at a paged cache of any engine, NumPy or torch; what is on a GPU is copied and looked at on the CPU.

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
    made = format_of_cache(cache) if format is None else format
    check_formats(format=made)
    flat = as_bytes(cache, "cache")
    require(flat.size == made.nbytes, f"cache has {flat.size} bytes", f"{made.nbytes}, as the format has")
    two = isinstance(scale_range, Sequence) and len(scale_range) == 2 and all(isinstance(x, Real) for x in scale_range)
    good = two and 0 <= scale_range[0] < scale_range[1]
    require(good, f"scale_range is {shown(scale_range)}", "two magnitudes, the smaller first")
    shared_prefix = flag("shared_prefix", shared_prefix)
    require(padding is None or is_integer(padding), f"padding is {shown(padding)}", "an entry of the table, or None")
    pages, slots = made.sizes.get("page", 1), made.sizes.get("slot", 1)
    which = np.asarray(poisoned)
    fits = which.dtype == np.bool_ and which.shape in ((), (pages, slots))
    require(fits, f"poisoned is {shown(poisoned)}", f"True, False, or bools [{pages}, {slots}]")
    found = _Found()
    used, owners = _look_at_table(found, table, lengths, pages, slots, shared_prefix, padding)
    for field in made.fields:
        _look_at_field(found, field, flat, used, scale_range)
    empty = ~used & which
    if empty.any():
        _look_for_strays(found, made, flat, empty)
    return Audit(tuple(found.flaws), found.counts, used, owners)


def in_numpy(given: Any, name: str) -> Any:
    """A table or lengths in CPU memory: an array as NumPy's."""
    return to_numpy(in_cpu_memory(given), name) if hasattr(given, "shape") else given


def check_array(cache: Any) -> None:
    """ValueError unless ``cache`` is an array."""
    require(hasattr(cache, "shape"), f"cache is a {type(cache).__name__}", "an array of NumPy or torch")


def format_of_cache(cache: Any) -> Format:
    """The format of a tensor of one of the usual shapes."""
    check_array(cache)
    shape, dtype = tuple(cache.shape), dtype_of(cache, "cache")
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
) -> tuple[Mask, np.ndarray[Any, np.dtype[np.int64]]]:
    """Check table and lengths; the slots in use, and how many sequences have each page."""
    entries, tokens = integers("table", in_numpy(table, "table")), integers("lengths", in_numpy(lengths, "lengths"))
    fits = entries.ndim == 2 and tokens.shape == entries.shape[:1]
    require(fits, f"table has shape {entries.shape}, lengths {tokens.shape}", "[sequences, columns] and [sequences]")
    most = entries.shape[1] * slots

    def beyond(row: int) -> tuple[str, dict[str, int]]:
        return f"lengths[{row}] is {tokens[row]}: the table has pages for {most} tokens", {"sequence": row}

    found.add("length", np.argwhere((tokens < 0) | (tokens > most)), beyond)
    held, column = np.clip(tokens, 0, most), np.arange(entries.shape[1])
    mine, exists = column < -(-held[:, None] // slots), (entries >= 0) & (entries < pages)

    def nothing(row: int, at: int) -> tuple[str, dict[str, int]]:
        words = f"table[{row}, {at}] is {entries[row, at]}, none of the {pages} pages, and has tokens"
        return words, {"sequence": row, "column": at}

    found.add("page", np.argwhere(mine & ~exists), nothing)
    owned, holds = np.argwhere(mine & exists), entries[mine & exists]
    owners = np.bincount(holds, minlength=pages)
    order = np.argsort(holds, kind="stable")
    ends = np.cumsum(owners)

    def who(page: int) -> np.ndarray[Any, Any]:
        return owned[order[ends[page] - owners[page] : ends[page]]]

    def same(page: int) -> bool:
        rows, at = who(page)[:, 0], who(page)[:, 1]
        alike = (at == at[0]).all() and (entries[rows, : at[0] + 1] == entries[rows[0], : at[0] + 1]).all()
        return bool(alike and (held[rows] >= (at[0] + 1) * slots).all())

    def several(page: int) -> tuple[str, dict[str, int]]:
        said = " and ".join(f"table[{row}, {at}]" for row, at in who(page)[:4].tolist())
        rest = " and others" if owners[page] > 4 else ""
        return f"page {page} has {owners[page]} owners: {said}{rest}", {"page": page}

    twice = np.flatnonzero(owners > 1)
    if shared_prefix:
        twice = np.array([page for page in twice.tolist() if not same(page)], np.int64)
    found.add("owners", twice[:, None], several)

    def stale(row: int, at: int) -> tuple[str, dict[str, int]]:
        page = int(entries[row, at])
        whose = f"sequence {who(page)[0, 0]} has page {page}" if owners[page] else f"nobody has page {page}"
        words = f"table[{row}, {at}] is {page}, behind the pages of {held[row]} tokens: {whose}"
        return words, {"sequence": row, "column": at, "page": page}

    found.add("tail", np.argwhere(~mine & exists & (entries != (-1 if padding is None else padding))), stale)
    used = np.zeros((pages, slots), np.bool_)
    inside = np.minimum(held[owned[:, 0]] - owned[:, 1] * slots, slots)
    np.logical_or.at(used, holds, np.arange(slots) < inside[:, None])
    return used, owners


def bytewise(field: Field) -> Field:
    """A field of half bytes as one of the bytes that they share; another one as it is."""
    if field.type.bits >= 8:
        return field
    halved = [
        piece if abs(piece.stride) != 4 else Piece(piece.axis, 2 * piece.divisor, piece.size // 2, 2 * piece.stride)
        for piece in field.pieces
    ]
    return Field(field.name, "u8", field.base // 8 * 8, tuple(halved))


def _views(field: Field, flat: Bytes, bits: int, wanted: Mask) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
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
    kept = view.shape[: sum(max(len(field.of(axis)), 1) for axis in KEPT)]
    layers, slots = (field.extent(axis) // max(field.group(axis), 1) for axis in ("layer", "slot"))
    return how(view.reshape(*kept, -1), axis=-1).reshape(layers, -1, slots)


def _look_at_field(
    found: _Found, field: Field, flat: Bytes, used: Mask, scale_range: tuple[float, float]
) -> None:
    """Check one field: unwritten slots, values that are not finite, scales out of range."""
    limit = _NOT_FINITE.get(field.stored)
    plain, wanted = bytewise(field), _slots_of(field, used)
    bits = field.type.bits if limit is not None else 8
    sign = (1 << (bits - 1)) - 1 if field.stored != "e8m0" else 255
    scratch = np.empty(0, f"<u{bits // 8}")
    ones = scratch.dtype.type((1 << bits) - 1)
    for page, view in _views(plain, flat, bits, wanted):
        mask = wanted[page:]
        if limit is None:
            unwritten = _reduced(plain, view, np.min) == ones
            found.add("unwritten", _places(unwritten, mask, page), partial(_name, field, flat, "unwritten"), field.name)
            continue
        if scratch.size < view.size:
            scratch = np.empty(view.size, scratch.dtype)
        codes = np.bitwise_and(view, scratch.dtype.type(sign), out=scratch[: view.size].reshape(view.shape))
        largest = _reduced(plain, codes, np.max)
        if not len(_places(largest >= limit, mask, page)):
            continue
        unwritten, poison = _reduced(plain, view, np.min) == ones, _reduced(plain, view, np.max) == ones
        endless = (largest == limit) & (field.stored not in _NO_INFINITY)
        rest = (largest >= limit) & ~poison & ~unwritten
        kinds = {"unwritten": unwritten, "poison": poison & ~unwritten, "nan": rest & ~endless, "inf": rest & endless}
        for kind, which in kinds.items():
            found.add(kind, _places(which, mask, page), partial(_name, field, flat, kind), field.name)
    if field.name.endswith("_scale") and field.stored in _NOT_FINITE and field.stored != "e8m0":
        _look_at_scales(found, field, flat, wanted, scale_range)


def _places(which: Mask, mask: Mask, page: int) -> np.ndarray[Any, Any]:
    """Layer, page and slot of what is true of the slots in ``mask``: ``[n, 3]``."""
    return np.argwhere(which & mask[: which.shape[1]]) + (0, page, 0)


def _slots_of(field: Field, used: Mask) -> Mask:
    """Used slots in the groups of slots that the field has: ``[pages or 1, groups or 1]``."""
    out = used if "page" in field.axes else used.any(0, keepdims=True)
    group = field.group("slot") if "slot" in field.axes else out.shape[1]
    return np.asarray(out.reshape(out.shape[0], -1, group).any(2))


def _name(field: Field, flat: Bytes, kind: str, *where: int) -> tuple[str, dict[str, int]]:
    """Words for what is wrong in a slot of a field, and where the first of it is."""
    codes, index = _codes_at(field, flat, where)
    if kind == "unwritten":
        return f"{field.name} of {_said(index)}: all bytes are {POISON:#x}", index
    bad = np.argwhere(~np.isfinite(field.type.numbers(codes)))
    axes = [axis for axis in ("head", "dim") if axis in field.axes]
    index.update({axis: int(at) * field.group(axis) for axis, at in zip(axes, bad[0], strict=True)})
    more = f", and {len(bad) - 1} more of the slot" if len(bad) > 1 else ""
    return f"{field.name} of {_said(index)}{more}", index


def _said(index: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {at}" for axis, at in index.items())


def _codes_at(field: Field, flat: Bytes, where: Sequence[int]) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
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


def _look_at_scales(found: _Found, field: Field, flat: Bytes, wanted: Mask, limits: tuple[float, float]) -> None:
    """Check the magnitudes of scales."""
    low, high = limits
    kind, sign = field.type, (1 << (field.type.bits - 1)) - 1
    # Without their signs codes of floats are in the order of their magnitudes.
    with np.errstate(over="ignore"):
        least, most = (int(kind.codes([edge])[0]) for edge in limits)
        least += float(kind.numbers(kind.codes([low]))[0]) < low
        most -= float(kind.numbers(kind.codes([high]))[0]) > high

    def wrong(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        size = codes & codes.dtype.type(sign)
        out = (size > most) & (size < _NOT_FINITE[field.stored])
        return out | ((size < least) & (size > 0)) if least > 1 else out

    def name(layer: int, page: int, slot: int) -> tuple[str, dict[str, int]]:
        codes, index = _codes_at(field, flat, (layer, page, slot))
        number = np.abs(kind.numbers(codes[wrong(codes)]))
        return f"{field.name} of {_said(index)} is {number.flat[0]:g}, outside {low:g} to {high:g}", index

    for page, view in _views(field, flat, kind.bits, wanted):
        found.add("scale", _places(_reduced(field, wrong(view), np.any), wanted[page:], page), name, field.name)


def _look_for_strays(found: _Found, made: Format, flat: Bytes, empty: Mask) -> None:
    """Name slots that hold no token and yet were written."""
    for field in made.fields:
        if "slot" not in field.axes or field.group("slot") != 1:
            continue
        plain, wanted = bytewise(field), _slots_of(field, empty)

        def name(layer: int, page: int, slot: int, field: Field = field) -> tuple[str, dict[str, int]]:
            index = {axis: at for axis, at in zip(KEPT, (layer, page, slot), strict=True) if axis in field.axes}
            return f"{field.name} of {_said(index)} was written, and holds no token", index

        for page, view in _views(plain, flat, 8, wanted):
            written = _reduced(plain, view, np.min) != POISON
            found.add("stray", _places(written, wanted[page:], page), name, field.name)
