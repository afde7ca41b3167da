"""One diagonal: a tile without and with its swizzle, what the lanes of one phase read, and the passes this takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .model.accesses import tile_reads
from .model.lanes import Image
from .pen.axis import QUIET
from .pen.palette import ACCENT, ALARM, BANKS, PAPER, order_colours
from .pen.picture import Picture
from .pen.svg import BoxGrid, Canvas
from .shared_memory import CARD, CARD_APART, CARD_GUTTER, CARD_ROW, CARD_TOP, draw_rows

if TYPE_CHECKING:
    from kvlab.layout import Swizzle

MOST_ROWS = 16
TICK = 20.0
SMALL, SMALL_ROW = 200.0, 20.0
"""Width of a tile and height of a row in the small picture."""


def draw_one_diagonal(
    swizzle: Any, *, row_bytes: int | None = None, arch: str = "sm_90", small: bool = False, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """One tile beside itself, plain (left) and swizzled (right): the first lanes that are served together, and a tick
    for each pass that they take.

    swizzle     a :class:`kvlab.layout.Swizzle`, or a :class:`kvlab.staging.SwizzledTile`, which says its rows itself
    row_bytes   of a row of the tile; 128 unless given
    arch        the machine whose widest fitting read is drawn: ldmatrix.x4 on NVIDIA where 16 bytes stay together
    small       a picture that is read at 400 px: large words, no numbers in the cells

    The colour of a byte is its column of 16 bytes in the tile: a swizzle turns columns into diagonals. Raises
    ValueError for rows that are no multiple of 16 bytes and for a swizzle that moves less than 4 bytes.

    >>> from kvlab.layout import Swizzle
    >>> draw_one_diagonal(Swizzle(3, 4, 3, "byte")).title
    'Sw<3,4,3> (byte): 8 lanes of ldmatrix.x4 take 1 pass instead of 8'
    >>> draw_one_diagonal(Swizzle(2, 4, 3, "byte"), row_bytes=64).title
    'Sw<2,4,3> (byte): 8 lanes of ldmatrix.x4 take 1 pass instead of 4'
    """
    from kvlab.hardware import get_arch, wavefronts
    from kvlab.layout import Swizzle

    row_bytes = getattr(swizzle, "row_bytes", 128) if row_bytes is None else row_bytes
    cure: Swizzle = getattr(swizzle, "swizzle", swizzle)
    if not isinstance(cure, Swizzle):
        raise ValueError(f"swizzle is {swizzle!r:.200}: must be a Swizzle or a SwizzledTile")
    in_bytes, machine = cure.in_bytes(), get_arch(arch)
    piece = min(16, 1 << in_bytes.base) if in_bytes.bits else 16
    if piece < 4:
        raise ValueError(f"swizzle is {cure}: must move 4 bytes or more together")
    if row_bytes < 16 or row_bytes % 16:
        raise ValueError(f"row_bytes is {row_bytes}: must be a multiple of 16")
    name, read = next(iter(tile_reads(machine, piece).items()))
    plain, canvas = read.address(row_bytes), Canvas()
    both: list[int] = []
    below: list[tuple[float, float, int, int]] = []
    apart, gutter = (SMALL + 24, 0.0) if small else (CARD_APART, CARD_GUTTER)
    for x, way, called in ((0.0, Swizzle.identity("byte"), "plain"), (apart, in_bytes, "swizzled")):
        count = wavefronts(read.op.name, way(plain), arch=machine)
        served = np.flatnonzero(count.phase == 0)
        both.append(count.phases[0].passes)
        passes = f"{both[-1]} pass{'es' * (both[-1] != 1)}"
        canvas.text(x + gutter, 12, f"{called}: {passes}", size=14, weight=600)
        tile = _small_tile if small else _tile
        tile(canvas, way, x, row_bytes, piece, 4 * count.bank_count, count.addresses[served], read.op.nbytes)
        below.append((x + gutter, canvas.bottom, both[-1], len(served)))
    bottom = max(y for _, y, _, _ in below) + 12
    for left, _, number, lanes in below:
        _ticks(canvas, left, bottom, number, lanes)
    canvas.extend(apart + SMALL if small else CARD_APART + CARD + 24, 0)
    told = f"{both[1]} pass{'es' * (both[1] != 1)} instead of {both[0]}"
    if both[0] == both[1]:
        told = f"{both[0]} pass{'es' * (both[0] != 1)} with and without it"
    note = ", provisional" if "wavefronts" in machine.provisional else ""
    seen = (
        "Shared memory in rows of all banks; the colour tells the column of 16 bytes of the tile, a cell is its "
        f"row,{'vector' if piece == 16 else 'piece'}. Outlined: what the first {len(served)} lanes read. A tick is a "
        "pass."
    )
    if small:
        seen = "Shared memory, a row a line; a colour is a column of the tile. Outlined: what is read together."
    elif len(served) > MOST_ROWS:
        seen += f" {MOST_ROWS} rows are shown."
    return canvas.picture(title or f"{cure}: {len(served)} lanes of {name} take {told}{note}", caption or seen)


def _tile(
    canvas: Canvas, way: Swizzle, x: float, row_bytes: int, piece: int, across: int,
    lanes: npt.NDArray[np.int64], nbytes: int,
) -> None:
    """The rows of ``across`` bytes that the lanes read, their bytes outlined."""
    rows = np.unique(np.concatenate([lanes // across, np.arange(8)]))[:MOST_ROWS]
    slot = np.arange((int(rows.max()) + 1) * across // piece)
    origin = way(slot * piece)
    pairs = np.stack([origin // row_bytes, origin % row_bytes // piece], axis=-1)
    draw_rows(canvas, Image.over(pairs, piece, 0, across, across // 4), rows, x, CARD_TOP)
    wide = (CARD - CARD_GUTTER) / across
    for address in lanes.tolist():
        place = np.flatnonzero(rows == address // across)
        if place.size:
            left, top = x + CARD_GUTTER + wide * (address % across), CARD_TOP + CARD_ROW * float(place[0])
            canvas.look_here(left + 1, top + 1, wide * nbytes - 2, CARD_ROW - 2, 2.0)


def _small_tile(
    canvas: Canvas, way: Swizzle, x: float, row_bytes: int, piece: int, across: int,
    lanes: npt.NDArray[np.int64], nbytes: int,
) -> None:
    """As :func:`_tile`, of the first eight rows that the lanes read: colours alone."""
    rows = np.unique(lanes // across)[:8]
    places, wide = across // piece, SMALL * piece / across
    origin = way(rows[:, None] * across + np.arange(places) * piece)
    xs, ys = x + wide * np.arange(places), CARD_TOP + SMALL_ROW * np.arange(len(rows))
    canvas.cells(BoxGrid(xs, ys, wide, SMALL_ROW), order_colours(origin % row_bytes // 16), BANKS)
    for address in lanes[np.isin(lanes // across, rows)].tolist():
        top = CARD_TOP + SMALL_ROW * float(np.flatnonzero(rows == address // across)[0])
        left = x + SMALL * (address % across) / across
        canvas.look_here(left + 1, top + 1, SMALL * nbytes / across - 2, SMALL_ROW - 2, 2.5)


def _ticks(canvas: Canvas, x: float, y: float, passes: int, lanes: int) -> None:
    """A square for each pass, numbered."""
    step = min(TICK, (CARD - CARD_GUTTER) / max(passes, 1))
    for number in range(passes):
        canvas.rect(x + step * number, y, step - 2, TICK - 2, fill=ACCENT if passes == 1 else ALARM)
        if step >= TICK:
            middle = x + step * number + 9
            canvas.text(middle, y + 13, str(number + 1), size=11, anchor="middle", fill=PAPER, weight=600)
    words = "all at once" if passes == 1 else f"{lanes} lanes wait for each other" if passes == lanes else ""
    canvas.text(x, y + TICK + 12, words, size=11, opacity=QUIET)
