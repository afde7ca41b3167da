"""Linear layouts, Triton's encodings among them: who holds which element, or what lies where in shared memory, and the
basis vectors as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .grid import draw_layout
from .model.holders import Preimage, image, lowest
from .model.offset_grid import FEW, Cells
from .pen.axis import QUIET, WIDTH, label_columns, label_rows, mark_gaps, period
from .pen.fragment import Fragment, draw_fragment, fragment_axes
from .pen.legend import keys
from .pen.palette import INK
from .pen.picture import Picture
from .pen.svg import HATCH, Canvas
from .pen.text import text_width
from .shared_memory import draw_image, draw_shared_memory

if TYPE_CHECKING:
    from kvlab.layout import Layout, LinearLayout
    from kvlab.layout.encodings import Encoding

GUTTER = 34.0
HEADER = 34.0
NAME = 66.0
MOST = 1 << 18
Int64 = npt.NDArray[np.int64]
_BELOW = "Below: the basis vectors, from which all others follow."


def draw_linear_layout(
    layout: LinearLayout, *, element_bytes: int = 2, banks: int = 32, thread: int | None = None, bits: bool = False,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """A :class:`kvlab.layout.LinearLayout` as what it describes, and below it the table of its basis vectors; with
    ``bits`` only the matrix of these vectors in binary digits: a column for each bit of an index, a row for each bit
    of a coordinate.

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
    >>> draw_linear_layout(LinearLayout({"lane": [[1, 0], [1, 1], [0, 0]]}, (2, 2)), bits=True).title
    'lane -> dim0, dim1: 2 of 3 bits choose the place, 1 holds a copy'
    """
    if not hasattr(layout, "in_dims"):
        raise ValueError(f"cannot draw {layout!r} as a linear layout: must be a LinearLayout")
    if bits:
        return _bit_matrix(layout, title, caption)
    names = set(layout.in_dims)
    if names & {"register", "lane", "warp"}:
        top, found, told = _held(layout, thread)
        found = f"{' x '.join(map(str, layout.shape))} elements: {found}"
    elif "offset" in names:
        top, found, told = _stored(layout, element_bytes, banks)
    elif list(layout.out_dims) == ["offset"]:
        top, found, told = _offsets(layout)
    else:
        raise ValueError(
            f"cannot draw a linear layout from {', '.join(layout.in_dims)} to {', '.join(layout.out_dims)}: must be "
            "from register, lane, warp or offset to coordinates, or from coordinates to offset"
        )
    return _with_bases(top, layout, title or found, caption or f"{told} {_BELOW}")


def draw_encoding(
    encoding: Encoding, shape: Sequence[int] | None = None, *, triton_version: str | None = None,
    element_bytes: int | None = None, banks: int = 32, thread: int | None = None, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """A Triton encoding on a tensor of ``shape``, by default the smallest that shows its pattern.

    - of registers: which thread and register hold each element; ``thread`` (warp * lanes + lane) can be picked out
    - of shared memory: what lies where, in elements of ``element_bytes`` (2, or what the encoding says), over ``banks``
      of 4 bytes (32, or 64 on gfx950); places that no element has (padding) are hatched
    - of tensor memory: the matrix of its basis vectors, as ``draw_linear_layout(bits=True)``

    Raises ValueError where the encoding does not fit the shape, and for a thread that it does not have.

    >>> from kvlab.layout.encodings import BlockedLayout, PaddedSharedLayout
    >>> draw_encoding(BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0])).title
    'BlockedLayout on 16 x 16: 64 threads hold 4 each, every element once'
    >>> draw_encoding(PaddedSharedLayout.with_identity_for([[64, 8]], (8, 64), (1, 0))).title
    'PaddedSharedLayout on 8 x 64: vector 0 of its first 8 rows lies in 8 bank groups'
    """
    if not isinstance(shape, tuple | list | None):
        raise ValueError(f"shape {shape!r} of {encoding}: must be a tuple of ints")
    shape = encoding.pattern_shape() if shape is None else tuple(shape)
    version = {} if triton_version is None else {"triton_version": triton_version}
    layout = encoding.to_linear_layout(shape, **version)
    if "row" in layout.in_dims:
        return _bit_matrix(layout, title, caption)
    if hasattr(encoding, "offsets"):
        size = element_bytes or getattr(encoding, "element_bitwidth", 16) // 8
        if hasattr(encoding, "interval_padding_pairs") or getattr(encoding, "fp4_padded", False):
            if math.prod(shape) > MOST:
                raise ValueError(f"shape {shape} of {encoding}: up to {MOST} padded elements can be drawn")
            top, found, told = _padded(shape, np.asarray(encoding.offsets(shape, **version)), size, banks)
        else:
            top, found, told = _stored(layout if "offset" in layout.in_dims else layout.invert(), size, banks)
        found = f"{'its transpose, ' * ('transposed' in found)}{found.rpartition(': ')[2]}"
    else:
        top, found, told = _held(layout, thread)
    below = _BELOW if not hasattr(encoding, "interval_padding_pairs") else f"{_BELOW[:-1]}, before the padding."
    name = f"{type(encoding).__name__} on {' x '.join(map(str, shape))}"
    return _with_bases(top, layout, title or f"{name}: {found}", caption or f"{told} {below}")


def _with_bases(top: Picture, layout: Any, title: str, caption: str) -> Picture:
    """A picture of a linear layout with the table of its basis vectors below."""
    canvas = Canvas()
    canvas.embed(top, 0, 0)
    _bases(canvas, layout, canvas.bottom + 22)
    return canvas.picture(title, caption)


def draw_thread_values(
    layout: Layout, shape: tuple[int, int], *, thread: int | None = None, warp_size: int = 32,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """A thread-value layout as the grid of the elements of a tile: which thread and value owns each.

    layout    a :class:`kvlab.layout.Layout` of two modes (thread, value) -> number of the element, column-major in a
              tile of ``shape`` (rows, columns), as CuTe's TV layouts
    thread    one to pick out

    Raises ValueError for elements outside the tile, a layout of another rank or of very many elements, or a thread that
    it does not have.

    >>> from kvlab.layout import Layout
    >>> draw_thread_values(Layout("((4,8),(2,2)):((32,1),(16,8))"), (16, 8)).title
    '((4,8),(2,2)):((32,1),(16,8)): 32 threads hold 4 each, every element once'
    """
    if not hasattr(layout, "offsets") or not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ValueError(f"cannot draw {layout!r} on {shape!r}: must be a Layout on (rows, columns)")
    rows, columns = shape
    if max(layout.size, rows * columns) > MOST:
        raise ValueError(f"layout {layout} on {rows} x {columns}: up to {MOST} elements can be drawn")
    place = np.asarray(layout.offsets())
    if place.ndim != 2:
        raise ValueError(f"layout {layout} has {place.ndim} modes: must be two, (thread, value)")
    if place.min() < 0 or place.max() >= rows * columns:
        raise ValueError(f"layout {layout} reaches element {place.max()}, a tile of {rows} x {columns} has fewer")
    row, column = place % rows, place // rows
    fragment, copies = _owners("v", row, column, (rows, columns), warp_size, thread)
    mine = np.argwhere(fragment.lane == thread)
    subject = None if thread is None else (np.unique(mine[:, 0]), np.unique(mine[:, 1]))
    words = "row %d, column %d\nthread %d, value v%d"
    picture = _grid(fragment.at, (rows, columns), bool((copies == 0).any()), thread, subject, words)
    canvas = Canvas()
    canvas.embed(picture, 0, 0)
    found = f"{layout}: {_finding(place.shape[0], place.shape[1], int(copies.min()), int(copies.max()))}"
    return canvas.picture(title or found, caption or _told("value"))


def _held(layout: Any, thread: int | None) -> tuple[Picture, str, str]:
    """The grid of threads and registers, what was found, and what is seen."""
    kept, (down, across) = _dims(layout.shape)
    names = ("register", "lane", "warp")
    vectors = [_value(v, kept, layout.shape) for name in names for v in layout.bases.get(name, [])]
    sizes = {name: layout.in_dims.get(name, 1) for name in names}
    registers, threads = sizes["register"], sizes["lane"] * sizes["warp"]
    if thread is not None and not 0 <= thread < threads:
        raise ValueError(f"thread is {thread}: must be one of the {threads} threads, 0..{threads - 1}")
    everyone = Preimage(tuple(vectors))
    own = Preimage(tuple(vectors[: registers.bit_length() - 1]))
    start = 0 if thread is None else int(everyone.to(thread * registers))

    def part(rows: Int64, columns: Int64) -> Fragment:
        place = rows[:, None] * across + columns
        number = everyone.of(place)
        if thread is not None:
            mine = own.of(place ^ start)
            number = np.where(mine >= 0, thread * registers + mine, number)
        owner, register = np.divmod(number, registers)  # -1 // registers is -1
        return Fragment("r", owner, np.where(number < 0, -1, register), registers, sizes["lane"])

    subject = None
    if thread is not None:
        places = start ^ own.to(np.arange(min(registers, FEW)))
        subject = np.unique(places // across), np.unique(places % across)
    whole = everyone.rank == (down * across).bit_length() - 1
    picture = _grid(part, (down, across), not whole, thread, subject, "row %d, column %d\nthread %d, register r%d")
    copies = everyone.copies
    return picture, _finding(threads, registers, copies if whole else 0, copies), _told("register")


def _dims(shape: tuple[int, ...]) -> tuple[list[int], tuple[int, int]]:
    """Dimensions that count, and the rows and columns of their grid: the first one, then all others, row-major; where
    there are more than two, those of extent 1 do not count."""
    kept = list(range(len(shape)))
    if len(shape) > 2:
        kept = [axis for axis in kept if shape[axis] > 1] or [0]
    sizes = [shape[axis] for axis in kept]
    if not sizes:
        raise ValueError(f"shape {shape} has no dimension: must have one, to be drawn")
    if math.prod(sizes) >= 1 << 62:
        raise ValueError(f"shape {shape} has 2**62 elements or more: fewer can be drawn")
    return kept, (1, sizes[0]) if len(sizes) == 1 else (sizes[0], math.prod(sizes[1:]))


def _value(vector: Sequence[int], kept: list[int], shape: tuple[int, ...]) -> int:
    """A place as the number of its cell, row-major."""
    number = 0
    for axis in kept:
        number = number * shape[axis] + vector[axis]
    return number


def _stored(layout: Any, element_bytes: int, banks: int) -> tuple[Picture, str, str]:
    """The image of shared memory of a map from offsets to coordinates: slots of up to 16 bytes that hold neighbours
    along a row (or down a column)."""
    kept, (_, across) = _dims(layout.shape)
    vectors = [_value(v, kept, layout.shape) for v in layout.bases["offset"]]
    along, below = (_neighbours(vectors, step, 16 // element_bytes) for step in (1, across))
    turned = below > along
    run = max(along, below)

    def of(slot: Int64) -> Int64:
        row, column = np.divmod(image(vectors[run.bit_length() - 1 :], slot), across)
        return np.stack([column, row // run] if turned else [row, column // run], axis=-1)

    picture = draw_image(of, 1 << (len(vectors) - run.bit_length() + 1), run * element_bytes, banks)
    return _named(picture, layout.shape, turned)


def _named(picture: Picture, shape: tuple[int, ...], turned: bool) -> tuple[Picture, str, str]:
    kind = f"columns of {' x '.join(map(str, shape))}, transposed: " if turned else ""
    return picture, kind + picture.title, picture.caption


def _neighbours(vectors: list[int], step: int, most: int) -> int:
    """Number of offsets, up to ``most``, that go to places that are ``step`` apart, wherever they begin."""
    run, bits = 1, 0
    while 2 * run <= most and bits < len(vectors) and vectors[bits] == step * run:
        if any(value // step & run for value in vectors[bits + 1 :]):
            break
        run, bits = 2 * run, bits + 1
    return run


def _padded(shape: tuple[int, ...], place: Int64, element_bytes: int, banks: int) -> tuple[Picture, str, str]:
    """The image of shared memory where elements lie at ``place`` [*shape] and nothing elsewhere: slots of up to 16
    bytes."""
    _, (_, across) = _dims(shape)
    count = -(-(int(place.max()) + 1) // 16) * 16
    number = np.full(count, -1, np.int64)
    number[place.ravel()] = np.arange(place.size)
    filled, run, turned = number >= 0, 1, False
    while run * element_bytes < 16 and count % (2 * run) == 0:
        pieces = number.reshape(-1, 2 * run)
        whole = (pieces >= 0).all(1)
        steps = np.diff(pieces[whole], axis=1)
        ways = [(steps == step).all() for step in (1, across)]
        if (whole != (pieces >= 0).any(1)).any() or not any(ways):
            break
        run, turned = 2 * run, not ways[0]
    row, column = np.divmod(number[::run], across)
    if turned:
        row, column = column, row
    row, column = np.where(filled[::run], row, -1), np.where(filled[::run], column // run, -1)
    picture = draw_shared_memory(np.stack([row, column], axis=-1), slot_bytes=run * element_bytes, banks=banks)
    return _named(picture, shape, turned)


def _offsets(layout: Any) -> tuple[Picture, str, str]:
    _, shape = _dims(tuple(layout.in_dims.values()))
    vectors = [v[0] for name in reversed(layout.in_dims) for v in layout.bases[name]]
    picture = draw_layout(Cells(shape, lambda row, column: image(vectors, row * shape[1] + column)))
    return picture, picture.title, picture.caption


def _owners(
    name: str, row: Int64, column: Int64, shape: tuple[int, int], warp: int, thread: int | None
) -> tuple[Fragment, Int64]:
    """Holders of each element, and their number; ``row`` and ``column`` are [threads, registers].

    Named are ``thread`` where it holds the element, else the lowest thread, with the lowest of its registers; -1 where
    nobody does."""
    threads, registers = row.shape
    if thread is not None and not 0 <= thread < threads:
        raise ValueError(f"thread is {thread}: must be one of the {threads} threads, 0..{threads - 1}")
    copies = np.zeros(shape, np.int64)
    np.add.at(copies, (row, column), 1)
    number = np.arange(row.size).reshape(row.shape)
    first = lowest(shape, (row, column), number)
    if thread is not None:
        own = lowest(shape, (row[thread], column[thread]), number[thread])
        first = np.where(own >= 0, own, first)
    owner, register = np.divmod(first, registers)  # -1 // registers is -1
    return Fragment(name, owner, np.where(first < 0, -1, register), registers, warp), copies


def _grid(
    part: Callable[[Int64, Int64], Fragment], shape: tuple[int, int], gaps: bool, thread: int | None,
    subject: tuple[Int64, Int64] | None, words: str,
) -> Picture:
    """The elements with who holds them; ``part`` gives those of some rows and columns, ``gaps``: nobody holds some."""
    sample = part(np.arange(min(shape[0], 64)), np.arange(min(shape[1], 256)))
    head = 16 if shape[0] <= 64 else max(8, min(16, period(sample.lane, 16) or 8))
    across, down = fragment_axes(sample, shape, subject, gutter=GUTTER, header=HEADER, head=head)
    shown = part(down.index, across.index)
    canvas = Canvas()
    canvas.text(0, 10, "row ↓  column →", size=10, opacity=QUIET)
    label_columns(canvas, across, HEADER - 5)
    label_rows(canvas, down, GUTTER - 7)
    draw_fragment(canvas, shown, across, down, thread, words=words)
    mark_gaps(canvas, across, down)
    entries = [("none", INK, "thick outline: a warp")] if shown.lane.max() >= shown.warp else []
    entries += [(HATCH, "", "nobody holds it")] if gaps else []
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


def _bit_matrix(layout: Any, title: str | None, caption: str | None) -> Picture:
    """The matrix over bits: lines between dimensions, a column without a 1 hatched."""
    canvas, tall = Canvas(), 20.0
    columns = [(name, bit, v) for name, vectors in layout.bases.items() for bit, v in enumerate(vectors)]
    rows = [(axis, name, bit) for axis, (name, size) in enumerate(layout.out_dims.items())
            for bit in range(size.bit_length() - 1)]
    wide = max(14.0, min(30.0, (WIDTH - NAME) // max(len(columns), 1)))
    right, below, left = NAME, HEADER + tall * len(rows), []
    for name, vectors in layout.bases.items():  # room for the name of each dimension
        left += [right + wide * bit for bit in range(len(vectors))]
        right += max(wide * len(vectors), text_width(name, 11) + 12) if vectors else 0
    canvas.text(NAME - 8, 10, "index", size=10, anchor="end", opacity=QUIET)
    for line, (_, name, bit) in enumerate(rows):
        y, of = HEADER + tall * line, f"{name} " * (bit == 0)
        canvas.text(NAME - 8, y + 14, f"{of}{1 << bit}", size=10, anchor="end", weight=600 if of else None)
        if of:
            canvas.line(0, y, right, y, opacity=0.5)
    for number, (name, bit, vector) in enumerate(columns):
        x, copy = left[number], not any(vector)
        canvas.text(x + wide / 2, HEADER - 6, str(1 << bit), size=10, anchor="middle", opacity=QUIET)
        words = f"{name} {1 << bit} -> {_vector(list(vector))}{': a copy at the same place' * copy}"
        for line, (axis, _, at) in enumerate(rows):
            shade = None if copy else 0.75 if vector[axis] >> at & 1 else 0.06
            y = HEADER + tall * line + 1
            canvas.rect(x + 1, y, wide - 2, tall - 2, fill=HATCH if copy else INK, opacity=shade, title=words)
        if bit == 0:
            canvas.line(x, 14, x, below, opacity=0.5)
            canvas.text(x + 4, 10, name, size=11, weight=600)
    copies = sum(not any(vector) for *_, vector in columns)
    if copies:
        keys(canvas, NAME, below + 14, [(HATCH, "", "zero: a copy at the same place")])
    canvas.extend(560, below)
    of, to = (", ".join(dict.fromkeys(names)) for names in ([c[0] for c in columns], [r[1] for r in rows]))
    found = f"{of} -> {to}: {len(columns) - copies} of {len(columns)} bits choose the place"
    found += f", {copies} hold{'s' * (copies == 1)} a copy" * bool(copies)
    told = "A column for each bit of an index, a row for each bit of a coordinate; filled is 1. A place is the "
    return canvas.picture(title or found, caption or f"{told}exclusive or of the columns of the bits that are set.")


def _vector(vector: list[int]) -> str:
    return str(vector[0]) if len(vector) == 1 else f"({','.join(map(str, vector))})"


def _finding(threads: int, registers: int, low: int, high: int) -> str:
    """In words: how many threads hold how much, and an element ``low`` to ``high`` times."""
    times = {1: "once", 2: "twice"}
    held = f"every element {times.get(low, f'{low} times')}" if low == high else f"elements {low} to {high} times"
    return f"{threads} thread{'s' * (threads != 1)} hold{'s' * (threads == 1)} {registers} each, {held}"


def _told(register: str) -> str:
    letter = register[0]
    counted = ", counted in elements as Triton does" if register == "register" else ""
    return (
        f"Each element with the thread T that holds it and the {register} {letter}{counted} (the lowest where several "
        "do); one hue: four neighbouring threads."
    )
