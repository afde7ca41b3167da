"""KV caches: which byte holds which element of which token, over NumPy arrays or torch tensors."""

from kvlab.cache.collection import PagedKVCacheCollection
from kvlab.cache.continuous import ContinuousBatchingKVCache
from kvlab.cache.continuous_collection import ContinuousBatchingKVCacheCollection
from kvlab.cache.dense import from_dense
from kvlab.cache.mha_operands import (
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    RaggedMHAOperand,
    TileTensorMHAOperand,
    as_operand,
)
from kvlab.cache.operand import MHAOperand
from kvlab.cache.page_lists import table_of_page_lists
from kvlab.cache.page_pool import OutOfPages, PageCopy, PagePool, copy_pages
from kvlab.cache.page_table import PageTable, lookup_table_columns
from kvlab.cache.paged import PagedKVCache
from kvlab.cache.pointer import UnsafePointer
from kvlab.cache.protocol import KVCacheT
from kvlab.cache.row_indices import PagedRowIndices, kv_num_sub_tiles, kv_sub_tile_rows
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.cache.tma_descriptors import padded_depth

__all__ = [
    "ContinuousBatchingKVCache", "ContinuousBatchingKVCacheCollection", "KVCacheMHAOperand", "KVCacheScalesMHAOperand",
    "KVCacheStaticParams", "KVCacheT", "MHAOperand", "OutOfPages", "PageCopy", "PagePool", "PageTable", "PagedKVCache",
    "PagedKVCacheCollection", "PagedRowIndices", "RaggedMHAOperand", "TileTensorMHAOperand", "UnsafePointer",
    "as_operand", "copy_pages", "from_dense", "kv_num_sub_tiles", "kv_sub_tile_rows", "lookup_table_columns",
    "padded_depth", "table_of_page_lists",
]
