"""The path of a byte: page table, page, tile, shared memory, fragment, MMA in one strip, the byte marked in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from kvlab.common.drawn import Drawn

from .pen.axis import QUIET
from .pen.palette import ACCENT, BANKS, INK, LANES, PAPER, lane_colours
from .pen.picture import Picture
from .pen.svg import BoxGrid, Canvas
from .pen.text import text_width, wrap

PANEL, HIGH, APART = 123.0, 152.0, 22.8
TOP = 24.0

Stage: TypeAlias = "Callable[[Canvas, BytePath, float], tuple[float, float]]"
"""Draws a stage with its left edge at x; returns the middle of the mark."""


@dataclass(frozen=True)
class BytePath(Drawn):
    """Places of one element of a K or V cache at every stage of its way into a matrix instruction.

    name                  what is followed: ``"K"``, ``"V"``
    sequence, token, head, element    which element: position in the sequence, KV head, index along the depth
    element_bytes         of the storage dtype
    page_table            the sequence's row of the page table: physical page of each logical page
    page_size, depth      tokens of a page, elements of a token of one head
    dram_byte             byte address of the element in the pool
    tile, tile_at         rows and columns of the tile; (row, column) of the element in it
    shared_byte, plain_byte    byte address in shared memory, with the swizzle and as it would be without
    warp, lane, register  who holds it, as which of the ``registers`` elements of the operand that a lane has; ``lanes``
                          of a warp
    packed                elements in one 32-bit register
    atom, shape, operand  name of the MMA atom, its (M, N, K), and whether the element is in ``"a"`` or ``"b"``
    operand_at            (row, column) of the element in the operand
    banks                 of shared memory: 32, or 64 on gfx950

    Raises ValueError for numbers that contradict each other."""

    name: str
    sequence: int
    token: int
    head: int
    element: int
    element_bytes: int
    page_table: tuple[int, ...]
    page_size: int
    depth: int
    dram_byte: int
    tile: tuple[int, int]
    tile_at: tuple[int, int]
    shared_byte: int
    plain_byte: int
    warp: int
    lane: int
    register: int
    lanes: int
    registers: int
    atom: str
    shape: tuple[int, int, int]
    operand: str
    operand_at: tuple[int, int]
    banks: int = 32
    packed: int = 1

    def __post_init__(self) -> None:
        if self.operand not in ("a", "b"):
            raise ValueError(f"operand is {self.operand!r}: must be 'a' or 'b'")
        for what, value, limit in (
            ("token", self.token, len(self.page_table) * self.page_size),
            ("element", self.element, self.depth),
            ("tile_at[0]", self.tile_at[0], self.tile[0]),
            ("tile_at[1]", self.tile_at[1], self.tile[1]),
            ("lane", self.lane, self.lanes),
            ("register", self.register, self.registers),
            ("operand_at[0]", self.operand_at[0], self.extent[0]),
            ("operand_at[1]", self.operand_at[1], self.extent[1]),
        ):
            if not 0 <= value < limit:
                raise ValueError(f"{what} is {value}: must be in 0..{limit - 1}")

    @property
    def logical_page(self) -> int:
        """Number of the sequence's page that holds the token."""
        return self.token // self.page_size

    @property
    def page(self) -> int:
        """The physical page."""
        return self.page_table[self.logical_page]

    @property
    def slot(self) -> int:
        """The token's place in the page."""
        return self.token % self.page_size

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the operand."""
        m, n, k = self.shape
        return (m, k) if self.operand == "a" else (k, n)


def draw_path_of_a_byte(path: Any, *, title: str | None = None, caption: str | None = None) -> Picture:
    """The six stages of :class:`BytePath` side by side; the accent marks the same byte in each, a line joins them. Of
    a :class:`ByteScroll`, those of its path.

    >>> path = BytePath(
    ...     name="K", sequence=0, token=17, head=0, element=3, element_bytes=2, page_table=(4, 2), page_size=16,
    ...     depth=64, dram_byte=4230, tile=(64, 64), tile_at=(17, 3), shared_byte=2198, plain_byte=2182, warp=2, lane=5,
    ...     register=1, lanes=32, registers=4, atom="mma.sync.m16n8k16.bf16", shape=(16, 8, 16), operand="b",
    ...     operand_at=(3, 1), packed=2,
    ... )
    >>> draw_path_of_a_byte(path).title
    'K, token 17, element 3: page 2 → byte 2,198 of shared memory → upper half of register 0 of lane 5'
    """
    path = getattr(path, "path", path)
    canvas = Canvas()
    marks = []
    for number, (name, draw, words) in enumerate(stages(path)):
        x = number * (PANEL + APART)
        canvas.text(x, 12, f"{number + 1}", size=12, weight=700, opacity=QUIET)
        canvas.text(x + 13, 12, name, size=11, weight=600)
        marks.append(draw(canvas, path, x))
        y = TOP + HIGH + 8
        for sentence in words:
            for line in wrap(sentence, PANEL, 10):
                y += 14
                canvas.text(x, y, line, size=10, opacity=0.85)
        canvas.extend(x + PANEL, y)
    _joined(canvas, marks)
    return canvas.picture(title or _title(path), caption or _caption(path))


def stages(path: BytePath) -> tuple[tuple[str, Stage, tuple[str, ...]], ...]:
    """Name, picture and words of each stage."""
    row, column = path.operand_at
    plain = f"without the swizzle: byte {path.plain_byte:,}, bank {path.plain_byte // 4 % path.banks} (dashed)"
    if path.plain_byte == path.shared_byte:
        plain = "the same as without a swizzle"
    return (
        ("page table", _table, (
            f"token {path.token} of sequence {path.sequence}: logical page {path.logical_page} is page {path.page}",
        )),
        ("page in DRAM", _page, (
            f"slot {path.slot} of {path.page_size}, element {path.element} of {path.depth} (head {path.head})",
            f"byte {path.dram_byte:,} of the pool",
        )),
        ("tile", _tile, (
            f"row {path.tile_at[0]}, column {path.tile_at[1]} of {path.tile[0]} x {path.tile[1]}",
            "shaded: the rows of this page",
        )),
        ("shared memory", _shared, (f"byte {path.shared_byte:,}, bank {path.shared_byte // 4 % path.banks}", plain)),
        ("fragment", _fragment, (
            f"warp {path.warp}, lane T{path.lane}",
            f"element {path.operand}{path.register} of {path.registers}: {_part(path)}",
        )),
        ("MMA", _mma, (f"{path.operand.upper()}[{row}, {column}] of", _breakable(path.atom))),
    )


def _mark(canvas: Canvas, x: float, y: float, width: float, height: float) -> tuple[float, float]:
    """The byte; returns its middle. At least 5 px each way, so that it is seen."""
    cx, cy = x + width / 2, y + height / 2
    width, height = max(width, 5.0), max(height, 5.0)
    canvas.rect(cx - width / 2, cy - height / 2, width, height, fill=ACCENT, stroke=PAPER, stroke_width=1.5)
    return cx, cy


def _frame(canvas: Canvas, x: float, y: float, width: float, height: float, fill: float = 0.05) -> None:
    canvas.rect(x, y, width, height, fill=INK, opacity=fill)
    canvas.rect(x, y, width, height, stroke=INK, stroke_width=0.8, opacity=0.5)


def _joined(canvas: Canvas, marks: list[tuple[float, float]]) -> None:
    for (x0, y0), (x1, y1) in pairwise(marks):
        bend = (x1 - x0) * 0.45
        d = f"M{x0 + 4:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1 - 4:.1f} {y1:.1f}"
        canvas.path(d, stroke=PAPER, stroke_width=3.5, opacity=0.7)
        canvas.path(d, stroke=ACCENT, stroke_width=1.4)


def _table(canvas: Canvas, path: BytePath, x: float) -> tuple[float, float]:
    """A window of the sequence's row of the page table."""
    shown = min(7, len(path.page_table))
    first = int(np.clip(path.logical_page - shown // 2, 0, len(path.page_table) - shown))
    box = 18.0
    middle = (0.0, 0.0)
    for i in range(shown):
        column, y = first + i, TOP + 4 + i * (box + 2)
        mine = column == path.logical_page
        canvas.text(x + 18, y + 13, str(column), size=10, anchor="end", mono=True, opacity=1.0 if mine else QUIET)
        _frame(canvas, x + 26, y, PANEL - 50, box, 0.12 if mine else 0.05)
        canvas.text(x + 34, y + 13, f"page {path.page_table[column]}", size=10, mono=True, weight=700 if mine else None)
        if mine:
            canvas.look_here(x + 26, y, PANEL - 50, box, 2.0)
            middle = (x + 26 + PANEL - 50, y + box / 2)
    if first + shown < len(path.page_table):
        canvas.text(x + 34, TOP + 4 + shown * (box + 2) + 9, f"⋮ {len(path.page_table)} in all", size=10, opacity=QUIET)
    return middle


def _page(canvas: Canvas, path: BytePath, x: float) -> tuple[float, float]:
    """One head of a page: tokens x depth."""
    rows = path.page_size
    height = min(HIGH - 18, max(60.0, 8.0 * rows))
    step = height / rows
    _frame(canvas, x, TOP + 14, PANEL, height)
    if step >= 4:
        lines = "".join(f"M{x:.1f} {TOP + 14 + step * r:.2f}h{PANEL}" for r in range(1, rows))
        canvas.path(lines, stroke=INK, stroke_width=0.5, opacity=0.25)
    canvas.text(x, TOP + 9, "token ↓  depth →", size=10, opacity=QUIET)
    y = TOP + 14 + step * path.slot
    canvas.rect(x, y, PANEL, step, fill=ACCENT, opacity=0.22)
    cell = PANEL / path.depth
    return _mark(canvas, x + cell * path.element, y, cell, step)


def _tile(canvas: Canvas, path: BytePath, x: float) -> tuple[float, float]:
    """The tile that a CTA works on; the rows that come from the same page are shaded."""
    rows, columns = path.tile
    scale = min(PANEL / columns, (HIGH - 18) / rows)
    if rows * scale < 40 or columns * scale < 40:  # a long thin tile is stretched
        across, down = PANEL, HIGH - 18
    else:
        across, down = columns * scale, rows * scale
    y0 = TOP + 14
    canvas.text(x, TOP + 9, "key ↓  depth →", size=10, opacity=QUIET)
    _frame(canvas, x, y0, across, down)
    first = max(0, path.tile_at[0] - path.slot)
    last = min(rows, path.tile_at[0] - path.slot + path.page_size)
    canvas.rect(x, y0 + down * first / rows, across, down * (last - first) / rows, fill=INK, opacity=0.14)
    y = y0 + down * path.tile_at[0] / rows
    canvas.rect(x, y, across, max(1.0, down / rows), fill=ACCENT, opacity=0.3)
    return _mark(canvas, x + across * path.tile_at[1] / columns, y, across / columns, down / rows)


def _shared(canvas: Canvas, path: BytePath, x: float) -> tuple[float, float]:
    """The rows around the byte, each all banks once, in 16-byte groups of banks."""
    row_bytes = 4 * path.banks
    groups = row_bytes // 16
    row, plain = path.shared_byte // row_bytes, path.plain_byte // row_bytes
    first = row - row % 8
    cell, high = PANEL / groups, 15.0
    canvas.text(x, TOP + 9, f"from byte {row_bytes * first:,}", size=10, opacity=QUIET)
    xs, ys = x + cell * np.arange(groups), TOP + 14 + high * np.arange(8)
    canvas.cells(BoxGrid(xs, ys, cell, high), np.tile(4 * (np.arange(groups) % 8) + 1, (8, 1)), BANKS, opacity=0.55)

    def corner(byte: int) -> tuple[float, float]:
        return x + cell * (byte % row_bytes // 16), TOP + 14 + high * (byte // row_bytes - first)

    if 0 <= plain - first < 8 and path.plain_byte // 16 != path.shared_byte // 16:
        px, py = corner(path.plain_byte)
        canvas.rect(px + 1, py + 1, cell - 2, high - 2, stroke="#000000", stroke_width=1.4, dash="3 2")
    sx, sy = corner(path.shared_byte)
    canvas.look_here(sx, sy, cell, high, 2.0)
    inside = cell * (path.shared_byte % 16) / 16
    return _mark(canvas, sx + inside, sy, cell * path.element_bytes / 16, high)


def _fragment(canvas: Canvas, path: BytePath, x: float) -> tuple[float, float]:
    """The registers of every lane of the warp."""
    lanes, registers = (
        np.arange(max(0, min(at - most // 2, count - most)), min(count, max(most, at + most - most // 2)))
        for at, count, most in ((path.lane, path.lanes, 128), (path.register, path.registers, 128))
    )
    cell, high = PANEL / len(registers), max(1.0, (HIGH - 18) // len(lanes))
    xs, ys = x + cell * np.arange(len(registers)), TOP + 14 + high * np.arange(len(lanes))
    canvas.text(x, TOP + 9, "lane ↓  element →", size=10, opacity=QUIET)
    index = np.tile(lane_colours(lanes)[:, None], (1, len(registers)))
    canvas.cells(BoxGrid(xs, ys, cell, high), index, LANES, opacity=0.7, rules=False)
    canvas.path("".join(f"M{v:.1f} {ys[0]:.1f}V{ys[-1] + high:.1f}" for v in xs[1:]), stroke=PAPER, stroke_width=1.0)
    y = float(ys[path.lane - lanes[0]])
    canvas.rect(x, y, PANEL, high, fill=ACCENT, opacity=0.22)
    return _mark(canvas, float(xs[path.register - registers[0]]), y, cell, high)


def _mma(canvas: Canvas, path: BytePath, x: float) -> tuple[float, float]:
    """A, B and C in the places of a product, to one scale."""
    m, n, k = path.shape
    gap = 8.0
    scale = min((PANEL - gap) / (k + n), (HIGH - 14 - gap) / (k + m), 5.0)
    corners = {"a": (x, TOP + 14 + k * scale + gap, m, k), "b": (x + k * scale + gap, TOP + 14, k, n)}
    corners["c"] = (corners["b"][0], corners["a"][1], m, n)
    for name, (left, top, rows, columns) in corners.items():
        _frame(canvas, left, top, columns * scale, rows * scale, 0.12 if name == path.operand else 0.04)
        canvas.text(left + 4, top + 12, name.upper(), size=10, weight=600, opacity=QUIET)
    left, top, _, _ = corners[path.operand]
    row, column = path.operand_at
    return _mark(canvas, left + scale * column, top + scale * row, scale, scale)


def _part(path: BytePath) -> str:
    """The register, and which part of it where several elements share one."""
    register, part = divmod(path.register, path.packed)
    names = {2: ("lower half of ", "upper half of ")}.get(
        path.packed, tuple(f"byte {k} of " for k in range(path.packed))
    )
    return f"{names[part] if path.packed > 1 else ''}register {register}"


def _breakable(name: str) -> str:
    """An atom's name with a space before its last part, where the panel is too narrow for it."""
    head, _, tail = name.rpartition(".")
    return name if text_width(name, 10) <= PANEL or not head else f"{head} .{tail}"


def _title(path: BytePath) -> str:
    return (
        f"{path.name}, token {path.token}, element {path.element}: page {path.page} → byte {path.shared_byte:,} of "
        f"shared memory → {_part(path)} of lane {path.lane}"
    )


def _caption(path: BytePath) -> str:
    return (
        f"One element of {path.element_bytes} bytes at six stages: in the page table, in its page, in the tile, in "
        f"shared memory, in the registers, in operand {path.operand.upper()} of the instruction. The mark is the same "
        "byte."
    )
