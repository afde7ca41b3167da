"""Global memory in sectors of 32 bytes: which of them a warp instruction moves, and which bytes its lanes want."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .model.holders import lowest
from .pen.axis import QUIET, WIDTH, axis, axis_of, label_rows, mark_gaps
from .pen.legend import keys
from .pen.palette import ACCENT, INK, LANES, lane_colours
from .pen.picture import Picture
from .pen.svg import HATCH, BoxGrid, Canvas
from .pen.text import text_width, wrap

if TYPE_CHECKING:
    from kvlab.hardware import Coalescing

GUTTER = 66.0
HEADER = 40.0
ROW = 24.0
LINE = 128
MOST = 16


def draw_coalescing(access: Coalescing, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Draws the requests of lanes in global memory, in lines of 128 bytes, and the sectors that move.

    access    a :class:`kvlab.hardware.Coalescing`: ``addresses`` and ``active`` [lanes], ``nbytes`` of a lane

    Lines that no lane touches are left out, and so are those after the first 15 but the last. Raises ValueError for an
    access without an active lane.

    >>> from kvlab.hardware import coalescing
    >>> draw_coalescing(coalescing(np.arange(32) * 4 + 8, 4)).title
    '32 lanes x 4 bytes: 5 sectors, ideal 4, 80% useful'
    """
    from kvlab.hardware import SECTOR_BYTES

    lanes = np.flatnonzero(access.active)
    if not lanes.size:
        raise ValueError(f"cannot draw {access!r}: no lane is active, nothing moves")
    where = access.addresses[lanes]
    piece = int(np.gcd.reduce(np.append(where, [access.nbytes, 32])))
    unit = min(piece, 16)
    byte = where[:, None] + np.arange(0, access.nbytes, unit)
    lines = np.unique(byte // LINE)
    shown = lines if len(lines) <= MOST else np.append(lines[: MOST - 1], lines[-1])
    count = LINE // unit
    readers = np.zeros((len(shown), count), np.int64)
    at = np.searchsorted(shown, byte // LINE).clip(max=len(shown) - 1)
    seen = shown[at] == byte // LINE
    place = at[seen], byte[seen] % LINE // unit
    np.add.at(readers, place, 1)
    owner = lowest(readers.shape, place, np.broadcast_to(lanes[:, None], byte.shape)[seen])
    moved = np.asarray((readers.reshape(len(shown), -1, SECTOR_BYTES // unit) > 0).any(axis=2), bool)

    canvas = Canvas()
    cell = np.floor(4 * (WIDTH - GUTTER) / count) / 4
    columns = axis(count, cell, GUTTER, limit=count, head=count)
    rows = axis_of(shown, ROW, HEADER)
    wide = cell * (SECTOR_BYTES // unit)
    canvas.text(GUTTER, 10, "lines of 128 bytes, four sectors of 32 bytes →", size=10, opacity=QUIET)
    canvas.text(GUTTER - 8, HEADER - 6, "byte", size=10, anchor="end", opacity=QUIET)
    for sector in range(LINE // SECTOR_BYTES):
        canvas.text(GUTTER + wide * sector + 2, HEADER - 6, f"+{SECTOR_BYTES * sector}", size=10, opacity=QUIET)
    label_rows(canvas, rows, GUTTER - 8, [f"{LINE * line:,}" for line in shown.tolist()], mono=True)
    inside = np.repeat(moved, SECTOR_BYTES // unit, axis=1)
    index = np.where(owner >= 0, lane_colours(owner), np.where(inside, -1, -2))
    boxes = BoxGrid(columns.edge, rows.edge, cell, ROW)
    canvas.cells(boxes, index, LANES)
    for row, sector in np.ndindex(moved.shape):
        x, y = GUTTER + wide * sector, float(rows.edge[row])
        if moved[row, sector]:
            canvas.rect(x + 1, y + 1.5, wide - 2, ROW - 3, stroke=ACCENT, stroke_width=2)
        else:
            canvas.rect(x + 1, y + 1.5, wide - 2, ROW - 3, stroke=INK, stroke_width=0.6, opacity=0.3)
    _names(canvas, owner, columns.edge, rows.edge, cell, access.nbytes // unit)
    words = [
        f"byte {LINE * line + unit * c}\n" + _who(o, n, m)
        for line, os, ns, ms in zip(shown.tolist(), owner.tolist(), readers.tolist(), inside.tolist(), strict=True)
        for c, (o, n, m) in enumerate(zip(os, ns, ms, strict=True))
    ]
    canvas.hover(boxes, "%s", np.array(words, object).reshape(owner.shape))
    mark_gaps(canvas, columns, rows, what="line")
    entries = [("none", ACCENT, "a sector that moves")]
    entries += [(HATCH, "", "moves, but no lane asks for it")] if (inside & (owner < 0)).any() else []
    y = keys(canvas, GUTTER, rows.end + 14, entries) + 4
    for sentence in access.explain().splitlines()[1:]:
        for text in wrap(sentence, WIDTH, 11):
            y += 16
            canvas.text(0, y, text, size=11)
    return canvas.picture(title or access.headline(), caption or _caption(access.nbytes))


def _names(canvas: Canvas, owner: Any, left: Any, top: Any, cell: float, most: int) -> None:
    """The lane's name over its bytes, where it fits."""
    xs, ys, texts, behind = [], [], [], []
    for row, line in enumerate(owner.tolist()):
        column = 0
        while column < len(line):
            lane, run = line[column], 1
            while column + run < len(line) and line[column + run] == lane and run < most:
                run += 1
            name = f"T{lane}"
            if lane >= 0 and cell * run >= text_width(name, 9.5, mono=True) + 3:
                xs.append(float(left[column]) + cell * run / 2)
                ys.append(float(top[row]) + 15.5)
                texts.append(name)
                behind.append(LANES[lane // 4 % len(LANES)])
            column += run
    canvas.labels(xs, ys, texts, behind, size=9.5)


def _who(lane: int, readers: int, moved: bool) -> str:
    if lane < 0:
        return "moves with its sector, nobody asks for it" if moved else "does not move"
    return f"lane {lane}" + (f" and {readers - 1} more" if readers > 1 else "")


def _caption(nbytes: int) -> str:
    return (
        f"Global memory; each lane T asks for {nbytes} byte{'s' * (nbytes != 1)}. A sector of 32 bytes moves whole if "
        "any of its bytes is asked for. One hue: four neighbouring lanes."
    )
