"""The picture of a replay: errors of all sides, where the first result that differs is off, and the lockstep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.common.checks import require
from kvlab.viz import Canvas, Picture, draw, draw_errors
from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.palette import ALARM, INK

if TYPE_CHECKING:
    from kvlab.replay.replaying import Comparison, Replay

MOST_ROWS, MOST_COLUMNS, TALLEST, LEFT, APART = 48, 96, 14.0, 150.0, 28.0


def draw_replay(found: Replay, lockstep: bool = True) -> Picture:
    """The picture of what :func:`kvlab.replay.replay` found. ValueError where two sides did not run."""
    parts: list[Picture] = []
    if found.comparisons:
        sides = dict.fromkeys(one.side for one in found.comparisons)
        errors = {side: [(one.error, one.allowed) for one in found.comparisons if one.side == side] for side in sides}
        parts.append(draw_errors(errors))
    bad = next((one for one in found.comparisons if not one.ok and one.shares is not None), None)
    if bad is not None:
        parts.append(draw_where(bad))
    if lockstep and found.lockstep is not None:
        parts.append(draw(found.lockstep))
    require(parts, f"{found.recorded.source} was compared with nothing", "a call of which two sides ran")
    canvas, y = Canvas(), 0.0
    for part in parts:
        canvas.embed(part, 0, y)
        y += part.extent[1] + APART
    captions = [part.caption for part in parts]
    return canvas.picture(f"{found.recorded.source}: {found.finding}", " ".join(captions))


def draw_where(one: Comparison) -> Picture:
    """A map of one result: the last axis from left to right, all others from top to bottom; red where it is off."""
    shares = np.asarray(one.shares)
    cells, rows, columns = _most(shares)
    canvas = Canvas()
    width = (WIDTH - LEFT) / len(columns)
    height = min(TALLEST, max(2.0, 3 * width))
    canvas.text(0, 12, f"{one.name}, {one.side}", size=12)
    canvas.rect(LEFT, 0, WIDTH - LEFT, height * len(rows), stroke=INK, stroke_width=0.5)
    for i, j in np.argwhere(~(cells <= 1)):
        share = float(cells[i, j])
        opacity = 1.0 if not math.isfinite(share) else min(1.0, 0.35 + 0.2 * math.log10(share))
        canvas.rect(
            LEFT + width * j, height * i, width, height, fill=ALARM, opacity=opacity,
            title=f"row {rows[i]}, column {columns[j]}: {share:.3g} times what is allowed",
        )
    bottom = height * len(rows)
    canvas.text(LEFT - 6, 10, "row 0", size=LABEL, anchor="end", opacity=QUIET)
    if bottom > 2 * 12:
        canvas.text(LEFT - 6, bottom, f"row {len(shares) - 1}", size=LABEL, anchor="end", opacity=QUIET)
    canvas.text(LEFT, bottom + 12, "column 0", size=LABEL, opacity=QUIET)
    canvas.text(WIDTH, bottom + 12, f"column {shares.shape[1] - 1}", size=LABEL, anchor="end", opacity=QUIET)
    canvas.extend(WIDTH, bottom + 14)
    off = int((~(shares <= 1)).sum())
    title = f"{one.name} of the {one.side} side: {off} of {shares.size} elements are off"
    return canvas.picture(title, "Red: where the first result that differs is off, the last axis from left to right.")


def _most(shares: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """The largest of each block of rows and columns, and where the blocks begin.

    >>> cells, rows, columns = _most(np.arange(4.0 * 960).reshape(4, 960))
    >>> cells.shape, columns[:3].tolist(), float(cells[0, 0])
    ((4, 96), [0, 10, 20], 9.0)
    """
    starts = [np.linspace(0, n, min(n, most) + 1).astype(int)[:-1] for n, most in
              zip(shares.shape, (MOST_ROWS, MOST_COLUMNS), strict=True)]
    cells = np.maximum.reduceat(np.maximum.reduceat(shares, starts[0], axis=0), starts[1], axis=1)
    return cells, *starts
