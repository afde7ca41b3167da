"""A TMA box over its tensor: what is in range, what arrives as zeros, and the image in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .model.tma_copy import Box, TmaCopy
from .pen.axis import QUIET, WIDTH
from .pen.palette import ACCENT, BANKS, INK, PAPER, order_colours
from .pen.picture import Picture
from .pen.svg import HATCH, BoxGrid, Canvas
from .pen.text import wrap
from .shared_memory import draw_image

if TYPE_CHECKING:
    from kvlab.hardware import TmaDescriptor, TMATensorTile

GUTTER = 52.0
TOP = 44.0
ACROSS, DOWN = 330.0, 220.0
WORDS = GUTTER + ACROSS + 60


def draw_tma_box(
    tile: TmaDescriptor | TMATensorTile, coords: Sequence[int] | None = None, *, address: int = 0,
    rows: Sequence[int] | None = None, title: str | None = None, caption: str | None = None,
) -> Picture:
    """One TMA copy: the box over the tensor, and below it the shared memory that it fills.

    tile      a :class:`kvlab.hardware.TmaDescriptor`, a :class:`kvlab.hardware.TMATensorTile` (several boxes) or a
              :class:`kvlab.hardware.TMAGather4Tile`
    coords    where it starts in the tensor, slowest dimension first, in elements; zeros by default
    address   byte address in shared memory, a multiple of 128
    rows      of a gather: the numbers of its rows

    A tensor of more than two dimensions is seen along the innermost one and the last other one in which the box has
    more than one element. Raises ValueError for coordinates or an address that the hardware would refuse.

    >>> from kvlab.hardware import TmaDescriptor
    >>> draw_tma_box(TmaDescriptor.of(np.zeros((64, 128), np.float16), (16, 64), "128B"), (56, 64)).title
    'TMA box 16 x 64 at (56, 64), swizzle 128B: 8 of 16 rows lie in the tensor, the others arrive as zeros'
    """
    copy = TmaCopy.of(tile, coords, address, rows)
    canvas = Canvas()
    view = _View.of(copy)
    _tensor(canvas, copy, view)
    y = 6.0
    for sentence in _words(copy):
        for line in wrap(sentence, WIDTH - WORDS, 11):
            canvas.text(WORDS, y + 10, line, size=11)
            y += 15
        y += 5
    y = max(canvas.bottom, TOP + view.height) + 24
    canvas.text(0, y, "its image in shared memory", size=12, weight=600)
    rules = {}
    if copy.count > 1:
        named = [*enumerate(copy.boxes[:-1]), (copy.count - 1, copy.boxes[-1])]
        named = named if copy.count <= 8 else [*named[:2], named[-1]]
        rules = {copy.address + box.offset: f"box {i}" for i, box in named}
    if rules and (copy.descriptor.image_bytes < 1024 or any(at % 128 for at in rules)):
        rules = {}
    canvas.embed(draw_image(copy.at, copy.size // 16, 16, 32, base=copy.address, rules=rules), 0, y + 10)
    return canvas.picture(title or _title(copy), caption or _caption(copy))


@dataclass(frozen=True)
class _View:
    """The window of the tensor that is shown: dimension ``down`` from the top, elements ``low`` to ``high`` of each
    direction, px of an element."""

    down: int | None
    low: tuple[int, int]
    high: tuple[int, int]
    scale: tuple[float, float]

    @classmethod
    def of(cls, copy: TmaCopy) -> _View:
        d = copy.descriptor
        wide = [dim for dim in range(d.rank - 1) if copy.extent[dim] > 1]
        down = (wide or [d.rank - 2])[-1] if d.rank > 1 else None
        spans = []
        for dim in (down, d.rank - 1):
            if dim is None:
                spans.append((0, 1))
                continue
            start = min(box.coords[dim] for box in copy.boxes)
            end = max(box.coords[dim] for box in copy.boxes) + d.box[dim]
            margin = max(end - start, 1) * 3 // 2
            spans.append((max(min(0, start), start - margin), min(max(d.shape[dim], end), end + margin)))
        (r0, r1), (c0, c1) = spans
        across, high = ACROSS / (c1 - c0), DOWN / (r1 - r0)
        one = min(across, high)
        scale = (max(one, min(high, 70 / (r1 - r0))), max(one, min(across, 120 / (c1 - c0))))
        return cls(down, (r0, c0), (r1, c1), scale)

    @property
    def height(self) -> float:
        return (self.high[0] - self.low[0]) * self.scale[0]

    @property
    def width(self) -> float:
        return (self.high[1] - self.low[1]) * self.scale[1]

    def x(self, column: int) -> float:
        return GUTTER + (min(max(column, self.low[1]), self.high[1]) - self.low[1]) * self.scale[1]

    def y(self, row: int) -> float:
        return TOP + (min(max(row, self.low[0]), self.high[0]) - self.low[0]) * self.scale[0]

    def rectangle(self, row: int, column: int, rows: int, columns: int) -> tuple[float, float, float, float]:
        x, y = self.x(column), self.y(row)
        return x, y, self.x(column + columns) - x, self.y(row + rows) - y


def _tensor(canvas: Canvas, copy: TmaCopy, view: _View) -> None:
    d = copy.descriptor
    extent = (1 if view.down is None else d.shape[view.down], d.shape[-1])
    canvas.text(
        0, 10, "row ↓  column →" if d.rank <= 2 else f"dim {view.down} ↓  dim {d.rank - 1} →", size=10, opacity=QUIET
    )
    x, y, wide, high = view.rectangle(0, 0, *extent)
    canvas.rect(x, y, wide, high, fill=INK, opacity=0.06)
    canvas.rect(x, y, wide, high, stroke=INK, stroke_width=1.0, opacity=0.5)
    for box in copy.boxes:
        _box(canvas, copy, view, box)
    _numbers(canvas, copy, view, extent)
    if view.high[0] < extent[0]:
        more = f"⋮  {extent[0] - view.high[0]} more rows"
        canvas.text(x + wide / 2, y + high + 13, more, size=10, anchor="middle", opacity=QUIET)


def _box(canvas: Canvas, copy: TmaCopy, view: _View, box: Box) -> None:
    """The box: its columns of 16 bytes in the colours that they have in shared memory, what is outside hatched."""
    d = copy.descriptor
    row = 0 if view.down is None else box.coords[view.down]
    rows, step = (1, 1) if view.down is None else (d.smem_box[view.down], d.element_strides[view.down])
    column, columns = box.coords[-1], d.box[-1]
    x, y, wide, high = view.rectangle(row, column, (rows - 1) * step + 1, columns)
    inside = copy.inside(box)
    canvas.rect(x, y, wide, high, fill=HATCH)
    if step > 1 and view.down is not None:  # rows that are skipped are no zeros
        skipped = view.rectangle(
            max(row, 0), max(column, 0), min(row + rows * step, d.shape[view.down]) - max(row, 0), columns
        )
        canvas.rect(*skipped, fill=PAPER)
        canvas.rect(*skipped, fill=INK, opacity=0.06)
    inner = int(np.prod(d.smem_box[(view.down or 0) + 1 : -1])) if view.down is not None else 1
    which = np.arange(rows) * inner % len(inside)
    there = inside[which]  # [rows, vectors]
    some = np.flatnonzero(there.any(axis=1))
    vectors = np.arange(inside.shape[1])
    px = view.scale[1] * 16 / d.dtype.itemsize
    xs = GUTTER + (column - view.low[1]) * view.scale[1] + px * vectors
    ys = TOP + (row - view.low[0] + step * np.arange(rows)) * view.scale[0]
    colour = order_colours(box.vector + vectors)
    if some.size and step == 1:
        one = np.where(there.any(axis=0), colour, -2)[None]
        canvas.cells(BoxGrid(xs, ys[some[:1]], px, view.scale[0] * (some[-1] - some[0] + 1)), one, BANKS, rules=False)
    elif some.size:
        canvas.cells(BoxGrid(xs, ys[some], px, view.scale[0]), np.where(there[some], colour, -2), BANKS, rules=False)
    if there.size * len(copy.boxes) <= 4096:
        words = "row %d: row %d of the tile, vector %d%s"
        told = np.where(there, "", ", zeros: outside the tensor")
        of_tile = box.row[which][:, None]
        canvas.hover(BoxGrid(xs, ys, px, view.scale[0]), words, row + step * np.arange(rows)[:, None], of_tile,
                     box.vector + vectors, told)
    canvas.rect(x, y, wide, high, stroke=ACCENT, stroke_width=2.0 if high > 8 else 1.2 if high > 4 else 0.4)


def _numbers(canvas: Canvas, copy: TmaCopy, view: _View, extent: tuple[int, int]) -> None:
    """Bounds of the tensor and of the boxes, along both edges, as far as there is room."""
    d = copy.descriptor
    starts = [(0 if view.down is None else box.coords[view.down], box.coords[-1]) for box in copy.boxes]
    rows = 1 if view.down is None else d.box[view.down]
    marks = {row for r, _ in starts for row in (r, r + rows)} if len(copy.boxes) < 5 else {r for r, _ in starts}
    ends = {0, extent[0]} & set(range(view.low[0], view.high[0] + 1))
    last = -100.0
    for row in sorted(marks | ends):
        at = view.y(row)
        if at - last >= 11:
            canvas.text(GUTTER - 6, at + 3.5, str(row), size=10, anchor="end", opacity=QUIET if row in ends else None)
            last = at
    marks = {column for _, c in starts for column in (c, c + d.box[-1])}
    ends = {0, extent[1]} & set(range(view.low[1], view.high[1] + 1))
    last = -100.0
    for column in sorted(marks | ends):
        at = view.x(column)
        if at - last >= 26:
            canvas.text(at, TOP - 6, str(column), size=10, anchor="middle", opacity=QUIET if column in ends else None)
            last = at


def _words(copy: TmaCopy) -> list[str]:
    d = copy.descriptor
    told = d.explain(copy.address).splitlines()
    if copy.count > 1:
        total = f"the mbarrier counts {copy.count * d.transaction_bytes} bytes in all."
        if copy.gathered:
            told[:2] = [
                f"A copy takes four rows from anywhere, {d.row_bytes} bytes of each; {copy.count // 4} fill the tile; "
                f"{total}"
            ]
        else:
            told.insert(0, f"{copy.count} boxes fill the tile; {total}")
    if copy.address == 0 and d.swizzle:
        del told[-1]
    hidden = d.rank - 2
    if hidden > 0:
        told.append(f"The tensor has {d.rank} dimensions, the picture shows two of them; it starts at {_at(copy)}.")
    return told


def _at(copy: TmaCopy) -> str:
    return f"({', '.join(map(str, copy.boxes[0].coords))})"


def _by(extents: Sequence[int]) -> str:
    return " x ".join(map(str, extents))


def _title(copy: TmaCopy) -> str:
    inside = np.concatenate([copy.inside(box) for box in copy.boxes])
    rows = inside.any(axis=1)
    name = f"TMA {'gather of' if copy.gathered else 'box' if len(copy.boxes) == 1 else 'tile'} {_by(copy.extent)}"
    where = "" if copy.gathered else f" at {_at(copy)}"
    if not copy.whole:
        found = f"{copy.count} boxes, {'each of them whole' if inside.all() else 'some of them not'} in the tensor"
    elif inside.all():  # each of its vectors does, the last ones perhaps not whole
        past = max(box.coords[-1] for box in copy.boxes) + copy.descriptor.box[-1] - copy.descriptor.shape[-1]
        out = f"its last {past} columns do not lie" if past > 1 else "its last column does not lie"
        found = f"{out} in the tensor" if past > 0 else "all of it lies in the tensor"
    elif not inside.any():
        found = "nothing of it lies in the tensor, all arrives as zeros"
    elif not rows.all():
        number = np.concatenate([box.row for box in copy.boxes])
        some, each = len(np.unique(number[rows])), len(np.unique(number))
        found = f"{some} of {each} rows lie in the tensor, the others arrive as zeros"
    else:
        found = f"{inside.mean():.0%} of it lies in the tensor, the rest arrives as zeros"
    return f"{name}{where}, swizzle {copy.descriptor.swizzle.label}: {found}"


def _caption(copy: TmaCopy) -> str:
    return (
        f"Top: the tensor of {_by(copy.descriptor.shape)} {copy.descriptor.dtype} and the box (outlined), "
        "hatched where it is outside. Below: rows of 128 bytes of shared memory; a cell is a 16-byte vector named "
        "row,vector of the tile, in the colour of its column."
    )
