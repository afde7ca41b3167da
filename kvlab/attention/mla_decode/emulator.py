"""MLA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.online_softmax import LOG2E, MASK_VALUE
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import Traffic, ceildiv, mla_cta, program_ids, ragged_range

from .config import MLADecodeConfig, MLADecodeProblem

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)


def attend(
    q_array: Array, cache: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: float, mask_value: float, problem: MLADecodeProblem, config: MLADecodeConfig, arch: str,
    traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows (tokens x heads) against the keys of one split of one sequence, for each program."""
    #: setup -> q, q_rope, lo, hi, limit    this program's rows, its split of the keys, the query tile
    heads, tokens, BN = problem.heads, problem.tokens, config.BN
    batch_and_tile, split = program_ids(config.grid(problem))  # [P]
    batch = batch_and_tile // config.row_tiles
    row = (batch_and_tile % config.row_tiles)[:, None] * config.BM + np.arange(config.BM, dtype=np.int32)  # [P, BM]
    num_keys = seq_lens[batch].astype(np.int32)
    size = ceildiv(ceildiv(num_keys, config.num_splits), BN) * BN
    lo = np.minimum(split * size, num_keys)
    hi = np.minimum(lo + size, num_keys)
    token = row // heads
    head = row % heads
    is_row = row < heads * tokens
    limit = np.minimum(num_keys[:, None] - tokens + 1 + token, hi[:, None])  # [P, BM], first key a row does not see
    columns, padded = (problem.latent, problem.rope), (config.BV, config.BR)
    cta = mla_cta(arch, config.BM, BN, columns, padded, cache, batch, hi, traffic, num_warps=config.num_warps)
    q_at = _offsets(q_array, batch[:, None], token, head, is_row)
    q, q_rope = cta.load_q(Memory.over(q_array, name="q"), q_at, is_row)
    m = np.full(row.shape, -np.inf, np.float32)
    l = np.zeros(row.shape, np.float32)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        active = start < hi  # [P], programs whose range is not over
        k, k_rope = cta.load_k(start, active)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = cta.scores((q, q_rope), (k, k_rope), active)
        s = s.with_values(s.values * np.float32(scale_log2))
        #: mask -> s    keys that a row does not see
        key = start[:, None, None, None] + s.map.col  # [P, threads, registers, elements]
        s = s.with_values(np.where(key < s.by_row(limit), s.values, np.float32(mask_value)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(np.exp2(s.values - s.by_row(m_new)))
        alpha = np.exp2(m - m_new)
        l = l * alpha + cta.row_sum(p)
        o = o.with_values(o.values * o.by_row(alpha))
        m = m_new
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = cta.load_v(active)
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    rows without a visible key give 0 and -inf
    sees = limit > lo[:, None]
    l = np.where(sees, l, np.float32(1))
    o = o.with_values(np.where(o.by_row(sees), o.values / o.by_row(l), np.float32(0)))
    lse = np.where(sees, (m + np.log2(l)) * LN2, np.float32(-np.inf))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (config.num_splits == 1))
    p_index, r_index = np.nonzero(writes_o)
    rows = o.tile()[p_index, r_index, : problem.latent].astype(o_array.dtype)  # [rows to write, v_dim]
    o_array[split[p_index], batch[p_index], token[p_index, r_index], head[p_index, r_index]] = rows
    p_index, r_index = np.nonzero(is_row)
    at = split[p_index], batch[p_index], head[p_index, r_index], token[p_index, r_index]
    lse_array[at] = lse[p_index, r_index]
    traffic.move("registers->DRAM", rows.nbytes + len(p_index) * lse.itemsize)


def launch(
    q: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    v_dim: int,
    scale: float,
    config: MLADecodeConfig,
    mask_value: float = MASK_VALUE,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, H, v_dim]`` of q's dtype and lse ``[B, H, S]`` float32. The arguments are valid.

    q ``[B, S, H, D]``, kv_cache ``[pages, page_size, D]``.
    """
    batch, tokens, heads, D = q.shape
    max_keys = block_table.shape[1] * kv_cache.shape[1]
    problem = MLADecodeProblem(batch, tokens, heads, v_dim, D - v_dim, q.itemsize, max_keys)
    traffic = Traffic() if traffic is None else traffic
    shape = batch, tokens, heads, v_dim
    out = np.empty(shape, q.dtype) if out is None else out
    lse = np.empty((batch, heads, tokens), np.float32)
    if q.size == 0:
        return out, lse
    before = np.maximum(seq_lens.astype(np.int64) - tokens, 0).astype(np.uint32)
    cache = PagedKVCache(kv_cache[:, :, None], before, block_table, tokens, max_keys)
    splits = config.num_splits
    part, part_lse = out[None], lse[None]
    if splits > 1:
        part = np.full((splits, *shape), np.nan, np.float32)
        part_lse = np.full((splits, *lse.shape), np.nan, np.float32)
    attend(q, cache, seq_lens, part, part_lse, scale * LOG2E, mask_value, problem, config, arch, traffic)
    if splits > 1:
        merge(part, part_lse.swapaxes(2, 3), out=out, lse=lse.swapaxes(1, 2), traffic=traffic)
    return out, lse


def _offsets(array: Array, batch: Array, token: Array, head: Array, valid: Array) -> Array:
    """Element offsets of rows ``(batch, token, head)`` of a strided array ``[B, S, H, D]``; 0 where not valid."""
    at = sum(
        index.astype(np.int64) * (stride // array.itemsize)
        for index, stride in zip((batch, token, head), array.strides, strict=False)
    )
    return np.where(valid, at, 0)
