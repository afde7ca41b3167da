"""Owners of the pages: sequences that grow, end, and share their beginnings (copy on write)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache.page_table import lookup_table_columns
from kvlab.common.checks import Int64, count
from kvlab.common.drawn import Drawn


class OutOfPages(RuntimeError):
    """No free page is left for what was asked; nothing has changed."""


@dataclass(frozen=True)
class PageCopy:
    """The first ``tokens`` slots of page ``source`` have to be copied to page ``target``, in all layers.

    >>> PageCopy(source=3, target=7, tokens=5)
    PageCopy(source=3, target=7, tokens=5)
    """

    source: int
    target: int
    tokens: int


class PagePool(Drawn):
    """The pages of a pool, each free or held by one or more sequences.

    A sequence holds ``ceil(length / page_size)`` pages. A fork holds its parent's pages until one of them writes into a
    page that both hold: that one gets a page of its own and a :class:`PageCopy` to carry out first. A sequence is named
    by a number that is never used again. ValueError for a sequence that is not there (freed, or never allocated);
    :class:`OutOfPages` where pages run out. Either way nothing has changed.

    >>> pool = PagePool(num_pages=6, page_size=4)
    >>> prompt, _ = pool.allocate(6)
    >>> branch = pool.fork(prompt)
    >>> pool.num_free, pool.append(branch, 1)  # its token 6 would go into a shared page
    (4, [PageCopy(source=1, target=2, tokens=2)])
    >>> pool.lookup_table([prompt, branch])[:, :3]
    array([[0, 1, 6],
           [0, 2, 6]], dtype=uint32)
    >>> pool.free(prompt), pool.num_free
    (None, 4)
    >>> pool.free(prompt)
    Traceback (most recent call last):
        ...
    ValueError: sequence is 0: must be in the pool; it was freed, or never allocated
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = count("num_pages", num_pages), count("page_size", page_size, least=1)
        try:
            self._free = list(range(self.num_pages))[::-1]
            self._references = np.zeros(self.num_pages, np.int64)
        except MemoryError:
            raise ValueError(f"num_pages {self.num_pages}: the list of free ones does not fit into memory") from None
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that are there."""
        return tuple(self._pages)

    def references(self, page: int) -> int:
        """Number of sequences that hold the page. ValueError unless the pool has it."""
        if count("page", page) >= self.num_pages:
            raise ValueError(f"page {page}: the pool has pages 0 to {self.num_pages - 1}")
        return int(self._references[page])

    def length(self, sequence: int) -> int:
        """Tokens of the sequence."""
        self._known(sequence)
        return self._lengths[sequence]

    def pages(self, sequence: int) -> tuple[int, ...]:
        """Pages of a sequence, in the order of its tokens."""
        self._known(sequence)
        return tuple(self._pages[sequence])

    def allocate(self, tokens: int = 0) -> tuple[int, Int64]:
        """A new sequence with room for ``tokens`` tokens: its number, and their slots."""
        sequence = self._next
        self._pages[sequence], self._lengths[sequence] = [], 0
        try:
            self.append(sequence, tokens)
        except (OutOfPages, ValueError):
            del self._pages[sequence], self._lengths[sequence]
            raise
        self._next += 1
        return sequence, self.slots(sequence, 0, tokens)

    def append(self, sequence: int, tokens: int) -> list[PageCopy]:
        """Make room for ``tokens`` more tokens. What is returned has to be copied before they are written."""
        length, pages = self.length(sequence), self._pages[sequence]
        new_length = length + count("tokens", tokens, bits=None)
        needed = self._pages_of(new_length) - len(pages)
        inside = length % self.page_size
        shared = tokens > 0 and inside > 0 and self.references(pages[-1]) > 1
        if needed + shared > self.num_free:
            raise OutOfPages(
                f"sequence {sequence} of {length} tokens: {tokens} more need {needed + shared} pages, "
                f"{self.num_free} of {self.num_pages} are free"
            )
        copies = []
        if shared:
            old = pages[-1]
            pages[-1] = self._take()
            self._release(old)
            copies.append(PageCopy(old, pages[-1], inside))
        pages += [self._take() for _ in range(needed)]
        self._lengths[sequence] = new_length
        return copies

    def fork(self, sequence: int, tokens: int | None = None) -> int:
        """A new sequence that begins with the first ``tokens`` tokens of another (all of them if None)."""
        length = self.length(sequence)
        tokens = length if tokens is None else count("tokens", tokens, bits=None)
        if tokens > length:
            raise ValueError(f"tokens {tokens} of sequence {sequence}: it has {length}")
        held = self._pages[sequence][: self._pages_of(tokens)]
        self._references[held] += 1
        child, self._next = self._next, self._next + 1
        self._pages[child], self._lengths[child] = list(held), tokens
        return child

    def truncate(self, sequence: int, tokens: int) -> None:
        """Drop all but the first ``tokens`` tokens, and the pages that only held the others."""
        length, pages = self.length(sequence), self._pages[sequence]
        if count("tokens", tokens, bits=None) > length:
            raise ValueError(f"tokens {tokens} of sequence {sequence}: it has {length}")
        keep = self._pages_of(tokens)
        for page in pages[keep:]:
            self._release(page)
        del pages[keep:]
        self._lengths[sequence] = tokens

    def free(self, sequence: int) -> None:
        """End a sequence; pages that nobody else holds are free again."""
        self.truncate(sequence, 0)
        del self._pages[sequence], self._lengths[sequence]

    def slots(self, sequence: int, first: int, tokens: int) -> Int64:
        """``page * page_size + slot`` of tokens ``[first, first + tokens)``: the ``slot_mapping`` of a store."""
        length = self.length(sequence)
        count("first", first)
        if first + count("tokens", tokens, bits=None) > length:
            raise ValueError(f"tokens {first} to {first + tokens} of sequence {sequence}: it has {length}")
        token = np.arange(first, first + tokens)
        pages = np.array(self._pages[sequence], np.int64)
        return pages[token // self.page_size] * self.page_size + token % self.page_size

    def lookup_table(self, sequences: Sequence[int], columns: int | None = None) -> np.ndarray[Any, Any]:
        """uint32 ``[batch, columns]``, filled up with the sentinel ``num_pages``; :func:`lookup_table_columns` of the
        longest sequence if ``columns`` is None."""
        rows = [self.pages(sequence) for sequence in sequences]
        most = max(map(len, rows), default=0)
        columns = lookup_table_columns(most) if columns is None else count("columns", columns)
        if columns < most:
            raise ValueError(f"columns {columns}: the longest sequence has {most} pages")
        table = np.full((len(rows), columns), self.num_pages, np.uint32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return table

    def lengths(self, sequences: Sequence[int]) -> np.ndarray[Any, Any]:
        """uint32 ``[batch]``: tokens of each sequence."""
        return np.array([self.length(sequence) for sequence in sequences], np.uint32)

    def _known(self, sequence: int) -> None:
        if sequence not in self._pages:
            raise ValueError(f"sequence is {sequence}: must be in the pool; it was freed, or never allocated")

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def __repr__(self) -> str:
        return (
            f"PagePool({self.num_pages} pages of {self.page_size} tokens, {self.num_free} free, "
            f"{len(self._pages)} sequences)"
        )


def copy_pages(cache: Any, copies: Iterable[PageCopy]) -> None:
    """Carry out the copies in the blocks (and scales) of a :class:`PagedKVCacheCollection`, in place.

    ValueError, before anything is written, for a page that the collection does not have or more tokens than one holds.

    >>> from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
    >>> cache = PagedKVCacheCollection.allocate(
    ...     KVCacheStaticParams(1, 2), num_pages=3, page_size=4, num_layers=1, batch_size=1, max_length=8, dtype="fp32"
    ... )
    >>> cache.blocks[1] = 7
    >>> copy_pages(cache, [PageCopy(1, 2, 3)])
    >>> cache.blocks[2, 0, 0, :, 0, 0].tolist()
    [7.0, 7.0, 7.0, nan]
    """
    copies = list(copies)
    for copy in copies:
        pages, most = int(cache.blocks.shape[0]), cache.page_size
        if not (0 <= copy.source < pages and 0 <= copy.target < pages and 0 <= copy.tokens <= most):
            raise ValueError(f"{copy}: must be pages 0 to {pages - 1} and at most {most} tokens")
    for copy in copies:
        for array in (cache.blocks, cache.scales):
            if array is not None:
                array[copy.target, :, :, : copy.tokens] = array[copy.source, :, :, : copy.tokens]
