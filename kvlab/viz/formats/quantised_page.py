"""A page of a quantised cache: the stored values of each token, and the scales beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..pen.axis import QUIET, WIDTH, Axis, axis_of, label_rows, mark_gaps
from ..pen.legend import keys
from ..pen.palette import BANKS, LANES
from ..pen.picture import Picture
from ..pen.svg import HATCH, BoxGrid, Canvas
from ..pen.text import text_width

if TYPE_CHECKING:
    from kvlab.cache import PagedKVCache

GUTTER, HEADER, ROW = 44.0, 56.0, 20.0
CELL, SCALE, BETWEEN = 47.0, 66.0, 44.0


def draw_quantised_page(
    cache: PagedKVCache, *, sequence: int = 0, page: int = 0, head: int = 0, mark: tuple[int, int] | None = None,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """The stored values (left) and the scales (right) of one page and head of a quantised ``PagedKVCache``.

    sequence, page   which row and column of the page table
    head             KV head
    mark             (slot, dim) of the one element to look at: its value and its scale are outlined

    A hue ties the dims of a group to their scale. Slots that hold only NaN, the poison of fresh pages, are hatched.
    Raises ValueError for a cache without scales, or a page, head or element that does not exist.

    >>> from kvlab.cache import PagedKVCache
    >>> blocks, scales = np.full((1, 4, 1, 64), 3, np.int8), np.full((1, 4, 1, 2), 0.5, np.float32)
    >>> cache = PagedKVCache(blocks, [4], [[0]], 0, 4, scales=scales, quantization_granularity=32)
    >>> draw_quantised_page(cache).title
    'Page 0: 4 of 4 slots filled; a head of a token takes 64 + 8 bytes'
    >>> draw_quantised_page(cache, mark=(2, 40)).title
    'Slot 2, dim 40: 3 stored x 0.5 = 1.5'
    """
    if getattr(cache, "scales", None) is None:
        raise ValueError(f"{cache!r} has no scales: it is not quantised")
    view = cache.numpy()
    assert view.scales is not None
    table, pages = np.asarray(view.lookup_table), view.blocks.shape[0]
    where = {
        "sequence": (sequence, table.shape[0]),
        "page": (page, table.shape[1]),
        "head": (head, view.blocks.shape[2]),
    }
    for name, (value, count) in where.items():
        if not 0 <= value < count:
            raise ValueError(f"{name} is {value}: must be in [0, {count})")
    physical = int(table[sequence, page])
    if not 0 <= physical < pages:
        raise ValueError(f"lookup_table[{sequence}, {page}] is {physical}, none of the {pages} pages")
    stored = view.blocks[physical, :, head].astype(np.float32)  # [slots, dims]
    scales = view.scales[physical, :, head].astype(np.float32)  # [slots, groups]
    slots, dims = stored.shape
    if mark is not None and not (0 <= mark[0] < slots and 0 <= mark[1] < dims):
        raise ValueError(f"mark is {mark}: must be an element of {slots} slots x {dims} dims")
    wide = view.quantization_granularity
    empty = np.isnan(stored).all(axis=1)

    groups = _groups(scales.shape[1], None if mark is None else mark[1] // wide)
    values, scale = _columns(groups, wide, dims, mark)
    rows = _rows(slots, empty, mark)
    canvas = Canvas()
    canvas.text(GUTTER, 10, f"stored {view.dtype}", size=12, weight=600)
    canvas.text(scale.end, 10, f"scales {view.scale_dtype}", size=12, weight=600, anchor="end")
    canvas.text(0, HEADER - 6, "slot", size=10, opacity=QUIET)
    label_rows(canvas, rows, GUTTER - 7)
    _header(canvas, values, scale, wide)
    _numbers(canvas, values, rows, stored, values.index // wide, empty, "slot %d, dim %d\nstored %s")
    _numbers(canvas, scale, rows, scales, scale.index, empty, "slot %d, group %d\nscale %s", strong=True)
    mark_gaps(canvas, values, rows, what="slot")
    x = (values.end + float(scale.edge[0])) / 2
    canvas.text(x, HEADER + 14, "×", size=15, anchor="middle", opacity=QUIET)
    if mark is not None:
        y = float(rows.edge[rows.index == mark[0]][0])
        canvas.look_here(float(values.edge[values.index == mark[1]][0]), y, values.cell, ROW, 2.5)
        canvas.look_here(float(scale.edge[scale.index == mark[1] // wide][0]), y, scale.cell, ROW, 2.5)
    if empty.any():
        keys(canvas, GUTTER, rows.end + 14, [(HATCH, "", "no token in this slot")])
    return canvas.picture(
        title or _title(view, physical, stored, scales, wide, empty, mark), caption or _caption(wide, physical, head)
    )


def _groups(count: int, marked: int | None) -> list[int]:
    """The groups that are shown: at most three."""
    if count <= 3:
        return list(range(count))
    return sorted({0, count - 1, marked or 1})


def _columns(groups: list[int], wide: int, dims: int, mark: tuple[int, int] | None) -> tuple[Axis, Axis]:
    """Some dims of each group, and its scale."""
    room = WIDTH - GUTTER - BETWEEN - axis_of(np.array(groups), SCALE, 0.0).end
    for each in range(16, 1, -1):
        index: list[int] = []
        for group in groups:
            inside = list(range(group * wide, min((group + 1) * wide, dims)))
            index += inside if len(inside) <= each else [*inside[: each - 1], inside[-1]]
        at = np.array(sorted({*index, *(() if mark is None else (mark[1],))}))
        values = axis_of(at, CELL, GUTTER)
        if values.end - GUTTER <= room:
            break
    return values, axis_of(np.array(groups), SCALE, values.end + BETWEEN)


def _rows(slots: int, empty: npt.NDArray[np.bool_], mark: tuple[int, int] | None) -> Axis:
    index = np.arange(slots)
    if slots > 20:
        full = np.flatnonzero(~empty)
        last = int(full[-1]) if full.size else 0
        near = {*range(8), last, min(last + 1, slots - 1), slots - 1, 0 if mark is None else mark[0]}
        index = np.array(sorted(near))
    return axis_of(index, ROW, HEADER)


def _header(canvas: Canvas, values: Axis, scale: Axis, wide: int) -> None:
    canvas.text(GUTTER, HEADER - 22, "dim →", size=10, opacity=QUIET)
    for x, dim in zip(values.centre.tolist(), values.index.tolist(), strict=True):
        canvas.text(x, HEADER - 6, str(dim), size=10, anchor="middle", opacity=QUIET)
    for x, group in zip(scale.centre.tolist(), scale.index.tolist(), strict=True):
        words = f"{group * wide}–{group * wide + wide - 1}"
        canvas.text(x, HEADER - 6, words, size=10, anchor="middle", opacity=QUIET)
    canvas.text(scale.end, HEADER - 22, "of dims", size=10, anchor="end", opacity=QUIET)


def _numbers(
    canvas: Canvas, columns: Axis, rows: Axis, numbers: npt.NDArray[np.float32], group: npt.NDArray[np.int64],
    empty: npt.NDArray[np.bool_], words: str, *, strong: bool = False,
) -> None:
    """Cells with their numbers, hued by group."""
    colours = [BANKS[4 * g + 2] for g in range(8)] if strong else list(LANES)
    index = np.where(empty[rows.index][:, None], -1, group % 8 + 0 * rows.index[:, None])
    boxes = BoxGrid(columns.edge, rows.edge, columns.cell, ROW)
    canvas.cells(boxes, index, colours)
    shown = numbers[np.ix_(rows.index, columns.index)]
    texts = np.array([[f"{x:.3g}" for x in line] for line in shown.tolist()], object)
    xs, ys = np.meshgrid(columns.centre, rows.centre)
    keep = (index >= 0) & np.array([[text_width(t, 9.5, mono=True) < columns.cell - 1 for t in line] for line in texts])
    behind = [colours[i] for i in index[keep].tolist()]
    canvas.labels(xs[keep], ys[keep] + 3.5, texts[keep].tolist(), behind, size=9.5)
    told = np.where(empty[rows.index][:, None], "nothing", texts)
    canvas.hover(boxes, words, rows.index[:, None], columns.index[None, :], told)


def _title(
    view: Any, physical: int, stored: Any, scales: Any, wide: int, empty: Any, mark: tuple[int, int] | None
) -> str:
    if mark is not None and not empty[mark[0]]:
        q, s = float(stored[mark]), float(scales[mark[0], mark[1] // wide])
        return f"Slot {mark[0]}, dim {mark[1]}: {q:g} stored x {s:.4g} = {q * s:.4g}"
    size = stored.shape[1] * view.dtype.itemsize
    more = scales.shape[1] * view.scale_dtype.itemsize
    full = int((~empty).sum())
    return f"Page {physical}: {full} of {len(stored)} slots filled; a head of a token takes {size} + {more} bytes"


def _caption(wide: int, physical: int, head: int) -> str:
    return (
        f"Page {physical}, KV head {head}: a line for each slot. Left the stored numbers, right the scales; "
        f"{wide} dims of one hue share a scale, and the value is stored number times scale."
    )
