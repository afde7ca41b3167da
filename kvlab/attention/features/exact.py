"""Attention of one sequence in float64, with every feature: what the references of all operations call."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.masks import MaskPlan
from kvlab.attention.tiles.online_softmax import MASK_VALUE

Array = np.ndarray[Any, Any]


def attention(
    q: Array, k: Array, v: Array, *, scale: float, mask: MaskPlan | None = None, sequence: int = 0,
    softcap: float = 0.0, sinks: Array | None = None, slopes: Array | None = None, k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> tuple[Array, Array]:
    """q ``[S, Hq, D]``, k ``[n, Hkv, D]``, v ``[n, Hkv, Dv]``; out ``[S, Hq, Dv]`` and lse ``[S, Hq]``, float64.

    Query i stands at position ``i + n - S``. Scores are, in this order: ``scale q (k k_scale)``, softcap, ALiBi
    (``slopes`` ``[Hq]`` times the distance, subtracted), the bias of the mask of ``sequence``. ``k_scale`` and
    ``v_scale`` are numbers, ``[Hkv]`` or ``[n, Hkv]``. A row without a key gives 0 and -inf, or the sink's logit where
    there are ``sinks`` ``[Hq]``.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 2, 16))
    >>> out, lse = attention(q, k, v, scale=0.25, mask=MaskPlan(right=0))
    >>> bool(np.allclose(out[0], v[0])), lse.shape
    (True, (5, 2))
    """
    (S, q_heads, _), (n, kv_heads, _) = q.shape, k.shape
    mask = MaskPlan() if mask is None else mask
    k, v = (x.astype(np.float64) * _rows(by, n, kv_heads) for x, by in ((k, k_scale), (v, v_scale)))
    k, v = (np.repeat(x, q_heads // kv_heads, axis=1) for x in (k, v))
    s = scale * np.einsum("ihd,nhd->hin", q.astype(np.float64), k)  # [Hq, S, n]
    if softcap:
        s = softcap * np.tanh(s / softcap)
    position, key = np.arange(S)[:, None] + n - S, np.arange(n)
    if slopes is not None:
        s = s - slopes.astype(np.float64)[:, None, None] * np.abs(position - key)
    first, limit = mask.interval.bounds(position, n, sequence)
    visible = np.broadcast_to((key >= first) & (key < limit), s.shape)
    if mask.bias is not None:
        bias = np.full((q_heads, S, n), -np.inf)
        rows, keys = min(S, mask.bias.shape[2]), min(n, mask.bias.shape[3])
        bias[:, :rows, :keys] = mask.bias[sequence if len(mask.bias) > 1 else 0, :, :rows, :keys].astype(np.float64)
        visible = visible & ~(bias <= MASK_VALUE)  # NaN masks nothing
        s = s + np.where(visible, bias, 0)
    s = np.where(visible, s, -np.inf)
    v = np.where(np.any(visible, axis=(0, 1)).reshape(n, 1, 1), v, 0)  # what no query sees may hold anything
    extra = np.full((q_heads, S, 1), -np.inf)
    if sinks is not None:
        extra[...] = sinks.astype(np.float64)[:, None, None]
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
