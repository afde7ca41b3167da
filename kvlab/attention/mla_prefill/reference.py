"""MLA prefill as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.features.exact import attention
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.masks import MaskPlan
from kvlab.attention.features.scales import Scales
from kvlab.attention.tiles.pages import Sequences

if TYPE_CHECKING:
    from kvlab.attention.features.resolve import Features

Array = np.ndarray[Any, Any]


def reference(
    q: Array, k: Array, v: Array, k_rope: Array, sequences: Sequences, *, scale: float, features: Features
) -> tuple[Array, Array]:
    """``softmax(scale (Q_nope K^T + Q_rope K_rope^T)) V`` of all sequences, float64.

    q ``[total, H, nope + rope]``, k ``[total_k, H, nope]``, v ``[total_k, H, value]``; k_rope ``[pages, page_size,
    rope]`` with table and seq_lens, or ``[total_k, rope]``. K and V of sequence b are those of its keys from
    ``starts[b]`` on (None: the last ones). out ``[total, H, value]``, lse ``[total, H]``.
    """
    (cu_q, cu_k, table, seq_lens, starts), scales = sequences, features.scales
    nope, heads, plain = k.shape[2], q.shape[1], replace(features, scales=Scales())
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((len(q), heads), -np.inf)
    for b in range(len(cu_q) - 1):
        rows, held = slice(cu_q[b], cu_q[b + 1]), slice(int(cu_k[b]), int(cu_k[b + 1]))
        num, new = int(cu_k[b + 1] - cu_k[b]), int(cu_q[b + 1] - cu_q[b])
        total = num
        if table is not None:
            total = int(keys_in_table(seq_lens, table, k_rope.shape[1])[b])
        pad = features.mask.padding(b, total)
        base, total = (total - num if starts is None else int(starts[b])) - pad, total - pad
        held = slice(held.start + max(-base, 0), held.stop - max(base + num - total, 0))  # those of the sequence
        base, num = max(base, 0), max(held.stop - held.start, 0)
        key = np.arange(base, base + num)
        where: Any = held if table is None else _slots(table[b], key + pad, k_rope.shape[1])
        by_key = np.broadcast_to(scales.rope.at(where, b), (num, 1))
        rope = k_rope[where].astype(np.float64) * by_key
        whole = np.zeros((2, total, heads, max(q.shape[2], v.shape[2])))  # those that k and v do not hold: masked
        by_query = np.broadcast_to(scales.q.at(None, b), (heads,))[:, None]
        for part, rows_of, by in ((0, k, scales.k), (1, v, scales.v)):
            by_row = np.broadcast_to(by.at(held, b), (num, heads))[..., None]
            whole[part, key, :, : rows_of.shape[2]] = rows_of[held].astype(np.float64) * by_row
        whole[0, key, :, nope : q.shape[2]] = rope[:, None]
        mask = _within(features.mask, b, heads, new, total, base, base + num)
        out[rows], lse[rows] = attention(
            q[rows].astype(np.float64) * by_query, whole[0, ..., : q.shape[2]], whole[1, ..., : v.shape[2]],
            **replace(plain, mask=mask).of_sequence(b, None, scale, rows),
        )
    return out, lse


def _slots(row: Array, key: Array, page_size: int) -> tuple[Array, Array]:
    """Page and slot of keys of a sequence, by its row of the table."""
    return row[key // page_size], key % page_size


def _within(mask: MaskPlan, b: int, heads: int, new: int, total: int, lo: int, hi: int) -> MaskPlan:
    """``mask`` of sequence ``b``, and keys outside ``[lo, hi)`` masked by its bias."""
    if (lo, hi) == (0, total):
        return mask
    bias = np.full((b + 1, heads, new, total), -np.inf)
    bias[b, :, :, lo:hi] = 0
    if mask.bias is not None:
        given = mask.bias[b if len(mask.bias) > 1 else 0].astype(np.float64)
        rows, keys = min(new, given.shape[1]), min(total, given.shape[2])
        bias[b, :, rows:], bias[b, :, :, keys:] = -np.inf, -np.inf
        bias[b, :, :rows, :keys] += given[:, :rows, :keys]
    return replace(mask, bias=bias)
