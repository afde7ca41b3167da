"""MHA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.online_softmax import LOG2E, MASK_VALUE
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import KVCacheIterator, Traffic, ceildiv, decode_cta, program_ids, ragged_range

from .config import DecodeConfig, DecodeProblem

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)


def attend(
    q_array: Array, k_cache: PagedKVCache, v_cache: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: float, mask_value: float, problem: DecodeProblem, config: DecodeConfig, arch: str, traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence, for each program."""
    #: setup -> q, lo, hi, limit    this program's rows, its split of the keys, the query tile
    group, tokens, BN = problem.group, problem.tokens, config.BN
    batch, kv_head_and_tile, split = program_ids(config.grid(problem))  # [P]
    kv_head = kv_head_and_tile // config.row_tiles
    row = (kv_head_and_tile % config.row_tiles)[:, None] * config.BM + np.arange(config.BM, dtype=np.int32)  # [P, BM]
    num_keys = seq_lens[batch].astype(np.int32)
    size = ceildiv(ceildiv(num_keys, config.num_splits), BN) * BN
    lo = np.minimum(split * size, num_keys)
    hi = np.minimum(lo + size, num_keys)
    token = row // group
    head = kv_head[:, None] * group + row % group
    is_row = row < group * tokens
    limit = np.minimum(
        num_keys[:, None] - tokens + 1 + token, hi[:, None]
    )  # [P, BM], first key that a row does not see
    cta = decode_cta(
        arch, config.BM, BN, config.BD, k_cache, v_cache, batch, kv_head, traffic, num_warps=config.num_warps
    )
    q = cta.load_q(Memory.over(q_array, name="q"), _offsets(q_array, batch[:, None], token, head, is_row), is_row)
    k_tiles, v_tiles = (KVCacheIterator(cache, BN, batch, kv_head, hi) for cache in (k_cache, v_cache))
    k_tiles.tile_start_row = v_tiles.tile_start_row = lo
    cta.follow(k_tiles, v_tiles)
    m = np.full(row.shape, -np.inf, np.float32)
    l = np.zeros(row.shape, np.float32)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        active = start < hi  # [P], programs whose range is not over
        k = cta.load_k(k_tiles.next_tile(), active)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = cta.scores(q, k, active)
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
        #: load_v -> v    the V tile of the same pages
        v = cta.load_v(v_tiles.next_tile(), active)
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
    rows = o.tile()[p_index, r_index, : problem.head_dim].astype(o_array.dtype)  # [rows to write, D]
    o_array[split[p_index], batch[p_index], token[p_index, r_index], head[p_index, r_index]] = rows
    p_index, r_index = np.nonzero(is_row)
    at = split[p_index], batch[p_index], head[p_index, r_index], token[p_index, r_index]
    lse_array[at] = lse[p_index, r_index]
    traffic.move("registers->DRAM", rows.nbytes + len(p_index) * lse.itemsize)


def launch(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    config: DecodeConfig,
    mask_value: float = MASK_VALUE,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, Hq, D]`` of q's dtype and lse ``[B, Hq, S]`` float32. The arguments are valid."""
    batch, tokens, q_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    max_keys = block_table.shape[1] * page_size
    problem = DecodeProblem(batch, tokens, q_heads, kv_heads, head_dim, q.itemsize, max_keys)
    traffic = Traffic() if traffic is None else traffic
    out = np.empty(q.shape, q.dtype) if out is None else out
    lse = np.empty((batch, q_heads, tokens), np.float32)
    if q.size == 0:
        return out, lse
    before = seq_lens.astype(np.int64) - tokens
    lengths = np.maximum(before, 0).astype(np.uint32), block_table, tokens, max_keys
    keys, values = PagedKVCache(k_cache, *lengths), PagedKVCache(v_cache, *lengths)
    splits = config.num_splits
    part, part_lse = out[None], lse[None]
    if splits > 1:
        part = np.full((splits, *q.shape), np.nan, np.float32)
        part_lse = np.full((splits, *lse.shape), np.nan, np.float32)
    attend(q, keys, values, seq_lens, part, part_lse, scale * LOG2E, mask_value, problem, config, arch, traffic)
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
