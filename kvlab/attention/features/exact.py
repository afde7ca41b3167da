"""Attention of one sequence in float64, with every feature: what the references of all operations call."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.qv import query_values_exactly
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scores import scores_exactly
from kvlab.attention.features.sinks import sinks_exactly

Array = np.ndarray[Any, Any]


def attention(
    q: Array, k: Array, v: Array, *, scale: float, features: Features, sequence: int = 0, rows: slice | None = None,
    k_scale: Any = 1.0, v_scale: Any = 1.0,
) -> tuple[Array, Array]:
    """q ``[S, Hq, D]``, k ``[n, Hkv, D]``, v ``[n, Hkv, Dv]``; out ``[S, Hq, Dv]`` and lse ``[S, Hq]``, float64.

    Query i is at position ``i + n - S``, or where ``features`` tell of its ``rows`` (None: from 0 on). Scores are
    ``scale q (k k_scale)``, and what the features of ``sequence`` make of them. ``k_scale`` and ``v_scale`` are
    numbers, ``[Hkv]`` or ``[n, Hkv]``. A row without a key gives 0 and -inf, or the sink's logit where there are sinks.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 2, 16))
    >>> out, lse = attention(q, k, v, scale=0.25, features=Features())
    >>> bool(np.allclose(out[0], v[0])), lse.shape
    (True, (5, 2))
    """
    (S, q_heads, _), (n, kv_heads, _) = q.shape, k.shape
    k, v = (x.astype(np.float64) * _rows(by, n, kv_heads) for x, by in ((k, k_scale), (v, v_scale)))
    k, v = (np.repeat(x, q_heads // kv_heads, axis=1) for x in (k, v))
    s = scale * np.einsum("ihd,nhd->hin", q.astype(np.float64), k)  # [Hq, S, n]
    s = s + scale * query_values_exactly(features.qv, v, sequence, rows)
    key, position = np.arange(n), features.mask.position(sequence, n, rows or slice(0, S))[:, None]
    first, limit = features.mask.interval.bounds(position, n, sequence)
    s, visible = scores_exactly(s, features, sequence, position, key, (key >= first) & (key < limit))
    v = np.where(np.any(visible, axis=(0, 1)).reshape(n, 1, 1), v, 0)  # what no query sees may hold anything
    extra = sinks_exactly(s, features.sinks)
    top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), extra)
    top = np.where(np.isneginf(top), 0, top)
    weight = np.exp(s - top)
    total = weight.sum(axis=-1, keepdims=True) + np.exp(extra - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return np.einsum("hin,nhd->ihd", weight / np.where(total == 0, 1, total), v), lse.T


def _rows(scale: Any, n: int, heads: int) -> Array:
    """A scale as ``[n, heads, 1]``."""
    return np.broadcast_to(np.asarray(scale, np.float64), (n, heads))[..., None]
