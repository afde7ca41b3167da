"""K and V of all layers, one block of tokens for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.cache.arrays import as_array, is_torch, to_numpy, to_torch
from kvlab.cache.checks import index, plain
from kvlab.cache.collection import PagedKVCacheCollection
from kvlab.cache.continuous import ContinuousBatchingKVCache
from kvlab.cache.params import KVCacheStaticParams

__all__ = ["ContinuousBatchingKVCacheCollection"]


class ContinuousBatchingKVCacheCollection:
    """The storage, and one table of blocks for all layers.

    Parameters
    ----------
    blocks : ``[blocks, KV, layers, max_seq_len, heads, head_size]``, otherwise as in :class:`PagedKVCacheCollection`.
    cache_lengths, lookup_table : integers ``[batch]``: tokens before this step, and the block of each sequence.
    max_seq_length, max_cache_length : most new tokens of a sequence; longest sequence with them.
    kv_params : must fit ``blocks``; made from them if None.
    strict : whether a store to a sequence whose entry is no block raises (True) or is dropped.

    >>> blocks = np.zeros((4, 2, 3, 32, 2, 64), np.float32)
    >>> pool = ContinuousBatchingKVCacheCollection(blocks, [20, 3], [3, 1], max_seq_length=1, max_cache_length=21)
    >>> pool
    ContinuousBatchingKVCacheCollection(4 blocks of 32 tokens, 3 layers, K and V, 2 heads x 64 float32, batch 2, numpy)
    >>> pool.get_value_cache(2).page_stride  # rows: a block of the view spans K and V of all layers
    192
    """

    def __init__(
        self,
        blocks: Any,
        cache_lengths: Any,
        lookup_table: Any,
        max_seq_length: int,
        max_cache_length: int,
        kv_params: KVCacheStaticParams | None = None,
        *,
        strict: bool = True,
    ) -> None:
        self.blocks, self.cache_lengths, self.lookup_table = map(as_array, (blocks, cache_lengths, lookup_table))
        shape = tuple(self.blocks.shape)
        if len(shape) != 6 or min(shape) < 1 or shape[1] > 2:
            raise ValueError(
                f"blocks has shape {shape}: expected 6 axes [blocks, KV, layers, max_seq_len, heads, head_size], "
                "KV 1 or 2, none of them empty"
            )
        self.kv_params = KVCacheStaticParams(*shape[4:], is_mla=shape[1] == 1) if kv_params is None else kv_params
        if (self.kv_params.kv_extent, self.kv_params.num_heads, self.kv_params.head_size) != (shape[1], *shape[4:]):
            raise ValueError(f"kv_params {self.kv_params} does not fit blocks of shape {shape}")
        self.max_seq_length, self.max_cache_length, self.strict = max_seq_length, max_cache_length, strict
        self.dtype: np.dtype[Any] = self.get_key_cache(0).dtype

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.blocks.shape[2])

    @property
    def max_seq_len(self) -> int:
        """Tokens of a block."""
        return int(self.blocks.shape[3])

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return int(self.lookup_table.shape[0])

    def get_key_cache(self, layer_idx: int) -> ContinuousBatchingKVCache:
        """K of one layer, a view."""
        return self._view(0, layer_idx)

    def get_value_cache(self, layer_idx: int) -> ContinuousBatchingKVCache:
        """V of one layer, a view. ValueError for MLA, which stores no V."""
        if self.kv_params.is_mla:
            raise ValueError("an MLA cache stores no V: read it out of get_key_cache")
        return self._view(1, layer_idx)

    def cache_length(self, bs_idx: Any) -> Any:
        """Tokens in the cache before this step: an int, or int64 of the shape of ``bs_idx``."""
        lengths = to_numpy(self.cache_lengths, "cache_lengths")
        return plain(lengths[index("bs_idx", bs_idx, self.batch_size)].astype(np.int64))

    def with_lengths(self, cache_lengths: Any, max_seq_length: int) -> ContinuousBatchingKVCacheCollection:
        """The same storage at another step, see ``PagedKVCacheCollection.with_lengths``."""
        lengths = as_array(cache_lengths)
        longest = max_seq_length + (int(lengths.max()) if len(lengths) else 0)
        return self._replace(cache_lengths=lengths, max_seq_length=max_seq_length, max_cache_length=longest)

    def paged(self) -> PagedKVCacheCollection:
        """The same bytes as a paged collection whose page is a block, for what asks for one."""
        return PagedKVCacheCollection(
            self.blocks, self.cache_lengths, self.lookup_table[:, None], self.max_seq_length, self.max_cache_length,
            self.kv_params, strict=self.strict,
        )  # fmt: skip

    def numpy(self) -> ContinuousBatchingKVCacheCollection:
        """Over NumPy arrays, the same bytes (bf16 by its bits). ValueError unless all of it is in CPU memory."""
        return self._map(to_numpy)

    def torch(self) -> ContinuousBatchingKVCacheCollection:
        """Over torch tensors, the same bytes (bf16 by its bits)."""
        return self._map(to_torch)

    def to(self, device: Any) -> ContinuousBatchingKVCacheCollection:
        """Over torch tensors on that device, copied if they are not there yet."""
        return self._map(lambda array, name: to_torch(array, name).to(device))

    def __repr__(self) -> str:
        blocks, kv, layers, tokens, heads, head_size = self.blocks.shape
        return (
            f"ContinuousBatchingKVCacheCollection({blocks} blocks of {tokens} tokens, {layers} layers, "
            f"{'K and V' if kv == 2 else 'K'}, {heads} heads x {head_size} {self.dtype}, batch {self.batch_size}, "
            f"{'torch' if is_torch(self.blocks) else 'numpy'})"
        )

    def _view(self, kv: int, layer_idx: int) -> ContinuousBatchingKVCache:
        layer = int(index("layer_idx", layer_idx, self.num_layers))
        return ContinuousBatchingKVCache(
            self.blocks[:, kv, layer], self.cache_lengths, self.lookup_table, self.max_seq_length,
            self.max_cache_length, strict=self.strict, kv_params=self.kv_params,
        )  # fmt: skip

    def _map(self, convert: Callable[[Any, str], Any]) -> ContinuousBatchingKVCacheCollection:
        names = ("blocks", "cache_lengths", "lookup_table")
        return self._replace(**{name: convert(getattr(self, name), name) for name in names})

    def _replace(self, **changes: Any) -> ContinuousBatchingKVCacheCollection:
        names = ("blocks", "cache_lengths", "lookup_table", "max_seq_length", "max_cache_length", "kv_params", "strict")
        return ContinuousBatchingKVCacheCollection(**({name: getattr(self, name) for name in names} | changes))
