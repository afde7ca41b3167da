"""MLA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features import Features
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.online_softmax import LOG2E, LOWEST
from kvlab.attention.operands import result_dtype
from kvlab.attention.scoring.emulator import (
    add_bias,
    by_column,
    cap,
    distance,
    in_pages,
    key_count,
    key_range,
    sink_alone,
    token_scale,
    visible_end,
)
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.memory import Memory, bfloat16
from kvlab.staging import Traffic, ceildiv, mla_cta, program_ids, ragged_range, row_offsets

from .config import MLADecodeConfig, MLADecodeProblem

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)


def attend(
    q_array: Array, cache: PagedKVCache, rope: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: float, features: Features, problem: MLADecodeProblem, config: MLADecodeConfig,
    arch: str, traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows (tokens x heads) against the keys of one split of one sequence, for each program."""
    #: setup -> q, q_rope, lo, hi, first, limit    this program's rows, its split of the keys, the query tile
    heads, tokens, BN, mask = problem.heads, problem.tokens, config.BN, features.mask
    bounds = mask.left, mask.right, mask.chunk
    batch_and_tile, split = program_ids(config.grid(problem))  # [P]
    batch = batch_and_tile // config.row_tiles
    row = (batch_and_tile % config.row_tiles)[:, None] * config.BM + np.arange(config.BM, dtype=np.int32)  # [P, BM]
    num_keys = key_count(seq_lens[batch], problem.max_keys)
    end = visible_end(num_keys, mask.valid, batch)
    token = row // heads
    head = row % heads
    is_row = row < heads * tokens
    position = num_keys[:, None] - tokens + token
    first, limit = key_range(position, end[:, None], *bounds)
    seen, _ = key_range(num_keys - tokens, end, *bounds)
    _, stop = key_range(num_keys - 1, end, *bounds)
    seen = seen if mask.windowed else 0 * seen  # keys [seen, stop) are those that some row sees
    stop = np.maximum(stop, seen)
    size = ceildiv(ceildiv(stop - seen, config.num_splits), BN) * BN
    lo = np.minimum(seen + split * size, stop)
    hi = np.minimum(lo + size, stop)
    limit = np.minimum(limit, hi[:, None])  # [P, BM], first key after first that a row does not see
    padded, dtype = (config.BV, config.BR), q_array.dtype if q_array.dtype.itemsize > 1 else bfloat16
    cta = mla_cta(
        arch, config.BM, BN, padded, cache, rope, batch, hi, traffic, dtype=dtype, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    rows = q_array.astype(dtype, copy=False)
    q_at = row_offsets(rows, (batch[:, None], token, head), is_row)
    q, q_rope = cta.load_q(Memory.over(rows, name="q"), q_at, is_row)
    q_scale = features.scales.q.heads
    scale_log2 = float(np.float32(scale_log2) * (np.float32(1) if q_scale is None else q_scale[0]))
    by, rope_scaled = features.scales.k, cache.dtype == rope.dtype
    kv_scale = np.float32(by.number) * (np.float32(1) if by.heads is None else by.heads[0])
    unit = np.float32(scale_log2) * (kv_scale if rope_scaled and by.tokens is None else np.float32(1))
    m = np.full(row.shape, LOWEST, np.float32)
    l = np.zeros(row.shape, np.float32)
    if features.sinks is not None:
        once = (split == 0)[:, None]
        sink, one = sink_alone(features.sinks.astype(np.float32)[head] * np.float32(LOG2E))
        m = np.where(once, sink, m)
        l = np.where(once, one, l)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        active = start < hi  # [P], programs whose range is not over
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k, k_rope = cta.load_k(start, active)
        by_key = np.full(key.shape, kv_scale)
        if by.tokens is not None:
            exists = key < hi[:, None]
            where = in_pages(cache, batch[:, None], key, exists)
            by_key = by_key * token_scale(by.tokens[..., 0], where, exists)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = cta.scores((q, q_rope), (k, k_rope), active, None if rope_scaled or not problem.fp8 else by_key)
        s = s.with_values(s.values * unit)
        if by.tokens is not None and rope_scaled:
            s = s.with_values(s.values * by_column(s, by_key))
        if features.softcap:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            s = distance(s, features.slopes[batch[:, None] if len(features.slopes) > 1 else 0, head], position, key)
        #: mask -> s    keys that a row does not see
        at = start[:, None, None, None] + s.map.col  # [P, threads, registers, elements]
        sees = (at < s.by_row(limit)) & (at >= s.by_row(first))
        if mask.bias is not None:
            s, sees = add_bias(s, sees, mask.bias, batch, head, token, key)
        s = s.with_values(np.where(sees, s.values, np.float32(-np.inf)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2(s.values - s.by_row(m_new)))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.with_values(o.values * o.by_row(alpha))
        m = m_new
        if by.tokens is not None:
            p = p.with_values(p.values * by_column(p, by_key))
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = cta.load_v(active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    some = l != 0
    l = np.where(some, l, np.float32(1))
    o = o.with_values(divide(o.values, o.by_row(l)))
    if by.tokens is None and problem.fp8:
        o = o.with_values(o.values * kv_scale)
    lse = np.where(some, (m + log2(l)) * LN2, np.float32(-np.inf))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (some | (config.num_splits == 1))
    p_index, r_index = np.nonzero(writes_o)
    rows = o.tile()[p_index, r_index, : problem.latent].astype(o_array.dtype)  # [rows to write, v_dim]
    o_array[split[p_index], batch[p_index], token[p_index, r_index], head[p_index, r_index]] = rows
    p_index, r_index = np.nonzero(is_row)
    at = split[p_index], batch[p_index], token[p_index, r_index], head[p_index, r_index]
    lse_array[at] = lse[p_index, r_index]
    traffic.move("registers->DRAM", rows.nbytes + len(p_index) * lse.itemsize)


def launch(
    q: Array,
    kv_cache: Array,
    k_rope: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    features: Features,
    config: MLADecodeConfig,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, H, v_dim]`` of q's dtype (bfloat16 for e4m3) and lse ``[B, S, H]`` float32. The
    arguments are valid.

    q ``[B, S, H, v_dim + rope]``; the windows of the cache, kv_cache ``[pages, page_size, v_dim]`` and k_rope.
    """
    batch, tokens, heads, _ = q.shape
    problem = MLADecodeProblem.of(q, kv_cache, k_rope, block_table)
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((batch, tokens, heads, problem.latent), result_dtype(q)) if out is None else out
    lse = np.empty((batch, tokens, heads), np.float32)
    if q.size == 0:
        return out, lse
    before = np.maximum(key_count(seq_lens, problem.max_keys) - tokens, 0).astype(np.uint32)
    sizes = before, block_table, tokens, problem.max_keys
    cache, rope = (PagedKVCache(window[:, :, None], *sizes) for window in (kv_cache, k_rope))
    part, part_lse = partial_results(out, lse, config.num_splits)
    scale_log2 = scale * features.scales.q.number * LOG2E
    with traffic.launch():
        attend(
            q, cache, rope, seq_lens, part, part_lse, scale_log2, features, problem, config, arch,
            traffic,
        )  # fmt: skip
    if config.num_splits > 1:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse
