"""Shared memory: rows of all banks, what lies in each slot, what one instruction reads; one image, or two compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .model.lanes import OUTSIDE, ROOMY, UNTOUCHED, ZEROS, Image, Lanes
from .model.offset_grid import FEW
from .pen.axis import QUIET, WIDTH, Axis, axis, axis_of, label_columns, label_rows, mark_gaps
from .pen.legend import keys
from .pen.palette import BANKS, INK, bank_colours, order_colours
from .pen.picture import Picture
from .pen.svg import HATCH, BoxGrid, Canvas
from .pen.text import text_width

if TYPE_CHECKING:
    from kvlab.hardware import Wavefronts

GUTTER = 52.0
HEADER = 44.0
ROW, LOW = 22.0, 17.0  # a tall image has lower rows, so that it stays within a screen
CARD, CARD_APART, CARD_GUTTER, CARD_ROW, CARD_TOP = 376.0, 452.0, 34.0, 16.0, 24.0
"""Two cards beside each other: the width of one, from one to the next, left of its rows, a row, above the first."""
COMPARED = 1 << 18
Int64 = npt.NDArray[np.int64]
TOLD = {"column": "its column of 16 bytes in the tile", "row": "its row in the tile", "bank": "its bank"}
"""What the colour of a byte can tell."""


def draw_shared_memory(
    slots: Any, *, slot_bytes: int = 16, base: int = 0, colour: str = "column", access: Wavefronts | None = None,
    addresses: npt.ArrayLike | None = None, lane_bytes: int = 16, phase: npt.ArrayLike | None = None,
    rules: Mapping[int, str] | None = None, row_bytes: int | None = None, banks: int | None = None, fold: bool = True,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """Draws the contents of shared memory, and the bytes that one instruction reads.

    slots        a :class:`kvlab.staging.SwizzledTile`; or ``[..., 2]`` integers, one pair for each slot in the order of
                 addresses: the (row, vector) of the tile that lies there, -1 for a slot that nobody wrote (hatched),
                 -3 for zeros that a copy wrote there, its source lying outside the tensor
    slot_bytes   16 or 4 (or another divisor of ``row_bytes``)
    base         byte address of the first slot
    colour       what a hue tells of a byte. ``"column"``: its column of 16 bytes in the tile (a swizzle moves the hues
                 sideways from row to row); ``"row"``: its row in the tile; ``"bank"``: its bank
    access       the :class:`kvlab.hardware.Wavefronts` of one instruction: its lanes are outlined, the lanes of its
                 first phase in the accent colour, and the title tells its wavefronts
    addresses, lane_bytes, phase    the same as plain arrays [lanes], -1 for an inactive lane
    rules        byte address -> label of what begins there (a stage, a block); multiples of ``row_bytes``
    row_bytes    of a row of the picture: all banks once, unless given
    banks        of 4 bytes: those of the machine of ``access``, else 32 (gfx950 has 64)
    fold         an image of more than 32 rows shows the first 8, those that lanes touch, and the last

    Raises ValueError for slots of another shape, addresses outside the image, or an unknown colour.

    >>> rows = np.stack(np.divmod(np.arange(64), 8), axis=-1)
    >>> draw_shared_memory(rows).title
    'Tile of 8 rows x 128 bytes: vector 0 of its first 8 rows lies in 1 bank group'
    """
    if banks is None:
        banks = 32 if access is None else access.arch.banks
    row_bytes = 4 * banks if row_bytes is None else row_bytes
    if hasattr(slots, "owner"):
        base = slots.base
    if slot_bytes <= 0 or row_bytes % slot_bytes or base % slot_bytes:
        raise ValueError(f"slot_bytes is {slot_bytes}: must divide row_bytes {row_bytes} and the base address {base}")
    if colour not in TOLD:
        raise ValueError(f"colour is {colour!r}: must be one of {', '.join(map(repr, TOLD))}")
    image = Image.over(slots, slot_bytes, base, row_bytes, banks)
    if not image.count:
        raise ValueError(f"slots {slots!r:.200} are none: at least one is drawn")
    lanes = Lanes.of(access, addresses, lane_bytes, phase, image)
    return _draw(image, lanes, colour, rules or {}, fold, title, caption)


def draw_tiles_beside(
    left: Any, right: Any, *, names: tuple[str, str], banks: int = 32, slot_bytes: int = 16, rows: int = 16,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """One tile as two machines, compilers or buffers keep it in shared memory.

    left, right   the images, as :func:`draw_shared_memory` takes them, in slots of ``slot_bytes``: a cell is the piece
                  row,number of the tile, named on hover and where there is room
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
    if (most := max(image.count for image in images)) > COMPARED:
        raise ValueError(f"{most} slots: up to {COMPARED} can be compared")
    canvas, gaps = Canvas(), False
    for x, image, name in zip((0.0, CARD_APART), images, names, strict=True):
        shown = np.arange(min(rows, image.rows))
        gaps |= bool((image.at(shown)[0] == UNTOUCHED).any())
        canvas.text(x, 12, name, size=12, weight=600)
        draw_rows(canvas, image, shown, x, CARD_TOP)
        if image.rows > rows:
            below = f"{image.rows - rows} more rows"
            canvas.text(x + CARD, CARD_TOP + CARD_ROW * rows + 14, below, size=10, anchor="end", opacity=QUIET)
    canvas.extend(CARD_APART + CARD + 24, 0)
    told = (
        f"Shared memory in rows of {4 * banks} bytes, all {banks} banks once; a cell is {slot_bytes} bytes of a row of "
        "the tile, the colour tells its column of 16 bytes."
    )
    told += " Hatched: nobody's." * gaps
    return canvas.picture(title or f"{names[0]} and {names[1]}: {_compared(images)}", caption or told)


def draw_rows(canvas: Canvas, image: Image, rows: Int64, x: float, y: float) -> float:
    """Rows of shared memory, as wide as a punch card; returns the width of a slot. A slot is named on hover, and where
    there is room."""
    row, vector = image.at(rows)
    left, wide = x + CARD_GUTTER, (CARD - CARD_GUTTER) / image.columns
    xs, ys = left + wide * np.arange(image.columns), y + CARD_ROW * np.arange(len(rows))
    colour = order_colours(np.maximum(vector, 0) * image.slot_bytes // 16)
    index = np.where(row >= 0, colour, np.where(row == UNTOUCHED, -1, -2))
    boxes = BoxGrid(xs, ys, wide, CARD_ROW)
    canvas.cells(boxes, index, BANKS)
    places = zip(*(field.ravel().tolist() for field in (image.address(rows), row, vector)), strict=True)
    words = [f"byte {a}, bank {a // 4 % image.banks}\n{_what(r, v, image.slot_bytes)}" for a, r, v in places]
    canvas.hover(boxes, "%s", np.array(words, object).reshape(row.shape))
    for top, at in zip(ys.tolist(), rows.tolist(), strict=True):
        byte = str(image.start + image.row_bytes * at)
        canvas.text(left - 6, top + 11.5, byte, size=10, anchor="end", mono=True, opacity=QUIET)
    texts = [f"{r},{v}" if r >= 0 else "" for r, v in zip(row.ravel().tolist(), vector.ravel().tolist(), strict=True)]
    if wide >= max(text_width(text, 9, mono=True) for text in texts) + 2:
        across, down = (places.ravel() for places in np.meshgrid(xs + wide / 2, ys + 11.5))
        behind = [BANKS[i] if i >= 0 else None for i in index.ravel().tolist()]
        canvas.labels(across, down, texts, behind, size=9)
    return wide


def draw_image(
    of: Callable[[Int64], Int64], count: int, slot_bytes: int, banks: int, *, base: int = 0, colour: str = "column",
    rules: Mapping[int, str] | None = None,
) -> Picture:
    """:func:`draw_shared_memory` of ``count`` slots that are computed where they are looked at: slots [n] -> [n, 2]."""
    image = Image(of, count, slot_bytes, base, 4 * banks, banks)
    return _draw(image, Lanes.of(None, None, 16, None, image), colour, rules or {}, True, None, None)


def _draw(
    image: Image, lanes: Lanes, colour: str, rules: Mapping[int, str], fold: bool, title: str | None,
    caption: str | None,
) -> Picture:
    slot_bytes, row_bytes, banks = image.slot_bytes, image.row_bytes, image.banks
    canvas = Canvas()
    columns = axis(
        image.columns, np.floor((WIDTH - GUTTER) / image.columns), GUTTER, limit=image.columns, head=image.columns
    )
    rows = _rows(image, lanes, rules, fold)
    _header(canvas, columns, image)
    label_rows(canvas, rows, GUTTER - 7, [str(image.start + row_bytes * r) for r in rows.index.tolist()], mono=True)
    (row, vector), address = image.at(rows.index), image.address(rows.index)
    index = {
        "column": lambda: order_colours(vector * slot_bytes // 16),
        "row": lambda: order_colours(row),
        "bank": lambda: bank_colours(address // 4 % banks, banks),
    }[colour]()
    index = np.where(row < 0, row, index)
    index = np.where(row <= OUTSIDE, -2, index)
    boxes = BoxGrid(columns.edge, rows.edge, columns.cell, rows.cell)
    canvas.cells(boxes, index, BANKS)
    canvas.cells(boxes, np.where(row == ZEROS, 0, -2), [INK], opacity=0.07)
    _rules(canvas, columns, rows, rules, image)
    taken = lanes.draw(canvas, columns, rows, image, index)
    _contents(canvas, columns, rows, row, vector, index, taken, slot_bytes)
    words = [
        f"byte {a}, bank {a // 4 % banks}\n{_what(r, v, slot_bytes)}{lanes.at(a, slot_bytes)}"
        for a, r, v in zip(*(field.ravel().tolist() for field in (address, row, vector)), strict=True)
    ]
    canvas.hover(boxes, "%s", np.array(words, object).reshape(row.shape))
    mark_gaps(canvas, columns, rows)
    entries = lanes.keys() + ([(HATCH, "", "nobody wrote here")] if (row == -1).any() else [])
    entries += [("none", "", "0: zeros, the source lies outside the tensor")] if (row == ZEROS).any() else []
    if entries:
        keys(canvas, GUTTER, rows.end + 14, entries)
    return canvas.picture(title or _title(image, lanes), caption or _caption(image, lanes, colour))


def _rows(image: Image, lanes: Lanes, rules: Mapping[int, str], fold: bool) -> Axis:
    count = image.rows
    starts = {}
    for address in rules:
        if address % image.row_bytes or not image.start <= address < image.end:
            raise ValueError(f"rule at byte {address} is not the start of a row of the image")
        starts[(address - image.start) // image.row_bytes] = True
    if fold and count > 32:
        used = lanes.address[lanes.address >= 0]
        kept = {*range(8), count - 1, *((used - image.start) // image.row_bytes).tolist()}
        kept |= {row for start in starts for row in range(start, min(start + 4, count))}
        index = np.array(sorted(kept))
        gaps = np.flatnonzero((np.diff(index) > 1) & (np.diff(index) <= 3))  # a gap that saves nothing
        index = np.union1d(index, [row for at in gaps for row in range(index[at], index[at + 1])]).astype(np.int64)
    else:
        index = np.arange(count)
    height = ROW if len(index) <= 24 else LOW
    return axis_of(index, height, HEADER, before=np.array([r in starts for r in index.tolist()]))


def _header(canvas: Canvas, columns: Axis, image: Image) -> None:
    canvas.text(GUTTER - 7, HEADER - 6, "byte", size=10, anchor="end", opacity=QUIET)
    each = image.slot_bytes // 4
    first = [c * image.slot_bytes // 4 % image.banks for c in range(image.columns)]
    if each > 1:
        names = [f"banks {bank}–{bank + each - 1}" for bank in first]
        names = names if columns.cell > 74 else [name.removeprefix("banks ") for name in names]
    else:
        names = [str(bank) for bank in first]
    canvas.text(GUTTER, HEADER - 22, f"rows of {image.row_bytes} bytes, bank of 4 bytes →", size=10, opacity=QUIET)
    label_columns(canvas, columns, HEADER - 6, names)


def _rules(canvas: Canvas, columns: Axis, rows: Axis, rules: Mapping[int, str], image: Image) -> None:
    for address, label in rules.items():
        row = (address - image.start) // image.row_bytes
        y = float(rows.edge[rows.index == row][0]) - 4
        canvas.line(0, y, columns.end, y, opacity=0.5)
        canvas.text(columns.end, y - 4, label, size=10, weight=600, anchor="end")


def _contents(
    canvas: Canvas, columns: Axis, rows: Axis, row: npt.NDArray[np.int64], vector: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64], taken: npt.NDArray[np.bool_], slot_bytes: int,
) -> None:
    """Contents of each slot, where there is room beside the lane's name."""
    texts, xs, ys, behind = [], [], [], []
    roomy = columns.cell >= ROOMY
    for (k, c), r in np.ndenumerate(row):
        text = "0" if r == ZEROS else f"{r},{vector[k, c]}" if columns.cell >= 40 else str(r)
        if (r < 0 and r != ZEROS) or taken[k, c] or columns.cell < 6.1 * len(text) + 3:
            continue
        texts.append(text)
        xs.append(float(columns.edge[c]) + (8 if roomy else columns.cell / 2))
        ys.append(float(rows.edge[k]) + rows.cell / 2 + 3.5)
        behind.append(BANKS[index[k, c]] if r >= 0 else None)
    canvas.labels(xs, ys, texts, behind, anchor="start" if roomy else "middle")


def _what(row: int, vector: int, slot_bytes: int) -> str:
    if row < 0:
        return {UNTOUCHED: "nobody wrote here", ZEROS: "zeros: outside the tensor"}.get(row, "outside the image")
    return f"row {row} of the tile, {'vector' if slot_bytes == 16 else 'piece'} {vector}"


def _title(image: Image, lanes: Lanes) -> str:
    access = lanes.access
    if access is not None:
        note = f" on {access.arch.name}, provisional" if access.provisional else ""
        passes = f"{access.wavefronts} wavefront{'s' if access.wavefronts != 1 else ''}"
        return f"{access.instruction}: {passes}, ideal {access.ideal}{note}"
    seen = min(image.count, FEW)
    tile = image.of(np.arange(seen))
    written = tile[:, 0] >= 0
    if not written.any():
        return f"{image.end - image.base} bytes of shared memory{' that nobody wrote' * (seen == image.count)}"
    row, vector = tile[written].T
    address = image.base + image.slot_bytes * np.flatnonzero(written)
    column = (vector == vector.min()) & (row < row.min() + 8)
    groups = len(np.unique(address[column] % (4 * image.banks) // 16))
    size = f"Tile of {len(np.unique(row))} rows x {image.slot_bytes * len(np.unique(vector))} bytes"
    if seen < image.count:
        size = f"{image.end - image.base} bytes of shared memory"
    name = "vector" if image.slot_bytes == 16 else "piece"
    return (
        f"{size}: {name} {vector.min()} of its first {len(np.unique(row[column]))} rows lies in "
        f"{groups} bank group{'s' if groups > 1 else ''}"
    )


def _compared(images: list[Image]) -> str:
    count = max(image.count for image in images)
    held = [np.stack(image.at(np.arange(image.rows)), axis=-1).reshape(-1, 2) for image in images]
    size = max(map(len, held))
    padded = [np.pad(one, ((0, size - len(one)), (0, 0)), constant_values=UNTOUCHED) for one in held]
    apart = int((padded[0] != padded[1]).any(axis=1).sum())
    if not apart:
        return f"the same piece of the tile in all {count} slots"
    return f"another piece of the tile in {apart} of {count} slots"


def _caption(image: Image, lanes: Lanes, colour: str) -> str:
    name = "vector of 16 bytes" if image.slot_bytes == 16 else f"piece of {image.slot_bytes} bytes"
    text = f"Shared memory in rows of {image.row_bytes} bytes. Each cell is a {name} of the tile, named row,number; "
    text += f"the colour tells {TOLD[colour]}."
    if lanes.groups():
        text += " Outlined: the bytes that one instruction reads, with the lane that asks for them."
    return text
