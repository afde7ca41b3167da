"""The scene of a paged cache: a token's page in the table and in the pool, its slot, its byte as a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.common.arrays import dtype_of, element_strides, to_numpy
from kvlab.viz.page_table import draw_page_table

from .scene import Knob, Scene

if TYPE_CHECKING:
    from kvlab.cache import PagedKVCache, PagedKVCacheCollection

MOST_ENTRIES, MOST_PAGES = 1 << 14, 1 << 12


def of_collection(pool: PagedKVCacheCollection, *, layer: int = 0) -> Scene:
    """The keys of one layer of a pool."""
    return of_cache(pool.get_key_cache(layer))


def of_cache(cache: PagedKVCache) -> Scene:
    """A cache whose sequences hold a token at least."""
    table, lengths = (np.asarray(to_numpy(array), np.int64) for array in (cache.lookup_table, cache.cache_lengths))
    _, page_size, heads, depth = cache.blocks.shape
    pages = cache.total_num_pages
    columns = max(1, int(-(-lengths.max(initial=0) // page_size)))
    if not lengths.size or lengths.min() < 1:
        raise ValueError(f"cache_lengths is {lengths.tolist()}: must be at least 1 of each sequence to be explored")
    if table[:, :columns].size > MOST_ENTRIES or pages > MOST_PAGES:
        raise ValueError(
            f"{table[:, :columns].size} entries, {pages} pages: must be at most {MOST_ENTRIES} and {MOST_PAGES}"
        )
    itemsize = dtype_of(cache.blocks, "blocks").itemsize
    strides = [stride * itemsize for stride in element_strides(cache.blocks, "blocks")]
    data: dict[str, Any] = {
        "table": table[:, :columns].tolist(), "lengths": lengths.tolist(), "page_size": page_size, "pages": pages,
        "strides": strides, "itemsize": itemsize, "heads": heads, "depth": depth,
    }
    knobs = {
        "sequence": Knob("sequence", 0, high=len(lengths) - 1),
        "token": Knob("token", int(lengths[0]) // 2, high=int(lengths.max()) - 1),
        "head": Knob("head", 0, high=heads - 1),
        "element": Knob("element", 0, high=depth - 1),
    }
    return Scene("pages", data, knobs, lambda: draw_page_table(cache))
