"""MHA decode as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.exact import attention
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import columns_of

Array = np.ndarray[Any, Any]


def reference(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, *, scale: float,
    features: Features | None = None,
) -> tuple[Array, Array]:
    """``softmax(scale Q K^T) V`` of the last S tokens of each sequence.

    q ``[B, S, Hq, D]``; caches ``[pages, page_size, Hkv, D]`` (V: Dv); block_table ``[B, columns]``; seq_lens ``[B]``,
    with the new tokens. Returns out ``[B, S, Hq, Dv]`` and lse (natural log) ``[B, S, Hq]``, float64. Token i of S
    is at position ``seq_len - S + i`` and sees the keys up to its own, or those of the mask of ``features``; a row
    without a key gives 0 and -inf, or the sink's logit.
    """
    features = Features() if features is None else features
    (batch, tokens, q_heads, _), page_size = q.shape, k_cache.shape[1]
    out, lse = np.zeros((batch, tokens, q_heads, columns_of(v_cache))), np.zeros((batch, tokens, q_heads))
    scales, seq_lens = features.scales, keys_in_table(seq_lens, block_table, page_size)
    for b in range(batch):
        pad = features.mask.padding(b, int(seq_lens[b]))
        key = np.arange(pad, int(seq_lens[b]))
        lowest = features.mask.position(b, len(key), slice(0, tokens)).min()
        seen = key - pad >= features.mask.interval.bounds(lowest, len(key), b)[0]
        at = np.where(seen, block_table[b, key // page_size], 0), key % page_size
        rows = scales.k.values(k_cache, at), scales.v.values(v_cache, at)
        out[b], lse[b] = attention(q[b], *rows, **features.of_sequence(b, at, scale))
    return out, lse
