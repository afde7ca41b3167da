"""An audit of a paged cache: which slots hold tokens, and where something is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..pen.axis import QUIET
from ..pen.legend import keys
from ..pen.palette import ALARM, LANES
from ..pen.picture import Picture
from ..pen.svg import HATCH, BoxGrid, Canvas
from ..pen.text import wrap

if TYPE_CHECKING:
    from kvlab.formats import Audit

LEFT, TOP, CELL, ROW = 64.0, 22.0, 12.0, 14.0
SLOTS, PAGES, LINES = 64, 40, 8
COLOURS = (LANES[4], LANES[1], ALARM, ALARM)
HELD, SHARED, FLAWED = 0, 1, 2


def draw_audit(found: Audit, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Pages down, slots across: what holds a token, pages of several owners, slots with a flaw; below, the first flaws.

    found    what :func:`kvlab.formats.audit` gives

    At most 40 pages and 64 slots are shown: the pages with flaws first among them.

    >>> from kvlab.formats import audit
    >>> pages = np.ones((4, 2, 1, 8), np.float16)
    >>> draw_audit(audit(pages, [[1, 1]], [3])).title
    '1 flaw: owners 1'
    """
    canvas = Canvas()
    pages, slots = found.used.shape
    flawed = np.array([flaw.index["page"] for flaw in found.flaws if "page" in flaw.index], np.int64)
    first = np.unique(flawed)[:PAGES]
    rest = np.setdiff1d(np.arange(min(pages, PAGES + first.size)), first)[: PAGES - first.size]
    shown = np.sort(np.concatenate([first, rest]))
    width = min(slots, SLOTS)
    colour = np.where(found.used[shown, :width], np.where(found.owners[shown] > 1, SHARED, HELD)[:, None], -1)
    told = np.where(colour < 0, "holds no token", "holds a token").astype(object)
    for flaw in found.flaws:
        row = np.flatnonzero(shown == flaw.index.get("page", -1))
        if row.size and flaw.index.get("slot", width) < width:
            colour[row[0], flaw.index["slot"]] = FLAWED
            told[row[0], flaw.index["slot"]] = str(flaw)
    xs, ys = LEFT + CELL * np.arange(width), TOP + ROW * np.arange(shown.size)
    boxes = BoxGrid(xs, ys, CELL, ROW)
    canvas.cells(boxes, colour, list(COLOURS))
    canvas.hover(boxes, "page %s, slot %s: %s", shown[:, None], np.arange(width), told)
    canvas.text(LEFT, TOP - 8, f"slots of a page, {width} of {slots} →", size=10, opacity=QUIET)
    for y, page in zip(ys.tolist(), shown.tolist(), strict=True):
        canvas.text(LEFT - 6, y + 11, f"page {page}", size=10, anchor="end", opacity=QUIET)
    entries = [(COLOURS[HELD], "", "token"), (COLOURS[SHARED], "", "token of a page with several owners"),
               (COLOURS[FLAWED], "", "flaw"), (HATCH, "", "no token")]
    y = keys(canvas, LEFT, float(ys[-1]) + ROW + 10, entries) + 6
    flaws = sum(found.counts.values())
    for flaw in found.flaws[:LINES]:
        for line in wrap(str(flaw), 780, 11):
            y += 14
            canvas.text(LEFT, y, line, size=11)
    if len(found.flaws) > LINES:
        canvas.text(LEFT, y + 14, f"and {flaws - LINES} more", size=11, opacity=QUIET)
    said = ", ".join(f"{kind} {number}" for kind, number in found.counts.items())
    held = f"{int(found.used.sum())} of {found.used.size} slots hold tokens"
    return canvas.picture(
        title or (f"{flaws} flaw{'s' * (flaws != 1)}: {said}" if said else f"Nothing is wrong: {held}"),
        caption or f"{shown.size} of {pages} pages, a line each; {held}.",
    )
