"""The grid: a layout as a table of offsets, coloured by bank or by owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import QUIET, WIDTH, Axis, axis, bracket, label_columns, label_rows, mark_gaps, period
from .legend import bank_legend, keys
from .palette import BANKS, INK, LANES, PAPER, bank_colours, lane_colours
from .picture import Picture
from .svg import Canvas
from .text import text_width

__all__ = ["draw_composed_layout", "draw_layout"]

GUTTER = 34.0
HEADER = 28.0


def draw_layout(
    layout: Any,
    *,
    element_bytes: int | None = None,
    base: int = 0,
    banks: int = 32,
    owner: npt.ArrayLike | None = None,
    register: npt.ArrayLike | None = None,
    warp_size: int = 32,
    inside: npt.ArrayLike | None = None,
    group: npt.ArrayLike | None = None,
    mark: tuple[int, int] | None = None,
    axes: tuple[str, str] = ("row", "column"),
    tiles: bool = False,
    fold: bool = True,
    title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """A layout as a grid: each cell shows its offset, its colour is the bank or the owner.

    layout           an object with ``.offsets()`` (a :class:`kvlab.layout.Layout`) or an integer array; rank 1 is drawn
                     as one row, modes after the first of a higher rank lie side by side, the earlier ones fastest
    element_bytes    bytes of an element: gives byte addresses and banks (without it, colour = offset modulo 32)
    base             byte address of offset 0
    owner, register  integer arrays like the grid: which lane (``T5``) and which of its registers holds the element,
                     -1 for nobody; the colour is then the quad of lanes, and warps are outlined
    inside           boolean array like the grid: cells outside are dimmed (a view inside its parent)
    group            integer array like the grid: neighbours with equal numbers are outlined together (vectors), -1: not
    mark             (row, column) of the one cell to look at
    tiles            a layout of two modes, (tile, rest), of one or two modes each, as ``zipped_divide`` gives: its
                     tiles as a grid, each outlined, instead of one a column
    fold             more than 24 rows fold to the first 8, a marked gap, and the last; likewise beyond 128 columns

    Raises ValueError for an array of other shape or without elements, or for ``tiles`` of a layout of other modes.

    >>> from kvlab.layout import Layout, zipped_divide
    >>> draw_layout(zipped_divide(Layout("(2,6):(6,1)"), (1, 2)), tiles=True).title
    '((1,2),(2,3)):((0,1),(6,2)): a grid of 2 x 3 tiles of 1 x 2 elements'
    >>> draw_layout([[0, 1], [2, 3]], element_bytes=2).title
    '2 x 2 elements: +1 along a row, +2 down a column; column 0 lies in 2 of 32 banks'
    """
    if tiles and group is not None:
        raise ValueError("group cannot be given with tiles: the tiles are the groups")
    if tiles:
        offset, group, found = _tiles(layout)
        title = title or f"{layout}: {found}"
    else:
        offset = _offsets(layout)
    who = _like("owner", owner, offset)
    reg = _like("register", register, offset)
    kept = _like("inside", inside, offset)
    together = _like("group", group, offset)
    if mark is not None and not (0 <= mark[0] < offset.shape[0] and 0 <= mark[1] < offset.shape[1]):
        raise ValueError(f"mark {mark} is not a cell of the grid of shape {offset.shape}")
    address = base + offset * element_bytes if element_bytes else None
    bank = (address // 4 if address is not None else offset) % banks
    colours, index = (BANKS, bank_colours(bank, banks)) if who is None else (LANES, lane_colours(who))

    repeat = period(index)
    widest = len(str(offset.max())) if who is None else len(f"T{who.max()}")
    columns, rows, labelled = _axes(offset.shape, widest, reg is not None, fold, repeat, mark)
    grid = np.ix_(rows.index, columns.index)
    canvas = Canvas()
    canvas.text(0, 10, f"{axes[0]} ↓  {axes[1]} →", opacity=QUIET, size=10)
    label_columns(canvas, columns, HEADER - 5)
    label_rows(canvas, rows, GUTTER - 7)
    shown = index[grid]
    if kept is None:
        canvas.cells(columns.edge, rows.edge, columns.cell, rows.cell, shown, colours)
    else:
        canvas.cells(columns.edge, rows.edge, columns.cell, rows.cell, shown, colours, opacity=0.22)
        bright = np.where(kept[grid].astype(bool), shown, -2)
        canvas.cells(columns.edge, rows.edge, columns.cell, rows.cell, bright, colours)
    if together is not None:
        for stroke, width in ((PAPER, 3.6), (INK, 1.4)):
            edges = columns.edge, rows.edge, columns.cell, rows.cell
            canvas.borders(*edges, together[grid], stroke=stroke, stroke_width=width)
    if who is not None and who.max() >= warp_size:
        canvas.borders(columns.edge, rows.edge, columns.cell, rows.cell, np.where(who < 0, -1, who // warp_size)[grid])
    if labelled:
        xs, ys = (a.ravel() for a in np.meshgrid(columns.centre, rows.centre))
        behind = [None if c < 0 else colours[c] for c in shown.ravel().tolist()]
        if kept is not None:
            behind = [b if k else None for b, k in zip(behind, kept[grid].ravel().tolist(), strict=True)]
        lift = -1.5 if reg is not None else 3.5
        canvas.labels(xs, ys + lift, _texts(offset[grid], None if who is None else who[grid]), behind)
        if reg is not None:
            canvas.labels(xs, ys + 9.5, [f"r{v}" if v >= 0 else "" for v in reg[grid].ravel().tolist()], behind, size=9)
    if mark is not None:
        _mark(canvas, columns, rows, mark)
    words, values = _details(axes, grid, offset, address, bank, who, reg, warp_size)
    canvas.hover(columns.edge, rows.edge, columns.cell, rows.cell, words, *values)
    mark_gaps(canvas, columns, rows, what=axes[0])
    plain = who is None and kept is None and together is None
    if plain and repeat is not None and 1 < repeat <= len(rows.index) and offset.shape[0] > 2:
        words = "the colours\nrepeat" if columns.end < WIDTH - 90 else ""
        bracket(canvas, columns.end + 5, float(rows.edge[0]), float(rows.edge[repeat - 1]) + rows.cell, words)
    if who is None:
        name = f"bank of 4 bytes{' (modulo 32)' if banks > 32 else ''}" if address is not None else "offset modulo 32"
        bank_legend(canvas, GUTTER, rows.end + 16, name)
    elif who.max() >= warp_size:
        keys(canvas, GUTTER, rows.end + 14, [("none", INK, "thick outline: a warp")])
    return canvas.picture(
        title or _title(layout, offset, bank, address, who, banks), caption or _caption(address, who, labelled)
    )


def draw_composed_layout(composed: Any, **how: Any) -> Picture:
    """The grid of a :class:`kvlab.layout.ComposedLayout`: in banks where a swizzle says what its unit is.

    ``how`` is as for :func:`draw_layout`.

    >>> from kvlab.layout import ComposedLayout, Layout, Swizzle
    >>> draw_composed_layout(ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16"))).title
    'Sw<3,3,3> (bfloat16) o (8,64):(64,1): column 0 lies in 8 of 32 banks'
    """
    unit = getattr(composed.outer, "unit_bytes", None)
    return draw_layout(composed, **{"element_bytes": unit, **how})


def _offsets(layout: Any) -> npt.NDArray[np.int64]:
    array = np.asarray(layout.offsets() if hasattr(layout, "offsets") else layout)
    if array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"layout {layout!r} must give a non-empty integer array of offsets, not {array.dtype}")
    if array.ndim < 2:
        return array.reshape(1, -1).astype(np.int64)
    return array.reshape(array.shape[0], -1, order="F").astype(np.int64)


def _tiles(layout: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], str]:
    """The offsets of a grid of tiles, the tile of each element, and words for both."""
    modes = getattr(layout, "modes", ())
    inner = [[part.size for part in mode.modes] for mode in modes]
    if len(modes) != 2 or len(inner[0]) != len(inner[1]) or len(inner[0]) > 2 or not layout.size:
        raise ValueError(
            f"tiles of {layout!r}: two modes, (tile, rest), of the same one or two modes each are accepted"
        )
    (rows, columns), (down, across) = ([*sizes, 1][:2] for sizes in inner)
    array = np.asarray(layout.offsets()).reshape(rows, columns, down, across, order="F").transpose(2, 0, 3, 1)
    number = np.arange(down * across).reshape(down, 1, across, 1)
    shape = (down * rows, across * columns)
    found = f"a grid of {down} x {across} tiles of {rows} x {columns} elements"
    return array.reshape(shape).astype(np.int64), np.broadcast_to(number, array.shape).reshape(shape), found


def _like(name: str, values: npt.ArrayLike | None, offset: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    if values is None:
        return None
    array = np.asarray(values)
    if array.shape != offset.shape:
        raise ValueError(f"{name} of shape {array.shape} does not fit the grid of shape {offset.shape}")
    return array.astype(np.int64)


def _texts(offset: npt.NDArray[np.int64], who: npt.NDArray[np.int64] | None) -> list[str]:
    if who is None:
        return [str(v) for v in offset.ravel().tolist()]
    return [f"T{v}" if v >= 0 else "" for v in who.ravel().tolist()]


def _axes(
    shape: tuple[int, ...],
    widest: int,
    two_lines: bool,
    fold: bool,
    repeat: int | None,
    mark: tuple[int, int] | None,
) -> tuple[Axis, Axis, bool]:
    """Columns, rows, and whether a cell has room for its text."""
    many = shape[1] > 128 and fold
    count = (72 if mark is None else 73) if many else shape[1]
    keep = (None, None) if mark is None else mark
    room = WIDTH - GUTTER - (20 if many else 0) * (1 if mark is None else 2)
    width = min(46.0, np.floor(4 * room / count) / 4)
    labelled = width >= text_width("0" * widest, 10, mono=True) + 3
    height = (30.0 if two_lines else 22.0) if labelled else max(12.0, min(16.0, width))
    columns = axis(shape[1], width, GUTTER, limit=128 if fold else shape[1], head=64, tail=8, keep=keep[1])
    head = repeat if repeat is not None and 8 < repeat <= 16 else 8
    rows = axis(shape[0], height, HEADER, limit=24 if fold else shape[0], head=head, keep=keep[0])
    return columns, rows, labelled


def _mark(canvas: Canvas, columns: Axis, rows: Axis, mark: tuple[int, int]) -> None:
    row, column = mark
    x = float(columns.edge[columns.index == column][0])
    y = float(rows.edge[rows.index == row][0])
    canvas.look_here(x, y, columns.cell, rows.cell)


def _details(
    axes: tuple[str, str],
    grid: tuple[npt.NDArray[np.int64], ...],
    offset: npt.NDArray[np.int64],
    address: npt.NDArray[np.int64] | None,
    bank: npt.NDArray[np.int64],
    who: npt.NDArray[np.int64] | None,
    reg: npt.NDArray[np.int64] | None,
    warp_size: int,
) -> tuple[str, list[npt.NDArray[np.int64]]]:
    """What hovering over a cell tells: a %-format and its arguments."""
    words, values = f"{axes[0]} %d, {axes[1]} %d\noffset %d", [*grid, offset[grid]]
    if address is not None:
        words += "\nbyte %d, bank %d"
        values += [address[grid], bank[grid]]
    if who is not None:
        words += "\nthread %d: warp %d, lane %d"
        values += [who[grid], who[grid] // warp_size, who[grid] % warp_size]
    if reg is not None:
        words += ", register %d"
        values.append(reg[grid])
    return words, values


def _title(
    layout: Any,
    offset: npt.NDArray[np.int64],
    bank: npt.NDArray[np.int64],
    address: npt.NDArray[np.int64] | None,
    who: npt.NDArray[np.int64] | None,
    banks: int,
) -> str:
    name = str(layout) if hasattr(layout, "offsets") else f"{offset.shape[0]} x {offset.shape[1]} elements"
    if who is not None:
        return f"{name}: {len(np.unique(who[who >= 0]))} threads hold {int((who >= 0).sum())} of {who.size} elements"
    steps = []
    for words, step in (("along a row", np.diff(offset, axis=1)), ("down a column", np.diff(offset, axis=0))):
        if step.size and (step == step.flat[0]).all():
            steps.append(f"{step.flat[0]:+d} {words}")
    distinct = len(np.unique(offset))
    spread = [f"{offset.size} elements share {distinct} offsets"] if distinct < offset.size else []
    if address is not None and offset.shape[0] > 1:
        spread.append(f"column 0 lies in {len(np.unique(bank[:, 0]))} of {banks} banks")
    found = "; ".join(part for part in (", ".join(steps), *spread) if part)
    return f"{name}: {found or f'{offset.size} elements at {distinct} offsets'}"


def _caption(address: npt.NDArray[np.int64] | None, who: npt.NDArray[np.int64] | None, labelled: bool) -> str:
    if who is not None:
        label = ", labelled with the thread that holds it" if labelled else ""
        return f"Each cell is an element{label}; the hue tells the quad: four neighbouring threads."
    label = ", labelled with its offset in elements" if labelled else ""
    colour = "the shared-memory bank it lies in" if address is not None else "the offset modulo 32"
    return f"Each cell is an element{label}; its colour is {colour}."
