"""The page table of a paged cache: sequence and token to page and slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.arrays import dtype_of, to_numpy
from kvlab.common.checks import Int64, count, index, integers
from kvlab.common.torch_here import is_torch

COLUMN_GROUP, COLUMN_TAIL = 8, 16


def lookup_table_columns(pages: int) -> int:
    """Columns of a page table for sequences of up to ``pages`` pages: a multiple of 8 plus a tail of 16 sentinels, so
    that a vector load of up to 8 entries may run past the end of any row.

    >>> lookup_table_columns(5)
    24
    """
    return -(-count("pages", pages) // COLUMN_GROUP) * COLUMN_GROUP + COLUMN_TAIL


class PageTable:
    """``entries[b, c]`` is the page of tokens ``[c * page_size, (c + 1) * page_size)`` of sequence ``b``.

    An entry outside ``[0, pages)`` is a sentinel: the tokens have no page. Entries may have any integer dtype.
    ``active`` says which of the asked tokens are meant; the entries of the others are not read.

    >>> table = PageTable(np.array([[2, 0, -1]]), page_size=4, pages=3)
    >>> table.find(0, np.array([3, 4]))
    (array([2, 0]), array([3, 0]))
    >>> table.has_page(0, np.array([7, 8]))
    array([ True, False])
    """

    def __init__(self, entries: np.ndarray[Any, Any], page_size: int, pages: int) -> None:
        self.entries, self.page_size, self.pages = entries, page_size, pages

    def find(self, batch_idx: Any, tok_idx: Any, active: Any = True) -> tuple[Int64, Int64]:
        """``(page, slot)`` of each token, 0 where not ``active``.

        IndexError for a token past the columns, ValueError for one whose entry is a sentinel."""
        batch, token, active = self._ask(batch_idx, tok_idx, active)
        page, slot = self._entry(batch, token, active)
        bad = (page < 0) | (page >= self.pages)
        if bad.any():
            b, t = int(batch[bad][0]), int(token[bad][0])
            c = t // self.page_size
            raise ValueError(
                f"lookup_table[{b}, {c}] is {self.entries[b, c]}, which is none of the pages [0, {self.pages}): "
                f"token {t} of sequence {b} has no page"
            )
        return page, slot

    def has_page(self, batch_idx: Any, tok_idx: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tells whether each token's entry is a page. IndexError for a token past the columns."""
        page, _ = self._entry(*self._ask(batch_idx, tok_idx, True))
        return np.asarray((page >= 0) & (page < self.pages))

    def _ask(self, batch_idx: Any, tok_idx: Any, active: Any) -> tuple[Int64, Int64, Any]:
        batch = index("batch_idx", batch_idx, self.entries.shape[0])
        batch, token, active = np.broadcast_arrays(batch, integers("tok_idx", tok_idx), active)
        room = self.entries.shape[1] * self.page_size
        outside = active & ((token < 0) | (token >= room))
        if outside.any():
            raise IndexError(
                f"tok_idx is {token[outside][0]}: must be in [0, {room}), as the page table has "
                f"{self.entries.shape[1]} columns of {self.page_size} tokens"
            )
        return batch, token, active

    def _entry(self, batch: Int64, token: Int64, active: Any) -> tuple[Int64, Int64]:
        column, slot = np.divmod(np.where(active, token, 0), self.page_size)
        entry = np.zeros(batch.shape, np.int64)
        entry[active] = self.entries[batch[active], column[active]]
        return entry, slot


def check_tables(cache_lengths: Any, lookup_table: Any, page_size: int) -> None:
    """ValueError unless lengths ``[batch]`` and table ``[batch, columns]`` are integers that fit each other.

    The lengths themselves are looked at in CPU memory only: reading them from a GPU would make the caller wait."""
    for name, array, axes in (("cache_lengths", cache_lengths, 1), ("lookup_table", lookup_table, 2)):
        if array.ndim != axes:
            expected = ("[batch]", "[batch, columns]")[axes - 1]
            raise ValueError(f"{name} has shape {tuple(array.shape)}: must be {expected}")
        if dtype_of(array, name).kind not in "iu":
            raise ValueError(f"{name} has dtype {array.dtype}: must be integers")
    batch, columns = lookup_table.shape
    if cache_lengths.shape[0] != batch:
        raise ValueError(
            f"lookup_table has {batch} rows, cache_lengths {cache_lengths.shape[0]} entries: one row a sequence"
        )
    if is_torch(cache_lengths) and cache_lengths.device.type != "cpu":
        return
    lengths, room = to_numpy(cache_lengths, "cache_lengths"), columns * page_size
    bad = (lengths < 0) | (lengths > room)
    if bad.any():
        raise ValueError(
            f"cache_lengths[{int(bad.argmax())}] is {lengths[bad][0]}: must be in [0, {room}], as the page table has "
            f"{columns} columns of {page_size} tokens"
        )
