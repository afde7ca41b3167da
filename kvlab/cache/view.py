"""Common part of the cache views: fields, sizes and elements."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

import numpy as np

from kvlab.cache.over_arrays import OverArrays
from kvlab.cache.page_table import PageTable
from kvlab.cache.pointer import UnsafePointer
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.cache.storage import BlockStorage
from kvlab.common.arrays import as_array, same_place, to_numpy
from kvlab.common.checks import Int64, count, index, integers, plain
from kvlab.common.torch_here import is_torch
from kvlab.layout import Layout, TileTensor
from kvlab.memory import Memory, as_dtype


class KVCacheView(OverArrays):
    """K or V of one layer, a view that owns no memory: the part that paged and continuous caches have in common.

    A subclass says in ``_entries`` which block holds which tokens of a sequence: ``[batch, columns]``, a column for
    each ``blocks.shape[1]`` tokens. Indices are ints or integer arrays that broadcast against each other; ``tok_idx``
    counts from the start of the sequence. All arithmetic is 64-bit. An index out of range raises IndexError, a table
    entry that is no block ValueError. The index methods need arrays in CPU memory."""

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int, *,
        strict: bool, num_blocks: int | None, kv_params: KVCacheStaticParams | None,
    ) -> None:
        self.storage = BlockStorage(blocks, "blocks")
        pages, _, heads, head_size = self.storage.shape
        self.blocks = self.storage.blocks
        self.cache_lengths, self.lookup_table = as_array(cache_lengths), as_array(lookup_table)
        same_place(blocks=self.blocks, cache_lengths=self.cache_lengths, lookup_table=self.lookup_table)
        self.max_seq_length = count("max_seq_length", max_seq_length)
        self.max_cache_length = count("max_cache_length", max_cache_length)
        self.strict = strict
        self.total_num_pages = pages if num_blocks is None else count("total_num_pages", num_blocks)
        if self.total_num_pages > pages:
            raise ValueError(f"total_num_pages {num_blocks} exceeds the {pages} pages of blocks")
        self.kv_params = KVCacheStaticParams(heads, head_size) if kv_params is None else kv_params
        if (self.kv_params.num_heads, self.kv_params.head_size) != (heads, head_size):
            raise ValueError(f"kv_params {self.kv_params} does not fit blocks of shape {self.storage.shape}")

    # Sizes.

    @property
    def dtype(self) -> np.dtype[Any]:
        """The storage dtype."""
        return self.storage.dtype

    @property
    def batch_size(self) -> int:
        """Sequences: rows of the page table."""
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
        """Blocks of the tokens, over the page table's own memory."""
        return PageTable(self._entries(), self.storage.shape[1], self.total_num_pages)

    def cache_lengths_nd(self) -> TileTensor:
        """The cache lengths as a tile tensor ``[batch]`` of uint32. ValueError unless they are in CPU memory.

        They are the cache's own bytes where those are uint32, else a copy."""
        lengths = np.ascontiguousarray(to_numpy(self.cache_lengths, "cache_lengths"), np.uint32)
        return TileTensor(Memory.over(lengths, name="cache_lengths"), np.uint32, Layout(lengths.shape[0]))

    def cache_length(self, batch_idx: Any) -> Any:
        """Tokens in the cache before this step: an int, or int64 of the shape of ``batch_idx``."""
        lengths = to_numpy(self.cache_lengths, "cache_lengths")
        return plain(lengths[index("batch_idx", batch_idx, self.batch_size)].astype(np.int64))

    def empty_cache(self) -> bool:
        """Tells whether no sequence of the batch had a token before this step: all cache lengths are 0."""
        return not to_numpy(self.cache_lengths, "cache_lengths").any()

    def max_prompt_length(self) -> int:
        """Most new tokens of any sequence."""
        return self.max_seq_length

    def max_context_length(self) -> int:
        """Longest sequence, new tokens included."""
        return self.max_cache_length

    # Rows: all heads of one token.

    @property
    def page_stride(self) -> int:
        """Rows from the first token of a block to that of the next. ValueError where rows are not dense."""
        return self.storage.page_stride

    def num_kv_rows(self) -> int:
        """Rows from the first of the first block to the last of the last block."""
        return self.storage.num_rows

    def row_idx(self, batch_idx: Any, start_tok_idx: Any) -> Any:
        """``block * page_stride + slot``: the row (all heads) of a token, an int or int64."""
        return plain(self.storage.row(*self.page_table.find(batch_idx, start_tok_idx)))

    def row_idx32(self, batch_idx: Any, start_tok_idx: Any) -> Any:
        """:meth:`row_idx` as int32, what a TMA coordinate holds. OverflowError where it does not fit."""
        row = np.asarray(self.row_idx(batch_idx, start_tok_idx))
        if row.size and row.max() > np.iinfo(np.int32).max:
            raise OverflowError(f"row {row.max()} does not fit in 32 bits; use row_idx, which is 64-bit")
        return plain(row.astype(np.int32))

    def kv_tma_coords(self, batch_idx: Any, tok_idx: Any) -> tuple[Any, Any]:
        """``(row_in_block, block)`` with ``block * page_stride + row_in_block == row_idx``; both fit in 32 bits."""
        block, slot = self.page_table.find(batch_idx, tok_idx)
        return plain(slot), plain(block)

    # Elements.

    def row_offsets(
        self, batch_idx: Any, tokens: Any, head_idx: Any, head_dim_idx: Any = 0, *, valid: Any = None
    ) -> Int64:
        """Element offsets in :attr:`memory` of ``(token, head, dim)`` for tiles over any pages: ``[..., rows]``, int64.

        A kvlab extension for pages smaller than a tile. ``tokens`` is ``[..., rows]``; ``batch_idx``, ``head_idx``,
        ``head_dim_idx`` are one for each program, ``[...]``.

        valid : leading rows in use, an int or ``[...]``. The others are not looked up and give -1."""
        tokens = integers("tokens", tokens)
        if not tokens.ndim:
            raise ValueError(f"tokens {tokens} has no axis: must be [..., rows]")
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
        value = self._stored(bs, head_idx, tok_idx, head_dim_idx, width)
        return value if output_dtype is None else value.astype(as_dtype(output_dtype))

    def store(self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, val: Any) -> None:
        """Write ``val[..., width]`` (a scalar has width 1), of the cache's dtype, to contiguous elements.

        Through a table entry that is no block: ValueError and nothing is written or, with ``strict=False``, these
        elements are dropped."""
        self._write(self.storage, bs, head_idx, tok_idx, head_dim_idx, val)

    def copy(self) -> Self:
        """Another view of the same memory."""
        return self._map(lambda array, name: array)

    @property
    def device_type(self) -> type[Self]:
        """The type that a kernel on the device gets: the view itself, which holds its arrays' addresses and strides."""
        return type(self)

    @staticmethod
    def get_type_name() -> str:
        """The type's name, for messages and traces."""
        raise NotImplementedError

    def __repr__(self) -> str:
        pages, page_size, heads, head_size = self.storage.shape
        return (
            f"{self.get_type_name()}({pages} pages x {page_size} tokens x {heads} heads x {head_size} {self.dtype}, "
            f"batch {self.batch_size}, {'torch' if is_torch(self.blocks) else 'numpy'})"
        )

    # For the subclasses.

    def _entries(self) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def _element_offset(self, batch: Any, token: Any, head: Any, dim: Any, active: Any = True) -> Int64:
        """Elements from the first of ``blocks``. Where not ``active`` no page is looked up: the value is void."""
        return self.storage.offset(*self.page_table.find(batch, token, active), head, dim)

    def _pointer(self, batch: Any, start: Int64, head: Any, dim: Any, rows: Int64) -> UnsafePointer:
        """The pointer to each window; to the first element of ``blocks`` where it has no rows."""
        offset = self._element_offset(batch, start, head, dim, rows > 0)
        return UnsafePointer(self.memory, np.where(rows > 0, offset, 0), self.dtype)

    def _stored(self, bs: Any, head: Any, token: Any, dim: Any, width: int) -> np.ndarray[Any, Any]:
        self.storage.check_width(dim, width)
        offset = self._element_offset(bs, token, head, dim)
        return self.memory.load(offset * self.dtype.itemsize, self.dtype, width)

    def _write(self, storage: BlockStorage, bs: Any, head: Any, token: Any, dim: Any, val: Any) -> None:
        """Write ``val[..., width]`` to elements of ``storage``, which has the blocks of the cache."""
        value = np.atleast_1d(to_numpy(as_array(val), "val"))
        if value.dtype != storage.dtype:
            what = "cache" if storage is self.storage else "scales"
            raise ValueError(f"val has dtype {value.dtype}, the {what} {storage.dtype}: convert with .astype")
        if not storage.memory.bytes.flags.writeable:
            raise ValueError(f"{storage.name} is read-only: nothing can be stored")
        storage.check_width(dim, value.shape[-1])
        active = np.True_ if self.strict else self.page_table.has_page(bs, token)
        offset = storage.offset(*self.page_table.find(bs, token, active), head, dim)
        value = np.broadcast_to(value, (*offset.shape, value.shape[-1]))
        keep = np.broadcast_to(active, offset.shape)
        storage.memory.store(offset[keep] * storage.dtype.itemsize, value[keep])
