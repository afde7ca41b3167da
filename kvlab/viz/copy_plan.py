"""The picture of a copy plan: source tile, lanes, destination, the first instruction of a warp emphasised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvlab.hardware import get_arch

from .model.copy_plan import CopyPlan
from .model.holders import lowest
from .pen.axis import GAP, QUIET, Axis, axis, axis_of, label_columns, label_rows, mark_gaps, some
from .pen.legend import keys
from .pen.palette import ACCENT, LANES, lane_colours
from .pen.picture import Picture
from .pen.svg import HATCH, BoxGrid, Canvas
from .pen.text import number, text_width

if TYPE_CHECKING:
    from kvlab.hardware import RegTileLoader, SubTileLoaderLDS, SubTileLoaderLDS_st_8x32
    from kvlab.layout import LinearLayout

GUTTER = 30.0
HEADER = 44.0
SOURCE, LANE, TARGET, BETWEEN = 316.0, 62.0, 330.0, 40.0
ROW, BOX = 20.0, 20.0
PALE = 0.3
Int64 = npt.NDArray[np.int64]


def draw_copy_plan(
    loader: CopyPlan | RegTileLoader | SubTileLoaderLDS | SubTileLoaderLDS_st_8x32 | LinearLayout,
    shape: tuple[int, int] | None = None, *, title: str | None = None, caption: str | None = None,
) -> Picture:
    """Source tile (left), the lanes of one instruction (middle), destination (right).

    loader    a :class:`CopyPlan`, or what :meth:`CopyPlan.of` takes: a ``RegTileLoader``, a ``SubTileLoaderLDS``, a
              register layout, with the ``shape`` of the tile

    The first instruction of warp 0 is bright, with an arrow for each bundle of lanes that fetch from one row; what the
    other instructions move is pale.

    >>> from kvlab.hardware import SubTileLoaderLDS
    >>> draw_copy_plan(SubTileLoaderLDS("bf16"), (32, 32)).title
    'SubTileLoaderLDS: 32 x 32 bfloat16 in 2 instructions of 64 lanes x 16 bytes; the first takes 16 rows of 64 bytes'
    """
    plan = loader if isinstance(loader, CopyPlan) else CopyPlan.of(loader, shape)
    canvas = Canvas()
    every = plan.bundles()
    bundles = every if len(every) <= 24 else [*every[:15], every[-1]]
    rows, edge = _source(canvas, plan, bundles)
    left = edge + BETWEEN
    top = HEADER
    canvas.text(left, HEADER - 8, "lanes", size=11, weight=600)
    boxes = {}
    for which, lanes in enumerate(bundles):
        y = top + which * (BOX + 2)
        if len(bundles) < len(every) and which == len(bundles) - 1:
            y += BOX
            canvas.text(
                left + LANE / 2, y - 5, f"⋮ {len(every) - len(bundles)} more", size=10, anchor="middle", opacity=QUIET
            )
        name = f"T{lanes[0]}" if len(lanes) == 1 else f"T{lanes[0]}–{lanes[-1]}"
        canvas.rect(left, y, LANE, BOX, fill=LANES[int(lane_colours(lanes[:1])[0])])
        canvas.labels([left + LANE / 2], [y + 14], [name], [LANES[int(lane_colours(lanes[:1])[0])]], size=10)
        boxes[which] = y + BOX / 2
    start = left + LANE + BETWEEN + 34
    ends = (
        _registers(canvas, plan, bundles, start, len(every) - len(bundles))
        if plan.destination is None
        else _shared(canvas, plan, bundles, start)
    )
    for which, lanes in enumerate(bundles):
        y, middle = rows[int(plan.row[0, lanes[0]])], (edge + left) / 2
        canvas.arrow([(edge + 3, y), (middle, y), (middle, boxes[which]), (left - 2, boxes[which])], width=0.9)
        if which in ends:
            middle, there = left + LANE, ends[which]
            room = start - 36 - middle
            canvas.arrow(
                [(middle + 2, boxes[which]), (middle + room / 2, boxes[which]), (middle + room / 2, there),
                 (start - (36 if plan.destination is not None else 4), there)], width=0.9,
            )
    entries = [("none", ACCENT, "the first instruction of warp 0")]
    entries += [(HATCH, "", "not part of this copy")] if canvas.hatched else []
    keys(canvas, GUTTER, canvas.bottom + 14, entries)
    return canvas.picture(title or _title(plan), caption or _caption(plan))


def _owners(plan: CopyPlan, rows: Int64, vectors: Int64) -> tuple[Int64, Int64]:
    """[rows, vectors] lane and instruction that fetch each of these vectors; -1 for nobody."""
    row, vector = plan.row, plan.col // plan.width
    which, who = np.nonzero(np.isin(row, rows) & np.isin(vector, vectors))
    place = np.searchsorted(rows, row[which, who]), np.searchsorted(vectors, vector[which, who])
    number = lowest((len(rows), len(vectors)), place, which * plan.lanes + who)
    held = number >= 0
    return np.where(held, number % plan.lanes, -1), np.where(held, number // plan.lanes, -1)


def _source(canvas: Canvas, plan: CopyPlan, bundles: list[npt.NDArray[np.int64]]) -> tuple[dict[int, float], float]:
    """The tile in vectors; returns the middle of each shown row, and where the rows end."""
    count = plan.shape[1] // plan.width
    first = sorted({int(plan.row[0, lanes[0]]) for lanes in bundles})
    taken = np.unique(plan.col[0][plan.row[0] >= 0]) // plan.width
    shown = np.arange(plan.shape[0]) if plan.shape[0] <= 24 else np.unique([*range(8), *first, plan.shape[0] - 1])
    across = some(count, 64, 16, 2, subject=taken, most=24)
    gaps = int(np.count_nonzero(np.diff(across, prepend=-1) > 1))
    cell = min(40.0, np.floor(4 * (SOURCE - GAP * gaps) / len(across)) / 4)
    columns, rows = axis_of(across, cell, GUTTER), axis_of(shown, ROW, HEADER)
    lane, instruction = _owners(plan, rows.index, columns.index)
    canvas.text(0, 10, f"source: {plan.shape[0]} x {plan.shape[1]} {plan.dtype}", size=11, weight=600)
    canvas.text(0, 24, f"row ↓  column →  a cell: {plan.width} elements", size=10, opacity=QUIET)
    label_columns(canvas, columns, HEADER - 6, [str(plan.width * c) for c in across.tolist()])
    label_rows(canvas, rows, GUTTER - 6)
    words = [
        f"row {r}, columns {plan.width * c}..{plan.width * c + plan.width - 1}\n" + _fetched(plan, int(i), int(t))
        for r, line in zip(rows.index.tolist(), np.stack([instruction, lane], -1).tolist(), strict=True)
        for c, (i, t) in zip(across.tolist(), line, strict=True)
    ]
    _cells(canvas, columns, rows, lane, instruction == 0, words)
    mark_gaps(canvas, columns, rows)
    return dict(zip(rows.index.tolist(), rows.centre.tolist(), strict=True)), columns.end


def _fetched(plan: CopyPlan, instruction: int, lane: int) -> str:
    if instruction < 0:
        return "not part of this copy"
    assert plan.warp is not None
    text = f"instruction {instruction} of warp {plan.warp[instruction]}, lane {lane}"
    return text if plan.destination is None else f"{text}\nto byte {plan.destination[instruction, lane]}"


def _cells(
    canvas: Canvas, columns: Axis, rows: Axis, lane: npt.NDArray[np.int64], mine: npt.NDArray[np.bool_],
    words: list[str],
) -> None:
    """Cells coloured and named by lane; those of the first instruction bright."""
    index = lane_colours(lane)
    boxes = BoxGrid(columns.edge, rows.edge, columns.cell, rows.cell)
    canvas.cells(boxes, np.where(mine, -2, index), LANES, opacity=PALE)
    canvas.cells(boxes, np.where(mine, index, -2), LANES)
    if columns.cell >= text_width(f"T{lane.max()}", 9.5, mono=True) + 2:
        xs, ys = (a.ravel() for a in np.meshgrid(columns.centre, rows.centre))
        texts = [f"T{t}" if t >= 0 else "" for t in lane.ravel().tolist()]
        behind = [LANES[i] if m and i >= 0 else None for i, m in zip(index.flat, mine.flat, strict=True)]
        bright = mine.ravel() & (lane.ravel() >= 0)
        canvas.labels(
            xs[bright], ys[bright] + 3.5, np.array(texts)[bright].tolist(), np.array(behind)[bright], size=9.5
        )
    _outline(canvas, columns, rows, rows.cell, mine)
    details = np.array(words, object).reshape(lane.shape)
    canvas.hover(boxes, "%s", details)


def _outline(canvas: Canvas, columns: Axis, rows: Axis, high: float, mine: npt.NDArray[np.bool_]) -> None:
    """The accent around the cells of the first instruction: their edges towards others."""
    around = np.pad(mine, 1)
    lines = []
    for dy, dx, edge in ((0, -1, "v{h}"), (0, 1, "v{h}"), (-1, 0, "h{w}"), (1, 0, "h{w}")):
        beside = around[1 + dy : 1 + dy + mine.shape[0], 1 + dx : 1 + dx + mine.shape[1]]
        for r, c in zip(*np.nonzero(mine & ~beside), strict=True):
            x = float(columns.edge[c]) + (columns.cell if dx > 0 else 0)
            y = float(rows.edge[r]) + (high if dy > 0 else 0)
            lines.append(f"M{number(x)} {number(y)}" + edge.format(h=number(high), w=number(columns.cell)))
    canvas.path("".join(lines), stroke=ACCENT, stroke_width=2.0)


def _shared(canvas: Canvas, plan: CopyPlan, bundles: list[npt.NDArray[np.int64]], left: float) -> dict[int, float]:
    """Rows of shared memory, all banks once; returns where each bundle's arrow ends."""
    assert plan.destination is not None
    active, size, arch = plan.row >= 0, plan.nbytes, get_arch(plan.arch)
    row_bytes = arch.pass_bytes
    base = int(plan.destination[active].min()) // row_bytes * row_bytes
    count = -(-(int(plan.destination[active].max()) + size - base) // row_bytes)
    first = np.unique(plan.destination[0][active[0]] - base) // row_bytes
    shown = np.arange(count) if count <= 24 else np.unique(np.r_[:4, first, count - 1])
    lane, instruction = (np.full((len(shown), row_bytes // size), -1, np.int64) for _ in range(2))
    which, who = np.nonzero(active & np.isin((plan.destination - base) // row_bytes, shown))
    place = plan.destination[which, who] - base
    at = np.searchsorted(shown, place // row_bytes), place % row_bytes // size
    lane[at], instruction[at] = who, which
    columns = axis(lane.shape[1], np.floor(4 * TARGET / lane.shape[1]) / 4, left, limit=128, head=128)
    rows = axis_of(shown, ROW, HEADER)
    canvas.text(left, 10, "destination: shared memory", size=11, weight=600)
    canvas.text(left, 24, f"rows of {row_bytes} bytes, bank of 4 bytes →", size=10, opacity=QUIET)
    banks = [str(size * c // arch.bank_bytes) for c in range(lane.shape[1])]
    label_columns(canvas, columns, HEADER - 6, banks)
    label_rows(canvas, rows, left - 5, [str(base + row_bytes * r) for r in shown.tolist()], mono=True)
    words = []
    for k, r in enumerate(rows.index.tolist()):
        for c in range(lane.shape[1]):
            i, t, byte = int(instruction[k, c]), int(lane[k, c]), base + row_bytes * r + size * c
            what = "not part of this copy" if i < 0 else f"row {plan.row[i, t]}, column {plan.col[i, t]}"
            bank = byte // arch.bank_bytes % arch.banks
            words.append(f"byte {byte}, bank {bank}\n{what}" + (f"\n{_fetched(plan, i, t)}" if i >= 0 else ""))
    _cells(canvas, columns, rows, lane, instruction == 0, words)
    mark_gaps(canvas, columns, rows)
    middle = dict(zip(rows.index.tolist(), rows.centre.tolist(), strict=True))
    ends = {n: int(plan.destination[0, lanes].min() - base) // row_bytes for n, lanes in enumerate(bundles)}
    return {n: middle[row] for n, row in ends.items() if row in middle}


def _registers(
    canvas: Canvas, plan: CopyPlan, bundles: list[npt.NDArray[np.int64]], left: float, hidden: int
) -> dict[int, float]:
    """The registers of the lanes of warp 0, a line for each bundle; the first instruction fills the first column."""
    assert plan.warp is not None
    count = int((plan.warp == 0).sum())
    wide = TARGET / max(count, 4)
    columns = axis(count, min(74.0, np.floor(4 * wide) / 4), left, limit=8, head=6)
    order = np.arange(len(bundles))
    rows = axis_of(np.where(order == len(bundles) - 1, order + hidden, order), BOX + 2, HEADER)
    canvas.text(left, 10, "destination: registers of each lane", size=11, weight=600)
    canvas.text(left, 24, "an instruction fills a column →", size=10, opacity=QUIET)
    spans = [
        f"r{plan.width * i}–{plan.width * i + plan.width - 1}" if plan.width > 1 else f"r{i}" for i in range(count)
    ]
    label_columns(canvas, columns, HEADER - 6, [spans[i] for i in columns.index.tolist()])
    lane = np.array([lanes[0] for lanes in bundles])[:, None] + 0 * columns.index
    mine = np.broadcast_to(columns.index == 0, lane.shape)
    index = lane_colours(lane)
    boxes = BoxGrid(columns.edge, rows.edge, columns.cell, BOX)
    canvas.cells(boxes, np.where(mine, -2, index), LANES, opacity=PALE)
    canvas.cells(boxes, np.where(mine, index, -2), LANES)
    _outline(canvas, columns, rows, BOX, mine)
    words = [
        f"lanes {lanes[0]}..{lanes[-1]}: {spans[i]}\n"
        f"row {plan.row[i, lanes[0]]}, columns {plan.col[i, lanes].min()}..{plan.col[i, lanes].max() + plan.width - 1}"
        for lanes in bundles for i in columns.index.tolist()
    ]
    canvas.hover(boxes, "%s", np.array(words, object).reshape(lane.shape))
    return dict(enumerate((rows.centre - 1).tolist()))


def _title(plan: CopyPlan) -> str:
    first = np.unique(plan.row[0][plan.row[0] >= 0])
    span = [plan.nbytes * int((plan.row[0] == r).sum()) for r in first.tolist()]
    taken = (
        f"{len(first)} row{'s' * (len(first) != 1)} of {span[0]} bytes" if len(set(span)) == 1 else f"{len(first)} rows"
    )
    count = len(plan.row)
    return (
        f"{plan.name}: {plan.shape[0]} x {plan.shape[1]} {plan.dtype} in {count} instruction{'s' * (count != 1)} of "
        f"{plan.lanes} lanes x {plan.nbytes} bytes; the first takes {taken}"
    )


def _caption(plan: CopyPlan) -> str:
    to = "the registers that it fills" if plan.destination is None else "the place in shared memory where it lands"
    return (
        f"Which lane T fetches which vector of the tile (left), and {to} (right). Bright: the first instruction of "
        "warp 0; an arrow is a bundle of its lanes that fetch from one row."
    )
