"""A film of one tile: the same 16 bytes in DRAM, on their way, in shared memory, in registers, in the product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.hardware import get_arch

from .pen.axis import QUIET, WIDTH
from .pen.palette import BANKS, INK
from .pen.picture import Picture
from .pen.svg import BoxGrid, Canvas
from .pen.text import wrap

PANEL, HEIGHT, APART, TOP = 146.0, 176.0, 30.5, 46.0
Int64 = npt.NDArray[np.int64]


def draw_tile_film(
    buffer: Any, events: Iterable[Any], *, stage: int = 0, strip: int = 0, thread: int = 5, program: int = 0,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """The tile in a stage of a buffer, frame after frame: DRAM, copy in flight, landed, registers, product.

    buffer    has ``params``, ``smem_image(program)`` and ``fragment_map()``, such as :class:`kvlab.staging.KVBuffer`
    events    those of its trace, (kind, what, stage, warps[, nbytes]): the film has the frames that they tell of
    stage     of shared memory, which has been loaded
    strip     the strip that the registers hold, of a buffer that has strips
    thread    the 16 bytes that the first element of its registers belongs to are outlined in every frame
    program   whose shared memory

    A colour is an eighth of the tile's rows (keys) in every frame; the followed row is darker. Raises ValueError for a
    stage without a tile and a thread that does not exist.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.staging import CpAsyncKVBuffer, NvidiaKVParams, Timeline, Traffic
    >>> params = NvidiaKVParams("bf16", BN=32, depth=64, kv_num_heads=1, transpose=True)
    >>> cache = PagedKVCache(np.zeros((1, 32, 1, 64), params.dtype), [32], [[0]], 0, 32)
    >>> traffic = Traffic(timeline=Timeline())
    >>> k = CpAsyncKVBuffer(params, cache, batch_idx=0, head_idx=0, end=32, traffic=traffic)
    >>> k.load_from_dram(0)
    >>> k.wait()
    >>> draw_tile_film(k, traffic.trace()).title
    'Key 1, bytes 0–15 of 128: byte 144 of the stage'
    >>> _ = k.load_from_shared(0)
    >>> draw_tile_film(k, traffic.trace(), thread=38).title
    'Key 9, bytes 0–15 of 128: byte 1168 of the stage, then 4 lanes of warp 1'
    """
    p, layout = buffer.params, buffer.fragment_map()
    if not 0 <= thread < layout.row.shape[0]:
        raise ValueError(f"thread is {thread}: must be one of the {layout.row.shape[0]} threads")
    scene = _scene(buffer, layout, stage, strip, thread, program)
    told = _told(events, p.role, stage)
    frames = ["DRAM", *(name for name in ("in flight", "landed", "registers", "product") if name in told)]
    canvas = Canvas()
    for i, name in enumerate(frames):
        x = i * (PANEL + APART)
        canvas.text(x, 12, f"{i + 1}  {_NAMES[name]}", size=12, weight=600)
        for n, line in enumerate(wrap(told.get(name, "before the first event"), PANEL, 10)[:2]):
            canvas.text(x, 25 + 12 * n, line, size=10, opacity=QUIET)
        _DRAW[name](canvas, x, scene)
        if i:
            y = TOP + HEIGHT / 2
            canvas.arrow([(x - APART + 6, y), (x - 5, y)], width=1.6)
    canvas.extend(WIDTH, TOP + HEIGHT + 20)
    return canvas.picture(title or _title(scene, frames), caption or _caption(p.role, scene))


@dataclass(frozen=True)
class _Scene:
    """The tile, the image of its stage, the registers of a warp, and the vector that is followed."""

    rows: int  # of the tile
    vectors: int  # 16-byte vectors of a row
    size: int  # bytes of an element
    slots: Int64  # [slots, 2] of the stage: row and vector
    across: int  # slots in a row of the picture
    row: Int64  # [lanes, elements] of the warp's registers, in the tile
    col: Int64
    block: tuple[Int64, Int64]  # rows and columns of the tile that the first instruction takes
    key: int
    vector: int
    warp: int
    role: str

    @property
    def keys_of_a_colour(self) -> int:
        """Neighbouring rows of the tile that have one colour."""
        return -(-self.rows // 8)

    @property
    def slot(self) -> int:
        """Place of the followed vector in the stage."""
        return int(np.flatnonzero((self.slots == (self.key, self.vector)).all(axis=1))[0])

    def followed(self, row: Int64, col: Int64) -> npt.NDArray[np.bool_]:
        """Elements of the followed vector."""
        return (row == self.key) & (col * self.size // 16 == self.vector)


def _scene(buffer: Any, layout: Any, stage: int, strip: int, thread: int, program: int) -> _Scene:
    p, size = buffer.params, buffer.params.dtype.itemsize
    slots = buffer.smem_image(program).stage(stage).slots
    if not (slots[:, 0] >= 0).any():
        raise ValueError(f"stage {stage} holds no tile: load it first")
    strips = p.transpose and layout.shape[1] < p.depth, not p.transpose and layout.shape[0] < p.BN
    row = layout.row + (strip * layout.shape[0] if strips[1] else 0)
    col = layout.col + (strip * layout.shape[1] if strips[0] else 0)
    warp, lanes = thread // layout.warp_size, layout.warp_size
    mine = slice(warp * lanes, (warp + 1) * lanes)
    block = np.unique(row[mine, 0]), np.unique(col[mine, 0])
    vectors = max(int(slots[:, 1].max()) + 1, -(-p.depth * size // 16))
    across = get_arch(getattr(p, "arch", "gfx950")).pass_bytes // 16
    return _Scene(
        p.BN, vectors, size, slots, across, row[mine].reshape(lanes, -1),
        col[mine].reshape(lanes, -1), block, int(row[thread, 0, 0]), int(col[thread, 0, 0]) * size // 16, warp, p.role,
    )


def _told(events: Iterable[Any], role: str, stage: int) -> dict[str, str]:
    """For each frame what the first events of the stage say."""
    told: dict[str, str] = {}
    last = ""
    for kind, what, at, warps, *_ in events:
        mine = at == stage and str(what).split()[0] == role
        who = f"warps {warps[0]}–{warps[-1]}" if len(warps) > 1 else f"warp {warps[0]}"
        if kind in ("copy", "write") and mine and "landed" not in told:
            told["in flight" if kind == "copy" else "landed"] = f"{what}, {who}"
        elif kind == "landed" and mine:
            told.setdefault("landed", f"{last} in all warps")
        elif kind.startswith("read") and mine and "landed" in told:
            told.setdefault("registers", f"{what}, {who}")
            told.setdefault("product", "one matrix instruction of the warp")
        elif kind == "wait":
            last = str(what)
    return told


_NAMES = {
    "DRAM": "in DRAM", "in flight": "in flight", "landed": "in shared memory", "registers": "in registers",
    "product": "in the product",
}


def _grid(
    canvas: Canvas, x: float, y: float, width: float, height: float, rows: Int64, s: _Scene, **how: Any
) -> tuple[Any, ...]:
    """Cells coloured by the eighth of the tile that a row ``[rows, columns]`` is in; their edges and sizes."""
    xs = x + width / rows.shape[1] * np.arange(rows.shape[1])
    ys = y + height / rows.shape[0] * np.arange(rows.shape[0])
    cell = width / rows.shape[1], height / rows.shape[0]
    index = np.where(rows >= 0, 4 * (np.maximum(rows, 0) // s.keys_of_a_colour % 8) + np.where(rows == s.key, 0, 2), -1)
    canvas.cells(BoxGrid(xs, ys, *cell), index, BANKS, rules=cell[1] >= 8, **how)
    return xs, ys, *cell


def _outline(canvas: Canvas, grid: tuple[Any, ...], where: npt.NDArray[np.bool_]) -> None:
    """The followed cells, run by run."""
    xs, ys, width, height = grid
    for r in np.flatnonzero(where.any(axis=1)):
        columns = np.flatnonzero(where[r])
        for run in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1):
            canvas.look_here(xs[run[0]], ys[r], width * len(run), max(height, 3.0), 2.0)


def _axis(canvas: Canvas, x: float, words: str) -> None:
    canvas.text(x, TOP + HEIGHT + 14, words, size=10, opacity=QUIET)


def _dram(canvas: Canvas, x: float, s: _Scene) -> None:
    rows = np.broadcast_to(np.arange(s.rows)[:, None], (s.rows, s.vectors))
    grid = _grid(canvas, x, TOP, PANEL, HEIGHT, rows, s)
    _outline(canvas, grid, (rows == s.key) & (np.arange(s.vectors) == s.vector))
    _axis(canvas, x, f"{s.rows} keys ↓  {16 * s.vectors} bytes →")


def _memory(canvas: Canvas, x: float, s: _Scene, **how: Any) -> None:
    rows = s.slots[:, 0].reshape(-1, s.across)
    grid = _grid(canvas, x, TOP, PANEL, HEIGHT, rows, s, **how)
    _outline(canvas, grid, (np.arange(rows.size) == s.slot).reshape(rows.shape))
    _axis(canvas, x, f"rows of {16 * s.across} bytes ↓")


def _in_flight(canvas: Canvas, x: float, s: _Scene) -> None:
    _memory(canvas, x, s, opacity=0.4)
    canvas.rect(x, TOP, PANEL, HEIGHT, stroke=INK, stroke_width=1.3, dash="4 3", title="in flight")


def _registers(canvas: Canvas, x: float, s: _Scene) -> None:
    grid = _grid(canvas, x, TOP, PANEL, HEIGHT, s.row, s)
    _outline(canvas, grid, s.followed(s.row, s.col))
    _axis(canvas, x, f"{len(s.row)} lanes ↓  elements →")


def _product(canvas: Canvas, x: float, s: _Scene) -> None:
    rows, cols = s.block
    block = np.broadcast_to(rows[:, None], (len(rows), len(cols)))
    height = HEIGHT * 0.42
    if s.role == "k":  # S^T = K Q^T: keys go down in both
        grid = _grid(canvas, x, TOP, PANEL * 0.5, height, block, s)
        _outline(canvas, grid, s.followed(block, np.broadcast_to(cols, block.shape)))
        side, result = x + PANEL * 0.62, np.broadcast_to(rows[:, None], (len(rows), len(rows)))
        canvas.rect(side, TOP, PANEL * 0.38, height, stroke=INK, stroke_width=1.0)
        canvas.text(side + PANEL * 0.19, TOP + height / 2 + 4, "Qᵀ", size=12, anchor="middle")
        canvas.text(x + PANEL * 0.56, TOP + height / 2 + 4, "×", size=12, anchor="middle")
        canvas.text(x, TOP + height + 16, "+=", size=12)
        _grid(canvas, x + 20, TOP + HEIGHT - height, PANEL * 0.5, height, result, s)
        canvas.text(x + 28 + PANEL * 0.5, TOP + HEIGHT - height / 2 + 4, "Sᵀ", size=12)
    else:
        canvas.rect(x, TOP, PANEL * 0.38, height, stroke=INK, stroke_width=1.0)
        canvas.text(x + PANEL * 0.19, TOP + height / 2 + 4, "P", size=12, anchor="middle")
        canvas.text(x + PANEL * 0.44, TOP + height / 2 + 4, "×", size=12, anchor="middle")
        grid = _grid(canvas, x + PANEL * 0.5, TOP, PANEL * 0.5, height, block, s)
        _outline(canvas, grid, s.followed(block, np.broadcast_to(cols, block.shape)))
        canvas.text(x, TOP + height + 16, "+=", size=12)
        canvas.rect(x + 20, TOP + HEIGHT - height, PANEL * 0.5, height, stroke=INK, stroke_width=1.0)
        canvas.text(x + 20 + PANEL * 0.25, TOP + HEIGHT - height / 2 + 4, "O", size=12, anchor="middle")
    _axis(canvas, x, "keys in colour")


_DRAW = {
    "DRAM": _dram, "in flight": _in_flight, "landed": _memory, "registers": _registers, "product": _product,
}


def _title(s: _Scene, frames: list[str]) -> str:
    within = f"bytes {16 * s.vector}–{16 * s.vector + 15} of {16 * s.vectors}"
    text = f"Key {s.key}, {within}: byte {16 * s.slot} of the stage"
    if "registers" not in frames:
        return text
    lanes = int(s.followed(s.row, s.col).any(axis=1).sum())
    return f"{text}, then {lanes} lane{'s' * (lanes != 1)} of warp {s.warp}"


def _caption(role: str, s: _Scene) -> str:
    return (
        f"One tile of {role.upper()} from DRAM to the matrix product, frame after frame, as its events tell. A colour "
        f"is {s.keys_of_a_colour} neighbouring keys in every frame, key {s.key} darker; the outline follows the same "
        "16 bytes."
    )
