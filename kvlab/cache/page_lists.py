"""Page lists, one after the other as some serving stacks keep them, to a page table."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache.page_table import lookup_table_columns
from kvlab.common.arrays import to_numpy
from kvlab.common.checks import Int64, count, integers


def table_of_page_lists(
    indptr: Any, indices: Any, last_page_len: Any, *, page_size: int, num_pages: int
) -> tuple[np.ndarray[Any, Any], Int64]:
    """``(lookup_table [B, columns] uint32, lengths [B] int64)`` of sequences whose pages are listed in a row.

    indptr         ``[B + 1]``: the pages of sequence b are ``indices[indptr[b] : indptr[b + 1]]``
    indices        page numbers, each in ``[0, num_pages)``
    last_page_len  ``[B]``: tokens in the last page of each sequence, 1 to ``page_size``; 0 where it has no page

    Integers, NumPy or torch in CPU memory. Unused entries of the table are ``num_pages``, the sentinel. ValueError for
    lists that fall or end elsewhere, for pages that are none, and for last pages that hold more than a page.

    >>> table, lengths = table_of_page_lists([0, 2, 2, 3], [7, 0, 4], [3, 0, 16], page_size=16, num_pages=8)
    >>> table[:, :3].tolist(), lengths.tolist()
    ([[7, 0, 8], [8, 8, 8], [4, 8, 8]], [19, 0, 16])
    >>> table_of_page_lists([0, 2], [7, 0], [17], page_size=16, num_pages=8)
    Traceback (most recent call last):
        ...
    ValueError: last_page_len[0] is 17: must be 1 to 16, as sequence 0 has 2 pages of 16
    """
    count("page_size", page_size, least=1)
    count("num_pages", num_pages)
    names = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    first, pages, last = (integers(name, to_numpy(array, name)) for name, array in names.items())
    if first.ndim != 1 or pages.ndim != 1 or last.shape != (first.size - 1,):
        raise ValueError(
            f"indptr has shape {first.shape}, indices {pages.shape}, last_page_len {last.shape}: must be [B + 1], "
            "[pages] and [B]"
        )
    held = np.diff(first)
    if first[0] != 0 or (held < 0).any() or first[-1] > pages.size:
        raise ValueError(
            f"indptr {first.tolist()} must rise from 0 to at most {pages.size}, the pages listed, and never fall"
        )
    used = pages[: first[-1]]
    none = (used < 0) | (used >= num_pages)
    if none.any():
        raise ValueError(f"indices[{int(none.argmax())}] is {used[none][0]}: must be 0 to {num_pages - 1}")
    bad = (last > page_size) | (last < 0) | ((last == 0) != (held == 0))
    if bad.any():
        b = int(bad.argmax())
        rule = f"1 to {page_size}" if held[b] else "0"
        raise ValueError(
            f"last_page_len[{b}] is {last[b]}: must be {rule}, as sequence {b} has {held[b]} pages of {page_size}"
        )
    table = np.full((held.size, lookup_table_columns(int(held.max(initial=0)))), num_pages, np.uint32)
    table[np.arange(table.shape[1]) < held[:, None]] = used
    return table, np.maximum(held - 1, 0) * page_size + last
