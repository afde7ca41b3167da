"""An axis of equal cells: where each lies, which are shown when there are too many, and its labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .svg import Canvas
from .text import text_width

WIDTH = 852.0
"""Width of the content of a picture that fills a 900-px notebook column."""

GAP = 20.0
LABEL = 10.0
QUIET = 0.75


@dataclass(frozen=True)
class Axis:
    """Cells along one direction.

    index     [shown] which elements are shown
    edge      [shown] where each begins, in px
    cell      px of one cell
    gaps      for each gap its middle in px and how many elements it hides"""

    index: npt.NDArray[np.int64]
    edge: npt.NDArray[np.float64]
    cell: float
    gaps: tuple[tuple[float, int], ...] = ()

    @property
    def end(self) -> float:
        """End of the last cell."""
        return float(self.edge[-1]) + self.cell

    @property
    def centre(self) -> npt.NDArray[np.float64]:
        """[shown] the middle of each cell."""
        return self.edge + self.cell / 2


def axis(count: int, cell: float, start: float, *, limit: int, head: int, tail: int = 1) -> Axis:
    """``count`` cells from ``start`` on; more than ``limit`` fold to the first ``head``, a gap, the last ``tail``.

    >>> folded = axis(128, 10.0, 0.0, limit=24, head=8)
    >>> folded.index.tolist(), folded.edge[-2:].tolist(), folded.gaps
    ([0, 1, 2, 3, 4, 5, 6, 7, 127], [70.0, 100.0], ((90.0, 119),))
    """
    return axis_of(some(count, limit, head, tail, most=0), cell, start)


def some(
    count: int, limit: int, head: int, tail: int, keep: int | None = None, subject: npt.NDArray[np.int64] | None = None,
    *, most: int,
) -> npt.NDArray[np.int64]:
    """Numbers of the shown ones of ``count``: all up to ``limit``, else the first ``head``, the last ``tail`` and
    ``keep``.

    subject    those that the picture is about, ascending: if they are not all, the first ``most`` of them, the last
               two and their neighbours are shown, and only the ends of the others

    >>> some(100, 24, 8, 1, most=16).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 99]
    >>> some(100, 24, 8, 1, subject=np.arange(60, 80), most=4).tolist()
    [0, 59, 60, 61, 62, 63, 78, 79, 80, 99]
    """
    if count <= max(limit, head + tail):
        return np.arange(count, dtype=np.int64)
    kept = [] if keep is None else [keep]
    if subject is None or not 0 < len(subject) < count:
        kept += [*range(head), *range(count - tail, count)]
    else:
        inside = subject.tolist() if len(subject) <= most + 2 else [*subject[:most].tolist(), *subject[-2:].tolist()]
        kept += [0, *inside, max(inside[0] - 1, 0), min(inside[-1] + 1, count - 1), count - 1]
    return np.unique(np.array(kept, np.int64))


def axis_of(
    index: npt.NDArray[np.int64], cell: float, start: float, *, before: npt.NDArray[np.bool_] | None = None
) -> Axis:
    """The elements ``index``, ascending, with a gap where some are left out, and where ``before`` [shown] asks for one.

    >>> axis_of(np.array([0, 1, 6]), 10.0, 0.0).edge.tolist()
    [0.0, 10.0, 40.0]
    """
    hidden = np.diff(index, prepend=index[:1] - 1) - 1
    wanted = hidden > 0 if before is None else (hidden > 0) | before
    edge = np.asarray(start + cell * np.arange(len(index)) + GAP * np.cumsum(wanted), np.float64)
    gaps = tuple((float(edge[i]) - GAP / 2, int(hidden[i])) for i in np.flatnonzero(hidden > 0))
    return Axis(np.asarray(index, np.int64), edge, cell, gaps)


def _step(along: Axis, room: float) -> int:
    """Label every ``step``-th cell: the smallest power of two that leaves ``room`` px for a label."""
    step = 1
    while step * along.cell < room:
        step *= 2
    return step


def label_columns(canvas: Canvas, columns: Axis, y: float, texts: list[str] | None = None) -> None:
    """Numbers above the columns with baseline ``y``, as many as there is room for."""
    names = texts or [str(i) for i in columns.index.tolist()]
    step = _step(columns, max(text_width(name, LABEL) for name in names) + 6)
    for x, index, name in zip(columns.centre.tolist(), columns.index.tolist(), names, strict=True):
        if index % step == 0:
            canvas.text(x, y, name, size=LABEL, anchor="middle", opacity=QUIET)


def label_rows(canvas: Canvas, rows: Axis, x: float, texts: list[str] | None = None, *, mono: bool = False) -> None:
    """Names left of the rows, ending at ``x``, as many as there is room for."""
    names = texts or [str(i) for i in rows.index.tolist()]
    step = _step(rows, LABEL + 1)
    for y, index, name in zip(rows.centre.tolist(), rows.index.tolist(), names, strict=True):
        if index % step == 0 or rows.gaps:
            canvas.text(x, y + 3.5, name, size=LABEL, anchor="end", opacity=QUIET, mono=mono)


def mark_gaps(canvas: Canvas, columns: Axis, rows: Axis, *, what: str = "row") -> None:
    """Dots in the gaps of a folded grid, with how much is left out."""
    middle = (float(columns.edge[0]) + columns.end) / 2
    for y, hidden in rows.gaps:
        canvas.text(
            middle, y + 3.5, f"⋮  {hidden} more {what}{'s' if hidden > 1 else ''}", size=LABEL, anchor="middle",
            opacity=QUIET,
        )
    for x, _ in columns.gaps:
        canvas.text(x, (float(rows.edge[0]) + rows.end) / 2 + 3.5, "⋯", size=13, anchor="middle", opacity=QUIET)


def period(pattern: npt.NDArray[np.int64], limit: int = 32) -> int | None:
    """The smallest number of rows after which ``pattern`` [rows, columns] repeats, if it does so at least once.

    >>> period(np.array([[0, 1], [1, 0], [0, 1], [1, 0]]))
    2
    """
    for length in range(1, min(limit, len(pattern) // 2) + 1):
        if np.array_equal(pattern[length:], pattern[:-length]):
            return length
    return None


def bracket(canvas: Canvas, x: float, y0: float, y1: float, text: str) -> None:
    """A bracket at the right of rows ``y0 .. y1`` with a few words."""
    canvas.path(f"M{x:g} {y0 + 1:g}h5V{y1 - 1:g}h-5", stroke="currentColor", stroke_width=1.0, opacity=QUIET)
    for k, word in enumerate(text.splitlines()):
        canvas.text(x + 10, (y0 + y1) / 2 + 3.5 + 13 * k, word, size=LABEL, opacity=QUIET)
