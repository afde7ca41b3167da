"""Keys in pages: which page of the table and which slot of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.cache import PagedKVCache

from .masked import load

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]


def in_pages(cache: PagedKVCache, batch: Array, key: Array, exists: Array) -> tuple[Array, Array]:
    """(page, slot) of keys of sequences ``batch``; page 0 of those that do not exist."""
    page = load(np.asarray(cache.lookup_table), (batch, key // cache.page_size_), mask=exists, other=0).astype(np.int64)
    return page, key % cache.page_size_


def in_pages_kernel(table_ptr, key, exists, PAGE):
    """(page, slot) of the keys of a sequence, 64 bits; page 0 of those that do not exist. ``table_ptr``: its row of the
    table.
    """
    page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
    return page, (key % PAGE).to(tl.int64)
