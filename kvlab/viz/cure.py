"""A conflict and its cure on one screen: both punch cards side by side, and under each the tile that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import QUIET
from .lanes import Image
from .palette import BANKS, order_colours
from .picture import Picture
from .punch_card import _bars, _Card, _ground, _lanes, _marks, _tops
from .svg import Canvas
from .text import text_width

__all__ = ["APART", "CARD", "ROW", "draw_cure", "draw_rows"]

Int64 = npt.NDArray[np.int64]

GUTTER, APART, CARD = 34.0, 452.0, 376.0
HEADER, ROW, ROWS = 40.0, 16.0, 8


def draw_cure(
    conflict: Any,
    cure: Any,
    *,
    tiles: Sequence[Any] | None = None,
    slot_bytes: int = 16,
    names: tuple[str, str] = ("as it is", "cured"),
    title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """One read twice: with conflicts (left), and as something else has cured it (right). It fits 900 x 720 px.

    conflict, cure   the :class:`kvlab.hardware.Wavefronts` of both, on one machine
    tiles            the two images of shared memory that they read, as :func:`draw_shared_memory` takes them, in slots
                     of ``slot_bytes``: the rows that the first phase reads are shown, a cell is the vector row,number
    names            what the two are called

    Raises ValueError for accesses of two machines, or tiles that are not two.

    >>> from kvlab.hardware import wavefronts
    >>> from kvlab.staging import SwizzledTile
    >>> tile, lane = SwizzledTile(rows=64, row_bytes=128), np.arange(32)
    >>> both = [wavefronts("ldmatrix.x4", t.address(lane % 8, lane // 8)) for t in (tile.plain(), tile)]
    >>> draw_cure(*both, tiles=(tile.plain(), tile)).title
    'ldmatrix.x4 on sm_90: 32 wavefronts as it is, 4 cured, ideal 4'
    """
    if conflict.arch.name != cure.arch.name:
        raise ValueError(f"conflict is of {conflict.arch.name}, cure of {cure.arch.name}: one machine is accepted")
    if tiles is not None and len(tiles) != 2:
        raise ValueError(f"tiles are {len(tiles)}: two are accepted, of the conflict and of the cure")
    canvas = Canvas()
    below = 0.0
    for x, access, name in zip((0.0, APART), (conflict, cure), names, strict=True):
        many = f"{access.wavefronts} wavefront{'s' * (access.wavefronts != 1)}"
        canvas.text(x, 12, f"{name}: {many}", size=12, weight=600)
        below = max(below, _card(canvas, _Card.of(access, None, 4, None, access.bank_count), x))
    for x, access, slots in zip((0.0, APART), (conflict, cure), tiles or (), strict=False):
        _tile(canvas, slots, slot_bytes, access, x, below + 14)
    canvas.extend(APART + CARD + 24, 0)
    note = ", provisional" if conflict.provisional else ""
    told = f"{conflict.wavefronts} wavefronts {names[0]}, {cure.wavefronts} {names[1]}, ideal {cure.ideal}{note}"
    where = conflict.instruction if conflict.instruction == cure.instruction else "the read"
    seen = "Lane by bank; a mark's shape tells the phase, its tone the pass in which it is served."
    seen += " Below: the tile, rows of all banks, what the first phase reads outlined." if tiles is not None else ""
    return canvas.picture(title or f"{where} on {conflict.arch.name}: {told}", caption or seen)


def _card(canvas: Canvas, card: _Card, x: float) -> float:
    """One punch card from ``x`` on; returns the y below it."""
    left = x + GUTTER
    cell = (CARD - GUTTER) / card.banks
    edges = np.asarray(left + cell * np.arange(card.banks), np.float64)
    height = 7.0 if len(card.phase) <= 32 else 4.5
    tops = _tops(card, height, HEADER)
    canvas.text(left, HEADER - 8, "lane ↓  bank of 4 bytes →", size=10, opacity=QUIET)
    _ground(canvas, edges, np.sort(tops), cell, height)
    _marks(canvas, card, edges + cell / 2, tops + height / 2, min(cell, height + 2))
    _lanes(canvas, card, left - 6, tops, height)
    for served in range(card.phases):
        lanes = np.flatnonzero(card.phase == served)
        if lanes.size:
            middle = (float(tops[lanes].min()) + float(tops[lanes].max()) + height) / 2
            canvas.text(x + CARD + 6, middle + 3.5, f"× {card.passes(served)}", size=10, opacity=QUIET)
    return _bars(canvas, card, edges, cell, float(tops.max()) + height + 20, x)


def _tile(canvas: Canvas, slots: Any, slot_bytes: int, access: Any, x: float, y: float) -> None:
    """The rows of shared memory that the first phase reads, at most eight."""
    image = Image.over(slots, slot_bytes, 0, 4 * access.arch.banks, access.arch.banks)
    lanes = np.flatnonzero(access.active & (access.phase == 0))
    address = access.addresses[lanes]
    rows = np.unique((address - image.start) // image.row_bytes)[:ROWS]
    if not lanes.size or rows[0] < 0 or rows[-1] >= image.rows:
        raise ValueError(f"tile {slots!r:.200}: the access reads bytes {address.tolist()}, which lie outside")
    wide = draw_rows(canvas, image, rows, x, y) / slot_bytes
    for byte in address.tolist():
        r, c = divmod(byte - image.start, image.row_bytes)
        k = np.flatnonzero(rows == r)
        if k.size:
            top = y + ROW * int(k[0]) + 1
            canvas.look_here(x + GUTTER + wide * c + 1, top, wide * access.op.nbytes - 2, ROW - 2, 1.6)


def draw_rows(canvas: Canvas, image: Image, rows: Int64, x: float, y: float) -> float:
    """Rows of shared memory, as wide as a punch card; returns the width of a slot."""
    row, vector = image.at(rows)
    left, wide = x + GUTTER, (CARD - GUTTER) / image.columns
    xs, ys = left + wide * np.arange(image.columns), y + ROW * np.arange(len(rows))
    colour = order_colours(np.maximum(vector, 0) * image.slot_bytes // 16)
    index = np.where(row >= 0, colour, np.where(row == -1, -1, -2))
    canvas.cells(xs, ys, wide, ROW, index, BANKS)
    for top, at in zip(ys.tolist(), rows.tolist(), strict=True):
        byte = str(image.start + image.row_bytes * at)
        canvas.text(left - 6, top + 11.5, byte, size=10, anchor="end", mono=True, opacity=QUIET)
    texts = [f"{r},{v}" if r >= 0 else "" for r, v in zip(row.ravel().tolist(), vector.ravel().tolist(), strict=True)]
    if wide >= max(text_width(text, 9, mono=True) for text in texts) + 2:
        across, down = (places.ravel() for places in np.meshgrid(xs + wide / 2, ys + 11.5))
        behind = [BANKS[i] if i >= 0 else None for i in index.ravel().tolist()]
        canvas.labels(across, down, texts, behind, size=9)
    return wide
