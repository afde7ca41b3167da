"""KV caches: which byte holds which element of which token, over NumPy arrays or torch tensors."""

from kvlab.cache.collection import PagedKVCacheCollection
from kvlab.cache.dense import from_dense
from kvlab.cache.page_table import PageTable, lookup_table_columns
from kvlab.cache.paged import PagedKVCache
from kvlab.cache.params import KVCacheStaticParams
from kvlab.cache.pointer import Pointer

__all__ = [
    "KVCacheStaticParams",
    "PageTable",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "Pointer",
    "from_dense",
    "lookup_table_columns",
]
