"""A swizzle before and after: the banks in which the rows of a tile lie, and the address bits that are XORed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import QUIET, axis, label_columns, label_rows, mark_gaps
from .legend import bank_legend
from .palette import ACCENT, BANKS, INK
from .picture import Picture
from .svg import Canvas
from .text import number

__all__ = ["draw_swizzle"]

GUTTER = 34.0
BETWEEN = 44.0
ROW_BYTES = 128


def draw_swizzle(
    swizzle: Any, *, row_bytes: int | None = None, title: str | None = None, caption: str | None = None
) -> Picture:
    """What ``swizzle`` does to rows of shared memory, before (left) and after (right).

    ``swizzle`` has ``bits, base, shift`` and, if it is a :class:`kvlab.layout.Swizzle`, a unit; it is called with int
    arrays in that unit. A cell is the piece that it moves as a whole (at most 16 bytes); its colour is the bank where
    the piece lies, its number the place in the row. Below: the bits of a byte address, and which are XORed into which.
    ``row_bytes`` is the row of the tile; without it, the row that the swizzle is made for, at least 128 bytes.

    Raises ValueError for a row that is no whole number of pieces.

    >>> from kvlab.layout import Swizzle
    >>> draw_swizzle(Swizzle(3, 4, 3, "byte")).title
    'Sw<3,4,3> (byte): the 8 rows of a column lie in 8 different bank groups instead of 1'
    """
    unit = int(getattr(swizzle, "unit_bytes", 1))
    piece = min(unit << swizzle.base, 16) if swizzle.bits else 16
    if row_bytes is None:
        row_bytes = max(ROW_BYTES, unit << (swizzle.base + abs(swizzle.shift))) if swizzle.bits else ROW_BYTES
    if row_bytes < piece or row_bytes % piece:
        raise ValueError(
            f"row_bytes {row_bytes} is not a multiple of the {piece} bytes that {swizzle} moves as a whole"
        )
    places = row_bytes // piece
    rows_shown = 1 << max(swizzle.bits, 3)
    before = np.arange(rows_shown)[:, None] * row_bytes + np.arange(places) * piece
    after = np.asarray(swizzle(before // unit)) * unit

    canvas = Canvas()
    cell = max(9.0, min(40.0, np.floor((852 - 2 * GUTTER - BETWEEN) / 2 / min(places, 32))))
    height = 24.0 if cell >= 20 else 16.0
    panels = []
    left = 0.0
    for name, address in (("before: as the tile is numbered", before), ("after: where it lies", after)):
        columns = axis(places, cell, left + GUTTER, limit=32, head=24, tail=4)
        rows = axis(rows_shown, height, 46, limit=16, head=8)
        canvas.text(left + GUTTER, 12, name, size=12, weight=600)
        label_columns(canvas, columns, 41)
        label_rows(canvas, rows, left + GUTTER - 7)
        canvas.text(left, 28, f"row ↓  {_piece(piece)} of the row →", size=10, opacity=QUIET)
        grid = np.ix_(rows.index, columns.index)
        bank = address[grid] // 4 % 32
        canvas.cells(columns.edge, rows.edge, cell, height, bank, BANKS)
        texts = [_place(a, b, row_bytes, piece) for a, b in zip(address[grid].flat, before[grid].flat, strict=True)]
        if cell >= 6.1 * max(map(len, texts)) + 3:
            xs, ys = (a.ravel() for a in np.meshgrid(columns.centre, rows.centre))
            canvas.labels(xs, ys + 3.5, texts, [BANKS[b] for b in bank.flat])
        words = f"row %d, {_piece(piece)} %d\nbyte %d before\nbyte %d after, bank %d"
        values = (*grid, before[grid], after[grid], after[grid] // 4 % 32)
        canvas.hover(columns.edge, rows.edge, cell, height, words, *values)
        mark_gaps(canvas, columns, rows)
        panels.append((columns, rows))
        left = columns.end + BETWEEN - GUTTER + 12
    shown = min(8, rows_shown)
    for columns, rows in panels:
        canvas.look_here(float(columns.edge[0]), float(rows.edge[0]), cell, shown * height, 2.5)
    y = bank_legend(canvas, GUTTER, rows.end + 14, "bank of 4 bytes")
    if swizzle.bits:
        _bits(canvas, swizzle, unit, y + 22)
    return canvas.picture(
        title or _title(swizzle, before, after, shown), caption or _caption(piece, row_bytes, swizzle.shift < 0)
    )


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
    cell = 26.0
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
        )  # fmt: skip
        canvas.text(
            edge(bit) + cell / 2, y + 16, str(bit), size=10, mono=True, anchor="middle",
            fill="var(--kvlab-paper,#ffffff)" if inside == "source" else None,
        )  # fmt: skip
    x0 = (edge(source) + cell + edge(source + swizzle.bits - 1)) / 2
    x1 = (edge(target) + cell + edge(target + swizzle.bits - 1)) / 2
    canvas.path(f"M{number(x0)} {y + 24:g}v10", stroke=INK)
    canvas.path(f"M{number(x0)} {y + 34:g}H{number(x1)}", stroke=INK)
    canvas.arrow([(x1, y + 34), (x1, y + 26)], stroke=INK)
    canvas.text((x0 + x1) / 2, y + 47, "XOR", size=10, anchor="middle", opacity=QUIET)
    end = edge(0) + cell + 14
    canvas.text(end, y + 10, "filled: source bits, unchanged", size=10, opacity=QUIET)
    canvas.text(end, y + 23, "outlined: the bits that change", size=10, opacity=QUIET)


def _groups(address: npt.NDArray[np.int64]) -> int:
    return len(np.unique(address % 128 // 16))


def _title(swizzle: Any, before: npt.NDArray[np.int64], after: npt.NDArray[np.int64], rows: int) -> str:
    if not swizzle.bits:
        return f"{swizzle}: the identity, every piece stays where it is"
    was, now = _groups(before[:rows, 0]), _groups(after[:rows, 0])
    if was == now:
        return (
            f"{swizzle}: {int((before != after).sum())} of {before.size} pieces move, a column keeps its {now} bank "
            + ("group" if now == 1 else "groups")
        )
    return f"{swizzle}: the {rows} rows of a column lie in {now} different bank groups instead of {was}"


def _caption(piece: int, row_bytes: int, across: bool) -> str:
    return (
        f"Rows of {row_bytes} bytes in pieces of {piece} bytes; colour = bank, number = place in the row where it "
        f"lies{' (2:6 = row 2, place 6)' if across else ''}. The outlined column is what eight lanes read together."
    )
