"""MHA prefill as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["attention", "reference"]

Array = np.ndarray[Any, Any]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """One sequence: q ``[S, Hq, D]``, k and v ``[n, Hkv, D]``; out ``[S, Hq, D]`` and lse ``[Hq, S]``, float64.

    Query i stands at position ``p = i + n - S`` and sees the keys ``p - left`` to ``p + right``. A row without a key
    gives 0 and -inf, or the sink's logit where there are sinks ``[Hq]``.
    """
    (S, q_heads, _), n = q.shape, len(k)
    k, v = (np.repeat(x.astype(np.float64), q_heads // x.shape[1], axis=1) for x in (k, v))
    s = scale * np.einsum("ihd,nhd->hin", q.astype(np.float64), k)  # [Hq, S, n]
    if softcap:
        s = softcap * np.tanh(s / softcap)
    p, key = np.arange(S)[:, None] + n - S, np.arange(n)
    s = np.where((key >= p - left) & (key <= p + right), s, -np.inf)
    extra = np.full((q_heads, S, 1), -np.inf)
    if sinks is not None:
        extra[...] = sinks.astype(np.float64)[:, None, None]
    top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), extra)
    top = np.where(np.isneginf(top), 0, top)
    weight = np.exp(s - top)
    total = weight.sum(axis=-1, keepdims=True) + np.exp(extra - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return np.einsum("hin,nhd->ihd", weight / np.where(total == 0, 1, total), v), lse


def reference(
    q: Array, k: Array, v: Array, cu_q: Array | None, cu_k: Array | None, table: Array | None, seq_lens: Array | None,
    sinks: Array | None, *, scale: float, left: int, right: int, softcap: float = 0.0,
) -> tuple[Array, Array]:  # fmt: skip
    """All sequences. q ``[B, S, Hq, D]``, or ``[1, total, Hq, D]`` with cu_q; k, v ``[B, n, Hkv, D]``, ``[1, total,
    Hkv, D]`` with cu_k, or pages with table and seq_lens. out as q, lse ``[B, Hq, S]`` or ``[1, Hq, total]``, float64.
    """
    out, lse = np.zeros(q.shape), np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b in range(len(q) if cu_q is None else len(cu_q) - 1):
        row, rows = (b, slice(None)) if cu_q is None else (0, slice(cu_q[b], cu_q[b + 1]))
        if table is not None and seq_lens is not None:
            key = np.arange(seq_lens[b])
            at: Any = table[b, key // k.shape[1]], key % k.shape[1]
        else:
            at = b if cu_k is None else (0, slice(cu_k[b], cu_k[b + 1]))
        options: dict[str, Any] = {"scale": scale, "left": left, "right": right, "softcap": softcap, "sinks": sinks}
        out[row, rows], lse[row, :, rows] = attention(q[row, rows], k[at], v[at], **options)
    return out, lse
