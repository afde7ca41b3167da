"""The arrays of one layer of a cache collection."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvlab.attention.call.checks import check_paged_collection
from kvlab.attention.call.kinds import kind_of
from kvlab.attention.features.scales import BLOCK, columns_of, is_four_bits, is_fp8
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import on_gpu
from kvlab.common.checks import is_integer, require, shown


class LayerArrays(NamedTuple):
    """Pages of K and V ``[pages, page_size, heads, head_size]`` and their scales; V's are None for MLA, the scales
    where there are none.
    """

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


def layer_arrays(cache: PagedKVCacheCollection, layer: int) -> LayerArrays:
    """The arrays of K and V of a layer, as ``cache.get_key_cache(layer)`` and ``cache.get_value_cache(layer)`` view
    them. Raises what these do: in CPU memory, where they look at values, for each call, on a GPU for the first of a
    kind.

    >>> import numpy as np
    >>> pool = PagedKVCacheCollection(np.zeros((5, 2, 3, 16, 2, 64), np.float32), [20], [[3, 0]], 1, 21)
    >>> layer_arrays(pool, 1).values.shape
    (5, 16, 2, 64)
    """
    require(is_integer(layer), f"layer is {shown(layer)}", "the number of a layer")
    if not 0 <= layer < cache.num_layers:
        raise IndexError(f"layer is {shown(layer)}: must be in [0, {cache.num_layers})")
    mla = cache.kv_params.is_mla

    def views() -> None:
        cache.get_key_cache(layer)
        if not mla:
            cache.get_value_cache(layer)

    if on_gpu(cache.blocks):
        arrays = cache.blocks, cache.cache_lengths, cache.lookup_table, cache.scales
        lengths = cache.max_seq_length, cache.max_cache_length, cache.total_num_pages
        settings = cache.strict, cache.quantization_granularity, *vars(cache.kv_params).values()
        kind_of("layer", (*arrays, *lengths, *settings, layer), views)
    else:
        views()
    k_scales, v_scales = (None if cache.scales is None else cache.scales[:, kv, layer] for kv in (0, int(not mla)))
    values = None if mla else cache.blocks[:, 1, layer]
    return LayerArrays(cache.blocks[:, 0, layer], values, k_scales, None if mla else v_scales)


def kv_pages(cache: Any, layer: int, other: str) -> LayerArrays:
    """The arrays of a layer of a paged collection of K and V. ValueError for another one; ``other`` takes MLA's."""
    check_paged_collection(cache)
    require(not cache.kv_params.is_mla, "cache is one of MLA, without V", f"one of K and V; {other} takes it")
    return layer_arrays(cache, layer)


def scales_of_pages(pages: LayerArrays) -> dict[str, Any]:
    """Keywords of the scales of a layer of K and V: of blocks of 16 dims where it is of 4 bits in e2m1, else of each
    token and head. ValueError for others.
    """
    if pages.key_scales is None:
        return {}
    granules, blocks = int(pages.key_scales.shape[-1]), columns_of(pages.keys) // BLOCK
    if is_four_bits(pages.keys) and is_fp8(pages.key_scales):
        require(granules == blocks, f"a cache of 4 bits with {granules} e4m3 scales a head and token",
                f"{blocks}, of {BLOCK} dims each; granularity {BLOCK // 2}, bytes of two dims")
        return {"k_block_scale": pages.key_scales, "v_block_scale": pages.value_scales}
    require(granules == 1, f"a cache with {granules} scales a head and token", "one; granularity head_size")
    return {"k_scale": pages.key_scales[..., 0], "v_scale": pages.value_scales[..., 0]}


def latent_pages(cache: Any, layer: int) -> Any:
    """The rows of a layer of a paged collection of MLA. ValueError for another one."""
    check_paged_collection(cache)
    mla = cache.kv_params.is_mla
    require(mla, f"cache stores K and V ({cache.kv_params})", "one for MLA, blocks [pages, 1, layers, ...]")
    return layer_arrays(cache, layer).keys
