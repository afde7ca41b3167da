"""The rows of a tile that spans pages (spec/kv_cache.md 1.10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache.checks import Int64, index, integers
from kvlab.cache.page_table import PageTable
from kvlab.cache.storage import BlockStorage

__all__ = ["FILL_ROW", "PagedRowIndices", "kv_num_sub_tiles", "kv_sub_tile_rows", "populate"]

FILL_ROW = 1 << 30
"""The row of a sub-tile that is not there: outside every pool, so that a TMA load of it delivers zeros."""

MAX_CHUNK = 8
"""Most table entries of one vector load."""


def kv_sub_tile_rows(BN: int, page_size: int) -> int:
    """Rows of a sub-tile, the part of a tile of ``BN`` keys that lies in one page (``page_size`` 0: no pages).

    >>> kv_sub_tile_rows(128, 32), kv_sub_tile_rows(128, 256), kv_sub_tile_rows(128, 0)
    (32, 128, 128)
    >>> kv_sub_tile_rows(128, 48)
    Traceback (most recent call last):
        ...
    ValueError: page_size 48 must divide BN 128, or be a multiple of it
    """
    rows = BN if page_size <= 0 or page_size >= BN else page_size
    if BN < 1 or BN % rows or (page_size > 0 and page_size % rows):
        raise ValueError(f"page_size {page_size} must divide BN {BN}, or be a multiple of it")
    return rows


def kv_num_sub_tiles(BN: int, page_size: int) -> int:
    """Sub-tiles of a tile of ``BN`` keys.

    >>> kv_num_sub_tiles(128, 32), kv_num_sub_tiles(128, 256)
    (4, 1)
    """
    return BN // kv_sub_tile_rows(BN, page_size)


@dataclass(frozen=True, eq=False)
class PagedRowIndices:
    """The first row of each sub-tile of a tile of ``BN`` keys.

    rows : int64 ``[..., num_pages]``, the leading axes those of the programs.

    >>> PagedRowIndices(BN=8, page_size=4, rows=np.array([96, 24])).get_row([0, 3, 4, 7])
    array([96, 99, 24, 27])
    """

    BN: int
    page_size: int
    rows: Int64

    @property
    def eff_page(self) -> int:
        """Keys of a sub-tile."""
        return kv_sub_tile_rows(self.BN, self.page_size)

    @property
    def num_pages(self) -> int:
        """Sub-tiles of the tile."""
        return kv_num_sub_tiles(self.BN, self.page_size)

    def get_row(self, offset: Any) -> Int64:
        """The row of key ``offset`` of the tile: int64 ``[..., *offset.shape]``. IndexError outside ``[0, BN)``."""
        page, slot = np.divmod(index("offset", offset, self.BN), self.eff_page)
        return np.asarray(self.rows[..., page] + slot)


def populate(
    table: PageTable,
    storage: BlockStorage,
    batch_idx: Any,
    base_kv_row: Any,
    *,
    BN: int,
    base_alignment: int,
    valid: Any,
) -> PagedRowIndices:
    """See :meth:`PagedKVCache.populate`. ``table`` counts every page of ``storage``, the null page included."""
    page_size = storage.shape[1]
    eff_page, num_pages = kv_sub_tile_rows(BN, page_size), kv_num_sub_tiles(BN, page_size)
    base = integers("base_kv_row", base_kv_row)
    if base_alignment < 1 or (base % base_alignment).any():
        raise ValueError(f"base_kv_row {base_kv_row} must be a multiple of base_alignment {base_alignment}")
    if num_pages > 1:
        _check_chunk(base, base_alignment, page_size, num_pages, table.entries.shape[1])
    first = base[..., None] + eff_page * np.arange(num_pages)
    end = BN if valid is None else integers("valid", valid)[..., None]
    active = eff_page * np.arange(num_pages) < end
    page, slot = table.find(integers("batch_idx", batch_idx)[..., None], first, active)
    return PagedRowIndices(BN, page_size, np.where(active, storage.row(page, slot), FILL_ROW))


def _check_chunk(base: Int64, base_alignment: int, page_size: int, num_pages: int, columns: int) -> None:
    """The conditions of reading the entries of a tile by aligned vectors."""
    if base_alignment < page_size or (base % page_size).any():
        raise ValueError(
            f"base_alignment {base_alignment} and base_kv_row {base.tolist()} must be multiples of the page size "
            f"{page_size} where a tile spans {num_pages} pages"
        )
    pages_aligned = base_alignment // page_size
    chunk = min(num_pages & -num_pages, pages_aligned & -pages_aligned, MAX_CHUNK)
    if columns % chunk:
        raise ValueError(
            f"lookup_table has {columns} columns, which vectors of {chunk} entries do not divide: use "
            f"lookup_table_columns, or promise no more than base_alignment={page_size}"
        )
