"""A matrix in registers: every element names the thread and the register that hold it, runs of registers as one box."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .axis import GAP, WIDTH, Axis, axis_of, some
from .palette import LANES, lane_colours
from .svg import BoxGrid, Canvas
from .text import text_width


@dataclass(frozen=True)
class Fragment:
    """Holder of each element: ``lane`` and ``register`` [rows, columns], -1 for nobody.

    name        of a register: ``a`` gives ``a3``
    registers   of a lane; 0 where the operand is in shared memory
    warp        threads of a warp where warps are to be outlined, else 0"""

    name: str
    lane: npt.NDArray[np.int64]
    register: npt.NDArray[np.int64]
    registers: int
    warp: int = 0

    def part(self, rows: Axis, columns: Axis) -> Fragment:
        """The elements that are shown."""
        return self.at(rows.index, columns.index)

    def at(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Fragment:
        """The elements of some rows and columns."""
        shown = np.ix_(rows, columns)
        return Fragment(self.name, self.lane[shown], self.register[shown], self.registers, self.warp)


def draw_fragment(
    canvas: Canvas, part: Fragment, columns: Axis, rows: Axis, lane: int | None = None, *, words: str,
    values: tuple[npt.NDArray[np.int64], ...] = (),
) -> None:
    """The cells, boxes, names and hover titles of ``part``, which is shown at ``rows`` and ``columns``; the elements of
    ``lane`` stand out.

    words    a %-format of row, column, lane, register and the ``values`` [shown rows, shown columns]"""
    number = _boxes(part, rows, columns)
    colour = lane_colours(part.lane)
    boxes, dim = BoxGrid(columns.edge, rows.edge, columns.cell, rows.cell), lane is not None
    canvas.cells(boxes, colour, LANES, opacity=0.25 if dim else None, rules=False)
    if dim:
        mine = np.where(part.lane == lane, colour, -2)
        canvas.cells(boxes, mine, LANES, rules=False)
    canvas.borders(boxes, number, stroke_width=0.6, opacity=0.35)
    if part.warp and part.lane.max() >= part.warp:
        canvas.outlines(boxes, part.lane // part.warp)
    _names(canvas, part, number, columns, rows, lane, colour)
    canvas.hover(boxes, words, rows.index[:, None], columns.index[None, :], part.lane, part.register, *values)


def fragment_axes(
    sample: Fragment, shape: tuple[int, int],
    subject: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None, *, gutter: float, header: float,
    head: int = 16,
) -> tuple[Axis, Axis]:
    """Columns and rows of a fragment of ``shape``, wide enough for the names of its boxes; what is too large folds.

    sample     some of it: how long the boxes are, and which way they go
    subject    the rows and the columns that the picture is about
    head       rows from the first one on that a folded picture shows"""
    flat, run = _runs(sample)
    who = text_width(f"T{sample.lane.max()}", 9.5, mono=True)
    least = max(4.0, (who + 3.5) / run) if flat else who + 3
    room = WIDTH - gutter
    about = (None, None) if subject is None else subject
    fit = min(72, int((room - 2 * GAP) // least))
    all_fit = shape[1] <= 128 and np.floor(4 * room / shape[1]) / 4 >= least
    wide = some(shape[1], shape[1] if all_fit else fit, fit - 3, 2, subject=about[1], most=fit - 6)
    gaps = int(np.count_nonzero(np.diff(wide, prepend=-1) > 1))
    cell = min(46.0, np.floor(4 * (room - GAP * gaps) / len(wide)) / 4)
    tall = some(shape[0], 32, head, 1, subject=about[0], most=head)
    return axis_of(wide, cell, gutter), axis_of(tall, row_height(sample, cell), header)


def row_height(part: Fragment, cell: float, least: float = 14.0) -> float:
    """Height of a row of ``part``, at ``least`` so much, so that the names of its boxes, of columns ``cell`` wide, have
    room."""
    flat, run = _runs(part)
    if not flat:
        return max(least, 26.0 if run == 1 else 36.0 / run)
    return 18.0 if cell * run >= _name_width(part) else 26.0


def _names(
    canvas: Canvas, part: Fragment, number: npt.NDArray[np.int64], columns: Axis, rows: Axis, lane: int | None,
    colour: npt.NDArray[np.int64],
) -> None:
    """``T5 a2–3`` in every box where it fits; the boxes of ``lane`` are outlined."""
    cell, height = columns.cell, rows.cell
    xs, ys, texts, behind, outlines = [], [], [], [], []
    _, first, counts = np.unique(number, return_index=True, return_counts=True)
    digits = len(str(part.registers - 1))
    most = (len(f"T{part.lane.max()}"), 1 + digits if counts.max() == 1 else 2 + 2 * digits, 1 + digits)
    for at, count in zip(first.tolist(), counts.tolist(), strict=True):
        row, column = divmod(at, part.lane.shape[1])
        down = row + 1 < part.lane.shape[0] and number[row + 1, column] == number[row, column]
        x, y = float(columns.edge[column]), float(rows.edge[row])
        wide, high = (cell, height * count) if down else (cell * count, height)
        who, low = int(part.lane[row, column]), int(part.register[row, column])
        span = f"{part.name}{low}" if count == 1 else f"{part.name}{low}–{low + count - 1}"
        lines = _lines(f"T{who}", span, wide, high, most) if who >= 0 else []
        xs += [x + wide / 2] * len(lines)
        ys += [y + high / 2 + 3.4 + 11 * (i - (len(lines) - 1) / 2) for i in range(len(lines))]
        texts += lines
        behind += [LANES[colour[row, column]] if lane is None or who == lane else None] * len(lines)
        if lane is not None and who == lane:
            outlines.append((x, y, wide, high))
    canvas.labels(xs, ys, texts, behind, size=9.5)
    for box in outlines:
        canvas.look_here(*box, 2.5)


def _joined(part: Fragment) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Tells whether an element and the next one, along a row and down a column, are of one lane in consecutive
    registers."""
    lane, register = part.lane, part.register
    along = (lane[:, 1:] == lane[:, :-1]) & (register[:, 1:] == register[:, :-1] + 1)
    return along, (lane[1:] == lane[:-1]) & (register[1:] == register[:-1] + 1)


def _runs(part: Fragment) -> tuple[bool, int]:
    """Tells whether the boxes lie along the rows, and how many elements one has."""
    along, down = _joined(part)
    flat = bool(along.sum() >= down.sum())
    size = part.lane.size
    return flat, max(1, round(size / max(1, size - int((along if flat else down).sum()))))


def _name_width(part: Fragment) -> float:
    """Width of the longest name of a box, with air."""
    return text_width(f"T{part.lane.max()} {part.name}–{2 * (part.registers - 1)}", 9.5, mono=True) + 6


def _boxes(part: Fragment, rows: Axis, columns: Axis) -> npt.NDArray[np.int64]:
    """[rows, columns] number of the run of consecutive registers of one lane that each shown element belongs to."""
    along_row, along_column = _joined(part)
    flip = along_column.sum() > along_row.sum()
    joined, index = (along_column.T, rows.index) if flip else (along_row, columns.index)
    joined = joined & (np.diff(index) == 1)
    starts = np.ones((joined.shape[0], joined.shape[1] + 1), bool)
    starts[:, 1:] = ~joined
    number = (np.cumsum(starts) - 1).reshape(starts.shape)
    return np.asarray(number.T if flip else number, np.int64)


def _lines(who: str, span: str, width: float, height: float, most: tuple[int, int, int]) -> list[str]:
    """The name in the box, in one to three lines, only what fits; decided by the longest names, for all boxes alike:
    ``most`` characters of who, of the whole span, and of one of its ends."""

    def fits(length: int, air: float) -> bool:
        return text_width("0" * length, 9.5, mono=True) + air <= width

    if fits(most[0] + most[1] + 1, 6):
        return [f"{who} {span}"]
    if height >= 24 and fits(max(most), 3):
        return [who, span]
    if height >= 36 and fits(max(most[0], most[2]), 2.5) and "–" in span:
        return [who, span[: span.index("–")], span[span.index("–") :]]
    return [who] if fits(most[0], 3) else []
