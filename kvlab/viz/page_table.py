"""A page table: where the pages of each sequence lie in the pool, what is valid in them, and what is free."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.common.arrays import numbered

from .pen.axis import QUIET, WIDTH, Axis, axis, axis_of, mark_gaps
from .pen.legend import keys
from .pen.palette import ACCENT, BANKS, INK, LANES
from .pen.picture import Picture
from .pen.svg import HATCH, Canvas
from .pen.text import text_width

GUTTER = 108.0
BOX_W, BOX_H, STRIP, GAP = 60.0, 30.0, 9.0, 6.0
LANE = 5.0  # left of the boxes: where the way of a token goes down
MOST = 1 << 18
"""Pages that are counted; of a larger table the picture tells of the sequences that it shows."""

Int64 = npt.NDArray[np.int64]


def draw_page_table(
    lookup_table: Any, lengths: npt.ArrayLike | None = None, page_size: int | None = None, *, pages: int | None = None,
    token: tuple[int, int] | None = None, names: Sequence[str] | None = None, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """The logical pages of each sequence, the physical pages of the pool, and the way of one token between them.

    lookup_table    integers ``[batch, columns]``, the physical page of each logical page; an entry outside
                    ``[0, pages)`` is a sentinel. Or a cache: it has ``lookup_table``, ``cache_lengths``, ``blocks``
                    (a continuous one: a page is the block of a sequence);
                    or a :class:`kvlab.cache.PagePool`
    lengths         ``[batch]`` valid tokens of each sequence
    page_size       tokens of a page
    pages           pages of the pool (without it: up to the largest entry)
    token           (sequence, position) of the one token to follow
    names           of the sequences

    Pages without a sequence, and slots without a token, are hatched; an entry for tokens that are not there yet, or a
    filler, holds none. A large pool shows the rows that have a used page, a large table its first sequences and the
    last.
    Raises ValueError for shapes that do not fit, a sequence longer than its pages, or a token that is not there.

    >>> draw_page_table([[2, 0, -1], [3, -1, -1]], [6, 3], page_size=4, token=(0, 5)).title
    'Token 5 of sequence 0 lies in page 0, slot 1'
    """
    pool = _Pool.of(lookup_table, lengths, page_size, pages, token)
    called = _Names(names, len(pool.length))
    marked = None if token is None else pool.find(*token)

    canvas = Canvas()
    room = int((WIDTH - GUTTER + GAP - 20) // (BOX_W + GAP))
    columns = axis(pool.seen, BOX_W + GAP, GUTTER, limit=room, head=room - 2, tail=2)
    if token is not None and token[1] // pool.page_size not in columns.index:
        kept = np.unique(np.r_[: room - 4, token[1] // pool.page_size, pool.seen - 2 : pool.seen])
        columns = axis_of(kept, BOX_W + GAP, GUTTER)
    rows = axis_of(pool.shown, BOX_H + 14, 34)
    _logical(canvas, pool, columns, rows, called, token)
    heading = rows.end + 30
    shelf = _Shelf.of(pool, heading + 22, None if marked is None else marked[0])
    owner = pool.owners(shelf)
    _physical(canvas, pool, shelf, owner, called, marked)
    if token is not None and marked is not None:
        _way(canvas, pool, columns, rows, shelf, token, marked[1], marked[0])
    canvas.text(0, heading, "pool", size=12, weight=600)
    words = f"{pool.pages:,} pages, {f'{pool.used.size:,} in use; ' if pool.whole else ''}"
    words += f"in each the sequence and its logical page{', + how many more have it' if pool.shared else ''}"
    canvas.text(GUTTER, heading, words, size=10, opacity=QUIET)
    if len(owner) < pool.pages or (pool.length % pool.page_size).any():
        keys(canvas, GUTTER, shelf.rows.end + 12, [(HATCH, "", "no token: the rest of a last page, or a free page")])
    return canvas.picture(title or _title(pool, called, token, marked), caption or _caption(token))


class _Names:
    """Names of the sequences."""

    def __init__(self, names: Sequence[str] | None, count: int) -> None:
        self.names, self.count = None if names is None else list(names), count
        if self.names is not None and len(self.names) != count:
            raise ValueError(f"names {self.names!r:.300} are not one for each of {count} sequences")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, sequence: int) -> str:
        return f"sequence {sequence}" if self.names is None else self.names[sequence]


@dataclass(frozen=True)
class _Pool:
    """A table [batch, columns] over a pool, and who holds what.

    length     [batch] tokens
    shown      the sequences with a line of their own
    seen       columns up to the last page that one of them names
    sequence, column, page   [held] every page that holds tokens, or, unless ``whole``, those of the shown sequences
    whole      whether all are counted
    used       the different pages"""

    table: npt.NDArray[Any]
    length: npt.NDArray[Any]
    page_size: int
    pages: int
    shown: Int64
    seen: int
    sequence: Int64
    column: Int64
    page: Int64
    whole: bool
    used: Int64

    @classmethod
    def of(
        cls, table: Any, lengths: Any, page_size: int | None, pages: int | None, token: tuple[int, int] | None
    ) -> _Pool:
        if hasattr(table, "sequences"):
            pool, known = table, table.sequences
            table, lengths, page_size, pages = (
                pool.lookup_table(known), pool.lengths(known), pool.page_size, pool.num_pages
            )
        elif hasattr(table, "lookup_table"):
            cache = table
            table, lengths = cache.lookup_table, cache.cache_lengths if lengths is None else lengths
            pages, page_size = getattr(cache, "total_num_pages", cache.blocks.shape[0]), cache.blocks.shape[-3]
            table = table if table.ndim != 1 else table[:, None]  # a whole block each, in place of pages
        entries, length = np.asarray(table), np.asarray([] if lengths is None else lengths)
        if entries.ndim != 2 or entries.dtype.kind not in "iu" or length.shape != entries.shape[:1]:
            raise ValueError(
                f"lookup_table of shape {entries.shape} and lengths of shape {length.shape} are not integers "
                "[batch, columns] and [batch]"
            )
        if not entries.size:
            raise ValueError(f"lookup_table of shape {entries.shape}: at least one sequence and one column are drawn")
        if page_size is None or page_size < 1:
            raise ValueError(f"page_size is {page_size}: must be a positive number of tokens")
        if length.dtype.kind not in "iu" or (length < 0).any():
            raise ValueError(f"lengths {length[:20].tolist()} are not numbers of tokens")
        used = -(-length.astype(np.int64) // page_size)
        if (used > entries.shape[1]).any():
            _refuse(entries, length, int(np.argmax(used > entries.shape[1])), page_size, pages)
        batch = len(length)
        shown = np.arange(batch) if batch <= 10 else np.array([*range(8), batch - 1])
        if token is not None and 0 <= token[0] < batch:
            shown = np.union1d(shown, [token[0]])
        whole = int(used.sum()) <= MOST
        rows, count = (np.arange(batch), used) if whole else (shown, np.minimum(used[shown], MOST // len(shown)))
        nth, column = numbered(count)
        sequence = rows[nth]
        page = entries[sequence, column].astype(np.int64)
        total = int(max(page.max(initial=-1) + 1, 1)) if pages is None else int(pages)
        wrong = (page < 0) | (page >= total)
        if wrong.any():
            _refuse(entries, length, int(sequence[np.argmax(wrong)]), page_size, total)
        some = entries[shown, : 1 << 16]
        known = np.flatnonzero(((some >= 0) & (some < total)).any(axis=0))
        seen = max(int(used[shown].max(initial=1)), int(known[-1]) + 1 if known.size else 1, 1)
        return cls(
            entries, length, page_size, total, shown, seen, sequence, column, page, whole, np.unique(page)
        )

    def entry(self, sequence: int, column: int) -> int | None:
        """The page that an entry names; None for a sentinel."""
        page = int(self.table[sequence, column])
        return page if 0 <= page < self.pages else None

    def valid(self, sequence: int, column: int) -> int:
        """Tokens in a logical page."""
        return min(max(int(self.length[sequence]) - column * self.page_size, 0), self.page_size)

    def held(self, sequence: int, column: int) -> str:
        """In words: the tokens of a logical page."""
        first, valid = column * self.page_size, self.valid(sequence, column)
        rest = f", {self.page_size - valid} slots empty" if valid < self.page_size else ""
        return f"tokens {first}–{first + valid - 1}{rest}" if valid else "no token yet"

    def find(self, sequence: int, position: int) -> tuple[int, int]:
        """(page, slot) of a token."""
        if not (0 <= sequence < len(self.length) and 0 <= position < self.length[sequence]):
            raise ValueError(f"token is {(sequence, position)}: must be one of {self.length[:20].tolist()} tokens")
        return int(self.table[sequence, position // self.page_size]), position % self.page_size

    def owners(self, shelf: _Shelf) -> dict[int, _Users]:
        """Page -> those whose tokens it holds, of the pages on the shelf."""
        here = np.flatnonzero(np.isin(self.page // shelf.in_a_row, shelf.rows.index))
        here = here[np.argsort(self.page[here], kind="stable")]
        pages, first, counts = np.unique(self.page[here], return_index=True, return_counts=True)
        most = np.maximum.reduceat(self.tokens[here], first) if here.size else first
        return {
            page: _Users(
                [*zip(self.sequence[here[at : at + 4]].tolist(), self.column[here[at : at + 4]].tolist(), strict=True)][
                    :count
                ],
                count,
                tokens,
            )
            for page, at, count, tokens in zip(*(a.tolist() for a in (pages, first, counts, most)), strict=True)
        }

    @functools.cached_property
    def tokens(self) -> Int64:
        """[held] tokens in each page that is held."""
        length = self.length[self.sequence].astype(np.int64)
        return np.clip(length - self.column * self.page_size, 0, self.page_size)

    @property
    def shared(self) -> int:
        """Pages that several sequences have."""
        return int(np.count_nonzero(np.unique(self.page, return_counts=True)[1] > 1))

    @property
    def filled(self) -> int:
        """Slots that hold a token."""
        most = np.zeros(self.used.size, np.int64)
        np.maximum.at(most, np.searchsorted(self.used, self.page), self.tokens)
        return int(most.sum())


@dataclass(frozen=True)
class _Users:
    """The first (sequence, logical page) that a page holds tokens of, how many they are, and the most tokens of one."""

    first: list[tuple[int, int]]
    count: int
    tokens: int


def _refuse(entries: npt.NDArray[Any], length: npt.NDArray[Any], sequence: int, page_size: int, pages: Any) -> None:
    exist = "" if pages is None else f" (pages 0..{pages - 1} exist)"
    row = entries[sequence]
    raise ValueError(
        f"sequence {sequence} has {length[sequence]} tokens, more than its pages "
        f"{row.tolist() if row.size <= 64 else str(row)} of {page_size} tokens hold{exist}"
    )


@dataclass(frozen=True)
class _Shelf:
    """Places of the pool's pages: ``in_a_row`` boxes of ``width`` px; ``rows`` of boxes."""

    in_a_row: int
    width: float
    rows: Axis

    @classmethod
    def of(cls, pool: _Pool, top: float, marked: int | None) -> _Shelf:
        in_a_row, width = (12, BOX_W) if pool.pages <= 96 else (24, 29.8)
        count = -(-pool.pages // in_a_row)
        row = None if marked is None else marked // in_a_row
        if count <= 20:
            index = np.arange(count)
        else:
            used = np.unique(pool.used // in_a_row)[:12]
            index = np.unique([0, *used.tolist(), *([] if row is None else [row]), count - 1])
        return cls(in_a_row, width, axis_of(index, BOX_H + 6, top, before=index == row))  # room for the slot's name

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
    canvas: Canvas, pool: _Pool, columns: Axis, rows: Axis, names: _Names, token: tuple[int, int] | None
) -> None:
    canvas.text(0, 10, "page table", size=12, weight=600)
    canvas.text(
        GUTTER, 10, f"logical pages of {pool.page_size} tokens in order, each with its page of the pool", size=10,
        opacity=QUIET,
    )
    for x, column in zip(columns.edge.tolist(), columns.index.tolist(), strict=True):
        canvas.text(x + BOX_W / 2, 26, str(column), size=10, anchor="middle", opacity=QUIET)
    for b, y in zip(rows.index.tolist(), rows.edge.tolist(), strict=True):
        canvas.text(0, y + 13, names[b], size=11)
        canvas.text(0, y + 26, f"{pool.length[b]} tokens", size=10, opacity=QUIET)
        for x, c in zip(columns.edge.tolist(), columns.index.tolist(), strict=True):
            page = pool.entry(b, c)
            if page is None:
                continue
            _box(canvas, x, y, BOX_W, f"→ {page}", b, pool.valid(b, c) / pool.page_size)
            if token is not None and (b, c) == (token[0], token[1] // pool.page_size):
                _slot(canvas, x, y, BOX_W, token[1] % pool.page_size, pool.page_size)
            told = f"{names[b]}, logical page {c}: {pool.held(b, c)}\nphysical page {page}"
            canvas.rect(x, y, BOX_W, BOX_H, title=told)
    mark_gaps(canvas, columns, rows, what="sequence")


def _physical(
    canvas: Canvas, pool: _Pool, shelf: _Shelf, owner: dict[int, _Users], names: _Names, marked: tuple[int, int] | None,
) -> None:
    for row in shelf.rows.index.tolist():
        pages = range(row * shelf.in_a_row, min((row + 1) * shelf.in_a_row, pool.pages))
        _, y = shelf.place(pages[0])
        name = f"{pages[0]}–{pages[-1]}" if len(pages) > 1 else str(pages[0])
        canvas.text(GUTTER - 2 * LANE, y + 19, name, size=10, anchor="end", mono=True, opacity=QUIET)
        for page in pages:
            x, y = shelf.place(page)
            users = owner.get(page, _Users([], 0, 0))
            text = "{}:{}".format(*users.first[0]) if users.first else ""
            if users.count > 1 and len(f"{text} +{users.count - 1}") * 6.1 < shelf.width:
                text += f" +{users.count - 1}"
            first = users.first[0][0] if users.first else None
            _box(canvas, x, y, shelf.width, text, first, users.tokens / pool.page_size)
            if marked is not None and marked[0] == page:
                _slot(canvas, x, y, shelf.width, marked[1], pool.page_size)
            told = "\n".join(f"{names[b]}, logical page {c}: {pool.held(b, c)}" for b, c in users.first)
            told += f"\nand {users.count - 4} more" if users.count > 4 else ""
            canvas.rect(x, y, shelf.width, BOX_H, title=f"page {page}\n{told or 'free'}")
    before = np.diff(shelf.rows.index, prepend=-1)
    for (y, hidden), row in zip(shelf.rows.gaps, shelf.rows.index[before > 1].tolist(), strict=True):
        first, end = (row - hidden) * shelf.in_a_row, row * shelf.in_a_row
        used = int(np.count_nonzero((pool.used >= first) & (pool.used < end)))
        words = f"⋮  {end - first:,} more pages" + (f", {f'{used:,}' if used else 'none'} in use" if pool.whole else "")
        canvas.text(GUTTER + 6 * BOX_W, y + 3.5, words, size=10, anchor="middle", opacity=QUIET)


def _way(
    canvas: Canvas, pool: _Pool, columns: Axis, rows: Axis, shelf: _Shelf, token: tuple[int, int], slot: int, page: int
) -> None:
    """From the logical page to the physical one: between the rows and left of the boxes, over none of them."""
    inside = (slot + 0.5) / pool.page_size
    x0 = float(columns.edge[columns.index == token[1] // pool.page_size][0]) + BOX_W * inside
    y0 = float(rows.edge[rows.index == token[0]][0]) + BOX_H + 1
    left, y1 = shelf.place(page)
    x1, lane = left + shelf.width * inside, GUTTER - LANE
    points = [(x0, y0), (x0, y0 + 6), (lane, y0 + 6), (lane, y1 - 12), (x1, y1 - 12)]
    canvas.path("M" + "L".join(f"{x:g} {y:g}" for x, y in points), stroke=ACCENT, stroke_width=1.8)
    canvas.arrow([(x1, y1 - 12), (x1, y1 - 1)], stroke=ACCENT, width=1.8)
    canvas.text(x0 + 6, y0 + 10, f"token {token[1]}", size=10, weight=600, fill=ACCENT)
    words = f"slot {slot}"
    beside = x1 + 6 + text_width(words, 11) <= WIDTH
    canvas.text(
        x1 + 6 if beside else x1 + 4, y1 - 4 if beside else y1 - 15, words, size=10, weight=600, fill=ACCENT,
        anchor="start" if beside else "end",
    )


def _title(pool: _Pool, names: _Names, token: tuple[int, int] | None, marked: tuple[int, int] | None) -> str:
    if token is not None and marked is not None:
        return f"Token {token[1]} of {names[token[0]]} lies in page {marked[0]}, slot {marked[1]}"
    tokens = int(pool.length.sum(dtype=np.int64))
    many = f"{len(names)} sequences" if len(names) > 1 else "1 sequence"
    if not pool.whole:
        return f"{many}, {tokens} tokens in pages of {pool.page_size} of a pool of {pool.pages}"
    empty = f"{pool.used.size * pool.page_size - pool.filled} of their slots hold no token"
    shared = f", {pool.shared} of them shared" if pool.shared else ""
    return f"{many}, {tokens} tokens in {pool.used.size} of {pool.pages} pages{shared}: {empty}"


def _caption(token: tuple[int, int] | None) -> str:
    text = "Above, the logical pages of each sequence in order; below, the pool with the same pages where they lie."
    text += " A hue stands for a sequence, the strip for its tokens."
    return text if token is None else f"{text} The marked token is followed from one to the other."
