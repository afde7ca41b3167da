"""MLA decode (absorbed) as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["reference"]


def reference(
    q: np.ndarray[Any, Any],
    kv_cache: np.ndarray[Any, Any],
    block_table: np.ndarray[Any, Any],
    seq_lens: np.ndarray[Any, Any],
    *,
    v_dim: int,
    scale: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """``softmax(scale Q K^T) V`` of the last S tokens of each sequence, V the first ``v_dim`` columns of K.

    q ``[B, S, H, D]``; kv_cache ``[pages, page_size, D]``; block_table ``[B, columns]``; seq_lens ``[B]`` with the new
    tokens. Returns out ``[B, S, H, v_dim]`` and lse (natural log) ``[B, H, S]``, float64. Token i of S sees the keys
    below ``seq_len - S + 1 + i``; a row without a key gives 0 and -inf.
    """
    batch, tokens, heads, _ = q.shape
    page_size = kv_cache.shape[1]
    out = np.zeros((batch, tokens, heads, v_dim))
    lse = np.full((batch, heads, tokens), -np.inf)
    for b in range(batch):
        n = int(seq_lens[b])
        if n == 0:
            continue
        key = np.arange(n)
        k = kv_cache[block_table[b, key // page_size], key % page_size].astype(np.float64)  # [n, D]
        s = scale * np.einsum("ihd,nd->hin", q[b].astype(np.float64), k)  # [H, S, n]
        visible = key < n - tokens + 1 + np.arange(tokens)[:, None]  # [S, n]
        some = visible.any(axis=1)
        s = np.where(visible, s, -np.inf)[:, some]
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        out[b, some] = np.einsum("hin,nd->ihd", p / total, k[:, :v_dim])
        lse[b][:, some] = (top + np.log(total))[..., 0]
    return out, lse
