"""The KV caches of serving stacks as collections, over the same memory."""

from __future__ import annotations

from typing import Any

import torch

from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
from kvlab.common.arrays import element_strides

_ORDERS = {"NHD": ("page_size", "heads"), "HND": ("heads", "page_size")}


def from_torch(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], cache_lengths: torch.Tensor, block_table: torch.Tensor,
    *, max_seq_length: int = 1, max_cache_length: int | None = None, layout: str = "NHD", kv_axis: int | None = None,
    scales: torch.Tensor | None = None, quantization_granularity: int = 1, strict: bool = True,
) -> PagedKVCacheCollection:
    """One layer's cache as a :class:`~kvlab.cache.PagedKVCacheCollection` of one layer: no byte is copied.

    Parameters
    ----------
    kv_cache : in the layout NHD
        * ``[2, pages, page_size, heads, D]`` (``kv_axis=0``): K of all pages, then V;
        * ``[pages, 2, page_size, heads, D]`` (``kv_axis=1``): K and V of each page, so that the views' page stride is
          doubled;
        * ``[pages, page_size, D]`` or ``[pages, page_size, 1, D]``: MLA, one row for K and V;
        * a pair ``(k, v)`` of ``[pages, page_size, heads, D]`` that lie equally in one allocation, K first (the views
          of either of the first two).
        In HND ``page_size`` and ``heads`` change places. Any strides with a contiguous last dimension.
    cache_lengths : integers ``[batch]``, tokens before this step; block_table : integers ``[batch, columns]``.
    max_seq_length, max_cache_length : most new tokens; longest sequence with them, what the table holds if None.
    kv_axis : which axis of five tells K from V. None: the one of extent 2; needed where both are.
    scales : of an fp8 cache, with the axes of ``kv_cache``; quantization_granularity : dims that share one.

    >>> kv = torch.zeros(6, 2, 16, 8, 128, dtype=torch.bfloat16)
    >>> cache = from_torch(kv, torch.tensor([20]), torch.tensor([[3, 1]]))
    >>> cache
    PagedKVCacheCollection(6 pages x 16 tokens, 1 layers, K and V, 8 heads x 128 bfloat16, batch 1, torch)
    >>> cache.get_value_cache(0).strides, cache.get_value_cache(0).blocks.data_ptr() == kv[:, 1].data_ptr()
    ((32768, 1024, 128, 1), True)
    """
    if layout not in _ORDERS:
        raise ValueError(f"layout is {layout!r}: must be NHD ({_axes('NHD')}) or HND ({_axes('HND')})")
    for name, array in (("cache_lengths", cache_lengths), ("block_table", block_table)):
        if not isinstance(array, torch.Tensor):
            raise ValueError(f"{name} is a {type(array).__name__}: must be a torch tensor, as kv_cache is")
    if kv_axis not in (None, 0, 1) or isinstance(kv_axis, bool):
        raise ValueError(f"kv_axis is {kv_axis!r}: must be 0, 1 or None")
    blocks = _six(kv_cache, layout, kv_axis, "kv_cache")
    six_scales = None if scales is None else _six(scales, layout, kv_axis, "scales")
    _, kv, _, page_size, heads, head_size = blocks.shape
    longest = block_table.shape[-1] * page_size if max_cache_length is None else max_cache_length
    return PagedKVCacheCollection(
        blocks, cache_lengths, block_table, max_seq_length, longest,
        KVCacheStaticParams(heads, head_size, is_mla=kv == 1), strict=strict, scales=six_scales,
        quantization_granularity=quantization_granularity,
    )


def _axes(layout: str) -> str:
    return f"[2, pages, {', '.join(_ORDERS[layout])}, D]"


def _six(cache: Any, layout: str, kv_axis: int | None, name: str) -> torch.Tensor:
    """``[pages, KV, 1, page_size, heads, D]``, a view."""
    if isinstance(cache, tuple | list):
        pair = len(cache) == 2 and all(isinstance(one, torch.Tensor) for one in cache)
        if not pair:
            kinds = ", ".join(type(one).__name__ for one in cache)
            raise ValueError(f"{name} is a {type(cache).__name__} of ({kinds}): must be a tensor or a pair (k, v)")
        kv = _pair(*cache, name=name)
    elif not isinstance(cache, torch.Tensor):
        raise ValueError(f"{name} is a {type(cache).__name__}: must be a torch tensor or a pair of them")
    elif cache.ndim == 5:
        axes = [axis for axis in (0, 1) if cache.shape[axis] == 2]
        axis = axes[0] if kv_axis is None and len(axes) == 1 else kv_axis
        if axis not in axes:
            rule = "kv_axis=0 or 1, as both are 2" if len(axes) == 2 else f"{_axes(layout)} or with 2 as second axis"
            raise ValueError(f"{name} has shape {tuple(cache.shape)} and kv_axis is {kv_axis}: must be {rule}")
        kv = cache.movedim(axis, 1)
    elif cache.ndim in (3, 4):
        heads = 2 if layout == "NHD" else 1
        rows = cache.unsqueeze(heads) if cache.ndim == 3 else cache
        if rows.shape[heads] != 1:
            rule = "one head, as a row of MLA is K and V; else a tensor of five axes, or a pair (k, v)"
            raise ValueError(f"{name} has shape {tuple(cache.shape)}, {rows.shape[heads]} heads: must be of {rule}")
        kv = rows.unsqueeze(1)
    else:
        raise ValueError(f"{name} has shape {tuple(cache.shape)}: must be {_axes(layout)}, or [pages, page_size, D]")
    return (kv.transpose(2, 3) if layout == "HND" else kv).unsqueeze(2)


def _pair(k: torch.Tensor, v: torch.Tensor, *, name: str) -> torch.Tensor:
    """``[pages, 2, ...]`` over a pair of views of one allocation."""
    strides = element_strides(k)
    alike = (k.shape, k.dtype, strides, k.device) == (v.shape, v.dtype, element_strides(v), v.device) and k.ndim == 4
    step = (v.data_ptr() - k.data_ptr()) // k.element_size() if alike else -1
    together = alike and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if not together or step < 0 or (v.data_ptr() - k.data_ptr()) % k.element_size():
        raise ValueError(
            f"{name}: k {tuple(k.shape)} and v {tuple(v.shape)} must be alike and lie in one allocation, K first; "
            "functions that take k_cache and v_cache apart have no such rule"
        )
    return k.as_strided((k.shape[0], 2, *k.shape[1:]), (strides[0], step, *strides[1:]))
