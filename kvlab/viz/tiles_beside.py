"""Two images of one tile in shared memory, side by side: who keeps which vector where."""

from __future__ import annotations

from typing import Any

import numpy as np

from .axis import QUIET
from .cure import APART, CARD, ROW, draw_rows
from .lanes import Image
from .picture import Picture
from .svg import Canvas

__all__ = ["draw_tiles_beside"]

HEADER, ROWS = 24.0, 16
MOST = 1 << 18


def draw_tiles_beside(
    left: Any,
    right: Any,
    *,
    names: tuple[str, str],
    banks: int = 32,
    slot_bytes: int = 16,
    rows: int = ROWS,
    title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """One tile as two machines, compilers or buffers keep it in shared memory.

    left, right   the images, as :func:`draw_shared_memory` takes them, in slots of ``slot_bytes``: a cell is the piece
                  row,number of the tile
    names         what the two are called
    banks         of 4 bytes; a row of the picture is all banks once
    rows          shown from the first byte on

    Raises ValueError for slots that are no pairs, for more than 2^18 of them, and for fewer than one row.

    >>> from kvlab.staging import SwizzledTile
    >>> tile = SwizzledTile(rows=64, row_bytes=128)
    >>> draw_tiles_beside(tile, tile.plain(), names=("swizzled", "plain")).title
    'swizzled and plain: another piece of the tile in 448 of 512 slots'
    >>> draw_tiles_beside(tile, tile, names=("one", "other")).title
    'one and other: the same piece of the tile in all 512 slots'
    """
    if rows < 1:
        raise ValueError(f"rows {rows}: at least 1 is drawn")
    images = [Image.over(slots, slot_bytes, 0, 4 * banks, banks) for slots in (left, right)]
    if (most := max(image.count for image in images)) > MOST:
        raise ValueError(f"{most} slots: up to {MOST} can be compared")
    canvas = Canvas()
    for x, image, name in zip((0.0, APART), images, names, strict=True):
        canvas.text(x, 12, name, size=12, weight=600)
        draw_rows(canvas, image, np.arange(min(rows, image.rows)), x, HEADER)
        if image.rows > rows:
            below = f"{image.rows - rows} more rows"
            canvas.text(x + CARD, HEADER + ROW * rows + 14, below, size=10, anchor="end", opacity=QUIET)
    canvas.extend(APART + CARD + 24, 0)
    told = (
        f"Shared memory in rows of {4 * banks} bytes, all {banks} banks once; a cell is {slot_bytes} bytes of the "
        "tile, row,number; the colour tells its column of 16 bytes."
    )
    return canvas.picture(title or f"{names[0]} and {names[1]}: {_found(images)}", caption or told)


def _found(images: list[Image]) -> str:
    count = max(image.count for image in images)
    held = [np.stack(image.at(np.arange(image.rows)), axis=-1).reshape(-1, 2) for image in images]
    size = max(map(len, held))
    padded = [np.pad(one, ((0, size - len(one)), (0, 0)), constant_values=-1) for one in held]
    apart = int((padded[0] != padded[1]).any(axis=1).sum())
    if not apart:
        return f"the same piece of the tile in all {count} slots"
    return f"another piece of the tile in {apart} of {count} slots"
