"""Rows of sequences, dense, ragged or in pages: how many there are and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.attention.features.intervals import most_keys
from kvlab.cache import PagedKVCache

from .masked import load

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]

NO_KEY = (1 << 31) - 1
"""A key that no row sees."""


class Sequences(NamedTuple):
    """Places of each sequence's rows: ragged ones between ``cu_q`` and ``cu_k`` ``[B + 1]``, keys in pages by the
    ``table`` ``[B, columns]`` and ``seq_lens`` ``[B]``. starts: ``[B]``, the first key that K and V of MLA hold.
    """

    cu_q: Any = None
    cu_k: Any = None
    table: Any = None
    seq_lens: Any = None
    starts: Any = None

    def most_keys(self, k: Any) -> int:
        """Most keys of a sequence of ``k`` ``[B, n, ..]``, ``[1, total, ..]`` or ``[pages, page_size, ..]``."""
        return int(k.shape[1]) if self.table is None else most_keys(self.table.shape[1], k.shape[1])


DENSE = Sequences()


def paged(
    caches: tuple[Array, ...], block_table: Array, num_keys: Array, tokens: int, max_keys: int
) -> tuple[PagedKVCache, ...]:
    """Pages ``[pages, page_size, H, D]`` as caches of a decode: of the keys ``[B]`` the last ``tokens`` are new."""
    before = np.maximum(num_keys - tokens, 0).astype(np.uint32)
    return tuple(PagedKVCache(pages, before, block_table, tokens, max_keys) for pages in caches)


def in_pages(cache: PagedKVCache, batch: Array, key: Array, exists: Array) -> tuple[Array, Array]:
    """(page, slot) of keys of sequences ``batch``; page 0 of those that do not exist."""
    page = load(np.asarray(cache.lookup_table), (batch, key // cache.page_size_), mask=exists, other=0).astype(np.int64)
    return page, key % cache.page_size_


def in_slots(cache: PagedKVCache, batch: Array, key: Array, exists: Array, slots: int) -> tuple[Array, ...]:
    """(page, slot, key, exists) of the places ``key`` in lists of the cache's slots, the rows ``batch`` of its table:
    a place that names none of the ``slots`` is none, and is then a key that no row sees.
    """
    row = load(np.asarray(cache.lookup_table), (batch, key), mask=exists, other=-1).astype(np.int64)
    exists = exists & (row >= 0) & (row < slots)
    row = np.where(exists, row, 0)
    return row // cache.page_size_, row % cache.page_size_, np.where(exists, key, np.int32(NO_KEY)), exists


def row_of(rows: Any, batch: Array, first: Array, key: Array, exists: Array) -> tuple[Array, Array]:
    """(page, slot) of keys of sequences ``batch``: of the pages of a cache, or of one piece a sequence whose first row
    is ``first``.
    """
    page, slot = batch, first + key
    if isinstance(rows, PagedKVCache):  #- address
        page, slot = in_pages(rows, batch, key, exists)
    return page, slot


def row_count(starts_array: Array | None, batch: Array, most: int) -> tuple[Array, Array]:
    """(first row, rows) of sequences: those from their start to the next one's, or ``most`` of their own piece."""
    first = np.zeros(len(batch), np.int64)
    count = np.full(len(batch), most, np.int32)
    if starts_array is not None:
        first = starts_array[batch].astype(np.int64)
        count = (starts_array[batch + 1] - starts_array[batch]).astype(np.int32)
    return first, count


def in_pages_kernel(table_ptr, key, exists, PAGE):
    """(page, slot) of the keys of a sequence, 64 bits; page 0 of those that do not exist. ``table_ptr``: its row of the
    table.
    """
    page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
    return page, (key % PAGE).to(tl.int64)


def in_slots_kernel(table_ptr, key, exists, slots, PAGE):
    """(page, slot, key, exists) as of ``in_slots``. ``table_ptr``: the list."""
    row = tl.load(table_ptr + key, mask=exists, other=-1).to(tl.int64)
    exists = exists & (row >= 0) & (row < slots)
    row = tl.where(exists, row, 0)
    return row // PAGE, row % PAGE, tl.where(exists, key, NO_KEY), exists


def row_of_kernel(table_ptr, table_batch, batch, first, key, exists, PAGE, MASKED):
    """(page, slot) as of ``row_of``; not ``MASKED``: all keys exist."""
    page, slot = batch, first + key
    if table_ptr is not None:  #- address
        at = table_ptr + batch * table_batch + key // PAGE
        if MASKED:
            page = tl.load(at, mask=exists, other=0).to(tl.int64)
        else:
            page = tl.load(at).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
    return page, slot


def row_count_kernel(starts_ptr, batch, most):
    """(first row, rows) as of ``row_count``."""
    first = tl.zeros([], tl.int64)
    count = most
    if starts_ptr is not None:
        first = tl.load(starts_ptr + batch).to(tl.int64)
        count = (tl.load(starts_ptr + batch + 1) - tl.load(starts_ptr + batch)).to(tl.int32)
    return first, count
