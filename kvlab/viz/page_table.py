"""A page table: where the pages of each sequence lie in the pool, what is valid in them, and what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import QUIET, WIDTH, Axis, axis, axis_of, mark_gaps
from .legend import keys
from .palette import ACCENT, BANKS, INK, LANES
from .picture import Picture
from .svg import HATCH, Canvas

__all__ = ["draw_page_table"]

GUTTER = 108.0
BOX_W, BOX_H, STRIP, GAP = 60.0, 30.0, 9.0, 6.0


def draw_page_table(
    lookup_table: Any,
    lengths: npt.ArrayLike | None = None,
    page_size: int | None = None,
    *,
    pages: int | None = None,
    token: tuple[int, int] | None = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """The logical pages of each sequence, the physical pages of the pool, and the way of one token between them.

    lookup_table    integers ``[batch, columns]``, the physical page of each logical page; an entry outside
                    ``[0, pages)`` is a sentinel. Or a cache: it has ``lookup_table``, ``cache_lengths``, ``blocks``
    lengths         ``[batch]`` valid tokens of each sequence
    page_size       tokens of a page
    pages           pages of the pool (without it: up to the largest entry)
    token           (sequence, position) of the one token to follow
    names           of the sequences

    Pages without a sequence, and slots without a token, are hatched. A large pool
    shows the rows that have a used page.
    Raises ValueError for shapes that do not fit, a sequence longer than its pages, or a token that is not there.

    >>> draw_page_table([[2, 0, -1], [3, -1, -1]], [6, 3], page_size=4, token=(0, 5)).title
    'Token 5 of sequence 0 lies in page 0, slot 1'
    """
    pool = _Pool.of(lookup_table, lengths, page_size, pages)
    called = list(names) if names is not None else [f"sequence {b}" for b in range(len(pool.length))]
    if len(called) != len(pool.length):
        raise ValueError(f"names {called} are not one for each of {len(pool.length)} sequences")
    marked = None if token is None else pool.find(*token)

    canvas = Canvas()
    seen = max(1, int(max((pool.known * (1 + np.arange(pool.table.shape[1]))).max(initial=1), 1)))
    room = int((WIDTH - GUTTER + GAP - 20) // (BOX_W + GAP))
    columns = axis(seen, BOX_W + GAP, GUTTER, limit=room, head=room - 2, tail=2)
    if token is not None and token[1] // pool.page_size not in columns.index:
        kept = np.unique(np.r_[: room - 4, token[1] // pool.page_size, seen - 2 : seen])
        columns = axis_of(kept, BOX_W + GAP, GUTTER)
    rows = axis_of(np.arange(len(pool.length)), BOX_H + 14, 34)
    _logical(canvas, pool, columns, rows, called, token)
    heading = rows.end + 44
    shelf = _Shelf.of(pool, heading + 22, None if marked is None else marked[0])
    _physical(canvas, pool, shelf, called, marked)
    if token is not None and marked is not None:
        _way(canvas, pool, columns, rows, shelf, token, marked[1], marked[0])
    canvas.text(0, heading, "pool", size=12, weight=600)
    words = f"{pool.pages} pages, {len(pool.owner)} in use; in each the sequence and its logical page"
    canvas.text(GUTTER, heading, words, size=10, opacity=QUIET, halo=True)
    if len(pool.owner) < pool.pages or (pool.length % pool.page_size).any():
        keys(canvas, GUTTER, shelf.rows.end + 12, [(HATCH, "", "no token: the rest of a last page, or a free page")])
    return canvas.picture(title or _title(pool, called, token, marked), caption or _caption(pool, token))


@dataclass(frozen=True)
class _Pool:
    """table [batch, columns], length [batch]; ``owner`` page -> (sequence, logical page) of everyone who uses it."""

    table: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    page_size: int
    pages: int
    owner: dict[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, table: Any, lengths: Any, page_size: int | None, pages: int | None) -> _Pool:
        if hasattr(table, "lookup_table"):
            cache = table
            table, lengths = cache.lookup_table, cache.cache_lengths if lengths is None else lengths
            pages, page_size = cache.blocks.shape[0], cache.blocks.shape[-3]
        entries, length = np.asarray(table), np.asarray([] if lengths is None else lengths)
        if entries.ndim != 2 or entries.dtype.kind not in "iu" or length.shape != entries.shape[:1]:
            raise ValueError(
                f"lookup_table of shape {entries.shape} and lengths of shape {length.shape} are not integers "
                "[batch, columns] and [batch]"
            )
        if not entries.size:
            raise ValueError(f"lookup_table of shape {entries.shape}: at least one sequence and one column are drawn")
        if page_size is None or page_size < 1:
            raise ValueError(f"page_size {page_size} is not a positive number of tokens")
        if length.dtype.kind not in "iu" or (length < 0).any():
            raise ValueError(f"lengths {length.tolist()} are not numbers of tokens")
        entries, length = entries.astype(np.int64), length.astype(np.int64)
        total = int(max(entries.max(initial=-1) + 1, 1)) if pages is None else int(pages)
        used = -(-length // page_size)
        owner: dict[int, list[tuple[int, int]]] = {}
        for b, count in enumerate(used.tolist()):
            if count > entries.shape[1] or ((entries[b, :count] < 0) | (entries[b, :count] >= total)).any():
                raise ValueError(
                    f"sequence {b} has {length[b]} tokens, more than its pages {entries[b].tolist()} of {page_size} "
                    f"tokens hold (pages 0..{total - 1} exist)"
                )
            for c, page in enumerate(entries[b].tolist()):
                if 0 <= page < total:
                    owner.setdefault(page, []).append((b, c))
        return cls(entries, length, page_size, total, owner)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """[batch, columns] whether an entry is a page."""
        return (self.table >= 0) & (self.table < self.pages)

    def valid(self, sequence: int, column: int) -> int:
        """Tokens in a logical page."""
        return int(np.clip(self.length[sequence] - column * self.page_size, 0, self.page_size))

    def held(self, sequence: int, column: int) -> str:
        """In words: the tokens of a logical page."""
        first, valid = column * self.page_size, self.valid(sequence, column)
        rest = f", {self.page_size - valid} slots empty" if valid < self.page_size else ""
        return f"tokens {first}–{first + valid - 1}{rest}" if valid else "no token yet"

    def find(self, sequence: int, position: int) -> tuple[int, int]:
        """(page, slot) of a token."""
        if not (0 <= sequence < len(self.length) and 0 <= position < self.length[sequence]):
            raise ValueError(f"token {(sequence, position)} is not there: lengths are {self.length.tolist()}")
        return int(self.table[sequence, position // self.page_size]), position % self.page_size


@dataclass(frozen=True)
class _Shelf:
    """Where the pages of the pool lie: ``in_a_row`` boxes of ``width`` px; ``rows`` of boxes."""

    in_a_row: int
    width: float
    rows: Axis

    @classmethod
    def of(cls, pool: _Pool, top: float, marked: int | None) -> _Shelf:
        in_a_row, width = (12, BOX_W) if pool.pages <= 96 else (24, 29.8)
        count = -(-pool.pages // in_a_row)
        many = count > 20
        index = np.array(sorted({0, count - 1, *(p // in_a_row for p in pool.owner)})) if many else np.arange(count)
        if many and len(index) > 14:
            last = {count - 1} if marked is None else {count - 1, marked // in_a_row}
            index = np.array(sorted({*index[:12].tolist(), *last}))
        return cls(in_a_row, width, axis_of(index, BOX_H + 6, top))

    def place(self, page: int) -> tuple[float, float]:
        """Left and top of a page's box."""
        row, column = divmod(page, self.in_a_row)
        return GUTTER + column * (self.width + 1.2), float(self.rows.edge[self.rows.index == row][0])


def _box(canvas: Canvas, x: float, y: float, width: float, text: str, sequence: int | None, share: float) -> None:
    """A page: its name, and below it a strip that shows how far it is filled."""
    if sequence is None:
        canvas.rect(x, y, width, BOX_H, fill=HATCH)
    else:
        filled = width * share
        canvas.rect(x, y, width, BOX_H - STRIP, fill=LANES[sequence % 8])
        canvas.text(x + width / 2, y + 15, text, size=10, mono=True, anchor="middle", fill="#000000")
        if filled:
            canvas.rect(x, y + BOX_H - STRIP, filled, STRIP, fill=BANKS[4 * (sequence % 8) + 1])
        if filled < width:
            canvas.rect(x + filled, y + BOX_H - STRIP, width - filled, STRIP, fill=HATCH)
    canvas.rect(x, y, width, BOX_H, stroke=INK, stroke_width=0.8, opacity=0.45)


def _slot(canvas: Canvas, x: float, y: float, width: float, slot: int, page_size: int) -> None:
    """One token in a page."""
    wide = max(3.0, width / page_size)
    canvas.look_here(x, y, width, BOX_H, 2.0)
    canvas.rect(min(x + width * slot / page_size, x + width - wide), y + BOX_H - STRIP, wide, STRIP, fill=ACCENT)


def _logical(
    canvas: Canvas, pool: _Pool, columns: Axis, rows: Axis, names: list[str], token: tuple[int, int] | None
) -> None:
    canvas.text(0, 10, "page table", size=12, weight=600)
    words = f"logical pages of {pool.page_size} tokens in order, each with its page of the pool"
    canvas.text(GUTTER, 10, words, size=10, opacity=QUIET)
    for x, c in zip(columns.edge.tolist(), columns.index.tolist(), strict=True):
        canvas.text(x + BOX_W / 2, 26, str(c), size=10, anchor="middle", opacity=QUIET)
    for b, y in enumerate(rows.edge.tolist()):
        canvas.text(0, y + 13, names[b], size=11)
        canvas.text(0, y + 26, f"{pool.length[b]} tokens", size=10, opacity=QUIET)
        for x, c in zip(columns.edge.tolist(), columns.index.tolist(), strict=True):
            if not pool.known[b, c]:
                continue
            page, valid = int(pool.table[b, c]), pool.valid(b, c)
            _box(canvas, x, y, BOX_W, f"→ {page}", b, valid / pool.page_size)
            if token is not None and token[0] == b and token[1] // pool.page_size == c:
                _slot(canvas, x, y, BOX_W, token[1] % pool.page_size, pool.page_size)
            told = f"{names[b]}, logical page {c}: {pool.held(b, c)}\nphysical page {page}"
            canvas.rect(x, y, BOX_W, BOX_H, title=told)
    mark_gaps(canvas, columns, rows)


def _physical(canvas: Canvas, pool: _Pool, shelf: _Shelf, names: list[str], marked: tuple[int, int] | None) -> None:
    for row in shelf.rows.index.tolist():
        pages = range(row * shelf.in_a_row, min((row + 1) * shelf.in_a_row, pool.pages))
        _, y = shelf.place(pages[0])
        name = f"{pages[0]}–{pages[-1]}" if len(pages) > 1 else str(pages[0])
        canvas.text(GUTTER - 10, y + 19, name, size=10, anchor="end", mono=True, opacity=QUIET)
        for page in pages:
            x, y = shelf.place(page)
            users = pool.owner.get(page, [])
            share = max((pool.valid(b, c) for b, c in users), default=0) / pool.page_size
            text = f"{users[0][0]}:{users[0][1]}" if users else ""
            if len(users) > 1 and shelf.width > 50:
                text += f" +{len(users) - 1}"
            _box(canvas, x, y, shelf.width, text, users[0][0] if users else None, share)
            if marked is not None and marked[0] == page:
                _slot(canvas, x, y, shelf.width, marked[1], pool.page_size)
            told = "\n".join(f"{names[b]}, logical page {c}: {pool.held(b, c)}" for b, c in users)
            canvas.rect(x, y, shelf.width, BOX_H, title=f"page {page}\n{told or 'free'}")
    before = np.diff(shelf.rows.index, prepend=-1)
    for (y, hidden), row in zip(shelf.rows.gaps, shelf.rows.index[before > 1].tolist(), strict=True):
        pages = range((row - hidden) * shelf.in_a_row, row * shelf.in_a_row)
        used = sum(page in pages for page in pool.owner)
        words = f"⋮  {len(pages)} more pages, {used or 'none'} in use"
        canvas.text(GUTTER + 6 * BOX_W, y + 3.5, words, size=10, anchor="middle", opacity=QUIET)


def _way(
    canvas: Canvas, pool: _Pool, columns: Axis, rows: Axis, shelf: _Shelf, token: tuple[int, int], slot: int, page: int
) -> None:
    """From the logical page to the physical one."""
    inside = (slot + 0.5) / pool.page_size
    x0 = float(columns.edge[columns.index == token[1] // pool.page_size][0]) + BOX_W * inside
    y0 = float(rows.edge[token[0]]) + BOX_H + 2
    left, y1 = shelf.place(page)
    x1 = left + shelf.width * inside
    bend = min(60.0, (y1 - y0) / 2)
    canvas.arrow([(x0, y0), (x0, y0 + bend), (x1, y1 - 2 - bend), (x1, y1 - 2)], stroke=ACCENT, width=1.8)
    canvas.text(x0, y0 + 10, f"token {token[1]}", size=10, weight=600, anchor="middle", fill=ACCENT, halo=True)
    canvas.text(x1 + 8, y1 - 7, f"slot {slot}", size=10, weight=600, fill=ACCENT, halo=True)


def _title(pool: _Pool, names: list[str], token: tuple[int, int] | None, marked: tuple[int, int] | None) -> str:
    if token is not None and marked is not None:
        return f"Token {token[1]} of {names[token[0]]} lies in page {marked[0]}, slot {marked[1]}"
    tokens, slots = int(pool.length.sum()), len(pool.owner) * pool.page_size
    many = f"{len(names)} sequences" if len(names) > 1 else "1 sequence"
    filled = sum(max(pool.valid(b, c) for b, c in users) for users in pool.owner.values())
    empty = f"{slots - filled} of their slots hold no token"
    return f"{many}, {tokens} tokens in {len(pool.owner)} of {pool.pages} pages: {empty}"


def _caption(pool: _Pool, token: tuple[int, int] | None) -> str:
    text = "Above, the logical pages of each sequence in order; below, the pool with the same pages where they lie."
    text += " A hue stands for a sequence, the strip for its tokens."
    return text if token is None else f"{text} The marked token is followed from one to the other."
