"""An MMA atom: A left, B on top, C in the corner; every element names the lane and the register that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import QUIET, WIDTH, Axis, axis, axis_of, label_columns, label_rows, mark_gaps
from .palette import INK, LANES, lane_colours
from .picture import Picture
from .svg import Canvas
from .text import text_width, wrap

__all__ = ["draw_atom"]

GUTTER = 26.0
HEADER = 34.0
APART = 30.0
NAMES = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}


def draw_atom(atom: Any, *, lane: int | None = None, title: str | None = None, caption: str | None = None) -> Picture:
    """The three operands of one MMA instruction, in the places of a matrix product.

    atom    a :class:`kvlab.hardware.MmaAtom`: ``name``, ``shape`` (M, N, K), ``warp_size`` and the maps ``a, b, c``
            from (lane, register) to (row, column); None for an operand that stays in shared memory
    lane    the one lane to look at: its elements are outlined, the others stand back

    Consecutive registers of a lane that lie side by side are one box: ``T5 a2–3`` means registers 2 and 3 of A's
    fragment of lane 5. Large operands fold. Raises ValueError for a lane that the atom does not have.

    >>> from kvlab.hardware import get_atom
    >>> draw_atom(get_atom("mma.sync.m16n8k16.bf16"), lane=5).title
    'mma.sync.m16n8k16.bf16: lane 5 holds 8 elements of A, 4 of B, 4 of C'
    """
    if lane is not None and not 0 <= lane < atom.warp_size:
        raise ValueError(f"lane {lane} is not a lane of {atom.name}, 0..{atom.warp_size - 1}")
    m, n, k = atom.shape
    a, b, c = (_Operand.of(atom, name, extent, lane) for name, extent in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))))

    wide_k, wide_n = _widths(a, k, n)
    height = 26.0 if min(wide_k, wide_n) >= 26 else 18.0
    depth = axis(k, wide_k, GUTTER, limit=40, head=32, tail=8)
    right = axis(n, wide_n, depth.end + APART + GUTTER, limit=32, head=24, tail=8)
    top = axis(k, height, HEADER, limit=40, head=32, tail=8)
    rows_shown = np.arange(m) if m <= 32 else np.unique(np.r_[:16, np.nonzero(c.lane == lane)[0], m - 8 : m])
    below = axis_of(rows_shown, height, top.end + APART + HEADER - 10)
    canvas = Canvas()
    for operand, columns, rows in ((b, right, top), (a, depth, below), (c, right, below)):
        left, y = float(columns.edge[0]), float(rows.edge[0])
        down, across = NAMES[operand.name]
        extent = f"{operand.lane.shape[0]} x {operand.lane.shape[1]}"
        canvas.text(left, y - 19, operand.name.upper(), size=13, weight=700)
        canvas.text(left + 18, y - 19, f"{down} ↓  {across} →   {extent}", size=10, opacity=QUIET)
        label_columns(canvas, columns, y - 5)
        label_rows(canvas, rows, left - 5)
        if operand.registers:
            _draw(canvas, operand, columns, rows, lane)
            mark_gaps(canvas, columns, rows)
        else:
            _in_shared_memory(canvas, columns, rows)
    _words(canvas, atom, (a, b, c), depth.end - 10)
    return canvas.picture(title or _title(atom, (a, b, c), lane), caption or _caption(lane))


@dataclass(frozen=True)
class _Operand:
    """Who holds each element: lane and register, [rows, columns]; ``registers`` of a lane, 0 in shared memory."""

    name: str
    lane: npt.NDArray[np.int64]
    register: npt.NDArray[np.int64]
    registers: int

    @classmethod
    def of(cls, atom: Any, name: str, extent: tuple[int, int], first: int | None) -> _Operand:
        """Where several lanes hold an element, lane ``first`` or else the lowest is named."""
        held = np.full((2, *extent), -1, np.int64)
        to_element = getattr(atom, name)
        if to_element is None:
            return cls(name, held[0], held[1], 0)
        registers = int(getattr(atom, f"regs_{name}"))
        order = np.arange(atom.warp_size)[::-1]
        if first is not None:
            order = np.append(order, first)
        lane, register = np.meshgrid(order, np.arange(registers), indexing="ij")
        row, column = to_element(lane, register)
        for where, value in zip(held, (lane, register), strict=True):
            where[row.ravel(), column.ravel()] = value.ravel()
        return cls(name, held[0], held[1], registers)

    def part(self, rows: Axis, columns: Axis) -> _Operand:
        """The elements that are shown."""
        shown = np.ix_(rows.index, columns.index)
        return _Operand(self.name, self.lane[shown], self.register[shown], self.registers)


def _boxes(part: _Operand, rows: Axis, columns: Axis) -> npt.NDArray[np.int64]:
    """[rows, columns] number of the run of consecutive registers of one lane that each shown element belongs to."""
    along_row = (part.lane[:, 1:] == part.lane[:, :-1]) & (part.register[:, 1:] == part.register[:, :-1] + 1)
    along_column = (part.lane[1:] == part.lane[:-1]) & (part.register[1:] == part.register[:-1] + 1)
    flip = along_column.sum() > along_row.sum()
    joined, index = (along_column.T, rows.index) if flip else (along_row, columns.index)
    joined = joined & (np.diff(index) == 1)
    starts = np.ones((joined.shape[0], joined.shape[1] + 1), bool)
    starts[:, 1:] = ~joined
    number = (np.cumsum(starts) - 1).reshape(starts.shape)
    return np.asarray(number.T if flip else number, np.int64)


def _draw(canvas: Canvas, operand: _Operand, columns: Axis, rows: Axis, lane: int | None) -> None:
    part = operand.part(rows, columns)
    number = _boxes(part, rows, columns)
    colour = lane_colours(part.lane)
    cell, height, dim = columns.cell, rows.cell, lane is not None
    canvas.cells(columns.edge, rows.edge, cell, height, colour, LANES, opacity=0.4 if dim else None, rules=False)
    if dim:
        mine = np.where(part.lane == lane, colour, -2)
        canvas.cells(columns.edge, rows.edge, cell, height, mine, LANES, rules=False)
    canvas.borders(columns.edge, rows.edge, cell, height, number, stroke_width=0.6, opacity=0.35)
    if operand.lane.max() >= 64:  # a warpgroup: its warps
        canvas.borders(columns.edge, rows.edge, cell, height, part.lane // 32)
    xs, ys, texts, behind, outlines = [], [], [], [], []
    _, first, counts = np.unique(number, return_index=True, return_counts=True)
    digits = len(str(operand.registers - 1))
    most = (len(f"T{part.lane.max()}"), 1 + digits if counts.max() == 1 else 2 + 2 * digits)
    for at, count in zip(first.tolist(), counts.tolist(), strict=True):
        row, column = divmod(at, part.lane.shape[1])
        down = row + 1 < part.lane.shape[0] and number[row + 1, column] == number[row, column]
        x, y = float(columns.edge[column]), float(rows.edge[row])
        wide, high = (cell, height * count) if down else (cell * count, height)
        who, low = int(part.lane[row, column]), int(part.register[row, column])
        span = f"{operand.name}{low}" if count == 1 else f"{operand.name}{low}–{low + count - 1}"
        lines = _lines(f"T{who}", span, wide, high, most)
        xs += [x + wide / 2] * len(lines)
        ys += [y + high / 2 + 3.4 + 11 * (i - (len(lines) - 1) / 2) for i in range(len(lines))]
        texts += lines
        behind += [LANES[colour[row, column]] if not dim or who == lane else None] * len(lines)
        if who == lane:
            outlines.append((x, y, wide, high))
    canvas.labels(xs, ys, texts, behind, size=9.5)
    for box in outlines:
        canvas.look_here(*box, 2.5)
    down_name, across_name = NAMES[operand.name]
    words = f"{operand.name.upper()}[{down_name} %d, {across_name} %d]\nlane %d, register {operand.name}%d"
    canvas.hover(
        columns.edge, rows.edge, cell, height, words,
        rows.index[:, None], columns.index[None, :], part.lane, part.register,
    )  # fmt: skip


def _widths(a: _Operand, k: int, n: int) -> tuple[float, float]:
    """Widths of the columns of A, and of B and C: a run of A's registers has room for its name, the rest is for n."""
    shown_k, shown_n = (k if k <= 40 else 40), (n if n <= 32 else 32)
    room = WIDTH - 2 * GUTTER - APART - 20 * ((k > 40) + (n > 32))
    run = max(1, int(np.argmin(np.append(a.lane[0] == a.lane[0, 0], False))))
    for_n = max((room - shown_k * max(8.0, 64 / run)) / shown_n, room / (shown_k + shown_n))
    wide_n = min(38.0, np.floor(2 * for_n) / 2)
    return min(38.0, np.floor(2 * (room - shown_n * wide_n) / shown_k) / 2), wide_n


def _in_shared_memory(canvas: Canvas, columns: Axis, rows: Axis) -> None:
    """An operand that no register holds."""
    left, top = float(columns.edge[0]), float(rows.edge[0])
    wide, high = columns.end - left, rows.end - top
    canvas.rect(left, top, wide, high, fill=INK, opacity=0.05)
    canvas.rect(left, top, wide, high, stroke=INK, stroke_width=0.8, opacity=0.5)
    lines = wrap("in shared memory: no register holds it", max(wide - 16, 60), 11)
    for i, line in enumerate(lines):
        y = top + high / 2 + 4 + 15 * (i - (len(lines) - 1) / 2)
        canvas.text(left + wide / 2, y, line, size=11, anchor="middle", opacity=0.75)


def _lines(who: str, span: str, width: float, height: float, most: tuple[int, int]) -> list[str]:
    """The name in the box, in one or two lines, only what fits; decided by the longest names, for all boxes alike."""

    def fits(length: int, air: float) -> bool:
        return text_width("0" * length, 9.5, mono=True) + air <= width

    if fits(most[0] + most[1] + 1, 6):
        return [f"{who} {span}"]
    if height >= 24 and fits(max(most), 3):
        return [who, span]
    return [who] if fits(most[0], 3) else []


def _words(canvas: Canvas, atom: Any, operands: tuple[_Operand, ...], room: float) -> None:
    """In the empty corner: what the picture says."""
    m, n, k = atom.shape
    held = ", ".join(f"{o.name.upper()} {o.registers}" for o in operands if o.registers)
    lines = [
        f"{atom.warp_size} lanes; registers of a lane, counted in elements: {held}",
        "one hue: a quad, four neighbouring lanes",
        *(["thick outline: a warp"] if atom.warp_size > 64 else []),
    ]
    canvas.text(0, HEADER, f"C[{m},{n}] += A[{m},{k}] B[{k},{n}]", size=11, mono=True)
    y = HEADER + 6
    for paragraph in lines:
        for line in wrap(paragraph, max(room, 120.0), 11):
            y += 15
            canvas.text(0, y, line, size=11, opacity=0.75)


def _title(atom: Any, operands: tuple[_Operand, ...], lane: int | None) -> str:
    held = [o for o in operands if o.registers]
    parts = [f"{o.registers}{_elements(o) if o is held[0] else ''} of {o.name.upper()}" for o in held]
    return f"{atom.name}: {'each lane' if lane is None else f'lane {lane}'} holds {', '.join(parts)}"


def _elements(operand: _Operand) -> str:
    return " element" if operand.registers == 1 else " elements"


def _caption(lane: int | None) -> str:
    text = "A at the left, B on top, C in the corner, as in the product. A box names a lane and its registers."
    return text if lane is None else f"{text} Outlined: what lane {lane} holds."
