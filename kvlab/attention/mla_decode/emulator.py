"""MLA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count
from kvlab.attention.features.resolve import Features
from kvlab.attention.machines.mla_decode import mla_cta
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.scoring.emulator import (
    add_bias,
    by_column,
    cap,
    distance,
    head_scale,
    key_range,
    sink_alone,
    token_scale,
    visible_end,
)
from kvlab.attention.tiles.masked import load, store
from kvlab.attention.tiles.online_softmax import LOG2E, LOWEST
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.memory import Memory, bfloat16
from kvlab.staging import Traffic, ceildiv, program_ids, ragged_range, row_offsets

from .config import MLADecodeConfig, MLADecodeProblem

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)
KV_HEAD = np.zeros(1, np.int64)  # the only one


def place(cache: PagedKVCache, batch: Array, key: Array, exists: Array) -> tuple[Array, Array]:
    """(page, slot) of the keys of a tile."""
    page = load(np.asarray(cache.lookup_table), (batch, key // cache.page_size_), mask=exists).astype(np.int64)
    slot = key % cache.page_size_
    return page, slot


def attend(
    q_array: Array, cache: PagedKVCache, rope: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: Any, SCALE: str, ROPE_SCALED: bool, features: Features, problem: MLADecodeProblem,
    config: MLADecodeConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads) against the keys of one split of one sequence, for each program. ``SCALE``: the
    kind of the cache's scale, "none" where it has none; ``ROPE_SCALED``: whether the rope part has it, too.
    """
    #: setup -> q, q_rope, lo, hi, first, limit    this program's rows, its split of the keys, the query tile
    heads, tokens, BN, mask, scales = problem.heads, problem.tokens, config.BN, features.mask, features.scales
    tile, split = program_ids(config.grid(problem))  # [P]
    row_tiles = ceildiv(heads * tokens, config.BM)
    batch = tile // row_tiles
    row = (tile % row_tiles)[:, None] * config.BM + np.arange(config.BM, dtype=np.int32)  # [P, BM], token-major
    num_keys = key_count(seq_lens[batch], problem.max_keys)
    end = visible_end(num_keys, mask.valid, batch)
    token = row // heads
    head = row % heads
    is_row = row < heads * tokens
    position = num_keys[:, None] - tokens + token
    first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)
    seen, _ = key_range(num_keys - tokens, end, mask.left, mask.right, mask.chunk)
    _, stop = key_range(num_keys - 1, end, mask.left, mask.right, mask.chunk)
    seen = np.where(mask.windowed, seen, 0)  # keys [seen, stop) are those that some row sees
    stop = np.maximum(stop, seen)
    size = ceildiv(ceildiv(stop - seen, config.num_splits), BN) * BN
    lo = np.minimum(seen + split * size, stop)
    hi = np.minimum(lo + size, stop)
    limit = np.minimum(limit, hi[:, None])  # [P, BM], first key after first that a row does not see
    cta = mla_cta(  #- programs
        arch, config.BM, BN, (config.BV, config.BR), cache, rope, batch, hi, traffic, dtype=q_array.dtype,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )
    dram = Memory.over(q_array, name="q")  #- address
    rows_at = row_offsets(q_array, (batch[:, None], token, head), is_row)  #- address
    q, q_rope = cta.load_q(dram, rows_at, is_row)
    scale_log2 = np.float32(scale_log2) * head_scale(scales.q.heads, KV_HEAD)
    kv_scale = np.float32(scales.k.number) * head_scale(scales.k.heads, KV_HEAD)
    unit = scale_log2 * kv_scale if ROPE_SCALED and (SCALE == "number" or SCALE == "head") else scale_log2
    m = np.full(row.shape, LOWEST, np.float32)
    l = np.zeros(row.shape, np.float32)
    if features.sinks is not None:
        sink, one = sink_alone(features.sinks.astype(np.float32)[head] * np.float32(LOG2E))
        m = np.where((split == 0)[:, None], sink, m)
        l = np.where((split == 0)[:, None], one, l)
    if features.slopes is not None:
        slope = np.broadcast_to(features.slopes, (problem.batch, heads))[batch[:, None], head]
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        by_key = np.broadcast_to(kv_scale, key.shape)
        if SCALE == "token":
            page, slot = place(cache, batch[:, None], key, key < hi[:, None])
            by_key = kv_scale * token_scale(scales.k.tokens[..., 0], (page, slot), key < hi[:, None])
        active = start < hi  # [P], programs whose range is not over  #- programs
        k, k_rope = cta.load_k(start, active)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = cta.scores((q, q_rope), (k, k_rope), active, by_key if SCALE != "none" and not ROPE_SCALED else None)
        s = s.with_values(s.values * unit)
        if SCALE == "token" and ROPE_SCALED:
            s = s.with_values(s.values * by_column(s, by_key))
        if features.softcap > 0:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see
        visible = by_column(s, key) < s.by_row(limit)  # [P, threads, registers, elements]
        if mask.windowed:
            visible = visible & (by_column(s, key) >= s.by_row(first))
        if mask.bias is not None:
            s, visible = add_bias(s, visible, mask.bias, batch, head, token, key)
        s = s.with_values(np.where(visible, s.values, np.float32(-np.inf)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2(s.values - s.by_row(m_new)))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.with_values(o.values * o.by_row(alpha))
        m = m_new
        if SCALE == "token":
            p = p.with_values(p.values * by_column(p, by_key))
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = cta.load_v(active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    sees = l != 0
    l = np.where(sees, l, np.float32(1))
    o = o.with_values(divide(o.values, o.by_row(l)))
    if SCALE == "number" or SCALE == "head":
        o = o.with_values(o.values * kv_scale)
    lse = np.where(sees, (m + log2(l)) * LN2, np.float32(-np.inf))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (config.num_splits == 1))
    d = np.arange(config.BV)
    part = split[:, None]
    o_mask = writes_o[:, :, None] & (d < problem.latent)
    store(o_array, (part[:, None], batch[:, None, None], token[:, :, None], head[:, :, None], d), o.tile(), mask=o_mask)
    store(lse_array, (part, batch[:, None], token, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(o_mask.sum()) * o_array.itemsize + int(is_row.sum()) * lse.itemsize)


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
    kind = features.scales.k.kind if problem.fp8 else "none"
    with traffic.launch():
        attend(
            q if q.dtype.itemsize > 1 else q.astype(bfloat16), cache, rope, seq_lens, part, part_lse, scale_log2, kind,
            k_rope.dtype == kv_cache.dtype, features, problem, config, arch, traffic,
        )
    if config.num_splits > 1:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse
