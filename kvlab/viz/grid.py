"""The grid: a layout as a table of offsets, coloured by bank or by owner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlab.layout import Layout

from .model.offset_grid import FEW, Cells, OffsetGrid
from .pen.axis import GAP, QUIET, WIDTH, Axis, axis_of, bracket, label_columns, label_rows, mark_gaps, period, some
from .pen.legend import bank_legend, keys
from .pen.palette import BANKS, INK, LANES, bank_colours, lane_colours
from .pen.picture import Picture
from .pen.svg import BoxGrid, Canvas
from .pen.text import text_width

if TYPE_CHECKING:
    from kvlab.layout import ComposedLayout

GUTTER = 34.0
HEADER = 28.0
MOST = 1 << 22
"""So many cells of an array are searched for what is inside."""

Int64 = npt.NDArray[np.int64]


def draw_layout(
    layout: Any, *, element_bytes: int | None = None, base: int = 0, banks: int = 32,
    owner: npt.ArrayLike | None = None, register: npt.ArrayLike | None = None, warp_size: int = 32,
    inside: npt.ArrayLike | Cells | None = None, group: npt.ArrayLike | Cells | None = None,
    mark: tuple[int, int] | None = None, axes: tuple[str, str] = ("row", "column"), tiles: bool = False,
    fold: bool = True, title: str | None = None, caption: str | None = None,
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
    fold             more than 24 rows fold to the first 8, a marked gap, and the last; likewise beyond 128 columns. Of
                     what is ``inside`` or has an owner, the first rows and columns are shown and the last, wherever

    Of a large layout only the cells that are shown are computed. Raises ValueError for an array of other shape or
    without elements, or for ``tiles`` of a layout of other modes.

    >>> from kvlab.layout import Layout, zipped_divide
    >>> draw_layout(zipped_divide(Layout("(2,6):(6,1)"), (1, 2)), tiles=True).title
    '((1,2),(2,3)):((0,1),(6,2)): a grid of 2 x 3 tiles of 1 x 2 elements'
    >>> draw_layout([[0, 1], [2, 3]], element_bytes=2).title
    '2 x 2 elements: +1 along a row, +2 down a column; the 2 rows of column 0 lie in 2 different banks'
    >>> draw_layout(Layout.row_major(1 << 20, 1 << 20)).title
    '(1048576,1048576):(1048576,1): +1 along a row, +1048576 down a column'
    """
    if tiles and group is not None:
        raise ValueError("group cannot be given with tiles: the tiles are the groups")
    if tiles:
        layout, number, found = _tiles(layout)
        title = title or f"{found}"
    field = OffsetGrid(layout)
    given: dict[str, Any] = {
        name: _like(name, values, field.shape)
        for name, values in (("owner", owner), ("register", register), ("inside", inside), ("group", group))
        if values is not None
    }
    if mark is not None and not (0 <= mark[0] < field.shape[0] and 0 <= mark[1] < field.shape[1]):
        raise ValueError(f"mark is {mark}: must be a cell of the grid of shape {field.shape}")
    repeat = _period(field, base, element_bytes, banks) if owner is None else _repeats(given["owner"])
    rows_shown, columns_shown = _shown(field.shape, fold, repeat, mark, _subject(given))
    offset = field.at(rows_shown, columns_shown)
    grid = np.ix_(rows_shown, columns_shown)
    part = {name: np.asarray(values[grid], np.int64) for name, values in given.items()}
    who, reg, kept = (part.get(name) for name in ("owner", "register", "inside"))
    together = number(rows_shown[:, None], columns_shown) if tiles else part.get("group")
    address = base + offset * element_bytes if element_bytes else None
    bank = (address // 4 if address is not None else offset) % banks
    colours, shown = (BANKS, bank_colours(bank, banks)) if who is None else (LANES, lane_colours(who))

    widest = max(len(str(offset.max())), len(str(offset.min()))) if who is None else len(f"T{who.max()}")
    columns, rows, labelled = _axes(rows_shown, columns_shown, widest, reg is not None)
    canvas = Canvas()
    canvas.text(0, 10, f"{axes[0]} ↓  {axes[1]} →", opacity=QUIET, size=10)
    label_columns(canvas, columns, HEADER - 5)
    label_rows(canvas, rows, GUTTER - 7)
    boxes = BoxGrid(columns.edge, rows.edge, columns.cell, rows.cell)
    canvas.cells(boxes, shown, colours, opacity=None if kept is None else 0.22)
    if kept is not None:
        canvas.cells(boxes, np.where(kept.astype(bool), shown, -2), colours)
    if together is not None:
        canvas.outlines(boxes, together, stroke_width=1.4)
    if who is not None and who.max() >= warp_size:
        canvas.outlines(boxes, np.where(who < 0, -1, who // warp_size))
    if labelled:
        behind = np.array([*colours, None], object)[np.where(kept == 0, -1, np.maximum(shown, -1))]
        xs, ys = (a.ravel() for a in np.meshgrid(columns.centre, rows.centre))
        _label(canvas, (xs, ys), _texts(offset, who), reg, behind.ravel().tolist())
    if mark is not None:
        _mark(canvas, columns, rows, mark)
    words, values = _details(axes, (rows_shown[:, None], columns_shown), offset, address, bank, who, reg, warp_size)
    canvas.hover(boxes, words, *values)
    mark_gaps(canvas, columns, rows, what=axes[0])
    plain = who is None and kept is None and together is None
    if plain and repeat is not None and 1 < repeat <= _run(rows.index) and field.shape[0] > 2:
        words = "the colours\nrepeat" if columns.end < WIDTH - 90 else ""
        bracket(canvas, columns.end + 5, float(rows.edge[0]), float(rows.edge[repeat - 1]) + rows.cell, words)
    if who is None:
        name = f"bank of 4 bytes{' (modulo 32)' if banks > 32 else ''}" if address is not None else "offset modulo 32"
        bank_legend(canvas, GUTTER, rows.end + 16, name)
    elif who.max() >= warp_size:
        keys(canvas, GUTTER, rows.end + 14, [("none", INK, "thick outline: a warp")])
    return canvas.picture(
        title or _title(field, given.get("owner"), base, element_bytes, banks),
        caption or _caption(address, who, labelled),
    )


def draw_composed_layout(composed: ComposedLayout, **how: Any) -> Picture:
    """The grid of a :class:`kvlab.layout.ComposedLayout`: in banks where a swizzle says what its unit is.

    ``how`` is as for :func:`draw_layout`.

    >>> from kvlab.layout import ComposedLayout, Layout, Swizzle
    >>> draw_composed_layout(ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16"))).title
    'Sw<3,3,3> (bfloat16) o (8,64):(64,1): the 8 rows of column 0 lie in 8 different banks'
    """
    unit = getattr(composed.outer, "unit_bytes", None)
    return draw_layout(composed, **{"element_bytes": unit, **how})


def _tiles(layout: Any) -> tuple[Layout, Callable[[Int64, Int64], Int64], str]:
    """The tiles side by side as one layout, the tile of a row and a column, and words for both."""
    modes = getattr(layout, "modes", ())
    inner = [mode.modes for mode in modes]
    if len(modes) != 2 or len(inner[0]) != len(inner[1]) or len(inner[0]) > 2 or not layout.size:
        raise ValueError(
            f"tiles of {layout!r}: must be two modes, (tile, rest), of the same one or two modes each"
        )
    (rows, columns), (down, across) = ([*(part.size for part in parts), 1][:2] for parts in inner)
    pairs = list(zip(*inner, strict=True))
    if len(pairs) == 1:
        pairs.append((Layout(1, 0), Layout(1, 0)))
    whole = Layout(
        tuple((one.shape, rest.shape) for one, rest in pairs), tuple((one.stride, rest.stride) for one, rest in pairs)
    )
    found = f"{layout}: a grid of {down} x {across} tiles of {rows} x {columns} elements"
    return whole, lambda row, column: row // rows + column // columns * down, found


def _like(name: str, values: npt.ArrayLike | Cells, shape: tuple[int, int]) -> npt.NDArray[Any] | Cells:
    array = values if isinstance(values, Cells) else np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} of shape {array.shape} does not fit the grid of shape {shape}")
    return array


def _subject(given: dict[str, Any]) -> tuple[Int64, Int64] | None:
    """The rows and columns with something to see: inside a view, or owned; None where that is all, or too many."""
    for name in ("inside", "owner"):
        values = given.get(name)
        if isinstance(values, Cells):
            return values.subject
        if values is not None:
            break
    if values is None or values.size > MOST:
        return None
    inside = values.astype(bool) if name == "inside" else values >= 0
    return np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))


def _shown(
    shape: tuple[int, int], fold: bool, repeat: int | None, mark: tuple[int, int] | None,
    subject: tuple[Int64, Int64] | None,
) -> tuple[Int64, Int64]:
    """Rows and columns that are shown."""
    head = repeat if repeat is not None and 8 < repeat <= 16 else 8
    at, about = mark or (None, None), subject or (None, None)
    rows = some(shape[0], 24 if fold else shape[0], head, 1, at[0], about[0], most=16)
    return rows, some(shape[1], 128 if fold else shape[1], 64, 8, at[1], about[1], most=64)


def _run(index: Int64) -> int:
    """Number of those shown from the first on without a gap."""
    return int(np.argmin(np.append(np.diff(index) == 1, False))) + 1


def _repeats(owner: npt.NDArray[Any]) -> int | None:
    return period(lane_colours(owner)) if owner.size <= FEW else None


def _period(field: OffsetGrid, base: int, element_bytes: int | None, banks: int) -> int | None:
    """After how many rows the colours repeat, where that is known of all rows."""
    if field.every is not None:
        place = (base + field.every * element_bytes) // 4 if element_bytes else field.every
        return period(bank_colours(place % banks, banks))
    step = field.steps[1]
    if step is None:
        return None
    unit = len(BANKS) * (4 if element_bytes else 1)
    after = unit // math.gcd(unit, step * (element_bytes or 1))
    return after if after <= min(32, field.shape[0] // 2) else None


def _label(
    canvas: Canvas, at: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]], texts: list[str],
    register: Int64 | None, behind: list[str | None],
) -> None:
    """The texts of all cells, and of which register an element is."""
    xs, ys = at
    canvas.labels(xs, ys + (3.5 if register is None else -1.5), texts, behind)
    if register is not None:
        canvas.labels(xs, ys + 9.5, [f"r{v}" if v >= 0 else "" for v in register.ravel().tolist()], behind, size=9)


def _texts(offset: npt.NDArray[np.int64], who: npt.NDArray[np.int64] | None) -> list[str]:
    if who is None:
        return [str(v) for v in offset.ravel().tolist()]
    return [f"T{v}" if v >= 0 else "" for v in who.ravel().tolist()]


def _axes(rows: Int64, columns: Int64, widest: int, two_lines: bool) -> tuple[Axis, Axis, bool]:
    """Columns, rows, and whether a cell has room for its text."""
    room = WIDTH - GUTTER - GAP * np.count_nonzero(np.diff(columns, prepend=-1) > 1)
    width = min(46.0, np.floor(4 * room / len(columns)) / 4)
    labelled = width >= text_width("0" * widest, 10, mono=True) + 3
    height = (30.0 if two_lines else 22.0) if labelled else max(12.0, min(16.0, width))
    return axis_of(columns, width, GUTTER), axis_of(rows, height, HEADER), labelled


def _mark(canvas: Canvas, columns: Axis, rows: Axis, mark: tuple[int, int]) -> None:
    row, column = mark
    x = float(columns.edge[columns.index == column][0])
    y = float(rows.edge[rows.index == row][0])
    canvas.look_here(x, y, columns.cell, rows.cell)


def _details(
    axes: tuple[str, str], grid: tuple[npt.NDArray[np.int64], ...], offset: npt.NDArray[np.int64],
    address: npt.NDArray[np.int64] | None, bank: npt.NDArray[np.int64], who: npt.NDArray[np.int64] | None,
    reg: npt.NDArray[np.int64] | None, warp_size: int,
) -> tuple[str, list[npt.NDArray[np.int64]]]:
    """Hover text of a cell: a %-format and its arguments."""
    words, values = f"{axes[0]} %d, {axes[1]} %d\noffset %d", [*grid, offset]
    if address is not None:
        words += "\nbyte %d, bank %d"
        values += [address, bank]
    if who is not None:
        words += "\nthread %d: warp %d, lane %d"
        values += [who, who // warp_size, who % warp_size]
    if reg is not None:
        words += ", register %d"
        values.append(reg)
    return words, values


def _title(field: OffsetGrid, who: npt.NDArray[Any] | None, base: int, element_bytes: int | None, banks: int) -> str:
    if who is not None:
        if who.size > FEW:
            return f"{field.name}: who holds which element"
        return f"{field.name}: {len(np.unique(who[who >= 0]))} threads hold {(who >= 0).sum()} of {who.size} elements"
    (along, down), distinct = field.steps, field.distinct
    found = [
        f"{along:+d} along a row" if along is not None else "",
        f"{down:+d} down a column" if down is not None else "",
    ]
    words = [", ".join(word for word in found if word)]
    if distinct is not None and distinct < field.size:
        words.append(f"{field.size} elements share {distinct} offsets")
    if element_bytes and field.shape[0] > 1:
        words.append(_column(field, base, element_bytes, banks))
    told = "; ".join(word for word in words if word)
    return f"{field.name}: {told or (f'{field.size} elements' + (f' at {distinct} offsets' if distinct else ''))}"


def _column(field: OffsetGrid, base: int, element_bytes: int, banks: int) -> str:
    """In how many banks the rows of column 0 lie, or ""."""
    seen = field.first_column(base, element_bytes, banks)
    if seen is None:
        return ""
    words, found = seen
    if found < min(words, banks):
        return f"column 0 lies in {found} of {banks} banks"
    if words >= banks:
        return f"column 0 lies in all {banks} banks"
    if words == 1:
        return "column 0 lies in one word"
    few = f"{words} words, " if words < field.shape[0] else ""
    return f"the {field.shape[0]} rows of column 0 lie in {few}{'in ' * bool(few)}{found} different banks"


def _caption(address: npt.NDArray[np.int64] | None, who: npt.NDArray[np.int64] | None, labelled: bool) -> str:
    if who is not None:
        label = ", labelled with the thread that holds it" if labelled else ""
        return f"Each cell is an element{label}; the hue tells the quad: four neighbouring threads."
    label = ", labelled with its offset in elements" if labelled else ""
    colour = "the shared-memory bank it lies in" if address is not None else "the offset modulo 32"
    return f"Each cell is an element{label}; its colour is {colour}."
