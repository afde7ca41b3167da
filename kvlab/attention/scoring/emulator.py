"""What attention kernels do to scores, in NumPy: the twins of ``kernel``'s helpers, on the registers of all programs.

``s`` is :class:`~kvlab.staging.Fragments`; vectors of rows are ``[P, BM]``, of keys ``[P, BN]``, of programs ``[P]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.intervals import key_count
from kvlab.attention.online_softmax import LOG2E, LOWEST, MASK_VALUE
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, multiply_add
from kvlab.staging import Fragments

__all__ = ["add_bias", "by_column", "cap", "distance", "head_scale", "in_pages", "key_count", "key_range",
           "sink_alone", "token_scale", "visible_end"]  # fmt: skip

Array = np.ndarray[Any, Any]


def key_range(position: Array, end: Array, left: int, right: int, chunk: int) -> tuple[Array, Array]:
    """(first, limit): the rows at ``position`` see ``first <= key < limit``; ``end`` keys may be seen at most."""
    first = np.maximum(position - np.int32(left), 0)
    limit = np.minimum(position + np.int32(right) + 1, end)
    if chunk:
        start = np.maximum(position, 0) // np.int32(chunk) * np.int32(chunk)
        first = np.maximum(first, start)
        limit = np.minimum(limit, np.where(position < 0, 0, start + np.int32(chunk)))
    return first, limit


def visible_end(num_keys: Array, valid: Array | None, batch: Array) -> Array:
    """Keys of sequences that may be seen: all, or the first of them that ``valid`` counts, any integers."""
    return num_keys if valid is None else np.clip(valid[batch].astype(np.int64), 0, num_keys).astype(np.int32)


def sink_alone(sink: Array) -> tuple[Array, Array]:
    """(maximum, sum) of rows that see a sink of this logit, in units of log2, and no key yet; -inf is no sink."""
    none = np.isneginf(sink)
    return np.where(none, np.float32(LOWEST), sink), np.where(none, np.float32(0), np.float32(1))


def cap(s: Fragments, softcap: float) -> Fragments:
    """``softcap * tanh(s / softcap)``; it saturates, it does not overflow. Small scores go by the series of tanh, as 1
    less something near 1 has no digits of them left."""
    one, third, fifth, seventh = (np.float32(c) for c in (1, -1 / 3, 2 / 15, -17 / 315))
    with np.errstate(over="ignore", invalid="ignore"):
        x = s.values * np.float32(2 / softcap)
        y = x * x * np.float32(0.25 / LOG2E**2)
        inner = multiply_add(y, multiply_add(y, seventh, fifth), third)
        series = s.values * multiply_add(y, inner, one)
        bounded = np.float32(softcap * LOG2E) * (one - divide(np.float32(2), exp2(x) + one))
    return s.with_values(np.where(np.abs(x) < np.float32(0.5), series, bounded))


def distance(s: Fragments, slope: Array, position: Array, key: Array) -> Fragments:
    """ALiBi: the rows' ``slope`` (natural units) times the distance of ``position`` and ``key``, subtracted."""
    far = np.abs(s.by_row(position) - by_column(s, key)).astype(np.float32)
    return s.with_values(s.values - s.by_row(slope * np.float32(LOG2E)) * far)


def add_bias(
    s: Fragments, visible: Array, bias: Array, batch: Array, head: Array, row: Array, key: Array
) -> tuple[Fragments, Array]:
    """(s, visible) with ``bias`` ``[B or 1, Hq or 1, rows, keys]`` of rows ``row`` of ``head``; outside it masks.

    ``visible`` ``[P, threads, registers, elements]``.
    """
    rows, keys = bias.shape[2:]
    row_at, key_at = s.by_row(row), by_column(s, key)
    inside = visible & (row_at < rows) & (key_at < keys)
    at_batch = np.where(inside, batch[:, None, None, None] if len(bias) > 1 else 0, 0)
    at_head = s.by_row(head) if bias.shape[1] > 1 else np.zeros_like(row_at)
    found = np.full(s.values.shape, -np.inf, np.float32)
    where = at_batch[inside], np.broadcast_to(at_head, inside.shape)[inside]
    found[inside] = bias[(*where, np.broadcast_to(row_at, inside.shape)[inside], key_at[inside])].astype(np.float32)
    visible = visible & ~(found <= np.float32(MASK_VALUE))  # NaN masks nothing
    return s.with_values(s.values + np.where(visible, found, np.float32(0)) * np.float32(LOG2E)), visible


def head_scale(scales: Array | None, kv_head: Array) -> Array:
    """The scale of each program's KV head ``[P]``; 1 where there is none."""
    return np.ones(len(kv_head), np.float32) if scales is None else scales[kv_head]


def in_pages(cache: PagedKVCache, batch: Array, key: Array, exists: Array) -> tuple[Array, Array]:
    """(page, slot) of keys of sequences ``batch``; (0, 0) of those that do not exist."""
    key = np.where(exists, key, 0)
    page = np.where(exists, np.asarray(cache.lookup_table)[batch, key // cache.page_size_], 0)
    return page.astype(np.int64), key % cache.page_size_


def token_scale(scales: Array, where: tuple[Any, ...], exists: Array) -> Array:
    """Scales ``[P, BN]`` of keys at ``where`` of ``scales``; 0 for those that do not exist."""
    safe = tuple(np.where(exists, index, 0) for index in where)
    found: Array = np.where(exists, scales[safe], np.float32(0))
    return found


def by_column(s: Fragments, vector: Array) -> Array:
    """``vector[P, columns]`` as each register element sees its column."""
    return np.take(vector, s.map.col, axis=1)
