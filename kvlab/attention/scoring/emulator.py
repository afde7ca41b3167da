"""Steps of attention kernels on scores, in NumPy: the twins of ``kernel``'s helpers, on the registers of all programs.

``s`` is :class:`~kvlab.staging.Fragments`; vectors of rows are ``[P, BM]``, of keys ``[P, BN]``, of programs ``[P]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.tiles.masked import load
from kvlab.attention.tiles.online_softmax import LOG2E, LOWEST, MASK_VALUE
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, multiply_add
from kvlab.staging import Fragments

Array = np.ndarray[Any, Any]
QUARTER_LN2_SQUARED = np.float32(0.25 / LOG2E**2)


def key_range(position: Array, end: Array, left: int, right: int, chunk: int) -> tuple[Array, Array]:
    """(first, limit): the rows at ``position`` see ``first <= key < limit``; ``end`` keys may be seen at most."""
    first = np.maximum(position - np.int32(left), 0)
    limit = np.minimum(position + np.int32(right) + 1, end)
    if chunk > 0:
        start = np.maximum(position, 0) // np.int32(chunk) * np.int32(chunk)
        first = np.maximum(first, start)
        limit = np.minimum(limit, np.where(position < 0, 0, start + np.int32(chunk)))
    return first, limit


def visible_end(num_keys: Array, valid_array: Array | None, batch: Array) -> Array:
    """Keys of sequences that may be seen: all, or the first of them that ``valid_array`` counts, any integers."""
    end = num_keys
    if valid_array is not None:
        end = np.maximum(np.minimum(valid_array[batch].astype(np.int64), num_keys), 0).astype(np.int32)
    return end


def sink_alone(sink: Array) -> tuple[Array, Array]:
    """(maximum, sum) of rows that see a sink of this logit, in units of log2, and no key yet; -inf is no sink."""
    none = np.isneginf(sink)
    return np.where(none, np.float32(LOWEST), sink), np.where(none, np.float32(0), np.float32(1))


def cap(s: Fragments, softcap: float) -> Fragments:
    """``softcap * tanh(s / softcap)``; it saturates, it does not overflow. Small scores go by the series of tanh, as 1
    less something near 1 has no digits of them left."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = s.values * np.float32(2.0 / softcap)
        y = x * x * QUARTER_LN2_SQUARED
        inner = multiply_add(y, multiply_add(y, np.float32(-17 / 315), np.float32(2 / 15)), np.float32(-1 / 3))
        series = s.values * multiply_add(y, inner, np.float32(1))
        small = np.abs(x) < 0.5
        bounded = np.float32(softcap * LOG2E) * (np.float32(1) - divide(np.float32(2), exp2(x) + np.float32(1)))
        return s.with_values(np.where(small, series, bounded))


def distance(s: Fragments, slope: Array, position: Array, key: Array) -> Fragments:
    """ALiBi: the rows' ``slope`` (natural units) times the distance of ``position`` and ``key``, subtracted."""
    away = np.abs(s.by_row(position) - by_column(s, key)).astype(np.float32)
    return s.with_values(s.values - s.by_row(slope * np.float32(LOG2E)) * away)


def add_bias(
    s: Fragments, visible: Array, bias_array: Array, batch: Array, head: Array, row: Array, key: Array
) -> tuple[Fragments, Array]:
    """(s, visible) with a bias ``[B or 1, Hq or 1, rows, keys]`` of rows ``row`` of ``head``; outside it masks.

    ``visible`` ``[P, threads, registers, elements]``.
    """
    rows, keys = bias_array.shape[2:]  #- launch
    row, key = s.by_row(row), by_column(s, key)
    batch = batch[:, None, None, None] if len(bias_array) > 1 else np.zeros(1, np.int64)  #- address
    head = s.by_row(head) if bias_array.shape[1] > 1 else np.zeros(1, np.int64)  #- address
    inside = visible & (row < rows) & (key < keys)
    bias = load(bias_array, (batch, head, row, key), mask=inside, other=-np.inf).astype(np.float32)
    visible = visible & ~(bias <= np.float32(MASK_VALUE))  # NaN masks nothing
    return s.with_values(s.values + np.where(visible, bias, np.float32(0)) * np.float32(LOG2E)), visible


def head_scale(scale_array: Array | None, kv_head: Array) -> Array:
    """The scale of each program's KV head ``[P]``; 1 where there is none."""
    scale = np.ones(len(kv_head), np.float32)
    if scale_array is not None:
        scale = scale_array[kv_head]
    return scale


def in_pages(cache: PagedKVCache, batch: Array, key: Array, exists: Array) -> tuple[Array, Array]:
    """(page, slot) of keys of sequences ``batch``; page 0 of those that do not exist."""
    page = load(np.asarray(cache.lookup_table), (batch, key // cache.page_size_), mask=exists, other=0).astype(np.int64)
    return page, key % cache.page_size_


def token_scale(scale_array: Array, at: tuple[Any, ...], exists: Array) -> Array:
    """Scales ``[P, BN]`` of keys at the index ``at``; 0 for those that do not exist."""
    return load(scale_array, at, mask=exists, other=0.0)


def by_column(s: Fragments, vector: Array) -> Array:
    """``vector[P, columns]`` as each register element sees its column."""
    return np.take(vector, s.map.col, axis=1)
