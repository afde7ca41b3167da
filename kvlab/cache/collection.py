"""K and V of all layers of a model in one pool of pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache.collection_base import KVCacheCollection
from kvlab.cache.page_table import lookup_table_columns
from kvlab.cache.paged import PagedKVCache
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.common.arrays import as_array
from kvlab.common.checks import count
from kvlab.common.drawn import Drawn
from kvlab.common.opaque import opaque_methods
from kvlab.memory import POISON, as_dtype


@opaque_methods
class PagedKVCacheCollection(KVCacheCollection[PagedKVCache], Drawn):
    """The pool, and one page table for all layers.

    Parameters
    ----------
    blocks : ``[pages, KV, layers, page_size, heads, head_size]``, a NumPy array or torch tensor, possibly strided (the
        last axis contiguous); KV is 2 (0 = K, 1 = V), or 1 where V is read out of K (MLA).
    cache_lengths : integers ``[batch]``, tokens of each sequence in the cache before this step.
    lookup_table : integers ``[batch, columns]``, the page of each ``page_size`` tokens of a sequence.
    max_seq_length, max_cache_length : most new tokens of a sequence; longest sequence with them.
    kv_params : must fit ``blocks``; made from them if None.
    strict, total_num_pages : see :class:`PagedKVCache`.
    scales : ``[pages, KV, layers, page_size, heads, ceil(head_size / quantization_granularity)]`` for a quantised pool.
    quantization_granularity : dims that share a scale. Of 4 bits, uint8 with two dims a byte, ``head_size`` and the
        granularity count bytes: e4m3 scales of 8 bytes (NVFP4), or float32 ones of a whole head (integers).

    All arrays belong to one library, on one device.

    >>> blocks = np.zeros((5, 2, 3, 16, 2, 64), np.float32)
    >>> pool = PagedKVCacheCollection(blocks, [20], [[3, 0]], max_seq_length=1, max_cache_length=21)
    >>> pool
    PagedKVCacheCollection(5 pages x 16 tokens, 3 layers, K and V, 2 heads x 64 float32, batch 1, numpy)
    >>> pool.get_value_cache(2).strides  # elements: a page of the view spans K and V of all layers
    (12288, 128, 64, 1)
    >>> pool.get_key_cache(3)
    Traceback (most recent call last):
        ...
    IndexError: layer_idx is 3: must be in [0, 3)
    """

    _arrays = (*KVCacheCollection._arrays, "scales")
    _settings = (*KVCacheCollection._settings, "total_num_pages", "quantization_granularity")

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int,
        kv_params: KVCacheStaticParams | None = None, *, strict: bool = True, total_num_pages: int | None = None,
        scales: Any = None, quantization_granularity: int = 1,
    ) -> None:
        super().__init__(
            blocks, cache_lengths, lookup_table, max_seq_length, max_cache_length, kv_params,
            strict=strict, axes="pages, KV, layers, page_size, heads, head_size",
        )
        shape = tuple(self.blocks.shape)
        self.total_num_pages = shape[0] if total_num_pages is None else total_num_pages
        self.scales = None if scales is None else as_array(scales)
        self.quantization_granularity = quantization_granularity
        if self.scales is not None and tuple(self.scales.shape[:3]) != shape[:3]:
            raise ValueError(f"scales has shape {tuple(self.scales.shape)}: must be {shape[:-1]} and the scales")
        self.dtype = self.get_key_cache(0).dtype

    @classmethod
    def allocate(
        cls, kv_params: KVCacheStaticParams, *, num_pages: int, page_size: int, num_layers: int, batch_size: int,
        max_length: int, dtype: Any = "bf16", scale_dtype: Any = None, quantization_granularity: int = 1,
    ) -> PagedKVCacheCollection:
        """A pool of NumPy memory in which no sequence has a token yet.

        ``num_pages`` pages and the null page, poisoned (bytes 0xFF: NaN in every float format); a uint32 page table
        for sequences of up to ``max_length`` tokens, filled with the sentinel ``num_pages``, which is the null page.
        With ``scale_dtype`` it is quantised, its scales poisoned too.

        >>> pool = PagedKVCacheCollection.allocate(
        ...     KVCacheStaticParams(2, 64), num_pages=6, page_size=128, num_layers=1, batch_size=2, max_length=600
        ... )
        >>> pool.blocks.shape, pool.lookup_table.shape, int(pool.lookup_table[0, 0])
        ((7, 2, 1, 128, 2, 64), (2, 24), 6)
        """
        count("num_pages", num_pages)
        for name, value in (("page_size", page_size), ("num_layers", num_layers), ("batch_size", batch_size)):
            count(name, value, least=1)
        pages_each = -(-count("max_length", max_length) // page_size)
        shape = (
            num_pages + 1, kv_params.kv_extent, num_layers, page_size, kv_params.num_heads, kv_params.head_size
        )
        count("quantization_granularity", quantization_granularity, least=1)
        blocks = _poisoned(shape, dtype)
        scales = None
        if scale_dtype is not None:
            scales = _poisoned((*shape[:-1], -(-shape[-1] // quantization_granularity)), scale_dtype)
        table = _unfilled((batch_size, lookup_table_columns(pages_each)), np.dtype(np.uint32))
        table[...] = num_pages
        lengths = np.zeros(batch_size, np.uint32)
        return cls(
            blocks, lengths, table, 0, 0, kv_params, total_num_pages=num_pages, scales=scales,
            quantization_granularity=quantization_granularity,
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.blocks.shape[3])

    def _extents(self) -> str:
        return f"{self.blocks.shape[0]} pages x {self.page_size} tokens"

    def _view(self, kv: int, layer: int) -> PagedKVCache:
        return PagedKVCache(
            self.blocks[:, kv, layer], self.cache_lengths, self.lookup_table, self.max_seq_length,
            self.max_cache_length, strict=self.strict, total_num_pages=self.total_num_pages, kv_params=self.kv_params,
            scales=None if self.scales is None else self.scales[:, kv, layer],
            quantization_granularity=self.quantization_granularity,
        )


def _poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    array = _unfilled(shape, as_dtype(dtype))
    array.reshape(-1).view(np.uint8)[...] = POISON
    return array


def _unfilled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array to be filled. ValueError where memory does not hold it."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):
        raise ValueError(f"an array {list(shape)} of {dtype} does not fit into memory") from None
