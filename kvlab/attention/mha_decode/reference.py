"""MHA decode as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["reference"]


def reference(
    q: np.ndarray[Any, Any],
    k_cache: np.ndarray[Any, Any],
    v_cache: np.ndarray[Any, Any],
    block_table: np.ndarray[Any, Any],
    seq_lens: np.ndarray[Any, Any],
    *,
    scale: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """``softmax(scale Q K^T) V`` of the last S tokens of each sequence.

    q ``[B, S, Hq, D]``; caches ``[pages, page_size, Hkv, D]``; block_table ``[B, columns]``; seq_lens ``[B]``, with the
    new tokens. Returns out ``[B, S, Hq, D]`` and lse (natural log) ``[B, Hq, S]``, float64. Token i of S sees the keys
    below ``seq_len - S + 1 + i``; a row without a key gives 0 and -inf.
    """
    batch, tokens, q_heads, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    out = np.zeros(q.shape)
    lse = np.full((batch, q_heads, tokens), -np.inf)
    for b in range(batch):
        n = int(seq_lens[b])
        if n == 0:
            continue
        key = np.arange(n)
        page = block_table[b, key // page_size]
        k = np.repeat(k_cache[page, key % page_size].astype(np.float64), q_heads // kv_heads, axis=1)  # [n, Hq, D]
        v = np.repeat(v_cache[page, key % page_size].astype(np.float64), q_heads // kv_heads, axis=1)
        s = scale * np.einsum("ihd,nhd->hin", q[b].astype(np.float64), k)  # [Hq, S, n]
        visible = key < n - tokens + 1 + np.arange(tokens)[:, None]  # [S, n]
        some = visible.any(axis=1)
        s = np.where(visible, s, -np.inf)[:, some]
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        out[b, some] = np.einsum("hin,nhd->ihd", p / total, v)
        lse[b][:, some] = (top + np.log(total))[..., 0]
    return out, lse
