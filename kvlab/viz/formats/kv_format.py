"""Bytes of a KV format: which field, slot, head and dim each of them holds."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvlab.common.checks import one_of

from ..pen.axis import QUIET
from ..pen.legend import keys
from ..pen.palette import BANKS
from ..pen.picture import Picture
from ..pen.svg import HATCH, BoxGrid, Canvas

if TYPE_CHECKING:
    from kvlab.formats import Agreement, Format

LEFT, TOP, CELL, ROW = 64.0, 8.0, 12.0, 12.0
COLUMNS, LINES = 64, 28
Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Byte range of what is drawn, what it holds in bytes, and the bytes themselves where they lie apart."""

    first: int
    last: int
    held: int
    apart: Ints | None


def draw_format(
    layout: Format, *, row: bool = False, page: int = 0, layer: int = 0, mark: int | None = None,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """One page of one layer of a :class:`kvlab.formats.Format`, or with ``row`` its first slot, byte by byte.

    page, layer    which
    mark           a byte to look at

    Cells have one colour for a field, slots alternate in lightness; padding is hatched. Hovering tells the bytes of a
    cell and what lies there. Raises ValueError for a page or layer that does not exist.

    >>> from kvlab.formats import known_format
    >>> draw_format(known_format("mla.656"), row=True).title
    'A row of mla.656: 656 bytes of latent, latent_scale, rope'
    """
    for name, value in (("page", page), ("layer", layer)):
        one_of(name, value, layout.sizes.get(name, 1), f"{name}s")
    place = _place(layout, page, layer, row)
    canvas = Canvas()
    _cells(canvas, layout, place, mark)
    names = [field.name for field in layout.fields]
    what = f"A row of {layout.name or 'the format'}" if row else f"Page {page} of {layout.name or 'the format'}"
    return canvas.picture(
        title or f"{what}: {place.held} bytes of {', '.join(names)}",
        caption or f"Bytes in the order of their addresses, {layout.print()}. A colour is a field, hatched is padding.",
    )


def draw_agreement(found: Agreement, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Pages of a writer's and a reader's format, one above the other, with the first difference marked in both.

    found    what :func:`kvlab.formats.agree` gives

    >>> from kvlab.formats import agree, known_format
    >>> draw_agreement(agree(known_format("vllm.blocks_first"), known_format("vllm.hnd"))).title
    'k of layer 0, page 0, slot 0, head 1, dim 0: written to byte 256, read from byte 4096'
    """
    canvas = Canvas()
    y = 0.0
    for what, layout, at in (("writer", found.writer, found.writer_at), ("reader", found.reader, found.reader_at)):
        number, layer = (found.index.get(axis, 0) for axis in ("page", "layer"))
        page = draw_format(layout, page=number, layer=layer, mark=at // 8 if at >= 0 else None)
        for line in textwrap.wrap(f"{what}: {layout.name or layout.print()}", 100):
            canvas.text(0, y + 12, line, size=12, weight=600)
            y += 16
        canvas.embed(page, 0, y + 4)
        y = canvas.bottom + 18
    words = found.words[0].upper() + found.words[1:] if found else found.words  # else it begins with a field's name
    same = "They put every element at the same place." if found else "The outlined cells should be the same bytes."
    return canvas.picture(title or words, caption or f"Above what the writer does, below what the reader does. {same}")


def _place(layout: Format, page: int, layer: int, row: bool) -> Span:
    """Where a page, or its first slot, lies. Only of a page whose bytes lie apart are these enumerated."""
    ends: list[tuple[int, int]] = []
    listed: list[Ints] = []
    bits = 0
    for field in layout.fields:
        tables = [field.table("copy"), field.table("layer")[layer:][:1], field.table("page")[page:][:1]]
        for axis in ("slot", "head", "dim"):
            tables.append(field.table(axis)[:: max(field.group(axis), 1)][: 1 if row and axis == "slot" else None])
        tables = [table for table in tables if table.size]  # a field without pages has none for page 1
        low, high = (field.base + sum(int(edge(table)) for table in tables) for edge in (np.min, np.max))
        ends.append((low, high + field.type.bits - 1))
        bits += int(np.prod([table.size for table in tables], dtype=np.int64)) * field.type.bits
        listed.append(_some(field, tables))
    first, last = min(low for low, _ in ends) // 8, max(high for _, high in ends) // 8
    steps = {int(field.table("page")[1]) // 8 for field in layout.fields if field.extent("page") > 1}
    if len(steps) == 1 and not row and last < first + min(steps) < 2 * last - first:
        last = first + min(steps) - 1  # padding up to the next page
    apart = last - first + 1 > bits // 4
    return Span(first, last, -(-bits // 8), np.unique(np.concatenate(listed)) if apart else None)


def _some(field: Any, tables: list[Ints]) -> Ints:
    """The bytes of the first elements, as many as a picture of bytes that lie apart can use."""
    at: Ints = np.full(1, field.base, np.int64)
    for table in sorted(tables, key=lambda one: int(one[-1] - one[0])):
        at = np.add.outer(at, table[: max(1, (1 << 16) // max(at.size, 1))]).ravel()
    return (at[:, None] // 8 + np.arange(-(-field.type.bits // 8))).ravel()


def _cells(canvas: Canvas, layout: Format, place: Span, mark: int | None) -> None:
    """The grid of bytes with its legend."""
    count = place.last - place.first + 1 if place.apart is None else place.apart.size
    unit = 1
    while count > unit * COLUMNS * LINES:
        unit *= 2
    at = np.arange(place.first, place.last + 1, unit) if place.apart is None else place.apart[::unit]
    lines = -(-at.size // COLUMNS)
    grid = np.pad(at, (0, lines * COLUMNS - at.size), constant_values=-1)
    number, slot = np.full(grid.size, -1), np.zeros(grid.size, np.int64)
    told = np.full(grid.size, "padding", object)
    fields = sorted(layout.fields, key=lambda field: not field.is_value)  # K has one colour in all formats
    for n, field in enumerate(fields):
        held, index = field.find(8 * grid)
        held &= grid >= 0
        number[held] = n
        named = [axis for axis in field.axes if axis not in ("layer", "page")]
        slot[held] = index["slot"][held] if "slot" in named else 0
        columns = [index[axis][held].tolist() for axis in named]
        words = ", ".join([f"{field.name} {field.stored}", *(f"{axis} %d" for axis in named)])
        told[held] = [words % where for where in zip(*columns, strict=True)] if named else words
    colour = np.where(number >= 0, 4 * (number % 8) + 1 + slot % 2, -1)
    colour[at.size :] = -2
    xs, ys = LEFT + CELL * np.arange(min(COLUMNS, at.size)), TOP + ROW * np.arange(lines)
    shape, wide = (lines, COLUMNS), xs.size
    boxes = BoxGrid(xs, ys, CELL, ROW)
    canvas.cells(boxes, colour.reshape(shape)[:, :wide], list(BANKS))
    canvas.hover(boxes, "byte %s: %s", grid.reshape(shape)[:, :wide], told.reshape(shape)[:, :wide])
    for y, byte in zip(ys.tolist(), grid.reshape(shape)[:, 0].tolist(), strict=True):
        canvas.text(LEFT - 6, y + 9.5, str(byte), size=9, anchor="end", mono=True, opacity=QUIET)
    if mark is not None and place.first <= mark <= place.last:
        cell = int(np.searchsorted(at, mark, "right")) - 1
        canvas.look_here(float(xs[cell % COLUMNS]), float(ys[cell // COLUMNS]), CELL, ROW, 2.5)
    entries = [(BANKS[4 * (n % 8) + 2], "", _words(field)) for n, field in enumerate(fields)]
    entries += [(HATCH, "", "padding")] if (colour == -1).any() else []
    bottom = keys(canvas, LEFT, float(ys[-1]) + ROW + 12, entries)
    each = f"a cell is {unit} bytes" if unit > 1 else "a cell is a byte"
    beside = "; bytes that lie apart are beside each other" if place.apart is not None else ""
    canvas.text(LEFT, bottom + 10, f"{each}, a line {unit * COLUMNS}{beside}", size=10, opacity=QUIET)


def _words(field: Any) -> str:
    """A field in the legend: its type, and what shares one of its elements."""
    group = field.group("dim")
    shared = "" if field.is_value else f", one for {group or 'all'} dims" if group != 1 else ", one for each dim"
    return f"{field.name} {field.stored}{shared}"
