"""Paged K and V for the NVIDIA buffers: three sequences, one that ends inside a tile, one of a single key."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.memory import as_dtype
from kvlab.staging import NvidiaKVParams

Array = np.ndarray[Any, Any]
BATCH, HEAD = np.array([0, 1, 2]), np.array([1, 0, 1])


def buffer(
    kind: Any, dtype: str, BN: int, depth: int, page: int, *, transpose: bool, stages: int = 2, **more: Any
) -> tuple[Any, Array]:
    """A K or V buffer over two tiles of keys, and the keys as float64 ``[3, 2 * BN, depth]``, zeros past the end."""
    rng, storage = np.random.default_rng(depth), as_dtype(dtype)
    columns, end = -(-2 * BN // page), np.array([2 * BN, BN + 5, 1])
    table = rng.permutation(3 * columns).reshape(3, columns)
    pool = rng.standard_normal((3 * columns, page, 2, depth)).astype(storage)
    cache = PagedKVCache(pool, end - 1, table, max_seq_length=1, max_cache_length=2 * BN)
    arch = "sm_90" if kind.__name__.startswith("Tma") else "sm_80"
    params = NvidiaKVParams(storage, BN, depth, 2, transpose, stages, arch)
    key = np.arange(2 * BN)
    rows = pool[table[:, key // page], key % page, HEAD[:, None]].astype(np.float64)
    dense = np.where((key < end[:, None])[..., None], rows, 0)
    return kind(params, cache, BATCH, HEAD, end, **more), dense


def padded(tile: Array, columns: int) -> Array:
    return np.pad(tile, ((0, 0), (0, 0), (0, columns - tile.shape[2])))
