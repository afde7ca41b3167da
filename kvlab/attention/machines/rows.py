"""Dense and ragged K or V as the iterator over DRAM tiles sees a cache: rows in one piece for each sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvlab.cache import KVCacheStaticParams
from kvlab.cache.pointer import UnsafePointer
from kvlab.cache.storage import BlockStorage
from kvlab.staging import KVCacheIterator

Array = np.ndarray[Any, Any]
RowsAt = tuple[Any, Any, Array, Any]
"""Rows as the iterator sees a cache, and each program's sequence, its first row there, and its KV head: ``[P]``, or one
sequence or head of all.
"""


class KeyRows(NamedTuple):
    """K and V, and K's rope part of MLA, as an iterator sees them; ``most`` keys in a sequence."""

    k: Any
    v: Any
    most: int
    rope: Any = None


class SequenceRows:
    """``[B, n, heads, D]``, or ``[1, total, heads, D]`` with the first row of each sequence in ``starts``.

    >>> rows = SequenceRows(np.arange(7 * 8.0).reshape(1, 7, 1, 8), np.array([0, 3, 7]))
    >>> rows.block_paged_ptr(np.array([1]), np.array([2]), np.array([0])).offset.tolist()
    [40]
    """

    page_size = 0

    def __init__(self, rows: np.ndarray[Any, Any], starts: np.ndarray[Any, Any] | None = None) -> None:
        self.storage, self.starts = BlockStorage(rows, "rows"), starts
        self.dtype, self.token_stride = self.storage.dtype, self.storage.strides[1]
        self.kv_params = KVCacheStaticParams(rows.shape[2], rows.shape[3])

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = 1,
    ) -> UnsafePointer:
        """Pointer to the first of ``tile_size`` rows; where ``valid`` is 0 one that must not be followed."""
        batch, start, head, some = np.broadcast_arrays(batch_idx, start_tok_idx, head_idx, np.asarray(valid) > 0)
        sequence, first = (batch, 0) if self.starts is None else (0 * batch, self.starts.astype(np.int64)[batch])
        page_stride, token_stride, head_stride, _ = self.storage.strides
        offset = sequence * page_stride + (first + start) * token_stride + head * head_stride + head_dim_idx
        return UnsafePointer(self.storage.memory, np.where(some, offset, 0), self.dtype)


def per_sequence(array: Array, starts: Array | None) -> Array:
    """An array ``[B, n, ...]`` as it is; ragged rows ``[1, total, ...]`` as one in which every sequence has them all.

    >>> per_sequence(np.arange(6).reshape(1, 3, 2), np.array([0, 1, 3])).tolist()
    [[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]]
    """
    if starts is None:
        return array
    shape, strides = (len(starts) - 1, *array.shape[1:]), (0, *array.strides[1:])
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def tile_walk(at: RowsAt, BN: int, start: Array, end: Array, column: int, columns: int) -> KVCacheIterator:
    """The walk over tiles of BN keys from ``start`` to ``end`` ``[P]``, of some columns."""
    rows, batch, first, head = at
    walk = KVCacheIterator(rows, BN, batch, head, first + end, depth=columns, head_dim_offset=column)
    walk.tile_start_row = first + start
    return walk
