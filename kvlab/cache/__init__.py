"""KV caches: which byte holds which element of which token, over NumPy arrays or torch tensors."""

from kvlab.cache.collection import PagedKVCacheCollection
from kvlab.cache.dense import from_dense
from kvlab.cache.page_table import PageTable, lookup_table_columns
from kvlab.cache.paged import PagedKVCache
from kvlab.cache.params import KVCacheStaticParams
from kvlab.cache.pointer import Pointer
from kvlab.cache.row_indices import PagedRowIndices, kv_num_sub_tiles, kv_sub_tile_rows

__all__ = [
    "KVCacheStaticParams",
    "PageTable",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "PagedRowIndices",
    "Pointer",
    "from_dense",
    "kv_num_sub_tiles",
    "kv_sub_tile_rows",
    "lookup_table_columns",
]
