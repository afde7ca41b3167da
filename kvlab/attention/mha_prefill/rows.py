"""Rows of dense, ragged and paged K or V, and the scales of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.scales import Scale
from kvlab.attention.machines.rows import RowsAt, SequenceRows
from kvlab.attention.scoring.emulator import in_pages, token_scale
from kvlab.cache import PagedKVCache

Array = np.ndarray[Any, Any]


def row_of(
    rows: SequenceRows | PagedKVCache, page: Array, first: Array, key: Array, exists: Array
) -> tuple[Array, Array]:
    """(page, row in it) of keys: of the page that the table names, or of one piece whose first row is ``first``."""
    slot = first + key
    if isinstance(rows, PagedKVCache):  #- address
        page, slot = in_pages(rows, page, key, exists)
    return page, slot


def per_sequence(array: Array, starts: Array | None) -> Array:
    """An array ``[B, n, ...]`` as it is; ragged rows ``[1, total, ...]`` as one in which every sequence has them all.

    >>> per_sequence(np.arange(6).reshape(1, 3, 2), np.array([0, 1, 3])).tolist()
    [[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]]
    """
    if starts is None:
        return array
    shape, strides = (len(starts) - 1, *array.shape[1:]), (0, *array.strides[1:])
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def key_scales(scales: tuple[Scale, Array], at: RowsAt, key: Array, end: Array) -> Array:
    """The scales ``[P, BN]`` of keys, which lie as the rows ``at`` do."""
    (scale, head), (rows, batch, first, _) = scales, at  #- address
    page, slot = row_of(rows, batch[:, None], first[:, None], key, key < end[:, None])
    return token_scale(scale.tokens, (page, slot, head[:, None]), key < end[:, None])
