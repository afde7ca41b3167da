"""MHA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features import Features
from kvlab.attention.fp8_pairs.emulator import narrow
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.online_softmax import LOG2E, LOWEST
from kvlab.attention.operands import result_dtype
from kvlab.attention.scoring.emulator import (
    add_bias,
    by_column,
    cap,
    distance,
    head_scale,
    in_pages,
    key_count,
    key_range,
    sink_alone,
    token_scale,
    visible_end,
)
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.memory import Memory
from kvlab.staging import Traffic, ceildiv, decode_cta, program_ids, ragged_range, row_offsets

from .config import CLASSES, DecodeConfig, DecodeProblem, problem_of

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)


def longest_first(seq_lens: Array, max_keys: int) -> Array:
    """The sequences ordered by the class of their length, the longest first, and in a class by number; int32.

    >>> longest_first(np.array([10, 1000, 0, 999]), 4096).tolist()
    [1, 3, 0, 2]
    """
    length = key_count(seq_lens, max_keys).astype(np.int64)
    longest = int(length.max(initial=1))
    kind = (longest - length) * (CLASSES - 1) // longest  # 0: the longest
    return np.argsort(kind, kind="stable").astype(np.int32)


def attend(
    q_array: Array, k_cache: PagedKVCache, v_cache: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: float, features: Features, problem: DecodeProblem, config: DecodeConfig, arch: str,
    traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence, for each program."""
    #: setup -> q, lo, hi, first, limit    this program's rows, the keys they see, its split of them, the query tile
    group, tokens, BN, mask, scales = problem.group, problem.tokens, config.BN, features.mask, features.scales
    program, split = program_ids(config.grid(problem))  # [P]
    batch, tile = np.divmod(program, np.int32(problem.kv_heads * config.row_tiles))
    if config.longest_first:
        batch = longest_first(seq_lens, problem.max_keys)[batch]
    kv_head = tile // config.row_tiles
    row = (tile % config.row_tiles)[:, None] * config.BM + np.arange(config.BM, dtype=np.int32)  # [P, BM]
    num_keys = key_count(seq_lens[batch], problem.max_keys)
    token = row // group
    head = kv_head[:, None] * group + row % group
    is_row = row < group * tokens
    safe_head = np.where(is_row, head, 0)
    position = num_keys[:, None] - tokens + token  # [P, BM]
    end = visible_end(num_keys, mask.valid, batch)
    sides = mask.left, mask.right, mask.chunk
    first, limit = key_range(position, end[:, None], *sides)  # [P, BM]
    begin = key_range(num_keys - tokens, end, *sides)[0] if mask.windowed else np.zeros_like(num_keys)
    stop = np.maximum(key_range(num_keys - 1, end, *sides)[1], begin)
    size = ceildiv(ceildiv(stop - begin, config.num_splits), BN) * BN
    lo = np.minimum(begin + split * size, stop)
    hi = np.minimum(lo + size, stop)
    first = np.maximum(first, lo[:, None])
    limit = np.minimum(limit, hi[:, None])  # a row sees the keys from first to below limit
    cta = decode_cta(
        arch, config.BM, BN, config.columns, config.v_columns, k_cache, v_cache, batch, kv_head, (lo, hi), traffic,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    factor = np.float32(scale_log2) * head_scale(scales.q.array, kv_head)[:, None]  # [P, 1]
    factor = factor * head_scale(scales.k.heads, kv_head)[:, None]
    rows = q_array
    if problem.pairs:
        rows, unit = narrow(q_array, np.abs(q_array.astype(np.float32)).max(axis=3))
        rows = rows if cta.q_columns is None else np.ascontiguousarray(rows[..., cta.q_columns])
        token_at = np.where(is_row, token, 0)
        factor = factor * np.where(is_row, unit[batch[:, None], token_at, safe_head], np.float32(0))  # [P, BM]
    q = cta.load_q(Memory.over(rows, name="q"), row_offsets(rows, (batch[:, None], token, head), is_row), is_row)
    factor = np.broadcast_to(factor, row.shape)
    m = np.full(row.shape, LOWEST, np.float32)
    l = np.zeros(row.shape, np.float32)
    if features.sinks is not None:  # counted once, by the first split
        sinks = np.where(is_row, features.sinks[safe_head].astype(np.float32), np.float32(0))
        sink, one = sink_alone(sinks * np.float32(LOG2E))
        m = np.where(split[:, None] == 0, sink, m)
        l = np.where(split[:, None] == 0, one, l)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        active = start < hi  # [P], programs whose range is not over
        key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
        exists = key < hi[:, None]
        where = in_pages(k_cache, batch[:, None], key, exists)
        k = cta.load_k(active)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales, softcap, ALiBi
        s = cta.scores(q, k, active)
        s = s.with_values(s.values * s.by_row(factor))
        if scales.k.tokens is not None:
            s = s.with_values(s.values * by_column(s, token_scale(scales.k.tokens, (*where, kv_head[:, None]), exists)))
        if features.softcap > 0:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            sequence = batch[:, None] if len(features.slopes) > 1 else 0
            slope = np.where(is_row, features.slopes[sequence, safe_head], np.float32(0))
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see
        visible = by_column(s, key) < s.by_row(limit)
        if mask.windowed:
            visible = visible & (by_column(s, key) >= s.by_row(first))
        if mask.bias is not None:
            visible = visible & s.by_row(is_row)
            s, visible = add_bias(s, visible, mask.bias, batch, safe_head, token, key)
        s = s.with_values(np.where(visible, s.values, np.float32(-np.inf)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2(s.values - s.by_row(m_new)))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.times(alpha)
        m = m_new
        #: load_v -> v    the V tile of the same pages
        v = cta.load_v(active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        if scales.v.tokens is not None:
            p = p.with_values(p.values * by_column(p, token_scale(scales.v.tokens, (*where, kv_head[:, None]), exists)))
        o = cta.accumulate(p, v, o, active)
    #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)
    last = np.float32(scales.v.number) * head_scale(scales.v.heads, kv_head)[:, None]
    safe = np.where(sees, l, np.float32(1))
    lse = np.where(sees, (m + log2(safe)) * LN2, np.float32(-np.inf))
    l = np.where(sees, divide(last, safe), np.float32(0))  # what the sums of a row are multiplied by
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (config.num_splits == 1))
    p_index, r_index = np.nonzero(writes_o)
    result = np.where(sees[..., None], o.rows() * l[..., None], np.float32(0))[p_index, r_index]  # [rows to write, Dv]
    stored = result.astype(o_array.dtype)
    o_array[split[p_index], batch[p_index], token[p_index, r_index], head[p_index, r_index]] = stored
    p_index, r_index = np.nonzero(is_row)
    at = split[p_index], batch[p_index], token[p_index, r_index], head[p_index, r_index]
    lse_array[at] = lse[p_index, r_index]
    traffic.move("registers->DRAM", stored.nbytes + len(p_index) * lse.itemsize)


def launch(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    config: DecodeConfig,
    features: Features | None = None,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32. The arguments are valid."""
    features = Features() if features is None else features
    problem = problem_of(q, k_cache, v_cache, block_table)
    batch, tokens, q_heads = q.shape[:3]
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((batch, tokens, q_heads, problem.v_dim), result_dtype(q)) if out is None else out
    lse = np.empty((batch, tokens, q_heads), np.float32)
    if out.size == 0:
        return out, lse
    before = key_count(seq_lens, problem.max_keys) - tokens
    lengths = np.maximum(before, 0).astype(np.uint32), block_table, tokens, problem.max_keys
    keys, values = PagedKVCache(k_cache, *lengths), PagedKVCache(v_cache, *lengths)
    part, part_lse = partial_results(out, lse, config.num_splits)
    scale_log2 = scale * LOG2E * features.scales.q.number * features.scales.k.number
    with traffic.launch():
        attend(
            q, keys, values, seq_lens, part, part_lse, scale_log2, features, problem, config, arch, traffic
        )  # fmt: skip
    if config.num_splits > 1:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse
