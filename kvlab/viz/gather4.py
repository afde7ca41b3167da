"""A gather of rows by number: from the sparse index list through the pages of the pool to the tile in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .model.tma_copy import TmaCopy
from .pen.axis import QUIET, WIDTH
from .pen.palette import BANKS, INK, order_colours, text_on
from .pen.picture import Picture
from .pen.svg import Canvas
from .pen.text import number
from .shared_memory import draw_image

if TYPE_CHECKING:
    from kvlab.cache import PagedKVCache
    from kvlab.hardware import TMAGather4Tile

LEFT, PAGE_GAP, SLOT_H, BOX_H = 70.0, 14.0, 22.0, 40.0


def draw_gather4(
    cache: PagedKVCache, tile: TMAGather4Tile, indices: Sequence[int], *, address: int = 0, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """Draws the tokens that a gather fetches, and the places of their rows in shared memory.

    cache      a paged cache: ``page_size_``, ``get_tma_row``, ``blocks``
    tile       its :class:`kvlab.hardware.TMAGather4Tile`
    indices    ``page * page_size + slot`` of each row of the tile
    address    byte address in shared memory, a multiple of 128

    Raises ValueError for another number of indices than rows of the tile.

    >>> from kvlab.cache import PagedKVCache
    >>> cache = PagedKVCache(np.zeros((4, 16, 1, 64), np.float16), [20], [[1, 0]], 1, 21)
    >>> tile = cache.create_gather4_tma_tile(tile_width=64, swizzle_mode="128B")
    >>> draw_gather4(cache, tile, [17, 3, 40, 18]).title
    '4 tokens from 3 pages: 1 gather4 instruction of 4 rows x 64 columns'
    """
    page_size, encoded = int(cache.page_size_), [int(e) for e in indices]
    if len(encoded) != tile.tile_height:
        raise ValueError(f"indices {encoded} are {len(encoded)}, the tile has {tile.tile_height} rows")
    rows = [int(r) for r in np.atleast_1d(cache.get_tma_row(np.array(encoded)))]
    shown = [*range(len(encoded))] if len(encoded) <= 32 else [*range(31), len(encoded) - 1]
    pages = sorted({encoded[i] // page_size for i in shown})
    touched = len({e // page_size for e in encoded})

    canvas = Canvas()
    canvas.text(0, 10, "pages", size=12, weight=600)
    many = f"{len(pages)} of {touched}" if touched > len(pages) else f"the {touched}"
    words = f"{many} pages of the pool that are touched, {page_size} slots each"
    canvas.text(LEFT, 10, words, size=10, opacity=QUIET)
    in_a_row = min(len(pages), 6)
    width = min(190.0, (WIDTH - LEFT - PAGE_GAP * (in_a_row - 1)) / in_a_row)
    places = _draw_pages(canvas, pages, page_size, in_a_row, width)
    _draw_rows(canvas, {i: (encoded[i], rows[i]) for i in shown}, places, page_size, width)
    y = canvas.bottom + 26
    canvas.text(0, y, "their image in shared memory", size=12, weight=600)
    copy = TmaCopy.of(tile, None, address, rows)
    per_group = tile.tile_height * tile.descriptor.pitch
    rules = {
        address + g * per_group: f"columns from {g * tile.descriptor.box[1]} on" for g in range(tile.column_groups)
    }
    rules = rules if len(rules) > 1 and per_group % 128 == 0 else {}
    if len(rules) > 4:
        rules = {at: rules[at] for at in [*list(rules)[:2], list(rules)[-1]]}
    canvas.embed(draw_image(copy.at, copy.size // 16, 16, 32, base=address, colour="row", rules=rules), 0, y + 8)
    ops = tile.tile_height // 4 * tile.column_groups
    done = f"{ops} gather4 instruction{'s' * (ops > 1)} of 4 rows x {tile.descriptor.box[1]} columns"
    found = f"{len(encoded)} tokens from {touched} pages: {done}"
    seen = (
        "Each index is page x page size + slot; get_tma_row turns it into a row of the pool's memory. Below: what the "
        "copies leave in shared memory, in the colour of the tile's row; a cell is 16 bytes, named row,vector."
    )
    return canvas.picture(title or found, caption or seen)


def _draw_pages(
    canvas: Canvas, pages: list[int], page_size: int, in_a_row: int, width: float
) -> dict[int, tuple[float, float]]:
    """Pages with their slots; where each lies."""
    places = {}
    for n, page in enumerate(pages):
        x, y = LEFT + n % in_a_row * (width + PAGE_GAP), 36.0 + n // in_a_row * (SLOT_H + 30)
        canvas.text(x, y - 5, f"page {page}", size=10)
        canvas.rect(x, y, width, SLOT_H, fill=INK, opacity=0.06)
        lines = "".join(
            f"M{number(x + width * s / page_size)} {number(y)}v{number(SLOT_H)}"
            for s in range(1, page_size if page_size <= 128 else 1)
        )
        canvas.path(lines, stroke=INK, stroke_width=0.6, opacity=0.25)
        canvas.rect(x, y, width, SLOT_H, stroke=INK, stroke_width=0.8, opacity=0.45)
        places[page] = (x, y)
    return places


def _draw_rows(
    canvas: Canvas, found: dict[int, tuple[int, int]], places: dict[int, tuple[float, float]], page_size: int,
    width: float,
) -> None:
    """The tile's rows, ``found`` as (index, TMA row), below their pages; arrows to the first eight."""
    top = canvas.bottom + 66
    wide = (WIDTH - LEFT) / min(len(found), 8)
    for k, (i, (e, row)) in enumerate(found.items()):
        page, slot = divmod(e, page_size)
        colour = BANKS[int(order_colours(i))]
        x, y = places[page]
        sx, sw = x + width * slot / page_size, width / page_size
        bx, by = LEFT + k % 8 * wide, top + k // 8 * (BOX_H + 8)
        canvas.rect(sx, y, sw, SLOT_H, fill=colour, title=f"page {page}, slot {slot}: index {e}, TMA row {row}")
        if k < 8:
            middle = sx + sw / 2
            end = bx + wide / 2 - 3
            canvas.arrow(
                [(middle, y + SLOT_H + 1), (middle, y + SLOT_H + 30), (end, by - 32), (end, by - 2)], width=1.1
            )
        canvas.rect(bx, by, wide - 6, BOX_H, fill=colour, title=f"row {i} of the tile: page {page}, slot {slot}")
        for line, text in enumerate((f"index {e}", f"row {row}")):
            canvas.text(bx + wide / 2 - 3, by + 16 + 15 * line, text, size=10, mono=True, anchor="middle",
                        fill=text_on(colour), weight=600 if line else None)
    canvas.text(0, top + 17, "get_", size=10, mono=True, opacity=QUIET)
    canvas.text(0, top + 31, "tma_row", size=10, mono=True, opacity=QUIET)
