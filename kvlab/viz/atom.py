"""An MMA atom: A left, B on top, C in the corner; every element names the lane and the register that hold it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .axis import QUIET, WIDTH, Axis, axis, axis_of, label_columns, label_rows, mark_gaps
from .fragment import Fragment, draw_fragment
from .palette import INK
from .picture import Picture
from .svg import Canvas
from .text import wrap

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
    a, b, c = (_of(atom, name, extent, lane) for name, extent in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))))

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
            draw_fragment(canvas, operand, columns, rows, lane, words=_hover(operand))
            mark_gaps(canvas, columns, rows)
        else:
            _in_shared_memory(canvas, columns, rows)
    _words(canvas, atom, (a, b, c), depth.end - 10)
    return canvas.picture(title or _title(atom, (a, b, c), lane), caption or _caption(lane))


def _of(atom: Any, name: str, extent: tuple[int, int], first: int | None) -> Fragment:
    """Where several lanes hold an element, lane ``first`` or else the lowest is named."""
    held = np.full((2, *extent), -1, np.int64)
    to_element = getattr(atom, name)
    if to_element is None:
        return Fragment(name, held[0], held[1], 0)
    registers = int(getattr(atom, f"regs_{name}"))
    order = np.arange(atom.warp_size)[::-1]
    if first is not None:
        order = np.append(order, first)
    lane, register = np.meshgrid(order, np.arange(registers), indexing="ij")
    row, column = to_element(lane, register)
    for where, value in zip(held, (lane, register), strict=True):
        where[row.ravel(), column.ravel()] = value.ravel()
    return Fragment(name, held[0], held[1], registers, 32 if atom.warp_size > 64 else 0)


def _hover(operand: Fragment) -> str:
    down, across = NAMES[operand.name]
    return f"{operand.name.upper()}[{down} %d, {across} %d]\nlane %d, register {operand.name}%d"


def _widths(a: Fragment, k: int, n: int) -> tuple[float, float]:
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


def _words(canvas: Canvas, atom: Any, operands: tuple[Fragment, ...], room: float) -> None:
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


def _title(atom: Any, operands: tuple[Fragment, ...], lane: int | None) -> str:
    held = [o for o in operands if o.registers]
    parts = [f"{o.registers}{_elements(o) if o is held[0] else ''} of {o.name.upper()}" for o in held]
    return f"{atom.name}: {'each lane' if lane is None else f'lane {lane}'} holds {', '.join(parts)}"


def _elements(operand: Fragment) -> str:
    return " element" if operand.registers == 1 else " elements"


def _caption(lane: int | None) -> str:
    text = "A at the left, B on top, C in the corner, as in the product. A box names a lane and its registers."
    return text if lane is None else f"{text} Outlined: what lane {lane} holds."
