"""A swizzle before and after: the banks in which the rows of a tile lie, and the address bits that are XORed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .pen.axis import QUIET, axis, label_columns, label_rows, mark_gaps
from .pen.legend import bank_legend
from .pen.palette import ACCENT, BANKS, INK, PAPER, bank_colours
from .pen.picture import Picture
from .pen.svg import BoxGrid, Canvas
from .pen.text import number

GUTTER = 34.0
BETWEEN = 44.0


def draw_swizzle(
    swizzle: Any, *, row_bytes: int | None = None, banks: int = 32, title: str | None = None, caption: str | None = None
) -> Picture:
    """Draws the effect of ``swizzle`` on rows of shared memory, before (left) and after (right).

    ``swizzle`` has ``bits, base, shift`` and, if it is a :class:`kvlab.layout.Swizzle`, a unit; it is called with int
    arrays in that unit. A cell is the piece that it moves as a whole (at most 16 bytes); its colour is the bank where
    the piece lies, its number the place in the row. Outlined: the pieces of a column that lanes read together, as many
    as all ``banks`` (of 4 bytes: 32, or 64 on gfx950) deliver in one pass. Below: the bits of a byte address, and which
    are XORed into which. ``row_bytes`` is the row of the tile; without it, the row that the swizzle is made for, at
    least as long as all banks.

    Raises ValueError for a row that is no whole number of pieces, and for one whose addresses take more than 62 bits.

    >>> from kvlab.layout import Swizzle
    >>> draw_swizzle(Swizzle(3, 4, 3, "byte")).title
    'Sw<3,4,3> (byte): the 8 rows of a column lie in 8 different bank groups instead of 1'
    >>> draw_swizzle(Swizzle(5, 0, 5, "fp32")).title
    'Sw<5,0,5> (float32): the 32 rows of a column lie in 32 different banks instead of 1'
    """
    unit, at_once = int(getattr(swizzle, "unit_bytes", 1)), 4 * banks
    piece = min(unit << swizzle.base, 16) if swizzle.bits else 16
    if row_bytes is None:
        row_bytes = max(at_once, unit << (swizzle.base + abs(swizzle.shift))) if swizzle.bits else at_once
    if row_bytes < piece or row_bytes % piece:
        raise ValueError(
            f"row_bytes is {row_bytes}: must be a multiple of the {piece} bytes that {swizzle} moves as a whole"
        )
    lanes = at_once // max(piece, 4)
    count = max(1 << swizzle.bits, lanes)
    if count * row_bytes >= 1 << 62:
        raise ValueError(f"{swizzle} on rows of {row_bytes} bytes: addresses below 2**62 can be drawn")
    places = row_bytes // piece

    def after(before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.asarray(swizzle(before // unit)) * unit + before % unit

    canvas = Canvas()
    cell = max(9.0, min(40.0, np.floor((852 - 2 * GUTTER - BETWEEN) / 2 / min(places, 32))))
    height = 24.0 if cell >= 20 and lanes <= 16 else 12.0
    panels = []
    left = 0.0
    for name, where in (("before: as the tile is numbered", lambda before: before), ("after: where it lies", after)):
        columns = axis(places, cell, left + GUTTER, limit=32, head=24, tail=4)
        rows = axis(count, height, 46, limit=max(16, min(lanes, 32)), head=min(lanes, 31))
        before = rows.index[:, None] * row_bytes + columns.index * piece
        address = where(before)
        canvas.text(left + GUTTER, 12, name, size=12, weight=600)
        label_columns(canvas, columns, 41)
        label_rows(canvas, rows, left + GUTTER - 7)
        canvas.text(left, 28, f"row ↓  {_piece(piece)} of the row →", size=10, opacity=QUIET)
        index = bank_colours(address // 4 % banks, banks)
        boxes = BoxGrid(columns.edge, rows.edge, cell, height)
        canvas.cells(boxes, index, BANKS)
        texts = [_place(a, b, row_bytes, piece) for a, b in zip(address.flat, before.flat, strict=True)]
        if height >= 16 and cell >= 6.1 * max(map(len, texts)) + 3:
            xs, ys = (a.ravel() for a in np.meshgrid(columns.centre, rows.centre))
            canvas.labels(xs, ys + 3.5, texts, [BANKS[i] for i in index.flat])
        words = f"row %d, {_piece(piece)} %d\nbyte %d before\nbyte %d after, bank %d"
        lies = after(before)
        values = (rows.index[:, None], columns.index, before, lies, lies // 4 % banks)
        canvas.hover(boxes, words, *values)
        mark_gaps(canvas, columns, rows)
        panels.append((columns, rows))
        left = columns.end + BETWEEN - GUTTER + 12
    for columns, rows in panels:
        together = rows.edge[rows.index < lanes]
        for run in np.split(together, np.flatnonzero(np.diff(together) > height + 1) + 1):
            canvas.look_here(float(columns.edge[0]), float(run[0]), cell, float(run[-1] - run[0]) + height, 2.5)
    y = bank_legend(canvas, GUTTER, rows.end + 14, f"bank of 4 bytes{' (modulo 32)' if banks > 32 else ''}")
    if swizzle.bits:
        _bits(canvas, swizzle, unit, y + 22)
    column = np.arange(lanes) * row_bytes
    found = [len(np.unique(address % at_once // max(piece, 4))) for address in (column, after(column))]
    title = title or _title(swizzle, lanes, found[0], found[1], piece)
    return canvas.picture(title, caption or _caption(piece, row_bytes, lanes, swizzle.shift < 0))


def _piece(nbytes: int) -> str:
    return {16: "vector", 4: "word", 1: "byte"}.get(nbytes, f"{nbytes}-byte piece")


def _place(address: int, origin: int, row_bytes: int, piece: int) -> str:
    """Place in the row, with the row where that changes (a negative shift)."""
    place = str(address % row_bytes // piece)
    return place if address // row_bytes == origin // row_bytes else f"{address // row_bytes}:{place}"


def _bits(canvas: Canvas, swizzle: Any, unit: int, y: float) -> None:
    """The bits of a byte address, highest at the left, with brackets from the source bits to those that change."""
    low = swizzle.base + unit.bit_length() - 1
    source, target = (low + max(swizzle.shift, 0), low - min(swizzle.shift, 0))
    count = max(source, target) + swizzle.bits
    cell = min(26.0, 520.0 / count)
    canvas.text(0, y + 16, "bits of a byte address", size=10, opacity=QUIET)
    left = 132.0

    def edge(bit: int) -> float:
        return float(left + cell * (count - 1 - bit))

    for bit in range(count):
        inside = "source" if source <= bit < source + swizzle.bits else "target" if target <= bit else ""
        inside = inside if inside != "target" or bit < target + swizzle.bits else ""
        canvas.rect(
            edge(bit), y, cell, 24, fill=INK if inside == "source" else "none", opacity=None if inside else 0.45,
            stroke=ACCENT if inside == "target" else INK, stroke_width=2 if inside == "target" else 1,
        )
        if cell < 15 and bit % 4:
            continue
        canvas.text(
            edge(bit) + cell / 2, y + 16, str(bit), size=10, mono=True, anchor="middle",
            fill=PAPER if inside == "source" else None,
        )
    x0 = (edge(source) + cell + edge(source + swizzle.bits - 1)) / 2
    x1 = (edge(target) + cell + edge(target + swizzle.bits - 1)) / 2
    canvas.path(f"M{number(x0)} {y + 24:g}v10", stroke=INK)
    canvas.path(f"M{number(x0)} {y + 34:g}H{number(x1)}", stroke=INK)
    canvas.arrow([(x1, y + 34), (x1, y + 26)], stroke=INK)
    canvas.text((x0 + x1) / 2, y + 47, "XOR", size=10, anchor="middle", opacity=QUIET)
    end = edge(0) + cell + 14
    canvas.text(end, y + 10, "filled: source bits, unchanged", size=10, opacity=QUIET)
    canvas.text(end, y + 23, "outlined: the bits that change", size=10, opacity=QUIET)


def _title(swizzle: Any, lanes: int, was: int, now: int, piece: int) -> str:
    if not swizzle.bits:
        return f"{swizzle}: the identity, every piece stays where it is"
    name = {16: "bank group", 8: "pair of banks"}.get(piece, "bank")
    many = name.replace("pair", "pairs") if piece == 8 else f"{name}s"
    if was == now:
        return f"{swizzle}: pieces move, but a column keeps its {now} {many if now > 1 else name}"
    found = f"{now} different {many}" if now == lanes else f"{now} of {lanes} {many}"
    return f"{swizzle}: the {lanes} rows of a column lie in {found} instead of {was}"


def _caption(piece: int, row_bytes: int, lanes: int, across: bool) -> str:
    text = f"Rows of {row_bytes} bytes in pieces of {piece} byte{'s' * (piece > 1)}; colour = bank, number = place in "
    text += f"the row where it lies{' (2:6 = row 2, place 6)' if across else ''}. "
    return f"{text}The outlined column is what {lanes} lanes read together."
