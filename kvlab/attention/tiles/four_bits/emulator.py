"""Scales of blocks of 4-bit columns, in NumPy: the twins of ``kernel``'s helpers."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.tiles.masked import load

Array = np.ndarray[Any, Any]


def key_blocks(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Scales ``[P, BN, D / 16]`` of K's blocks in ``slot`` of ``page``, 0 for keys that do not exist; ``[1]`` where
    there are none. ``features``: Features.
    """
    return block_scales(features.scales.k.blocks, page, slot, kv_head, exists)


def value_blocks(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """The same of V."""
    return block_scales(features.scales.v.blocks, page, slot, kv_head, exists)


def block_scales(scale_array: Array | None, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Rows of ``scale_array`` ``[pages, page_size, Hkv, D / 16]``.

    >>> scales = np.arange(8.0).reshape(1, 2, 1, 4)
    >>> block_scales(scales, np.array([[0, 0]]), np.array([[1, 0]]), np.array([0]), np.array([[True, False]])).tolist()
    [[[4.0, 5.0, 6.0, 7.0], [0.0, 0.0, 0.0, 0.0]]]
    """
    scale = np.ones(1, np.float32)
    if scale_array is not None:
        at = page[..., None], slot[..., None], kv_head[:, None, None], np.arange(scale_array.shape[3])  #- address
        scale = load(scale_array, at, mask=exists[..., None], other=0.0)
    return scale
