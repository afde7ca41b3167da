"""K and V of all layers, one block of tokens for each sequence."""

from __future__ import annotations

from typing import Any

from kvlab.cache.collection import PagedKVCacheCollection
from kvlab.cache.collection_base import KVCacheCollection
from kvlab.cache.continuous import ContinuousBatchingKVCache
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.common.drawn import Drawn
from kvlab.common.opaque import opaque_methods


@opaque_methods
class ContinuousBatchingKVCacheCollection(KVCacheCollection[ContinuousBatchingKVCache], Drawn):
    """The storage, and one table of blocks for all layers.

    Parameters
    ----------
    blocks : ``[blocks, KV, layers, max_seq_len, heads, head_size]``, otherwise as in :class:`PagedKVCacheCollection`.
    cache_lengths, lookup_table : integers ``[batch]``: tokens before this step, and the block of each sequence.
    max_seq_length, max_cache_length : most new tokens of a sequence; longest sequence with them.
    kv_params : must fit ``blocks``; made from them if None.
    strict : whether a store to a sequence whose entry is no block raises (True) or is dropped.

    >>> import numpy as np
    >>> blocks = np.zeros((4, 2, 3, 32, 2, 64), np.float32)
    >>> pool = ContinuousBatchingKVCacheCollection(blocks, [20, 3], [3, 1], max_seq_length=1, max_cache_length=21)
    >>> pool
    ContinuousBatchingKVCacheCollection(4 blocks of 32 tokens, 3 layers, K and V, 2 heads x 64 float32, batch 2, numpy)
    >>> pool.get_value_cache(2).page_stride  # rows: a block of the view spans K and V of all layers
    192
    """

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int,
        kv_params: KVCacheStaticParams | None = None, *, strict: bool = True,
    ) -> None:
        super().__init__(
            blocks, cache_lengths, lookup_table, max_seq_length, max_cache_length, kv_params,
            strict=strict, axes="blocks, KV, layers, max_seq_len, heads, head_size",
        )
        self.dtype = self.get_key_cache(0).dtype

    @property
    def max_seq_len(self) -> int:
        """Tokens of a block."""
        return int(self.blocks.shape[3])

    def paged(self) -> PagedKVCacheCollection:
        """The same bytes as a paged collection whose page is a block, for what asks for one."""
        return PagedKVCacheCollection(
            self.blocks, self.cache_lengths, self.lookup_table[:, None], self.max_seq_length, self.max_cache_length,
            self.kv_params, strict=self.strict,
        )

    def _extents(self) -> str:
        return f"{self.blocks.shape[0]} blocks of {self.max_seq_len} tokens"

    def _view(self, kv: int, layer: int) -> ContinuousBatchingKVCache:
        return ContinuousBatchingKVCache(
            self.blocks[:, kv, layer], self.cache_lengths, self.lookup_table, self.max_seq_length,
            self.max_cache_length, strict=self.strict, kv_params=self.kv_params,
        )
