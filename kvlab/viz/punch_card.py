"""Punch cards: which lane touches which bank, in which phase and which pass; one, or a conflict beside its cure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlab.hardware.banks.wavefront_explain import listed

from .model.lanes import Image
from .pen.axis import QUIET, axis, label_columns
from .pen.palette import ALARM, INK
from .pen.picture import Picture
from .pen.svg import Canvas
from .pen.text import number, wrap
from .shared_memory import CARD, CARD_APART, CARD_GUTTER, CARD_ROW, draw_rows

if TYPE_CHECKING:
    from kvlab.hardware import Wavefronts

GUTTER = 40.0
HEADER = 32.0
BETWEEN = 8.0
BARS = 36.0
CARD_HEADER, TILE_ROWS = 40.0, 8


def draw_punch_card(
    access: Wavefronts | None = None, *, addresses: npt.ArrayLike | None = None, lane_bytes: int = 4,
    phase: npt.ArrayLike | None = None, banks: int = 32, title: str | None = None, words: str | None = None,
    caption: str | None = None,
) -> Picture:
    """Lanes x banks of one shared-memory instruction, with the passes that each bank needs as bars below.

    access       the :class:`kvlab.hardware.Wavefronts` of the instruction; or, as plain arrays:
    addresses    [lanes] byte address of each lane, -1 for an inactive one
    lane_bytes   bytes that a lane moves: a multiple of 4
    phase        [lanes] in which phase a lane is served (without it: all in one)
    banks        of 4 bytes: 32, or 64 on gfx950
    words        the text below the card (with ``access``: its ``explain()`` without the headline)

    The lanes of a phase lie together, also where they are no neighbours (16-byte reads of gfx942 and gfx950). A
    mark's shape tells its phase; a stronger mark is served in a later pass. Raises ValueError for an address that is
    not a multiple of 4 or a phase that does not fit.

    >>> draw_punch_card(addresses=np.arange(32) * 8).title
    '2 wavefronts, ideal 1: 16 of 32 banks have to deliver 2 words'
    """
    card = _Card.of(access, addresses, lane_bytes, phase, banks)
    banks = card.banks
    canvas = Canvas()
    cell = 21.0 * 32 / banks
    columns = axis(banks, cell, GUTTER, limit=banks, head=banks)
    height = 11.5 if len(card.phase) <= 32 else 5.5
    tops = _tops(card, height, HEADER)
    bottom = float(tops.max()) + height
    canvas.text(0, 10, "lane ↓  bank of 4 bytes →", size=10, opacity=QUIET)
    label_columns(canvas, columns, HEADER - 6)
    _ground(canvas, columns.edge, np.sort(tops), cell, height)
    _marks(canvas, card, columns.centre, tops + height / 2, min(cell, height))
    _lanes(canvas, card, GUTTER - 7, tops, height)
    right = columns.end + 12
    for served in range(card.phases):
        lanes = np.flatnonzero(card.phase == served)
        if lanes.size:
            y0, y1 = float(tops[lanes[0]]), float(tops[lanes[-1]]) + height
            canvas.path(f"M{number(right - 6)} {number(y0 + 1)}h4V{number(y1 - 1)}h-4", stroke=INK, opacity=QUIET)
            _shape(canvas, served, right + 8, (y0 + y1) / 2 - 6, 4.2, 1.0)
            passes = card.passes(served)
            text = f"phase {served}: {passes} pass{'es' if passes > 1 else ''}"
            short = y1 - y0 < 30
            canvas.text(right + (18 if short else 2), (y0 + y1) / 2 + (-2 if short else 12), text, size=10)
            if card.apart and not short:
                for below, named in enumerate(wrap(f"lanes {listed(lanes.tolist())}", 110, 10)):
                    canvas.text(right + 2, (y0 + y1) / 2 + 25 + 13 * below, named, size=10)
    legend_right = _lightness(canvas, card, right, HEADER - 16)
    canvas.extend(legend_right, 0)
    y = _bars(canvas, card, columns.edge, cell, bottom + 22, 0.0)
    told = words if words is not None else ("" if access is None else access.explain().partition("\n")[2])
    for paragraph in told.splitlines():
        for line in wrap(paragraph, max(canvas.right, 420.0), 11):
            y += 16
            canvas.text(0, y, line, size=11)
    return canvas.picture(title or _title(access, card), caption or _caption(card))


def draw_cure(
    conflict: Any, cure: Wavefronts | None = None, *, tiles: Sequence[Any] | None = None,
    slot_bytes: int = 16, names: tuple[str, str] = ("as it is", "cured"), title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """One read twice: with conflicts (left), and as something else has cured it (right). It fits 900 x 720 px.

    conflict, cure   the :class:`kvlab.hardware.Wavefronts` of both, on one machine; or a :class:`kvlab.hardware.Cure`
                     alone, the result of a search: its worst instruction before and after
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
    found = conflict if cure is None else None
    if cure is None:
        if not hasattr(conflict, "candidates"):
            raise ValueError(f"conflict is {conflict!r:.200}, cure None: must be two Wavefronts, or one Cure")
        if conflict.before is None:
            raise ValueError(f"conflict is {conflict}: has no picture, must have an access beside its copies")
        title = title or str(conflict)
        conflict, cure = conflict.before, conflict.after
    if conflict.arch.name != cure.arch.name:
        raise ValueError(f"conflict is of {conflict.arch.name}, cure of {cure.arch.name}: must be one machine")
    if tiles is not None and len(tiles) != 2:
        raise ValueError(f"tiles are {len(tiles)}: must be two, of the conflict and of the cure")
    canvas = Canvas()
    below = 0.0
    for x, access, name in zip((0.0, CARD_APART), (conflict, cure), names, strict=True):
        many = f"{access.wavefronts} wavefront{'s' * (access.wavefronts != 1)}"
        canvas.text(x, 12, f"{name}: {many}", size=12, weight=600)
        below = max(below, _card(canvas, _Card.of(access, None, 4, None, access.bank_count), x))
    for x, access, slots in zip((0.0, CARD_APART), (conflict, cure), tiles or (), strict=False):
        _tile(canvas, slots, slot_bytes, access, x, below + 14)
    canvas.extend(CARD_APART + CARD + 24, 0)
    note = ", provisional" if conflict.provisional else ""
    told = f"{conflict.wavefronts} wavefronts {names[0]}, {cure.wavefronts} {names[1]}, ideal {cure.ideal}{note}"
    where = conflict.instruction if conflict.instruction == cure.instruction else "the read"
    seen = "Lane by bank; a mark's shape tells the phase, its tone the pass in which it is served."
    seen += " Below: the tile, rows of all banks, what the first phase reads outlined." if tiles is not None else ""
    if found is not None and found.wavefronts != cure.wavefronts:
        seen += " Drawn is the worst instruction; the title counts all that read the tile."
    return canvas.picture(title or f"{where} on {conflict.arch.name}: {told}", caption or seen)


@dataclass(frozen=True)
class _Card:
    """phase [lanes]; bank, word and pass [lanes, words of a lane]; -1 where a lane is inactive."""

    phase: npt.NDArray[np.int64]
    word: npt.NDArray[np.int64]
    turn: npt.NDArray[np.int64]
    banks: int

    @classmethod
    def of(cls, access: Any, addresses: Any, nbytes: int, phase: Any, banks: int) -> _Card:
        if access is not None:
            return cls(access.phase, access.words, access.pass_in_phase, access.bank_count)
        address = np.asarray([] if addresses is None else addresses, np.int64)
        if address.ndim != 1 or address.size == 0:
            raise ValueError(f"addresses has shape {address.shape}: must be [lanes], one byte address each")
        if nbytes < 4 or nbytes % 4 or (address[address >= 0] % 4).any():
            raise ValueError(f"lane_bytes {nbytes} and every address must be multiples of 4, the width of a bank")
        served = np.zeros(len(address), np.int64) if phase is None else np.asarray(phase, np.int64)
        if served.shape != address.shape:
            raise ValueError(f"phase of shape {served.shape} does not fit addresses of shape {address.shape}")
        served = np.where(address < 0, -1, served)
        word = address[:, None] // 4 + np.arange(nbytes // 4)
        return cls(served, word, _turns(served, word, banks), banks)

    @property
    def bank(self) -> npt.NDArray[np.int64]:
        return self.word % self.banks

    @property
    def phases(self) -> int:
        return int(self.phase.max()) + 1

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """[lanes] from top to bottom: phase after phase; an inactive lane stays with the one before it."""
        lanes = np.arange(len(self.phase))
        last_active = np.maximum.accumulate(np.where(self.phase >= 0, lanes, 0))
        return np.argsort(self.phase[last_active], kind="stable")

    @property
    def apart(self) -> bool:
        """Tells whether the lanes of a phase are no neighbours."""
        return bool((np.diff(self.order) < 0).any())

    def passes(self, phase: int) -> int:
        """Passes of one phase: the most words that one bank has to deliver in it."""
        return int(self.turn[self.phase == phase].max(initial=-1)) + 1

    @property
    def needed(self) -> npt.NDArray[np.int64]:
        """[phases, banks] words that each bank has to deliver."""
        out = np.zeros((self.phases, self.banks), np.int64)
        on = self.phase >= 0
        served = np.broadcast_to(self.phase[:, None], self.word.shape)[on]
        np.maximum.at(out, (served, self.bank[on]), self.turn[on] + 1)
        return out


def _turns(phase: npt.NDArray[np.int64], word: npt.NDArray[np.int64], banks: int) -> npt.NDArray[np.int64]:
    """[lanes, words] the pass of its phase in which a word is delivered: its place among its bank's different words."""
    served = np.broadcast_to(phase[:, None], word.shape)
    key = np.stack([served, word % banks, word], axis=-1).reshape(-1, 3)
    table, inverse = np.unique(key, axis=0, return_inverse=True)
    bank = table[:, 0] * banks + table[:, 1]
    turn = (np.arange(len(table)) - np.searchsorted(bank, bank))[inverse.reshape(-1)].reshape(word.shape)
    return np.where(served < 0, -1, turn)


def _tops(card: _Card, height: float, start: float) -> npt.NDArray[np.float64]:
    """[lanes] where the row of each lane begins; phases are set apart."""
    served = np.maximum.accumulate(np.maximum(card.phase[card.order], 0))
    tops = np.empty(len(card.phase))
    tops[card.order] = start + height * np.arange(len(served)) + BETWEEN * np.cumsum(np.diff(served, prepend=0) != 0)
    return tops


def _lanes(canvas: Canvas, card: _Card, x: float, tops: npt.NDArray[np.float64], height: float) -> None:
    """The names of the lanes, as many as there is room for."""
    step = next(n for n in (1, 2, 4, 8) if n * height >= 11)
    for place, lane in enumerate(card.order.tolist()):
        if place % step == 0:
            y, inactive = float(tops[lane]) + height / 2 + 3.5, bool(card.phase[lane] < 0)
            canvas.text(x, y, f"T{lane}", size=10, anchor="end", mono=True, opacity=QUIET, inactive=inactive)


def _ground(
    canvas: Canvas, left: npt.NDArray[np.float64], tops: npt.NDArray[np.float64], cell: float, height: float
) -> None:
    """A faint card, its 16-byte groups of banks set apart by lines."""
    x0, x1 = float(left[0]), float(left[-1]) + cell
    starts = np.flatnonzero(np.diff(tops, prepend=tops[0] - 99) > height + 1)
    for first, end in zip(starts.tolist(), [*starts[1:].tolist(), len(tops)], strict=True):
        y0, y1 = float(tops[first]), float(tops[end - 1]) + height
        canvas.rect(x0, y0, x1 - x0, y1 - y0, fill=INK, opacity=0.05)
        groups = "".join(f"M{number(x)} {number(y0)}V{number(y1)}" for x in left[4::4])
        canvas.path(groups, stroke=INK, opacity=0.18)


def _opacity(card: _Card, turn: int) -> float:
    most = int(card.turn.max())
    return 0.4 + 0.6 * turn / most if most else 0.75


def _marks(canvas: Canvas, card: _Card, xs: npt.NDArray[np.float64], ys: npt.NDArray[np.float64], room: float) -> None:
    for lane, served in enumerate(card.phase.tolist()):
        if served < 0:
            continue
        for word, bank, turn in zip(card.word[lane], card.bank[lane], card.turn[lane], strict=True):
            told = f"lane {lane}, phase {served}, pass {turn + 1} of {card.passes(served)}"
            told += f"\nbyte {4 * word}: word {word}, bank {bank}"
            size = 0.29 * room + (0.8 if turn else 0.0)
            _shape(canvas, served, float(xs[bank]), float(ys[lane]), size, _opacity(card, int(turn)), told)


def _shape(canvas: Canvas, phase: int, x: float, y: float, r: float, opacity: float, title: str | None = None) -> None:
    """Circle, square, triangle, diamond, and the same hollow: eight phases."""
    kind = phase % 4
    if kind == 0:
        d = f"M{number(x - r)} {number(y)}a{number(r)} {number(r)} 0 1 0 {number(2 * r)} 0"
        d += f"a{number(r)} {number(r)} 0 1 0 {number(-2 * r)} 0z"
    elif kind == 1:
        s = 0.9 * r
        d = f"M{number(x - s)} {number(y - s)}h{number(2 * s)}v{number(2 * s)}h{number(-2 * s)}z"
    elif kind == 2:
        d = f"M{number(x)} {number(y - 1.1 * r)}l{number(1.15 * r)} {number(2 * r)}h{number(-2.3 * r)}z"
    else:
        s = 1.2 * r
        d = f"M{number(x)} {number(y - s)}l{number(s)} {number(s)}l{number(-s)} {number(s)}l{number(-s)} {number(-s)}z"
    hollow = phase // 4 % 2 == 1
    canvas.path(
        d, fill="none" if hollow else INK, stroke=INK if hollow else None, stroke_width=1.4 if hollow else None,
        opacity=opacity, title=title,
    )


def _lightness(canvas: Canvas, card: _Card, x: float, y: float) -> float:
    """Draws the meaning of a mark's lightness; returns its reach."""
    most = int(card.turn.max()) + 1
    if most < 2:
        return x
    canvas.text(x, y, "pass 1", size=10, opacity=QUIET)
    steps = sorted({round(k * (most - 1) / min(4, most - 1)) for k in range(min(4, most - 1) + 1)})
    for k, turn in enumerate(steps):
        _shape(canvas, 0, x + 44 + 12 * k, y - 3.5, 4.2, _opacity(card, turn))
    canvas.text(x + 44 + 12 * len(steps) - 3, y, str(most), size=10, opacity=QUIET)
    return x + 44 + 12 * len(steps) + 14


def _bars(canvas: Canvas, card: _Card, left: npt.NDArray[np.float64], cell: float, y: float, x0: float) -> float:
    """Passes of each bank, all phases together; what is more than one for a phase stands out. Returns the y below."""
    needed = card.needed
    total, ideal = needed.sum(axis=0), (needed > 0).sum(axis=0)
    most = int(total.max())
    unit = min(12.0, BARS / max(1, most))
    base = y + 18 + unit * most
    canvas.text(x0, y - 2, "words that each bank has to deliver, all phases together", size=10, opacity=QUIET)
    for x, n, fair in zip(left.tolist(), total.tolist(), ideal.tolist(), strict=True):
        if n:
            canvas.rect(x + 2, base - unit * fair, cell - 4, unit * fair, fill=INK, opacity=0.4)
        if n > fair:
            canvas.rect(x + 2, base - unit * n, cell - 4, unit * (n - fair), fill=ALARM)
    step = 1 if cell >= 16 else 4
    for bank, (x, n) in enumerate(zip(left.tolist(), total.tolist(), strict=True)):
        if bank % step == 0 and n:
            canvas.text(x + cell / 2, base - unit * n - 3, str(n), size=9, anchor="middle", mono=True)
    canvas.line(float(left[0]), base, float(left[-1]) + cell, base, opacity=0.5)
    if (total > ideal).any():
        if cell >= 16:
            canvas.rect(x0 + 320, y - 11, 10, 10, fill=ALARM)
            canvas.text(x0 + 335, y - 2, "more than one in a phase: conflicts", size=10, opacity=QUIET)
        else:
            canvas.text(x0, base + 14, "red: more than one in a phase, conflicts", size=10, opacity=QUIET)
            base += 8
    return base + 8


def _card(canvas: Canvas, card: _Card, x: float) -> float:
    """One punch card from ``x`` on; returns the y below it."""
    left = x + CARD_GUTTER
    cell = (CARD - CARD_GUTTER) / card.banks
    edges = np.asarray(left + cell * np.arange(card.banks), np.float64)
    height = 7.0 if len(card.phase) <= 32 else 4.5
    tops = _tops(card, height, CARD_HEADER)
    canvas.text(left, CARD_HEADER - 8, "lane ↓  bank of 4 bytes →", size=10, opacity=QUIET)
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
    rows = np.unique((address - image.start) // image.row_bytes)[:TILE_ROWS]
    if not lanes.size or rows[0] < 0 or rows[-1] >= image.rows:
        raise ValueError(f"tile {slots!r:.200}: the access reads bytes {address.tolist()}, which lie outside")
    wide = draw_rows(canvas, image, rows, x, y) / slot_bytes
    for byte in address.tolist():
        r, c = divmod(byte - image.start, image.row_bytes)
        k = np.flatnonzero(rows == r)
        if k.size:
            top = y + CARD_ROW * int(k[0]) + 1
            canvas.look_here(x + CARD_GUTTER + wide * c + 1, top, wide * access.op.nbytes - 2, CARD_ROW - 2, 1.6)


def _title(access: Any, card: _Card) -> str:
    if access is not None:
        return f"{access.headline()}{' (provisional)' if access.provisional else ''}"
    passes = sum(card.passes(p) for p in range(card.phases))
    ideal = sum(card.passes(p) > 0 for p in range(card.phases))
    found = f"{passes} wavefront{'s' if passes != 1 else ''}, ideal {ideal}"
    worst = card.needed.max(axis=0, initial=0)
    if ideal == 0:
        return f"{found}: no lane is active"
    if passes == ideal:
        return f"{found}: no bank has two words to deliver in one phase"
    return f"{found}: {int((worst == worst.max()).sum())} of {card.banks} banks have to deliver {worst.max()} words"


def _caption(card: _Card) -> str:
    text = "A mark: the lane reads or writes the bank. "
    text += "Its shape tells the phase" if card.phases > 1 else "All lanes are served in one phase"
    return text + ("; the stronger its tone, the later the pass." if card.turn.max() > 0 else ".")
