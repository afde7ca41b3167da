"""The rows of a tile that spans pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache.page_table import PageTable
from kvlab.cache.storage import BlockStorage
from kvlab.common.checks import Int64, count, index, integers
from kvlab.layout.algebra.int_tuple import at_once

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
    ValueError: page_size is 48: must divide BN 128, or be a multiple of it
    """
    count("BN", BN, least=1)
    count("page_size", page_size, least=-1)
    rows = BN if page_size <= 0 or page_size >= BN else page_size
    if BN % rows or (page_size > 0 and page_size % rows):
        raise ValueError(f"page_size is {page_size}: must divide BN {BN}, or be a multiple of it")
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
    pair_cta, is_leader : whether two CTAs load the tile, half of it each, and whether this is the first of them.

    >>> tile = PagedRowIndices(BN=8, page_size=4, rows=np.array([96, 24]))
    >>> tile.get_row([0, 3, 4, 7])
    array([96, 99, 24, 27])
    """

    BN: int
    page_size: int
    rows: Int64
    pair_cta: bool = False
    is_leader: bool = True

    def __post_init__(self) -> None:
        if self.pair_cta and self.BN % 2:
            raise ValueError(f"BN {self.BN} of a pair of CTAs must be even")

    @property
    def eff_page(self) -> int:
        """Keys of a sub-tile."""
        return kv_sub_tile_rows(self.BN, self.page_size)

    @property
    def num_pages(self) -> int:
        """Sub-tiles of the tile."""
        return kv_num_sub_tiles(self.BN, self.page_size)

    @property
    def cta_group(self) -> int:
        """CTAs that share the tile."""
        return 2 if self.pair_cta else 1

    def get_row(self, offset: Any) -> Int64:
        """The row of key ``offset`` of the tile: int64 ``[..., *offset.shape]``. IndexError outside ``[0, BN)``."""
        page, slot = np.divmod(index("offset", offset, self.BN), self.eff_page)
        return np.asarray(self.rows[..., page] + slot)

    def k_copies(self, valid_pages: int | None = None, *, oob_fill: bool = False) -> tuple[Int64, int]:
        """The copies with which this CTA loads its rows of K: ``(first rows [..., copies], rows of a copy)``.

        All ``BN`` rows, or those of its half where ``pair_cta``. Copy p lands ``p * rows`` rows into the tile.

        valid_pages : copy only the first so many. oob_fill : the others too, from row 2**30, which delivers zeros.

        >>> pair = PagedRowIndices(BN=8, page_size=4, rows=np.array([96, 24]), pair_cta=True, is_leader=False)
        >>> pair.k_copies()
        (array([24]), 4)
        >>> PagedRowIndices(BN=8, page_size=16, rows=np.array([96]), pair_cta=True, is_leader=False).k_copies()
        (array([100]), 4)
        """
        rows = self.BN // self.cta_group
        step = min(self.eff_page, rows)
        first = (0 if self.is_leader or not self.pair_cta else rows) + np.arange(0, rows, step)
        return self._some(self.get_row(first), valid_pages, oob_fill), step

    def v_copies(
        self, slot: int, num_v_sub_tiles: int = 1, valid_pages: int | None = None, *, oob_fill: bool = False
    ) -> tuple[Int64, int]:
        """The same for part ``slot`` of V, which is loaded in ``num_v_sub_tiles`` parts of equally many keys.

        >>> tile = PagedRowIndices(BN=8, page_size=4, rows=np.array([96, 24]))
        >>> tile.v_copies(1, 2), tile.v_copies(3, 4)
        ((array([24]), 4), (array([26]), 2))
        """
        if num_v_sub_tiles < 1 or self.BN % num_v_sub_tiles:
            raise ValueError(f"num_v_sub_tiles is {num_v_sub_tiles}: must divide BN {self.BN}")
        rows = self.BN // num_v_sub_tiles
        step = math.gcd(self.eff_page, rows)
        first = int(index("slot", slot, num_v_sub_tiles)) * rows + np.arange(0, rows, step)
        return self._some(self.get_row(first), valid_pages, oob_fill), step

    @staticmethod
    def _some(rows: Int64, valid_pages: int | None, oob_fill: bool) -> Int64:
        """The first ``valid_pages`` copies, followed by zeros where ``oob_fill``."""
        copies = rows.shape[-1]
        valid = copies if valid_pages is None else valid_pages
        if not 1 <= valid <= copies:
            raise ValueError(f"valid_pages is {valid_pages}: must be 1 to {copies}, the copies of this CTA")
        return np.where(np.arange(copies) < valid, rows, FILL_ROW) if oob_fill else rows[..., :valid]


def aligned_rows(base_kv_row: Any, base_alignment: int) -> Int64:
    """``base_kv_row`` as int64. ValueError unless all are multiples of ``base_alignment``."""
    base = integers("base_kv_row", base_kv_row)
    if (base % count("base_alignment", base_alignment, least=1)).any():
        raise ValueError(f"base_kv_row is {base_kv_row}: must be a multiple of base_alignment {base_alignment}")
    return base


def populate_rows(
    row_of: Callable[[Any, Int64, Any], Int64], batch_idx: Any, base: Int64, *, BN: int, page_size: int,
    valid: Any = None, pair_cta: bool = False, is_leader: bool = True,
) -> PagedRowIndices:
    """``rows[i] = row_of(batch_idx, base + i * eff_page, active)``: what every operand without pages does.

    Sub-tiles at or past ``valid`` keys are not ``active`` and get row 2**30."""
    eff_page, num_pages = kv_sub_tile_rows(BN, page_size), kv_num_sub_tiles(BN, page_size)
    offset = eff_page * np.arange(at_once(num_pages, "sub-tiles"))
    active = offset < (BN if valid is None else integers("valid", valid)[..., None])
    rows = row_of(integers("batch_idx", batch_idx)[..., None], base[..., None] + offset, active)
    return PagedRowIndices(BN, page_size, np.where(active, rows, FILL_ROW), pair_cta, is_leader)


def populate(
    table: PageTable, storage: BlockStorage, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int,
    valid: Any, pair_cta: bool, is_leader: bool,
) -> PagedRowIndices:
    """See :meth:`PagedKVCache.populate`. ``table`` counts every page of ``storage``, the null page included."""
    page_size = storage.shape[1]
    num_pages = kv_num_sub_tiles(BN, page_size)
    base = aligned_rows(base_kv_row, base_alignment)
    if num_pages > 1:
        _check_chunk(base, base_alignment, page_size, num_pages, table.entries.shape[1])
    return populate_rows(
        lambda batch, first, active: storage.row(*table.find(batch, first, active)),
        batch_idx, base, BN=BN, page_size=page_size, valid=valid, pair_cta=pair_cta, is_leader=is_leader,
    )


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
