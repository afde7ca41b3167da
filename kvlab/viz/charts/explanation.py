"""The plan of a call: who runs it and why, its sizes, and its grid of programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.palette import BANKS
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas
from kvlab.viz.pen.text import text_width, wrap

from .schedule import draw_schedule

ROW, CELL, MOST = 18.0, 11.0, (32, 16)
GRID = 470.0


def draw_explanation(plan: Any, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Draws what :func:`kvlab.attention.explain` found: sizes of the configuration, the grid of programs, the schedule
    where there is one.

    plan    a :class:`kvlab.attention.Explanation`

    >>> from kvlab.attention import Explanation
    >>> draw_explanation(Explanation("merge_states", "emulator", "NumPy arrays", None, (4, 8))).title
    'merge_states runs in the emulator (NumPy arrays): 4 x 8 programs'
    """
    canvas = Canvas()
    fields = [("reason", plan.reason), *([("machine", plan.arch)] if plan.arch else [])]
    if dataclasses.is_dataclass(plan.config):
        fields += [(one.name, repr(getattr(plan.config, one.name))) for one in dataclasses.fields(plan.config)]
    left, y = max(text_width(name, 11) for name, _ in fields) + 18, 0.0
    for name, value in fields:
        canvas.text(0, y + 12, name, size=11, opacity=QUIET)
        for line in wrap(value, GRID - left - 20, 11):
            canvas.text(left, y + 12, line, size=11)
            y += ROW
    down = _grid(canvas, plan.grid)
    y = max(y, down)
    if plan.schedule is not None and len(plan.schedule.units):
        shared = draw_schedule(plan.schedule)
        canvas.embed(shared, 0, y + 16)
        y += 16 + shared.extent[1]
    canvas.extend(WIDTH, y)
    return canvas.picture(title or _title(plan), caption or _CAPTION)


_CAPTION = "Left: the sizes that were chosen for these arguments. Right: the programs of the launch. Nothing has run."


def _grid(canvas: Canvas, grid: tuple[int, ...]) -> float:
    """Programs as cells: the last axis across, the others down; where they end."""
    across, down = grid[-1], 1
    for size in grid[:-1]:
        down *= size
    if len(grid) == 1:
        across, down = min(grid[0], MOST[0]), -(-grid[0] // MOST[0])
    canvas.text(GRID, 12, "grid: " + " x ".join(f"{size:,}" for size in grid) + " programs", size=11, weight=600)
    shown = min(across, MOST[0]), min(down, MOST[1])
    for row in range(shown[1]):
        for column in range(shown[0]):
            number = row * across + column
            if len(grid) == 1 and number >= grid[0]:
                break
            x, y, side = GRID + CELL * column, 22 + CELL * row, CELL - 2
            canvas.rect(x, y, side, side, fill=BANKS[29], title=f"program {number}")
    y = 22 + CELL * shown[1]
    if shown != (across, down):
        canvas.text(GRID, y + 12, f"the first {shown[1]} x {shown[0]} are shown", size=LABEL, opacity=QUIET)
        y += 16
    return y


def _title(plan: Any) -> str:
    where = "in the emulator" if plan.backend == "emulator" else f"by the backend {plan.backend}"
    return f"{plan.operation} runs {where} ({plan.reason}): {' x '.join(f'{n:,}' for n in plan.grid)} programs"
