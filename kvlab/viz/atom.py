"""An MMA atom: A left, B on top, C in the corner; every element names the lane and the register that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlab.hardware import get_arch

from .pen.axis import QUIET, WIDTH, Axis, axis, axis_of, label_columns, label_rows, mark_gaps
from .pen.fragment import Fragment, draw_fragment, row_height
from .pen.palette import INK
from .pen.picture import Picture
from .pen.svg import Canvas
from .pen.text import wrap

if TYPE_CHECKING:
    from kvlab.hardware import MmaAtom

GUTTER = 26.0
HEADER = 34.0
APART = 30.0
NAMES = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}


def draw_atom(
    atom: MmaAtom, *, lane: int | None = None, title: str | None = None, caption: str | None = None
) -> Picture:
    """The three operands of one MMA instruction, in the places of a matrix product.

    atom    a :class:`kvlab.hardware.MmaAtom`: ``name``, ``shape`` (M, N, K), ``warp_size`` and the maps ``a, b, c``
            from (lane, register) to (row, column); None for an operand that stays in shared memory
    lane    the one lane to look at (of a warpgroup: the thread, 0 to 127): its elements are outlined, the others lie
            back

    Consecutive elements of a lane that lie side by side are one box: ``T5 a2–3`` means elements 2 and 3 of A's fragment
    of lane 5, which are in bf16 the two halves of one 32-bit register. Large operands fold. Raises ValueError for a
    lane that the atom does not have.

    >>> from kvlab.hardware import get_atom
    >>> draw_atom(get_atom("mma.sync.m16n8k16.bf16"), lane=5).title
    'mma.sync.m16n8k16.bf16: lane 5 holds 8 elements of A, 4 of B, 4 of C'
    >>> draw_atom(get_atom("wgmma.m64n16k16.bf16"), lane=37).title
    'wgmma.m64n16k16.bf16: lane 5 of warp 1 (thread 37) holds 8 elements of A, 8 of C'
    """
    if lane is not None and not 0 <= lane < atom.warp_size:
        raise ValueError(f"lane is {lane}: must be a lane of {atom.name}, 0..{atom.warp_size - 1}")
    m, n, k = atom.shape
    a, b, c = (_of(atom, name, extent, lane) for name, extent in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))))

    wide_k, wide_n = _widths(a, k, n)
    of_b = row_height(b, wide_n, 9.0 if k <= 40 else 14.0) if b.registers else 8.0
    of_c = max(row_height(part, wide) for part, wide in ((a, wide_k), (c, wide_n)) if part.registers)
    if min(wide_k, wide_n) < 26:  # too narrow for a name of two lines
        of_b, of_c = min(of_b, 18.0), min(of_c, 18.0)
    if m > 16 and of_c == 18:
        of_c = 15.0
    depth = axis(k, wide_k, GUTTER, limit=40, head=32, tail=8)
    right = axis(n, wide_n, depth.end + APART + GUTTER, limit=32, head=24, tail=8)
    top = axis(k, of_b, HEADER, limit=40, head=32, tail=8)
    rows_shown = np.arange(m) if m <= 32 else np.unique(np.r_[:16, np.nonzero(c.lane == lane)[0], m - 8 : m])
    below = axis_of(rows_shown, of_c, top.end + APART + HEADER - 10)
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
            part = operand.part(rows, columns)
            words, values = _hover(atom, part)
            draw_fragment(canvas, part, columns, rows, lane, words=words, values=values)
            mark_gaps(canvas, columns, rows)
        else:
            _in_shared_memory(canvas, columns, rows)
    _words(canvas, atom, (a, b, c), depth.end - 10)
    return canvas.picture(title or _title(atom, (a, b, c), lane), caption or _caption(atom, lane))


def _of(atom: Any, name: str, extent: tuple[int, int], first: int | None) -> Fragment:
    """Names lane ``first`` of several that hold an element, or else the lowest."""
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
    return Fragment(name, held[0], held[1], registers, _warp(atom))


def _warp(atom: Any) -> int:
    """Lanes of a warp, where the instruction is one of several: of a warpgroup; else 0."""
    if not hasattr(atom, "arch"):
        return 0
    lanes = get_arch(atom.arch).warp_size
    return lanes if atom.warp_size > lanes else 0


def _each(atom: Any, operand: Fragment) -> int:
    """Elements in a 32-bit register."""
    return max(1, 4 // atom.dtype_of(operand.name).itemsize) if hasattr(atom, "dtype_of") else 1


def _hover(atom: Any, operand: Fragment) -> tuple[str, tuple[npt.NDArray[np.int64], ...]]:
    """A %-format of row, column, lane, element and the values with it."""
    down, across = NAMES[operand.name]
    words, values = f"{operand.name.upper()}[{down} %d, {across} %d]\n", []
    words += "thread %d" if operand.warp else "lane %d"
    words += f", element {operand.name}%d"
    if operand.warp:
        words += "\nwarp %d, lane %d"
        values += [operand.lane // operand.warp, operand.lane % operand.warp]
    each = _each(atom, operand)
    if each > 1:
        words += f"\n{_PART[each]} %d of 32-bit register %d"
        values += [operand.register % each, operand.register // each]
    return words, tuple(values)


_PART = {2: "half", 4: "byte"}


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
    held = ", ".join(f"{o.name.upper()} {o.registers}{_packed(atom, o)}" for o in operands if o.registers)
    lines = [
        f"{atom.warp_size} {'threads; elements of each' if _warp(atom) else 'lanes; elements of each'}: {held}",
        "one hue: a quad, four neighbouring lanes",
        *(["thick outline: a warp"] if _warp(atom) else []),
    ]
    canvas.text(0, HEADER, f"C[{m},{n}] += A[{m},{k}] B[{k},{n}]", size=11, mono=True)
    y = HEADER + 6
    for paragraph in lines:
        for line in wrap(paragraph, max(room, 120.0), 11):
            y += 15
            canvas.text(0, y, line, size=11, opacity=0.75)


def _packed(atom: Any, operand: Fragment) -> str:
    """In words: how many registers the elements take, where that is another number."""
    each = _each(atom, operand)
    return f" in {-(-operand.registers // each)} registers" if each > 1 else ""


def _title(atom: Any, operands: tuple[Fragment, ...], lane: int | None) -> str:
    held = [o for o in operands if o.registers]
    parts = [f"{o.registers}{_elements(o) if o is held[0] else ''} of {o.name.upper()}" for o in held]
    warp = _warp(atom)
    who = "each thread" if warp else "each lane"
    if lane is not None:
        who = f"lane {lane % warp} of warp {lane // warp} (thread {lane})" if warp else f"lane {lane}"
    return f"{atom.name}: {who} holds {', '.join(parts)}"


def _elements(operand: Fragment) -> str:
    return " element" if operand.registers == 1 else " elements"


def _caption(atom: Any, lane: int | None) -> str:
    who = "thread" if _warp(atom) else "lane"
    text = "A at the left, B on top, C in the corner, as in the product. A box names a "
    text += f"{who} and which of its elements of the operand it holds."
    return text if lane is None else f"{text} Outlined: what {who} {lane} holds."
