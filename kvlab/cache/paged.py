"""The paged KV cache: which byte holds element ``(sequence, token, head, dim)`` (spec/kv_cache.md 1.3 to 1.7)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from kvlab.cache.arrays import as_array, is_torch, same_place, to_numpy, to_torch
from kvlab.cache.checks import Int64, count, index, integers, plain
from kvlab.cache.page_table import PageTable, check_tables
from kvlab.cache.params import KVCacheStaticParams
from kvlab.cache.pointer import Pointer
from kvlab.cache.row_indices import PagedRowIndices, populate
from kvlab.cache.storage import BlockStorage
from kvlab.memory import Memory, as_dtype

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """K or V of one layer in pages, a view: it owns no memory.

    Parameters
    ----------
    blocks : ``[pages, page_size, heads, head_size]``, a NumPy array or torch tensor, usually a strided view (K and V as
        halves of one buffer; HND storage transposed). Only strides are used for addressing; the last axis must be
        contiguous.
    cache_lengths : integers ``[batch]``, tokens of each sequence that were in the cache *before* this step.
    lookup_table : integers ``[batch, columns]``, see :class:`PageTable`. Columns past a sequence's end may hold
        anything: they are never followed.
    max_seq_length : most new tokens of any sequence in this step.
    max_cache_length : longest sequence of the batch, new tokens included.
    strict : whether a store through a table entry that is no page raises (True) or is dropped (False). A load raises.
    total_num_pages : table entries at or past it are sentinels. All pages of ``blocks`` unless given; a pool whose last
        page is the null page of its sentinel has one less.
    kv_params : must fit ``blocks``; made from them if None.

    Indices are ints or integer arrays that broadcast against each other; ``tok_idx`` counts from the start of the
    sequence. All arithmetic is 64-bit. An index out of range raises IndexError, a table entry that is no page
    ValueError. The index methods need arrays in CPU memory.

    >>> blocks = np.arange(3 * 4 * 2 * 8, dtype=np.float32).reshape(3, 4, 2, 8)
    >>> cache = PagedKVCache(blocks, [6], [[2, 0, -1]], max_seq_length=1, max_cache_length=7)
    >>> cache.load(0, 1, np.array([3, 4]), 0, width=4)  # head 1 of the last token in page 2 and the first in page 0
    array([[184., 185., 186., 187.],
           [  8.,   9.,  10.,  11.]], dtype=float32)
    >>> cache.row_idx(0, 3), cache.block_paged_ptr(0, 3, 1).offset
    (11, 184)
    >>> cache.load(0, 0, 8, 0)
    Traceback (most recent call last):
        ...
    ValueError: lookup_table[0, 2] is -1, which is none of the pages [0, 3): token 8 of sequence 0 has no page
    """

    def __init__(
        self,
        blocks: Any,
        cache_lengths: Any,
        lookup_table: Any,
        max_seq_length: int,
        max_cache_length: int,
        *,
        strict: bool = True,
        total_num_pages: int | None = None,
        kv_params: KVCacheStaticParams | None = None,
    ) -> None:
        self.storage = BlockStorage(blocks, "blocks")
        pages, page_size, heads, head_size = self.storage.shape
        self.blocks = self.storage.blocks
        self.cache_lengths, self.lookup_table = as_array(cache_lengths), as_array(lookup_table)
        same_place(blocks=self.blocks, cache_lengths=self.cache_lengths, lookup_table=self.lookup_table)
        check_tables(self.cache_lengths, self.lookup_table, page_size)
        self.max_seq_length = count("max_seq_length", max_seq_length)
        self.max_cache_length = count("max_cache_length", max_cache_length)
        self.strict = strict
        self.total_num_pages = pages if total_num_pages is None else count("total_num_pages", total_num_pages)
        if self.total_num_pages > pages:
            raise ValueError(f"total_num_pages {total_num_pages} exceeds the {pages} pages of blocks")
        self.kv_params = KVCacheStaticParams(heads, head_size) if kv_params is None else kv_params
        if (self.kv_params.num_heads, self.kv_params.head_size) != (heads, head_size):
            raise ValueError(f"kv_params {self.kv_params} does not fit blocks of shape {self.storage.shape}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The storage dtype."""
        return self.storage.dtype

    @property
    def page_size_(self) -> int:
        """Tokens of a page."""
        return self.storage.shape[1]

    @property
    def batch_size(self) -> int:
        """Sequences: rows of the lookup table."""
        return int(self.lookup_table.shape[0])

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of page, token, head and dim in elements."""
        return self.storage.strides

    @property
    def token_stride(self) -> int:
        """Elements between a head of one token and the same head of the next token in the page."""
        return self.storage.strides[1]

    @property
    def memory(self) -> Memory:
        """The bytes from the first to the last element of ``blocks``, shared; ``blocks[0, 0, 0, 0]`` has address 0."""
        return self.storage.memory

    @cached_property
    def page_table(self) -> PageTable:
        """The lookup table, shared."""
        return PageTable(to_numpy(self.lookup_table, "lookup_table"), self.page_size_, self.total_num_pages)

    @staticmethod
    def get_type_name() -> str:
        """The type's name, for messages and traces."""
        return "PagedKVCache"

    def cache_lengths_nd(self) -> Any:
        """The ``[batch]`` vector of cache lengths, as it was given."""
        return self.cache_lengths

    def cache_length(self, batch_idx: Any) -> Any:
        """Tokens in the cache before this step: an int, or int64 of the shape of ``batch_idx``."""
        lengths = to_numpy(self.cache_lengths, "cache_lengths")
        return plain(lengths[index("batch_idx", batch_idx, self.batch_size)].astype(np.int64))

    def empty_cache(self) -> bool:
        """Whether no sequence of the batch has a token: ``max_cache_length == 0``."""
        return self.max_cache_length == 0

    def max_prompt_length(self) -> int:
        """Most new tokens of any sequence."""
        return self.max_seq_length

    def max_context_length(self) -> int:
        """Longest sequence, new tokens included."""
        return self.max_cache_length

    def max_tile_size(self) -> int:
        """Most rows of a tile that is one strided window: a page."""
        return self.page_size_

    def copy(self) -> PagedKVCache:
        """Another view of the same memory."""
        return self._map(lambda array, name: array)

    @property
    def page_stride(self) -> int:
        """Rows from the first token of a page to that of the next. ValueError where rows are not dense."""
        return self.storage.page_stride

    def num_kv_rows(self) -> int:
        """Rows from the first of the first page to the last of the last page."""
        return self.storage.num_rows

    def row_idx(self, batch_idx: Any, tok_idx: Any) -> Any:
        """``lookup_table[b, t // page_size] * page_stride + t % page_size``: the row (all heads) of a token, int64."""
        return plain(self.storage.row(*self.page_table.find(batch_idx, tok_idx)))

    def row_idx32(self, batch_idx: Any, tok_idx: Any) -> Any:
        """:meth:`row_idx` as int32, what a TMA coordinate holds. OverflowError where it does not fit."""
        row = np.asarray(self.row_idx(batch_idx, tok_idx))
        if row.size and row.max() > np.iinfo(np.int32).max:
            raise OverflowError(f"row {row.max()} does not fit in 32 bits; use row_idx, which is 64-bit")
        return plain(row.astype(np.int32))

    def get_tma_row(self, encoded_index: Any) -> Any:
        """The row of the token that a sparse index list names by ``page * page_size + slot``: int or int64."""
        encoded = index("encoded_index", encoded_index, self.storage.shape[0] * self.page_size_)
        return plain(self.storage.row(*np.divmod(encoded, self.page_size_)))

    def populate(
        self, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int, valid: Any = None
    ) -> PagedRowIndices:
        """The rows of keys ``[base_kv_row, base_kv_row + BN)``, one tile for each program (spec/kv_cache.md 1.10).

        base_alignment : what ``base_kv_row`` is promised to be a multiple of (else ValueError), at least the page size
            where a tile spans pages. A tile within a page is only known by its first row, not to end in that page.
        valid : leading keys in use, an int or one for each program. Sub-tiles without one are not looked up and get
            row 2**30, which TMA reads as zeros. Without ``valid`` a null page is a page like any other.
        """
        table = PageTable(self.page_table.entries, self.page_size_, self.storage.shape[0])
        return populate(table, self.storage, batch_idx, base_kv_row, BN=BN, base_alignment=base_alignment, valid=valid)

    # Elements.

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile: int = 1, valid: Any = None
    ) -> Pointer:
        """Pointer to an element, from which on ``tile`` tokens lie ``token_stride`` elements apart.

        tile : rows of the window. ValueError unless it divides the page size and the window ends in the page it starts
            in; smaller pages are addressed row by row, see :meth:`row_offsets`.
        valid : rows of the window in use, an int or one for each program. Where it is 0 or less nothing is looked up
            and the pointer is the one to the first element of ``blocks``, not to be followed.
        """
        if tile < 1 or self.page_size_ % tile:
            raise ValueError(
                f"tile {tile} must divide the page size {self.page_size_}; tiles over smaller pages go by row_offsets"
            )
        rows = np.minimum(tile, integers("valid", tile if valid is None else valid))
        start = integers("start_tok_idx", start_tok_idx)
        crossing = (rows > 0) & (start % self.page_size_ + rows > self.page_size_)
        if crossing.any():
            raise ValueError(
                f"start_tok_idx {np.broadcast_to(start, crossing.shape)[crossing][0]}: a tile of {tile} rows from "
                f"there crosses the end of its page of {self.page_size_} tokens; start tiles on multiples of {tile}"
            )
        offset = self._element_offset(batch_idx, start, head_idx, head_dim_idx, rows > 0)
        return Pointer(self.memory, np.where(rows > 0, offset, 0), self.dtype)

    def row_offsets(
        self, batch_idx: Any, tokens: Any, head_idx: Any, head_dim_idx: Any = 0, *, valid: Any = None
    ) -> Int64:
        """Element offsets in :attr:`memory` of ``(token, head, dim)`` for tiles over any pages: ``[..., rows]``, int64.

        A kvlab extension for pages smaller than a tile. ``tokens`` is ``[..., rows]``; ``batch_idx``, ``head_idx``,
        ``head_dim_idx`` are one for each program, ``[...]``.

        valid : leading rows in use, an int or ``[...]``. The others are not looked up and give -1.
        """
        tokens = integers("tokens", tokens)
        if not tokens.ndim:
            raise ValueError(f"tokens {tokens} has no axis: expected [..., rows]")
        row = np.arange(tokens.shape[-1])
        active = row < (row.size if valid is None else integers("valid", valid)[..., None])
        names = {"batch_idx": batch_idx, "head_idx": head_idx, "head_dim_idx": head_dim_idx}
        batch, head, dim = (integers(name, value)[..., None] for name, value in names.items())
        offset = self._element_offset(batch, tokens, head, dim, active)
        return np.where(active, offset, -1)

    def load(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1, output_dtype: Any = None
    ) -> np.ndarray[Any, Any]:
        """``width`` contiguous elements ``[..., width]``, cast to ``output_dtype`` if given."""
        self.storage.check_width(head_dim_idx, width)
        offset = self._element_offset(bs, tok_idx, head_idx, head_dim_idx)
        value = self.memory.load(offset * self.dtype.itemsize, self.dtype, width)
        return value if output_dtype is None else value.astype(as_dtype(output_dtype))

    def store(self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, val: Any) -> None:
        """Write ``val[..., width]`` (a scalar has width 1), of the cache's dtype, to contiguous elements.

        Through a table entry that is no page: ValueError and nothing is written or, with ``strict=False``, these
        elements are dropped.
        """
        value = np.atleast_1d(to_numpy(as_array(val), "val"))
        if value.dtype != self.dtype:
            raise ValueError(f"val has dtype {value.dtype}, the cache {self.dtype}: convert with .astype")
        if not self.memory.bytes.flags.writeable:
            raise ValueError("blocks is read-only: nothing can be stored")
        self.storage.check_width(head_dim_idx, value.shape[-1])
        active = np.True_ if self.strict else self.page_table.has_page(bs, tok_idx)
        offset = self._element_offset(bs, tok_idx, head_idx, head_dim_idx, active)
        value = np.broadcast_to(value, (*offset.shape, value.shape[-1]))
        keep = np.broadcast_to(active, offset.shape)
        self.memory.store(offset[keep] * self.dtype.itemsize, value[keep])

    # The same cache over the arrays of the other library.

    def numpy(self) -> PagedKVCache:
        """Over NumPy arrays, the same bytes (bf16 by its bits). ValueError unless all of it is in CPU memory."""
        return self._map(to_numpy)

    def torch(self) -> PagedKVCache:
        """Over torch tensors, the same bytes (bf16 by its bits)."""
        return self._map(to_torch)

    def __repr__(self) -> str:
        pages, page_size, heads, head_size = self.storage.shape
        return (
            f"PagedKVCache({pages} pages x {page_size} tokens x {heads} heads x {head_size} {self.dtype}, "
            f"batch {self.batch_size}, {'torch' if is_torch(self.blocks) else 'numpy'})"
        )

    def _map(self, convert: Callable[[Any, str], Any]) -> PagedKVCache:
        return PagedKVCache(
            convert(self.blocks, "blocks"),
            convert(self.cache_lengths, "cache_lengths"),
            convert(self.lookup_table, "lookup_table"),
            self.max_seq_length,
            self.max_cache_length,
            strict=self.strict,
            total_num_pages=self.total_num_pages,
            kv_params=self.kv_params,
        )

    def _element_offset(self, batch: Any, token: Any, head: Any, dim: Any, active: Any = True) -> Int64:
        """Elements from the first of ``blocks``. Where not ``active`` no page is looked up: the value is void."""
        return self.storage.offset(*self.page_table.find(batch, token, active), head, dim)
