"""Linear layouts: who holds which element, or what lies where in shared memory, and the basis vectors as a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import QUIET, WIDTH, label_columns, label_rows, mark_gaps, period
from .fragment import Fragment, draw_fragment, fragment_axes
from .grid import draw_layout
from .holders import lowest
from .legend import keys
from .palette import INK
from .picture import Picture
from .shared_memory import draw_shared_memory
from .svg import HATCH, Canvas
from .text import text_width

__all__ = ["draw_linear_layout", "draw_thread_values"]

GUTTER = 34.0
HEADER = 34.0
NAME = 66.0
BELOW = "Below: the basis vectors, from which all others follow."


def draw_linear_layout(
    layout: Any,
    *,
    element_bytes: int = 2,
    banks: int = 32,
    thread: int | None = None,
    title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """A :class:`kvlab.layout.LinearLayout` as what it describes, and below it the table of its basis vectors.

    - ``register``, ``lane``, ``warp`` -> coordinates: the grid of elements, each with the thread and the register that
      hold it (where several do, the lowest); ``thread`` (warp * lanes + lane) can be picked out: all that it holds is
      named by it.
    - ``offset`` -> coordinates: the image of shared memory, in elements of ``element_bytes``, over ``banks`` of 4 bytes
      (32, or 64 on gfx950).
    - coordinates -> ``offset``: the grid of offsets.

    Of more than two dimensions those of extent 1 do not count; the rows are the first of the others, and the rest lies
    side by side, the later dimensions fastest. Of several CTAs
    (``block``) the first is drawn.

    Raises ValueError for a layout of another kind, or a thread that it does not have.

    >>> from kvlab.hardware import get_atom
    >>> from kvlab.layout import LinearLayout
    >>> draw_linear_layout(LinearLayout.from_atom(get_atom("mma.sync.m16n8k16.bf16"))).title
    '16 x 8 elements: 32 threads hold 4 each, every element once'
    """
    if not hasattr(layout, "in_dims"):
        raise ValueError(f"cannot draw {layout!r} as a linear layout: a LinearLayout is accepted")
    names = set(layout.in_dims)
    if names & {"register", "lane", "warp"}:
        top, found, told = held(layout, thread)
        found = f"{' x '.join(map(str, layout.shape))} elements: {found}"
    elif "offset" in names:
        top, found, told = stored(
            layout.shape, layout(offset=np.arange(layout.in_dims["offset"])), element_bytes, banks
        )
    elif list(layout.out_dims) == ["offset"]:
        top, found, told = _offsets(layout)
    else:
        raise ValueError(
            f"cannot draw a linear layout from {', '.join(layout.in_dims)} to {', '.join(layout.out_dims)}: from "
            "register, lane, warp or offset to coordinates, or from coordinates to offset is accepted"
        )
    return with_bases(top, layout, title or found, caption or f"{told} {BELOW}")


def with_bases(top: Picture, layout: Any, title: str, caption: str) -> Picture:
    """A picture of a linear layout with the table of its basis vectors below."""
    canvas = Canvas()
    canvas.embed(top, 0, 0)
    _bases(canvas, layout, canvas.bottom + 22)
    return canvas.picture(title, caption)


def draw_thread_values(
    layout: Any, shape: tuple[int, int], *, thread: int | None = None, warp_size: int = 32,
    title: str | None = None, caption: str | None = None,
) -> Picture:  # fmt: skip
    """A thread-value layout as the grid of the elements of a tile: which thread and value owns each.

    layout    a :class:`kvlab.layout.Layout` of two modes (thread, value) -> number of the element, column-major in a
              tile of ``shape`` (rows, columns), as CuTe's TV layouts
    thread    one to pick out

    Raises ValueError for elements outside the tile, a layout of another rank, or a thread that it does not have.

    >>> from kvlab.layout import Layout
    >>> draw_thread_values(Layout("((4,8),(2,2)):((32,1),(16,8))"), (16, 8)).title
    '((4,8),(2,2)):((32,1),(16,8)): 32 threads hold 4 each, every element once'
    """
    if not hasattr(layout, "offsets") or not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ValueError(f"cannot draw {layout!r} on {shape!r}: a Layout on (rows, columns) is accepted")
    place = np.asarray(layout.offsets())
    rows, columns = shape
    if place.ndim != 2:
        raise ValueError(f"layout {layout} has {place.ndim} modes, two are accepted: (thread, value)")
    if place.min() < 0 or place.max() >= rows * columns:
        raise ValueError(f"layout {layout} reaches element {place.max()}, a tile of {rows} x {columns} has fewer")
    row, column = place % rows, place // rows
    fragment, copies = _owners("v", row, column, (rows, columns), warp_size, thread)
    picture = _grid(fragment, copies, thread, "row %d, column %d\nthread %d, value v%d")
    canvas = Canvas()
    canvas.embed(picture, 0, 0)
    found = f"{layout}: {_finding(place.shape[0], place.shape[1], copies)}"
    return canvas.picture(title or found, caption or _told("value"))


def held(layout: Any, thread: int | None) -> tuple[Picture, str, str]:
    """The grid of threads and registers, what was found, and what is seen."""
    sizes = {name: layout.in_dims.get(name, 1) for name in ("warp", "lane", "register")}
    index = np.indices(tuple(sizes.values()), np.int64)
    given = {name: i for name, i in zip(sizes, index, strict=True) if name in layout.in_dims}
    coordinates = layout(**given)
    shape, row, column = _flat(layout.shape, coordinates)
    threads = sizes["warp"] * sizes["lane"]
    flat = (threads, sizes["register"])
    fragment, copies = _owners("r", row.reshape(flat), column.reshape(flat), shape, sizes["lane"], thread)
    picture = _grid(fragment, copies, thread, "row %d, column %d\nthread %d, register r%d")
    return picture, _finding(*flat, copies), _told("register")


def stored(
    shape: tuple[int, ...], coordinates: tuple[npt.NDArray[np.int64], ...], element_bytes: int, banks: int
) -> tuple[Picture, str, str]:
    """The image of shared memory: slots of up to 16 bytes that hold neighbours along a row (or down a column).

    coordinates    for each dimension the coordinate of the element at each place, -1 where there is none
    """
    filled = np.asarray(coordinates[0]) >= 0
    _, row, column = _flat(shape, tuple(np.maximum(axis, 0) for axis in coordinates))
    row, column = np.where(filled, row, -1), np.where(filled, column, -1)
    run, down = 1, False
    while run * element_bytes < 16 and len(row) % (2 * run) == 0:
        pieces = np.arange(len(row)).reshape(-1, 2 * run)
        whole = filled[pieces].all(1)
        steps = [np.diff(places[pieces[whole]], axis=1) for places in (row, column)]
        ways = [(a == 1).all() and (b == 0).all() for a, b in (steps, steps[::-1])]
        if (whole != filled[pieces].any(1)).any() or not any(ways):
            break
        run, down = 2 * run, bool(ways[0])
    if down:
        row, column = column, row
    slots = np.stack([row[::run], np.where(filled[::run], column[::run] // run, -1)], axis=-1)
    picture = draw_shared_memory(slots, slot_bytes=run * element_bytes, banks=banks)
    kind = f"columns of {' x '.join(map(str, shape))}, transposed: " if down else ""
    return picture, kind + picture.title, picture.caption


def _offsets(layout: Any) -> tuple[Picture, str, str]:
    grid = np.ix_(*(np.arange(size) for size in layout.in_dims.values()))
    offsets = layout(**dict(zip(layout.in_dims, grid, strict=True)))[0]
    picture = draw_layout(np.asarray(offsets))
    return picture, picture.title, picture.caption


def _flat(
    shape: tuple[int, ...], coordinates: tuple[Any, ...]
) -> tuple[tuple[int, int], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of a tensor of any rank: the first dimension, then all others, row-major; where there are more
    than two, those of extent 1 do not count."""
    arrays = np.broadcast_arrays(*coordinates)
    if len(shape) > 2:
        kept = [axis for axis, extent in enumerate(shape) if extent > 1] or [0]
        shape, arrays = tuple(shape[axis] for axis in kept), tuple(arrays[axis] for axis in kept)
    if len(shape) == 1:
        return (1, shape[0]), np.zeros_like(arrays[0]), np.asarray(arrays[0], np.int64)
    column = np.ravel_multi_index(arrays[1:], shape[1:])
    return (shape[0], int(np.prod(shape[1:]))), np.asarray(arrays[0], np.int64), np.asarray(column, np.int64)


def _owners(
    name: str, row: npt.NDArray[np.int64], column: npt.NDArray[np.int64], shape: tuple[int, int], warp: int,
    thread: int | None,
) -> tuple[Fragment, npt.NDArray[np.int64]]:  # fmt: skip
    """Who holds each element, and how many do; ``row`` and ``column`` are [threads, registers].

    Named are ``thread`` where it holds the element, else the lowest thread, with the lowest of its registers; -1 where
    nobody does."""
    threads, registers = row.shape
    if thread is not None and not 0 <= thread < threads:
        raise ValueError(f"thread {thread} is not one of the {threads} threads, 0..{threads - 1}")
    copies = np.zeros(shape, np.int64)
    np.add.at(copies, (row, column), 1)
    number = np.arange(row.size).reshape(row.shape)
    first = lowest(shape, (row, column), number)
    if thread is not None:
        own = lowest(shape, (row[thread], column[thread]), number[thread])
        first = np.where(own >= 0, own, first)
    owner, register = np.divmod(first, registers)  # -1 // registers is -1
    return Fragment(name, owner, np.where(first < 0, -1, register), registers, warp), copies


def _grid(fragment: Fragment, copies: npt.NDArray[np.int64], thread: int | None, words: str) -> Picture:
    shape = fragment.lane.shape
    mine = np.argwhere(fragment.lane == thread)
    subject = None if thread is None else (np.unique(mine[:, 0]), np.unique(mine[:, 1]))
    head = 16 if shape[0] <= 64 else max(8, min(16, period(fragment.lane, 16) or 8))
    across, down = fragment_axes(fragment, shape, subject, gutter=GUTTER, header=HEADER, head=head)
    canvas = Canvas()
    canvas.text(0, 10, "row ↓  column →", size=10, opacity=QUIET)
    label_columns(canvas, across, HEADER - 5)
    label_rows(canvas, down, GUTTER - 7)
    draw_fragment(canvas, fragment.part(down, across), across, down, thread, words=words)
    mark_gaps(canvas, across, down)
    entries = [("none", INK, "thick outline: a warp")] if fragment.lane.max() >= fragment.warp else []
    entries += [(HATCH, "", "nobody holds it")] if (copies == 0).any() else []
    if entries:
        keys(canvas, GUTTER, down.end + 14, entries)
    return canvas.picture("", "")


def _bases(canvas: Canvas, layout: Any, y: float) -> None:
    """The table: a line for each input dimension, a column for each bit, in it where the index 1 << bit goes."""
    outs = list(layout.out_dims)
    lines = [(name, vectors) for name, vectors in layout.bases.items() if vectors]
    texts = [[_vector(v) for v in vectors] for _, vectors in lines]
    widest = max([text_width(t, 10, mono=True) for line in texts for t in line] + [30.0])
    wide = min(max(widest + 10, 44.0), 120.0)
    most = max(1, int((WIDTH - NAME) // wide))
    goes = f"({', '.join(outs)})" if len(outs) > 1 else outs[0] if outs else "nothing"
    canvas.text(
        0, y, f"basis vectors: where index 1, 2, 4, ... of each dimension goes, as {goes}", size=10, opacity=QUIET
    )
    y += 8
    bits = min(most, max((len(v) for _, v in lines), default=0))
    for bit in range(bits):
        canvas.text(NAME + wide * (bit + 0.5), y + 12, str(1 << bit), size=10, anchor="middle", opacity=QUIET)
    y += 18
    for (name, vectors), line in zip(lines, texts, strict=True):
        canvas.text(NAME - 8, y + 15, name, size=11, anchor="end", weight=600)
        for bit, (vector, text) in enumerate(zip(vectors, line, strict=True)):
            if bit and bit % most == 0:
                y += 24
            x, zero = NAME + wide * (bit % most), not any(vector)
            words = f"{name} {1 << bit} -> {text}{': the same place again (a broadcast)' if zero else ''}"
            canvas.rect(
                x + 1, y, wide - 2, 22, fill=HATCH if zero else INK, opacity=None if zero else 0.06, title=words
            )
            canvas.text(x + wide / 2, y + 15, text, size=10, mono=True, anchor="middle", halo=zero)
        y += 26
    if any(not any(vector) for _, vectors in lines for vector in vectors):
        keys(canvas, NAME, y + 2, [(HATCH, "", "zero: a copy at the same place")])


def _vector(vector: list[int]) -> str:
    return str(vector[0]) if len(vector) == 1 else f"({','.join(map(str, vector))})"


def _finding(threads: int, registers: int, copies: npt.NDArray[np.int64]) -> str:
    low, high = int(copies.min()), int(copies.max())
    times = {1: "once", 2: "twice"}
    held = f"every element {times.get(low, f'{low} times')}" if low == high else f"elements {low} to {high} times"
    return f"{threads} thread{'s' * (threads != 1)} hold{'s' * (threads == 1)} {registers} each, {held}"


def _told(register: str) -> str:
    letter = register[0]
    return (
        f"Each element with the thread T that holds it and the {register} {letter} (the lowest where several do); "
        "one hue: four neighbouring threads."
    )
