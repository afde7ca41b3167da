"""Scores of a tile as the softmax takes them: every feature in its turn, in float64, in NumPy and in Triton.

Scores are in units of log2, but in float64. The order: softmax scale, scales of q and k, temperature, softcap, ALiBi,
bias, mask. Two twins are called for each tile, ``adjust`` and ``hide``; ``row_terms`` before the first. Hopper's
kernels take features that are the same for all keys of a row: ``factor_of`` at first, ``adjust_by_row`` for each tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.staging import Fragments

from .alibi import lower, lower_exactly, lower_kernel, slope_of, slope_of_kernel
from .bias import add_bias, add_bias_exactly, add_bias_kernel
from .resolve import Features
from .scales import head_scale, head_scale_kernel
from .softcap import bound, bound_kernel, cap, cap_exactly, cap_kernel
from .temperature import heat, heat_exactly, heat_kernel

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]


def scores_exactly(
    s: Array, features: Features, sequence: int, position: Array, key: Array, visible: Array
) -> tuple[Array, Array]:
    """(scores, visible) ``[Hq, S, n]`` in float64 of the queries of a sequence at ``position`` ``[S, 1]``; -inf where
    hidden.

    s : scale Q K^T, scales of fp8 included. visible : what the mask's interval shows.
    """
    s = heat_exactly(s, features.temperature)
    s = cap_exactly(s, features.softcap)
    s = lower_exactly(s, features.slopes, sequence, position, key)
    s, visible = add_bias_exactly(s, np.broadcast_to(visible, s.shape), features.mask.bias, sequence)
    return np.where(visible, s, -np.inf), visible


def factor_of(scale: Any, features: Features, batch: Any, kv_head: Any, head: Array) -> Array:
    """Factor of the scores of query heads ``head``, ``scale`` with it, of the shape of ``head``; ``batch`` and
    ``kv_head``: the sequences and the KV heads of these, which broadcast against it.
    """
    factor = head_scale(scale, features.scales.q.heads, batch, kv_head)
    factor = head_scale(factor, features.scales.k.heads, batch, kv_head)
    return heat(np.broadcast_to(factor, head.shape), features.temperature, head)


def row_terms(
    scale_log2: Any, features: Features, batch: Array, kv_head: Array, head: Array
) -> tuple[Array, Array]:
    """(factor, slope) ``[P, BM]`` of rows of query heads ``head``: what their scores are multiplied by, and ALiBi's."""
    factor = factor_of(scale_log2, features, batch[:, None], kv_head[:, None], head)
    slope = slope_of(features.slopes, batch, head)
    return factor, slope


def adjust(
    s: Fragments, factor: Array, slope: Array, scale: Any, features: Features, position: Array, key: Array
) -> Fragments:
    """Products of rows at ``position`` ``[P, BM]`` and keys ``[P, BN]`` as scores; ``scale``: that of the keys' tokens
    ``[P, BN]``.
    """
    s = s * s.by_row(factor)
    if features.scales.k.tokens is not None and features.scales.k.minima is None:
        s = s * s.by_column(scale)
    if features.softcap > 0:
        s = cap(s, features.softcap)
    if features.slopes is not None:
        s = lower(s, slope, position, key)
    return s


def adjust_by_row(s: Fragments, factor: Array, inner: Any, features: Features) -> Fragments:
    """Products as scores by what is the same for all keys of a row: ``factor`` ``[P, BM]``, and a softcap, which makes
    ``tanh(s * inner)`` of them; the softmax multiplies by the second of ``cap_terms``.
    """
    s = s * s.by_row(factor)
    if features.softcap > 0:
        s = bound(s, inner)
    return s


def differs_by_head(features: Features) -> bool:
    """Tells whether the scores of the query heads of a KV head have arrays of their own: slopes or temperatures.

    >>> differs_by_head(Features(softcap=30.0)), differs_by_head(Features(temperature=np.ones(4, np.float32)))
    (False, True)
    """
    return features.slopes is not None or features.temperature is not None


def beyond_rows(features: Features) -> str | None:
    """Keyword of a feature that ``adjust_by_row`` and an interval of keys cannot do, None if they can do all.

    >>> beyond_rows(Features(slopes=np.ones((1, 4), np.float32))), beyond_rows(Features(softcap=30.0))
    ('alibi_slopes', None)
    """
    mask = features.mask
    asked = {"leftpad_k": mask.leftpad, "q_positions": mask.positions, "alibi_slopes": features.slopes,
             "qv": features.qv}
    return next((name for name, array in asked.items() if array is not None), None)


def hide(
    s: Fragments, rows: tuple[Array, ...], key: Array, features: Features, bounded: bool
) -> Fragments:
    """Scores, -inf where a row does not see the key. ``rows``: batch ``[P]``, head, token, whether there is such a row,
    the first key that it sees, and the one after the last, ``[P, BM]``. bounded : some row may not see the first keys.
    """
    batch, head, token, is_row, first, limit = rows
    visible = s.by_column(key) < s.by_row(limit)
    if bounded:
        visible = visible & (s.by_column(key) >= s.by_row(first))
    if features.mask.bias is not None:
        visible = visible & s.by_row(is_row)
        s, visible = add_bias(s, visible, features.mask.bias, batch, head, token, key)
    return s.with_values(np.where(visible, s.values, np.float32(-np.inf)))


def factor_of_kernel(scale, features, numbers, batch, kv_head, head):
    """Factor of the scores of query heads ``head``, as of ``factor_of``; ``scale`` alone where there is no more.
    """
    factor = head_scale_kernel(scale, features.q_heads, numbers.q_scale_batch, numbers.q_scale_head, batch, kv_head)
    factor = head_scale_kernel(factor, features.k_heads, numbers.k_scale_batch, numbers.k_scale_head, batch, kv_head)
    return heat_kernel(factor, features.temperature, head)


def row_terms_kernel(scale_log2, features, numbers, batch, kv_head, head):
    """(factor, slope) of rows as of ``row_terms``: a factor of all rows, or ``[BM, 1]``; a slope ``[BM]``."""
    factor = factor_of_kernel(scale_log2, features, numbers, batch, kv_head, head[:, None])
    slope = slope_of_kernel(features.slopes, numbers.slopes_batch, batch, head)
    return factor, slope


def adjust_kernel(s, factor, slope, scale, features, numbers, position, key):
    """Products of rows at ``position`` ``[BM]`` and keys ``[BN]`` as scores, as of ``adjust``."""
    s = s * factor
    if features.k_tokens is not None and features.k_minima is None:
        s = s * scale[None, :]
    if numbers.softcap is not None:
        s = cap_kernel(s, numbers.softcap)
    if features.slopes is not None:
        s = lower_kernel(s, slope, position, key)
    return s


def adjust_by_row_kernel(s, factor, inner, numbers):
    """Products as scores by what is the same for all keys of a row, as of ``adjust_by_row``."""
    s = s * factor
    if numbers.softcap is not None:
        s = bound_kernel(s, inner)
    return s


def hide_kernel(s, rows, key, features, numbers, bounded):
    """Scores, -inf where a row does not see the key, as of ``hide``."""
    batch, head, token, is_row, first, limit = rows
    visible = key[None, :] < limit[:, None]
    if bounded:
        visible = visible & (key[None, :] >= first[:, None])
    if features.bias is not None:
        visible = visible & is_row[:, None]
        s, visible = add_bias_kernel(s, visible, features.bias, numbers, batch, head, token, key)
    return tl.where(visible, s, -float("inf"))
