"""The continuous KV cache: a sequence has one block of ``max_seq_len`` tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache.page_table import check_tables
from kvlab.cache.paged import PagedKVCache
from kvlab.cache.pointer import UnsafePointer
from kvlab.cache.row_indices import PagedRowIndices, aligned_rows, populate_rows
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.cache.stored_scales import Unquantized, zeros_at
from kvlab.cache.tma_descriptors import TmaTiles
from kvlab.cache.view import KVCacheView
from kvlab.common.arrays import to_numpy
from kvlab.common.checks import Int64, count, integers
from kvlab.common.drawn import Drawn
from kvlab.memory import float32


class ContinuousBatchingKVCache(Unquantized, TmaTiles, KVCacheView, Drawn):
    """K or V of one layer, a whole block for each sequence; a view: it owns no memory.

    Parameters
    ----------
    blocks : ``[blocks, max_seq_len, heads, head_size]``, strides as in :class:`PagedKVCache`.
    cache_lengths : integers ``[batch]``, tokens of each sequence that were in the cache *before* this step.
    lookup_table : integers ``[batch]``, the block of each sequence; one outside ``[0, blocks)`` is a sentinel.
    max_seq_length, max_cache_length, strict, kv_params : see :class:`PagedKVCache`.

    It has no scales: ``load_scale`` and ``load_quantized`` give zeros, ``store_scale`` does nothing, as the trait says.

    >>> blocks = np.arange(3 * 8 * 2 * 4, dtype=np.float32).reshape(3, 8, 2, 4)
    >>> cache = ContinuousBatchingKVCache(blocks, [5, 0], [2, 0], max_seq_length=1, max_cache_length=6)
    >>> cache.row_idx(0, 5), cache.load(0, 1, 5, 0, width=2).tolist(), cache.max_tile_size(), cache.page_size_
    (21, [172.0, 173.0], -1, 0)
    >>> cache.load(0, 0, 8, 0)
    Traceback (most recent call last):
        ...
    IndexError: tok_idx is 8: must be in [0, 8), as the page table has 1 columns of 8 tokens
    """

    page_size_ = 0
    """There are no pages."""

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int, *,
        strict: bool = True, kv_params: KVCacheStaticParams | None = None,
    ) -> None:
        super().__init__(
            blocks, cache_lengths, lookup_table, max_seq_length, max_cache_length,
            strict=strict, num_blocks=None, kv_params=kv_params,
        )
        if self.lookup_table.ndim != 1:
            raise ValueError(f"lookup_table has shape {tuple(self.lookup_table.shape)}: must be [batch], a block each")
        check_tables(self.cache_lengths, self.lookup_table[:, None], self.max_seq_len)

    @property
    def max_seq_len(self) -> int:
        """Tokens of a block."""
        return self.storage.shape[1]

    @staticmethod
    def get_type_name() -> str:
        """The type's name, for messages and traces."""
        return "ContinuousBatchingKVCache"

    @staticmethod
    def max_tile_size() -> int:
        """-1: a tile may have any number of rows."""
        return -1

    def get_tma_row(self, encoded_index: Any) -> Any:
        """``encoded_index`` itself."""
        return encoded_index

    def populate(
        self, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int = 1, pair_cta: bool = False,
        is_leader: bool = True, valid: Any = None,
    ) -> PagedRowIndices:
        """The row of key ``base_kv_row``: the tile of ``BN`` keys is one window. Arguments: see
        ``PagedKVCache.populate``; ``valid`` 0 gives row 2**30."""
        base = aligned_rows(base_kv_row, base_alignment)
        return populate_rows(
            lambda batch, first, active: self.storage.row(*self.page_table.find(batch, first, active)),
            batch_idx, base, BN=BN, page_size=0, valid=valid, pair_cta=pair_cta, is_leader=is_leader,
        )

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to an element, from which on ``tile_size`` tokens lie ``token_stride`` elements apart.

        ``valid`` as in ``PagedKVCache.block_paged_ptr``. IndexError where valid rows lie past the block's end."""
        count("tile_size", tile_size, least=1)
        rows = np.asarray(np.minimum(tile_size, integers("valid", 1 if valid is None else valid)))
        start = integers("start_tok_idx", start_tok_idx)
        end: Int64 = np.asarray(start + rows)
        past = (rows > 0) & (end > self.max_seq_len)
        if past.any():
            raise IndexError(f"tok_idx is {int(end[past].flat[0]) - 1}: must be in [0, {self.max_seq_len}), the block")
        return self._pointer(batch_idx, start, head_idx, head_dim_idx, rows)

    # The parts of the trait that are about scales.

    def load_quantized(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """Zeros ``[..., width]`` of the storage dtype."""
        return zeros_at(self.dtype, width, bs, head_idx, tok_idx, head_dim_idx)

    def load_scale(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """Zeros of float32, ``[..., width]``."""
        return zeros_at(float32, width, bs, head_idx, tok_idx, head_dim_idx)

    def store_scale(self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, scales: Any) -> None:
        """Stores nothing: a continuous cache has no scales."""

    def paged(self) -> PagedKVCache:
        """The same bytes as a paged cache whose page is a block.

        >>> blocks = np.zeros((3, 8, 2, 4), np.float32)
        >>> ContinuousBatchingKVCache(blocks, [5, 0], [2, 0], 1, 6).paged().row_idx(0, 5)
        21
        """
        return PagedKVCache(
            self.blocks, self.cache_lengths, self.lookup_table[:, None], self.max_seq_length, self.max_cache_length,
            strict=self.strict, kv_params=self.kv_params,
        )

    def _entries(self) -> np.ndarray[Any, Any]:
        return to_numpy(self.lookup_table, "lookup_table")[:, None]
