"""A view of memory inside the tensor that it was taken from: a tile bright, or the lanes that share it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlab.layout import Layout

from .grid import draw_layout
from .model.offset_grid import FEW, Cells, Leaves, OffsetGrid
from .pen.axis import QUIET, label_columns, label_rows, mark_gaps
from .pen.fragment import Fragment, draw_fragment, fragment_axes
from .pen.legend import keys
from .pen.picture import Picture
from .pen.svg import HATCH, Canvas

if TYPE_CHECKING:
    from kvlab.layout import TileTensor

GUTTER, HEADER = 34.0, 28.0
Int64 = npt.NDArray[np.int64]


def draw_tile_tensor(
    tensor: TileTensor, *, inside: TileTensor | None = None, banks: int = 32, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """A :class:`kvlab.layout.TileTensor` as a grid, coloured by bank.

    A view is drawn inside the tensor that it was taken from (or ``inside``), the rest dimmed, its vectors outlined. A
    view of many lanes shows which lane T holds each element, and as which of the elements e of its load. ``banks`` of
    4 bytes are those of the machine: 32, or 64 on gfx950. Of several programs the first is drawn. A large view in a
    tensor in which its elements cannot be told by their strides is drawn alone. Raises ValueError for ``inside`` in
    another memory.

    >>> from kvlab.layout import Layout, TileTensor
    >>> tensor = TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32")
    >>> draw_tile_tensor(tensor.tile((4, 8), (1, 1))).title
    '(4,8):(16,1) at element 72 of (8,16):(16,1): 32 of 128 elements'
    >>> draw_tile_tensor(tensor.vectorize(1, 4).distribute(Layout.row_major(4, 4), np.arange(16))).title
    '16 lanes share (8,16):(16,1): 8 elements each, in vectors of 4'
    """
    parent = inside if inside is not None else tensor.parent
    size, first = tensor.dtype.itemsize, int(np.ravel(tensor.offset)[0])
    if parent is not None and parent.memory is not tensor.memory:
        raise ValueError(f"{tensor!r} does not lie inside {parent!r}: their memories differ")
    found = None if parent is None else Inside.of(tensor, parent)
    if parent is None or found is None:
        base = first * size + tensor.memory.base
        return draw_layout(
            tensor.layout, element_bytes=size, base=base, banks=banks, title=title, caption=caption
        )
    if len(found.held.lanes) > 1:
        return _shared_out(tensor, parent, found, banks, title, caption)
    shape = found.field.shape
    number = Cells(shape, lambda r, c: found.number(r.ravel(), c.ravel()) // tensor.element_size, found.subject)
    kept = Cells(shape, lambda r, c: found.number(r.ravel(), c.ravel()) >= 0, found.subject)
    count = found.held.count
    return draw_layout(
        parent.layout, element_bytes=size, base=found.start * size + tensor.memory.base, banks=banks,
        inside=None if count == found.field.size else kept, group=number if tensor.element_size > 1 else None,
        title=title or _tile(tensor, parent, found, count), caption=caption or TILE,
    )


@dataclass(frozen=True)
class _Held:
    """The scalars of a view: ``lanes`` [lanes] where each lane begins, in scalars of the memory.

    ordered, order    all scalars of all lanes ascending, and the number of each; None where they are too many
    leaves, weights   of the layout and of the element within: how much a step in each adds to the number"""

    lanes: Int64
    each: int
    ordered: Int64 | None
    order: Int64 | None
    leaves: Leaves
    weights: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> _Held:
        lanes, leaves, weights = _lanes(tensor), [], []
        inner = Layout(tensor.element_size, 1) if tensor.element_layout is None else tensor.element_layout
        weight = 1
        for layout in (inner, tensor.layout):
            for mode in reversed(layout.modes):  # a load counts modes as NumPy does, the last one fastest
                one, at = Leaves.of(mode), weight
                for extent, stride in zip(one.extents, one.strides, strict=True):
                    leaves.append((extent, stride))
                    weights.append(at)
                    at *= extent
                weight *= mode.size
        each = tensor.layout.size * tensor.element_size
        ordered = order = None
        if len(lanes) * each <= 4 * FEW:
            inside = np.ravel(tensor.layout.offsets())[:, None] + np.ravel(inner.offsets())
            index = (lanes[:, None] + inside.ravel()).ravel()
            order = np.argsort(index, kind="stable")
            ordered = index[order]
        extents, strides = zip(*leaves, strict=True) if leaves else ((), ())
        return cls(lanes, each, ordered, order, Leaves(extents, strides), tuple(weights))

    @property
    def known(self) -> bool:
        """Tells whether a scalar's place tells who holds it."""
        return self.ordered is not None or (self.leaves.ordered is not None and len(self.lanes) <= 256)

    @property
    def count(self) -> int:
        """Different scalars, of one lane."""
        return len(np.unique(self.ordered)) if self.ordered is not None else self.each

    def number(self, place: Int64) -> Int64:
        """For each place the number of its scalar, counted through the lanes, the lowest of several; or -1."""
        if self.ordered is not None and self.order is not None:
            at = np.searchsorted(self.ordered, place).clip(max=len(self.ordered) - 1)
            return np.where(self.ordered[at] == place, self.order[at], -1)
        out = np.full(place.shape, -1, np.int64)
        for lane in reversed(range(len(self.lanes))):
            found = self.leaves.find(place - self.lanes[lane])
            assert found is not None
            steps, there = found
            total = sum((i * w for i, w in zip(steps, self.weights, strict=True)), np.zeros_like(place))
            out = np.where(there, lane * self.each + total, out)
        return out

    @property
    def some(self) -> Int64:
        """Scalars of every lane: all, or the first and the last ones of every leaf."""
        if self.ordered is not None:
            return self.ordered
        found = np.zeros(1, np.int64)
        for k in self.leaves.ordered or ():
            n, d = self.leaves.extents[k], self.leaves.strides[k]
            steps = np.unique([*range(min(n, 70)), n - 2, n - 1]) * d
            if found.size * steps.size <= FEW // 16:
                found = np.add.outer(found, steps).ravel()
            else:
                found = np.union1d(np.add.outer(found, steps[[0, -1]]).ravel(), steps)
        return np.add.outer(self.lanes, found).ravel()


@dataclass(frozen=True)
class Inside:
    """A view in its tensor: the tensor's ``field``, which begins at scalar ``start``, and the rows and columns with
    something of the view."""

    held: _Held
    field: OffsetGrid
    start: int
    subject: tuple[Int64, Int64]

    @classmethod
    def of(cls, tensor: Any, parent: Any) -> Inside | None:
        """None where a place does not tell a cell, or who holds it."""
        held, field, start = _Held.of(tensor), OffsetGrid(parent.layout), int(np.ravel(parent.offset)[0])
        found = field.find(held.some - start) if held.known else None
        if found is None:
            return None
        row, column, there = found
        return cls(held, field, start, (np.unique(row[there]), np.unique(column[there])))

    def number(self, rows: Int64, columns: Int64) -> Int64:
        """[rows, columns] the number of the scalar in each cell, -1 outside the view."""
        return self.held.number(self.start + self.field.at(rows, columns))


def _lanes(tensor: Any) -> Int64:
    """The offsets of the lanes of the first program: the last axis of the offset."""
    offset = np.asarray(tensor.offset, np.int64)
    if offset.ndim == 0 or (offset.ndim == 1 and tensor.memory.programs is not None):
        return offset.reshape(-1)[:1]
    return np.asarray(offset.reshape(-1, offset.shape[-1])[0])


def _shared_out(
    tensor: Any, parent: Any, found: Inside, banks: int, title: str | None, caption: str | None
) -> Picture:
    """The lanes that hold the elements, run by run."""
    field, each, size = found.field, found.held.each, tensor.dtype.itemsize

    def part(rows: Int64, columns: Int64) -> Fragment:
        number = found.number(rows, columns)
        return Fragment("e", np.where(number < 0, -1, number // each), np.where(number < 0, -1, number % each), each, 0)

    rows, columns = found.subject
    columns_, rows_ = fragment_axes(
        part(rows[:32], np.arange(columns[0], min(columns[0] + 128, field.shape[1]))), field.shape, found.subject,
        gutter=GUTTER, header=HEADER, head=8,
    )
    shown = part(rows_.index, columns_.index)
    offset = field.at(rows_.index, columns_.index)
    address = tensor.memory.base + (found.start + offset) * size
    canvas = Canvas()
    canvas.text(0, 10, "row ↓  column →", size=10, opacity=QUIET)
    label_columns(canvas, columns_, HEADER - 5)
    label_rows(canvas, rows_, GUTTER - 7)
    words = "row %d, column %d\nlane %d, element %d\noffset %d\nbyte %d, bank %d"
    draw_fragment(
        canvas, shown, columns_, rows_, words=words, values=(offset, address, address // 4 % banks)
    )
    mark_gaps(canvas, columns_, rows_)
    if (shown.lane < 0).any():
        keys(canvas, GUTTER, rows_.end + 14, [(HATCH, "", "no lane of the view holds it")])
    vector = f", in vectors of {tensor.element_size}" if tensor.element_size > 1 else ""
    told = f"{len(found.held.lanes)} lanes share {parent.layout}: {each} elements each{vector}"
    return canvas.picture(title or told, caption or LANES)


def _tile(tensor: Any, parent: Any, found: Inside, count: int) -> str:
    vector = f", in vectors of {tensor.element_size}" if tensor.element_size > 1 else ""
    at = int(found.held.lanes[0])
    return f"{tensor.layout} at element {at} of {parent.layout}: {count} of {found.field.size} elements{vector}"


LANES = "Each element of the whole with the lane T that holds it, and which of its elements e, in the order of a load."
TILE = "The view inside the whole, each element labelled with its offset; colour = bank, dimmed = outside the view."
