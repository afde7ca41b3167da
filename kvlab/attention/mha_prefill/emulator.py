"""MHA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count, most_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import P_SCALE
from kvlab.attention.machines.prefill import Pieces, prefill_cta
from kvlab.attention.scoring.emulator import (
    add_bias,
    by_column,
    cap,
    distance,
    head_scale,
    key_range,
    sink_alone,
    visible_end,
)
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import LOG2E, LOWEST
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.staging import Traffic, program_ids, ragged_range

from .config import PrefillConfig, PrefillProblem
from .rows import SequenceRows, key_scales, per_sequence

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)


def attend(
    q_array: Array, k_rows: Any, v_rows: Any, cu_q_array: Array | None, cu_k_array: Array | None,
    lens_array: Array | None, max_k: int, o_array: Array, lse_array: Array, scale_log2: Any, o_scale: float,
    features: Features, base2: bool,
    problem: PrefillProblem, config: PrefillConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see, for each program."""
    #: setup -> q, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    BM, BN, mask, scales = config.BM, config.BN, features.mask, features.scales  #- launch
    tile_and_batch, heads = program_ids(config.grid(problem))  # [P]
    tile = config.row_tiles - 1 - tile_and_batch // problem.batch
    batch = tile_and_batch % problem.batch
    row = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    token = row // config.pack
    head = heads[:, None] * config.pack + row % config.pack
    kv_head = heads * config.pack // problem.group
    q_first, num_q = row_count(cu_q_array, batch, problem.max_q)
    k_first, num_keys = row_count(cu_k_array, batch, max_k)
    if lens_array is not None:
        num_keys = key_count(lens_array[batch], max_k)
    end = visible_end(num_keys, mask.valid, batch)
    is_row = token < num_q[:, None]
    position = token + num_keys[:, None] - num_q[:, None]
    first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)  # [P, BM], keys that a row sees
    top = tile * BM // config.pack + num_keys - num_q  # positions of the tile's rows
    bottom = np.minimum((tile * BM + BM - 1) // config.pack, num_q - 1) + num_keys - num_q
    lo, every = key_range(top, end, mask.left, mask.right, mask.chunk)
    if not mask.bounded:
        lo = lo // BN * BN  # it is 0
    _, hi = key_range(bottom, end, mask.left, mask.right, mask.chunk)
    hi = np.where(bottom < top, lo, np.maximum(hi, lo))
    full = np.maximum(np.minimum(every // BN * BN, hi), lo)
    if mask.bounded:
        full = lo
    q_dtype = q_array.dtype
    dtype = float8_e4m3fn if problem.p_fp8 else bfloat16 if q_dtype == float8_e4m3fn else q_dtype
    cta = prefill_cta(arch, problem, config, q_dtype, dtype, k_rows, v_rows, batch, kv_head, traffic)  #- programs
    q_row = q_first[:, None] + token
    q = cta.load_q(q_array, (batch[:, None], q_row, head), is_row)
    k_at = k_rows, batch, k_first, kv_head
    v_at = v_rows, batch, k_first, kv_head
    k_scales = scales.k, kv_head
    v_scales = scales.v, kv_head
    scale_log2 = np.float32(scale_log2) * head_scale(scales.q.heads, kv_head)
    scale_log2 = scale_log2 * head_scale(scales.k.heads, kv_head)
    if features.slopes is not None:
        slope = np.broadcast_to(features.slopes, (problem.batch, problem.q_heads))[batch[:, None], head]
    m = np.full(row.shape, LOWEST, np.float32)
    l = np.zeros(row.shape, np.float32)
    if features.sinks is not None:
        m, l = sink_alone(features.sinks.astype(np.float32)[head] * np.float32(LOG2E))
    o = cta.zeros()
    cta.follow(k_at, v_at, lo, full, hi)  #- programs
    for start in ragged_range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        active = start < full  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
        k = cta.load_k(k_at, key, full, active)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = cta.scores(q, k, active) * scale_log2[:, None, None, None]
        if scales.k.tokens is not None:
            s = s * by_column(s, key_scales(k_scales, k_at, key, full))
        if features.softcap > 0:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            s = distance(s, slope, position, key)
        s = s.only(active[:, None, None, None])  #- programs
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2((s - s.by_row(m_new)).values))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = rescale(o, alpha)
        m = m_new
        if scales.v.tokens is not None:
            p = p * by_column(p, key_scales(v_scales, v_at, key, full))
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_at, key, full, active)
        #: accumulate -> o    O += P V, P rounded once
        o = cta.accumulate(p, v, o, dtype, active)
    for start in ragged_range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        active = start < hi  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k = cta.load_k(k_at, key, hi, active)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = cta.scores(q, k, active) * scale_log2[:, None, None, None]
        if scales.k.tokens is not None:
            s = s * by_column(s, key_scales(k_scales, k_at, key, hi))
        if features.softcap > 0:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see; the bias of those that it sees
        visible = (by_column(s, key) >= s.by_row(first)) & (by_column(s, key) < s.by_row(limit))
        visible = visible & active[:, None, None, None]  #- programs
        if mask.bias is not None:
            s, visible = add_bias(s, visible, mask.bias, batch, head, token, key)
        s = s.with_values(np.where(visible, s.values, np.float32(-np.inf)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2((s - s.by_row(m_new)).values))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = rescale(o, alpha)
        m = m_new
        if scales.v.tokens is not None:
            p = p * by_column(p, key_scales(v_scales, v_at, key, hi))
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_at, key, hi, active)
        #: accumulate -> o    O += P V, P rounded once
        o = cta.accumulate(p, v, o, dtype, active)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf; with a sink, its logit
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)
    l = np.where(sees, l, np.float32(1))
    factor = divide((np.float32(o_scale) * head_scale(scales.v.heads, kv_head))[:, None], l)
    o = normalised(o, sees, factor)
    lse = np.where(sees, m + log2(l), np.float32(-np.inf))
    if not base2:
        lse = lse * LN2
    #: store    the rows of this sequence
    store_rows(o_array, (batch[:, None], q_row, head), o, is_row, problem.value_dim)
    store(lse_array, (batch[:, None], q_row, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(is_row.sum()) * (problem.value_dim * o_array.itemsize + lse.itemsize))


def row_count(starts_array: Array | None, batch: Array, most: int) -> tuple[Array, Array]:
    """(first row, rows) of sequences: those from their start to the next one's, or ``most`` of their own piece."""
    first = np.zeros(len(batch), np.int64)
    count = np.full(len(batch), most, np.int32)
    if starts_array is not None:
        first = starts_array[batch].astype(np.int64)
        count = (starts_array[batch + 1] - starts_array[batch]).astype(np.int32)
    return first, count


def rescale(o: Pieces, alpha: Array) -> Pieces:
    """Rows of the pieces times ``alpha``."""
    if len(o) > 1:
        return o[0].times(alpha), o[1].times(alpha)
    else:
        return (o[0].times(alpha),)


def normalised(o: Pieces, sees: Array, factor: Array) -> Pieces:
    """Rows of the pieces times ``factor``; 0 where a row sees nothing."""
    final = o[0].with_values(np.where(o[0].by_row(sees), o[0].times(factor).values, np.float32(0)))
    if len(o) > 1:
        return final, o[1].with_values(np.where(o[1].by_row(sees), o[1].times(factor).values, np.float32(0)))
    else:
        return (final,)


def store_rows(row_array: Array, index: tuple[Array, ...], o: Pieces, exists: Array, DV: int) -> None:
    """The first DV columns of the pieces to the rows at ``index`` that exist."""
    row = [axis[..., None] for axis in index]  #- address
    d = np.arange(o[0].shape[1])
    inside = exists[..., None] & (d < DV)
    store(row_array, (*row, d), o[0].tile(), mask=inside)
    if len(o) > 1:
        d = o[0].shape[1] + np.arange(o[1].shape[1])
        inside = exists[..., None] & (d < DV)
        store(row_array, (*row, d), o[1].tile(), mask=inside)


def launch(
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array | None = None,
    cu_k: Array | None = None,
    table: Array | None = None,
    seq_lens: Array | None = None,
    *,
    scale: float,
    problem: PrefillProblem,
    config: PrefillConfig,
    features: Features,
    base2: bool = False,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twin; arrays as in ``reference``: out ``[.., Hq, Dv]`` of q's dtype (bfloat16 for e4m3) and lse
    ``[.., Hq]`` float32. The arguments are valid.
    """
    out = np.empty((*q.shape[:3], v.shape[3]), result_dtype(q)) if out is None else out
    lse = np.empty(q.shape[:3], np.float32)
    if out.size == 0:
        return out, lse
    max_k = k.shape[1]
    if max_k == 0:  # no sequence has a key
        k, v = (np.zeros((len(x), 1, *x.shape[2:]), x.dtype) for x in (k, v))
    k_rows: Any
    v_rows: Any
    if table is not None and seq_lens is not None:
        max_k = most_keys(table.shape[1], k.shape[1])
        lengths = key_count(seq_lens, max_k).astype(np.uint32), table, problem.max_q, max_k
        k_rows, v_rows = (PagedKVCache(x, *lengths) for x in (k, v))
    else:
        k_rows, v_rows = (SequenceRows(per_sequence(x, cu_k)) for x in (k, v))
    traffic, scales = Traffic() if traffic is None else traffic, features.scales
    k_scale, v_scale = (
        x if x.tokens is None else replace(x, tokens=per_sequence(x.tokens, cu_k)) for x in (scales.k, scales.v)
    )
    features = replace(features, scales=replace(scales, k=k_scale, v=v_scale))
    o_array, lse_array = (per_sequence(x, cu_q) for x in (out, lse))
    with traffic.launch():
        attend(
            per_sequence(q, cu_q), k_rows, v_rows, cu_q, cu_k, seq_lens, max_k, o_array, lse_array,
            scale * scales.q.number * scales.k.number * LOG2E, scales.v.number / (P_SCALE if problem.p_fp8 else 1),
            features, base2, problem, config, arch, traffic,
        )
    return out, lse
