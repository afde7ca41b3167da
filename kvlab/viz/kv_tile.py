"""A tile of keys in DRAM: where each row lies, which run of which page it belongs to, and which rows do not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.staging.tile.iterator import key_offsets, keys_and_columns, valid_keys

from .pen.axis import QUIET, WIDTH, axis, axis_of, label_columns, label_rows, mark_gaps
from .pen.legend import keys
from .pen.palette import BANKS, INK, order_colours, text_on
from .pen.picture import Picture
from .pen.svg import BoxGrid, Canvas

if TYPE_CHECKING:
    from kvlab.layout import TileTensor

GUTTER, HEADER, ROW, RIGHT = 88.0, 48.0, 20.0, 200.0


def draw_kv_tile(
    tile: TileTensor, *, program: int = 0, fold: bool = True, title: str | None = None, caption: str | None = None
) -> Picture:
    """The rows of one program of a tile that a :class:`kvlab.staging.KVCacheIterator` gives, with their byte addresses
    in DRAM.

    fold    show the first rows of each run, and those around the last row that exists

    Raises ValueError for a program that does not exist.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.staging import KVCacheIterator
    >>> cache = PagedKVCache(np.zeros((2, 32, 1, 64), np.float16), [40], [[1, 0]], 1, 40)
    >>> walk = KVCacheIterator(cache, 64, batch_idx=0, kv_head_idx=0, end=40)
    >>> draw_kv_tile(walk.next_tile()).title
    'Tile of 64 keys x 64 float16: 40 exist in 2 runs, a key every 128 bytes'
    """
    offsets, run_rows = key_offsets(tile), tile.shape[0]
    if not 0 <= program < len(offsets):
        raise ValueError(f"program is {program}: must be one of the {len(offsets)} programs of the tile")
    rows_, depth = keys_and_columns(tile)
    size, valid = tile.dtype.itemsize, int(valid_keys(tile)[program])
    offset = offsets[program]
    address = np.where(offset < 0, -1, tile.memory.base + offset * size)
    step = max(1, 16 // size)
    count = -(-depth // step)
    starts = np.arange(0, rows_, run_rows)

    canvas = Canvas()
    room = WIDTH - GUTTER - RIGHT * (len(starts) > 1)
    columns = axis(count, min(44.0, np.floor(4 * room / count) / 4), GUTTER, limit=count, head=count)
    kept = np.arange(rows_)
    if fold and rows_ > 24:
        near = np.r_[:4, *(np.r_[s : s + 3] for s in starts[:8]), valid - 2 : valid + 2, rows_ - 1]
        kept = np.unique(near[(near >= 0) & (near < rows_)])
    rows = axis_of(kept, ROW, HEADER, before=np.isin(kept, starts[1:]))
    canvas.text(GUTTER - 7, HEADER - 22, "byte in DRAM", size=10, anchor="end", opacity=QUIET)
    canvas.text(GUTTER, HEADER - 22, f"row ↓  column → in vectors of {step} elements, 16 bytes", size=10, opacity=QUIET)
    label_columns(canvas, columns, HEADER - 6, [str(step * c) for c in range(count)])
    label_rows(canvas, rows, GUTTER - 7, [str(a) if a >= 0 else "—" for a in address[kept].tolist()], mono=True)
    exists = kept[:, None] + 0 * columns.index < valid
    colour = order_colours(kept)[:, None] + 0 * columns.index
    boxes = BoxGrid(columns.edge, rows.edge, columns.cell, ROW)
    canvas.cells(boxes, np.where(exists, colour, -2), BANKS)
    canvas.cells(boxes, np.where(exists, -2, 0), [INK], opacity=0.07)
    for y, row in zip(rows.edge.tolist(), kept.tolist(), strict=True):
        fill = text_on(BANKS[int(order_colours(row))]) if row < valid else INK
        text = f"row {row}" if row < valid else f"row {row}: zeros"
        if columns.end - GUTTER > 80:
            canvas.text(GUTTER + 6, y + 14, text, size=10, mono=True, fill=fill)
    if len(starts) > 1:
        for number, start in enumerate(starts.tolist()):
            if start not in kept:
                continue
            y = float(rows.edge[kept == start][0])
            canvas.line(0, y - 1, columns.end + 8, y - 1, opacity=0.5)
            canvas.text(columns.end + 14, y + 14, f"run {number}: {run_rows} rows of one page", size=10, weight=600)
    words = "row %d, columns %d..%d\n%s"
    where = np.array(
        [[f"byte {address[r] + 16 * c}" if r < valid else "does not exist: read as zeros" for c in range(count)]
         for r in kept.tolist()], object,
    )
    first = step * columns.index[None, :]
    canvas.hover(boxes, words, kept[:, None], first, first + step - 1, where)
    mark_gaps(canvas, columns, rows)
    if valid < rows_:
        keys(canvas, GUTTER, rows.end + 14, [("none", "", "no such key: a load delivers zeros")])
    runs = -(-max(valid, 1) // run_rows)
    split = f" in {runs} run{'s' * (runs > 1)}" if len(starts) > 1 else ""
    strides: Any = tile.layout.stride
    pitch = strides[0] * size
    found = f"Tile of {rows_} keys x {depth} {tile.dtype}: {valid} exist{split}, a key every {pitch} bytes"
    seen = "Each line is a key of the tile with the address of its first byte; cells are vectors of 16 bytes."
    seen += " A run lies in one page and is one window of memory." if len(starts) > 1 else ""
    return canvas.picture(title or found, caption or seen)
