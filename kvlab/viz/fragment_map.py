"""Lanes and their elements: a tile whose elements name the thread and the register element that hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .model.holders import lowest
from .model.offset_grid import FEW
from .pen.axis import QUIET, WIDTH, Axis, axis_of, label_columns, label_rows, mark_gaps
from .pen.fragment import Fragment, draw_fragment
from .pen.legend import keys
from .pen.palette import ACCENT, INK
from .pen.picture import Picture
from .pen.svg import Canvas
from .pen.text import text_width

if TYPE_CHECKING:
    from kvlab.staging import FragmentMap

GUTTER, HEADER = 44.0, 44.0
Int64 = npt.NDArray[np.int64]


def draw_fragment_map(
    fragments: FragmentMap, *, thread: int | None = None, axes: tuple[str, str] = ("row", "column"), fold: bool = True,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """The registers of a CTA laid over the tile that they hold.

    fragments    a :class:`kvlab.staging.FragmentMap`: ``shape``, and ``row`` and ``col`` [threads, registers, elements]
    thread       the one thread to look at, ``warp * fragments.warp_size + lane``: what it holds is outlined
    axes         what rows and columns are, such as ``("key", "depth")``
    fold         leave out rows and columns of a large tile, never those of ``thread``

    A box is a run of neighbouring elements in one thread; its numbers count the elements through the registers. Where
    several threads hold an element, the first is named. Raises ValueError for a thread that does not exist.

    >>> from kvlab.staging import FragmentMap
    >>> lane = np.arange(4)[:, None, None]
    >>> m = FragmentMap((2, 4), lane // 2, 2 * (lane % 2) + np.arange(2))
    >>> draw_fragment_map(m, thread=3).title
    'Warp 0, lane 3 holds 2 elements: row 1; column 2–3'
    """
    threads, per_register, warp_size = fragments.row.shape[0], fragments.row.shape[2], fragments.warp_size
    if thread is not None and not 0 <= thread < threads:
        raise ValueError(f"thread is {thread}: must be one of the {threads} threads")
    mine = np.zeros((0, 2), np.int64)
    if thread is not None:
        mine = np.unique(np.stack([fragments.row[thread].ravel(), fragments.col[thread].ravel()], axis=1), axis=0)
    columns, rows = _axes(fragments, mine, fold)
    part, many = _owners(fragments, thread, rows.index, columns.index)

    canvas = Canvas()
    canvas.text(0, 10, f"{axes[0]} ↓  {axes[1]} →", size=10, opacity=QUIET)
    label_columns(canvas, columns, HEADER - 6)
    label_rows(canvas, rows, GUTTER - 7)
    words = f"{axes[0]} %d, {axes[1]} %d\nthread %d, its element %d\nwarp %d, lane %d, register %d, element %d"
    words += "\nheld by %d threads" if many.max() > 1 else ""
    values = (
        part.lane // warp_size,
        part.lane % warp_size,
        part.register // per_register,
        part.register % per_register,
    )
    draw_fragment(
        canvas, part, columns, rows, thread, words=words, values=(*values, many) if many.max() > 1 else values
    )
    mark_gaps(canvas, columns, rows, what=axes[0])
    entries = [("none", ACCENT, f"thread {thread}")] if thread is not None else []
    entries += [("none", INK, f"thick line: a warp of {warp_size} lanes")] if part.lane.max() >= warp_size else []
    keys(canvas, GUTTER, rows.end + 14, entries)
    return canvas.picture(
        title or _title(fragments, thread, mine, warp_size, axes), caption or _caption(per_register, many)
    )


def _owners(fragments: Any, thread: int | None, rows: Int64, columns: Int64) -> tuple[Fragment, Int64]:
    """Holders of the elements [rows, columns] (``thread`` where it does, else the first), and how many do."""
    count, shape = fragments.row[0].size, (len(rows), len(columns))
    row, col = (a.reshape(len(a), -1) for a in (fragments.row, fragments.col))
    who, element = np.nonzero(np.isin(row, rows) & np.isin(col, columns))
    place = np.searchsorted(rows, row[who, element]), np.searchsorted(columns, col[who, element])
    number = who * count + element
    held = lowest(shape, place, number)
    if thread is not None:
        own = who == thread
        mine = lowest(shape, (place[0][own], place[1][own]), number[own])
        held = np.where(mine >= 0, mine, held)
    cell = np.ravel_multi_index(place, shape)
    different = np.unique(cell + held.size * who) % held.size
    holders = np.bincount(different, minlength=held.size).reshape(shape)
    lane, register = np.where(held < 0, -1, held // count), np.where(held < 0, -1, held % count)
    return Fragment("r", lane, register, count, fragments.warp_size), holders


def _axes(fragments: Any, mine: Int64, fold: bool) -> tuple[Axis, Axis]:
    """Cells wide enough for the names of the boxes; large tiles fold."""
    count, warp_size = fragments.shape, fragments.warp_size
    sample, _ = _owners(fragments, None, np.arange(min(count[0], 64)), np.arange(min(count[1], 256)))
    owner, element = sample.lane, sample.register
    along = (owner[:, 1:] == owner[:, :-1]) & (element[:, 1:] == element[:, :-1] + 1)
    down = (owner[1:] == owner[:-1]) & (element[1:] == element[:-1] + 1)
    flat = along.sum() >= down.sum()
    run = max(1, round(owner.size / max(1, owner.size - int(max(along.sum(), down.sum())))))
    name = text_width(f"T{len(fragments.row) - 1}", 9.5, mono=True) + 4
    least = min(46.0, 76.0 / run) if flat else name
    room = WIDTH - GUTTER
    cell = min(46.0, np.floor(4 * room / count[1]) / 4)
    columns = np.arange(count[1]) if not fold or cell >= least else None
    if columns is None:
        fit = int((room - 40) // least)
        first = mine[:1, 1] if len(mine) and mine[:, 1].min() >= fit - 3 else mine[:0, 1]
        columns = np.unique(np.r_[: min(fit - 3, count[1]), max(count[1] - 2, 0) : count[1], first])
        gaps = int((np.diff(columns) > 1).sum())
        cell = min(46.0, np.floor(4 * (room - 20.0 * gaps) / len(columns)) / 4)
    height = 20.0 if flat else 14.0
    if fold and count[0] > 32:
        first_column, _ = _owners(fragments, None, np.arange(min(count[0], 1024)), np.arange(1))
        edges = np.flatnonzero(np.diff(first_column.lane[:, 0] // warp_size, prepend=-2))[:16]
        near = (edges, np.minimum(edges + 1, count[0] - 1), np.unique(mine[:, 0])[:16])
        rows = np.unique(np.concatenate([np.arange(8), [count[0] - 1], *near]))
    else:
        rows = np.arange(count[0])
    return axis_of(columns, cell, GUTTER), axis_of(rows, height, HEADER)


def _title(fragments: Any, thread: int | None, mine: Int64, warp_size: int, axes: tuple[str, str]) -> str:
    threads, count = fragments.row.shape[0], fragments.row[0].size
    if thread is None:
        text = f"{fragments.shape[0]} x {fragments.shape[1]} elements in {threads} threads, {count} in each"
        if max(fragments.row.size, math.prod(fragments.shape)) > 4 * FEW:
            return text
        _, holders = _owners(fragments, None, *(np.arange(n) for n in fragments.shape))
        many = np.unique(holders)
        return text + (f"; every element in {many[0]} threads" if len(many) == 1 and many[0] > 1 else "")
    rows, columns = (_spans(np.unique(mine[:, i])) for i in (0, 1))
    return (
        f"Warp {thread // warp_size}, lane {thread % warp_size} holds {count} elements: {axes[0]} {rows}; "
        f"{axes[1]} {columns}"
    )


def _spans(index: Int64) -> str:
    """``0–3, 8``: runs of neighbours."""
    runs = np.split(index, np.flatnonzero(np.diff(index) > 1) + 1)
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(words if len(words) <= 5 else [*words[:4], "…", words[-1]])


def _caption(per_register: int, holders: Int64) -> str:
    text = "Each box is a run of neighbouring elements that one thread T holds; r counts the elements through its "
    text += f"registers, {per_register} to a register. The hue tells the quad of lanes."
    return text + (" Where several threads hold the same, one of them is named." if holders.max() > 1 else "")
