"""MLA decode (absorbed) as mathematics: float64, one page of NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.attention.call.latent_rows import BLOCK
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.exact import attention
from kvlab.attention.features.intervals import keys_in_table
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import Scales

Array = np.ndarray[Any, Any]


def reference(
    q: Array, kv_cache: Array, k_rope: Array, block_table: Array, seq_lens: Array | None, *, scale: float,
    features: Features, row_scales: Array | None = None,
) -> tuple[Array, Array]:
    """``softmax(scale Q K^T) V`` of the last S tokens of each sequence, V the latent columns of K.

    q ``[B, S, H, v_dim + rope]``; the windows of the cache, kv_cache ``[pages, page_size, v_dim]`` and k_rope;
    block_table ``[B, columns]``; seq_lens ``[B]`` with the new tokens. The scale of K multiplies the latent
    columns, and those of rope where they are e4m3 too. Returns out ``[B, S, H, v_dim]`` and lse (natural log)
    ``[B, S, H]``, float64.
    Token i of S is at position ``seq_len - S + i``; a row without a key gives 0 and -inf, or the sink's logit.
    Without seq_lens, S is 1 and a row of block_table has the slots, ``page * page_size + slot``, that its token sees;
    other integers are none. row_scales ``[pages, page_size, v_dim / 128]``: float32 that latents are multiplied by; the
    products are those of the dtype that is multiplied, q's or bfloat16.
    """
    (batch, tokens, heads, _), (_, page_size, v_dim) = q.shape, kv_cache.shape
    plain = replace(features, scales=Scales())
    out, lse = np.zeros((batch, tokens, heads, v_dim)), np.full((batch, tokens, heads), -np.inf)
    keys = None if seq_lens is None else keys_in_table(seq_lens, block_table, page_size)
    for b in range(batch):
        if keys is None:
            row = block_table[b].astype(np.int64)
            where = np.divmod(row[(row >= 0) & (row < len(kv_cache) * page_size)], page_size)
        else:
            key = np.arange(features.mask.padding(b, int(keys[b])), keys[b])
            where = block_table[b, key // page_size], key % page_size
        n = len(where[1])
        by = np.broadcast_to(features.scales.k.at((*where, 0), b), n)[:, None]
        q_scale = np.ravel(features.scales.q.at(None, b))[0]
        v = kv_cache[where].astype(np.float64) * by
        if row_scales is not None:
            true = kv_cache[where].astype(np.float32) * np.repeat(row_scales[where], BLOCK, axis=-1)
            v = true.astype(result_dtype(q)).astype(np.float64)
        rope = k_rope[where].astype(np.float64) * (by if k_rope.dtype == kv_cache.dtype else 1)
        k = np.concatenate([v, rope], -1)[:, None]  # [n, 1, v_dim + rope]
        out[b], lse[b] = attention(q[b], k, v[:, None], **plain.of_sequence(b, None, scale * q_scale))
    return out, lse
