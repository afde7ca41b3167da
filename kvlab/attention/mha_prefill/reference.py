"""MHA prefill as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.exact import attention
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import columns_of
from kvlab.attention.tiles.pages import Sequences

Array = np.ndarray[Any, Any]


def reference(
    q: Array, k: Array, v: Array, sequences: Sequences, *, scale: float, features: Features
) -> tuple[Array, Array]:
    """All sequences. q ``[B, S, Hq, D]``, or ``[1, total, Hq, D]`` with cu_q; k, v ``[B, n, Hkv, D or Dv]``, ``[1,
    total, ..]`` with cu_k, or pages with table and seq_lens. out ``[.., Hq, Dv]`` of q's rows, lse ``[..,
    Hq]``, float64.
    """
    cu_q, cu_k, table, seq_lens, _ = sequences
    out, scales = np.zeros((*q.shape[:3], columns_of(v))), features.scales
    lse = np.full(q.shape[:3], -np.inf)
    for b in range(len(q) if cu_q is None else len(cu_q) - 1):
        row, rows = (b, slice(None)) if cu_q is None else (0, slice(cu_q[b], cu_q[b + 1]))
        if table is not None:
            num_keys = int(keys_in_table(seq_lens, table, k.shape[1])[b])
            key = np.arange(features.mask.padding(b, num_keys), num_keys)
            at: Any = table[b, key // k.shape[1]], key % k.shape[1]
        else:
            start, end = (0, k.shape[1]) if cu_k is None else (int(cu_k[b]), int(cu_k[b + 1]))
            at = (b if cu_k is None else 0), slice(start + features.mask.padding(b, end - start), end)
        options = features.of_sequence(b, at, scale, None if cu_q is None else rows)
        keys, values = scales.k.values(k, at), scales.v.values(v, at)
        out[row, rows], lse[row, rows] = attention(q[row, rows], keys, values, **options)
    return out, lse
