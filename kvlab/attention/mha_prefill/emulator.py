"""MHA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features import Features
from kvlab.attention.intervals import most_keys
from kvlab.attention.online_softmax import LOG2E, LOWEST
from kvlab.attention.operands import result_dtype
from kvlab.attention.scales import P_SCALE, Scale
from kvlab.attention.scoring.emulator import (
    add_bias,
    by_column,
    cap,
    distance,
    head_scale,
    key_count,
    key_range,
    sink_alone,
    visible_end,
)
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.memory import Memory
from kvlab.staging import Fragments, Traffic, program_ids, ragged_range, row_offsets

from .config import PrefillConfig, PrefillProblem
from .machine import prefill_cta
from .rows import SequenceRows, by_token, next_tiles, tile_walks, token_scales

Array = np.ndarray[Any, Any]
LN2, HIDDEN = np.float32(0.6931471805599453), np.float32(-np.inf)


def attend(
    q_array: Array, k_rows: Any, v_rows: Any, cu_q: Array | None, num_keys: Array, max_k: int, o_array: Array,
    lse_array: Array, scale_log2: Any, o_scale: float, features: Features, base2: bool,
    problem: PrefillProblem, config: PrefillConfig, arch: str, traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see, for each program."""
    #: setup -> q, q_rest, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    BM, BN, pack, mask, scales = config.BM, config.BN, config.pack, features.mask, features.scales
    tile_and_batch, heads = program_ids(config.grid(problem))  # [P]
    tile, batch = config.row_tiles - 1 - tile_and_batch // problem.batch, tile_and_batch % problem.batch
    row = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    token, head = row // pack, heads[:, None] * pack + row % pack
    kv_head = heads * pack // problem.group
    starts = np.zeros(problem.batch, np.int64) if cu_q is None else cu_q[:-1].astype(np.int64)
    num_q = np.full(problem.batch, problem.max_q, np.int32) if cu_q is None else np.diff(cu_q).astype(np.int32)
    q_row, num_q, num_keys = starts[batch][:, None] + token, num_q[batch], key_count(num_keys[batch], max_k)
    end = visible_end(num_keys, mask.valid, batch)
    is_row = token < num_q[:, None]
    position = token + (num_keys - num_q)[:, None]
    sides = mask.left, mask.right, mask.chunk
    first, limit = key_range(position, end[:, None], *sides)  # [P, BM], the keys that a row sees
    top = tile * BM // pack + num_keys - num_q  # positions of the tile's rows
    bottom = np.minimum((tile * BM + BM - 1) // pack, num_q - 1) + num_keys - num_q
    lo, every = key_range(top, end, *sides)
    _, hi = key_range(bottom, end, *sides)
    hi = np.where(bottom < top, lo, np.maximum(hi, lo))
    full = np.maximum(np.minimum(every // BN * BN, hi), lo)
    if mask.bounded:
        full = lo
    cta = prefill_cta(arch, problem, config, q_array.dtype, k_rows, v_rows, batch, kv_head, traffic)
    sequence = batch if cu_q is None else 0 * batch
    dram, q_at = Memory.over(q_array, name="q"), row_offsets(q_array, (sequence[:, None], q_row, head), is_row)
    q, q_rest = cta.load_q(dram, q_at, is_row)
    scale_log2 = np.float32(scale_log2) * head_scale(scales.q.heads, kv_head)
    scale_log2 = (scale_log2 * head_scale(scales.k.heads, kv_head))[:, None, None, None]
    m = np.full(row.shape, LOWEST, np.float32)
    l = np.zeros(row.shape, np.float32)
    if features.sinks is not None:
        m, l = sink_alone(features.sinks.astype(np.float32)[head] * np.float32(LOG2E))
    slope = None
    if features.slopes is not None:
        slope = np.broadcast_to(features.slopes, (problem.batch, problem.q_heads))[batch[:, None], head]
    o, o_rest = cta.zeros()
    columns = cta.columns(k_rows, v_rows)
    k_tiles, v_tiles = (tile_walks(rows, BN, batch, kv_head, full, lo, widths) for rows, widths in columns)
    k_last, v_last = (tile_walks(rows, BN, batch, kv_head, hi, full, widths) for rows, widths in columns)
    cta.follow(k_tiles, v_tiles, k_last, v_last)
    for start in ragged_range(lo, full, BN):
        #: load_k -> k, k_rest    a K tile that every row sees, DRAM -> shared memory
        active = start < full  # [P], programs whose range is not over
        key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
        k, k_rest = cta.load_k(next_tiles(k_tiles), active)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = cta.scores(q, q_rest, k, k_rest, active)
        s, by = _scores(s, scale_log2, scales.k, k_rows, batch, kv_head, key, full, features, slope, position)
        s = s.with_values(np.where(active[:, None, None, None], s.values, HIDDEN))
        #: softmax -> p, m, l, o, o_rest    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o, o_rest = _online(cta, s, m, l, o, o_rest, active, by)
        p = by_token(p, scales.v, v_rows, batch, kv_head, key, key < full[:, None])
        #: load_v -> v, v_rest    the V tile of the same keys
        v, v_rest = cta.load_v(next_tiles(v_tiles), active)
        #: accumulate -> o, o_rest    O += P V, P rounded once
        o, o_rest = cta.accumulate(p, v, v_rest, o, o_rest, active)
    for start in ragged_range(full, hi, BN):
        #: load_k -> k, k_rest    a K tile that some rows see in part
        active = start < hi
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k, k_rest = cta.load_k(next_tiles(k_last), active)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = cta.scores(q, q_rest, k, k_rest, active)
        s, _ = _scores(s, scale_log2, scales.k, k_rows, batch, kv_head, key, hi, features, slope, position)
        #: mask -> s    keys that a row does not see; the bias of those that it sees
        key_at = by_column(s, key)  # [P, threads, registers, elements]
        visible = (key_at >= s.by_row(first)) & (key_at < s.by_row(limit)) & active[:, None, None, None]
        if mask.bias is not None:
            s, visible = add_bias(s, visible, mask.bias, batch, head, token, key)
        s = s.with_values(np.where(visible, s.values, HIDDEN))
        #: softmax -> p, m, l, o, o_rest    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o, o_rest = _online(cta, s, m, l, o, o_rest, active)
        p = by_token(p, scales.v, v_rows, batch, kv_head, key, key < hi[:, None])
        #: load_v -> v, v_rest    the V tile of the same keys
        v, v_rest = cta.load_v(next_tiles(v_last), active)
        #: accumulate -> o, o_rest    O += P V, P rounded once
        o, o_rest = cta.accumulate(p, v, v_rest, o, o_rest, active)
    #: normalise -> o, o_rest, lse    rows without a sum have seen no key: 0 and -inf; with a sink, its logit
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)
    l = np.where(sees, l, np.float32(1))
    factor = divide((np.float32(o_scale) * head_scale(scales.v.heads, kv_head))[:, None], l)
    o, o_rest = (
        x.with_values(np.where(x.by_row(sees), x.values * x.by_row(factor), np.float32(0))) for x in (o, o_rest)
    )
    lse = np.where(sees, m + log2(l), np.float32(-np.inf))
    if not base2:
        lse = lse * LN2
    #: store    the rows of this sequence
    p_index, r_index = np.nonzero(is_row)
    parts = [o.tile()[p_index, r_index]] + ([o_rest.tile()[p_index, r_index]] if config.V1 else [])
    rows = np.concatenate(parts, axis=1)[:, : problem.value_dim].astype(o_array.dtype)  # [rows to write, Dv]
    which, at, to = sequence[p_index], q_row[p_index, r_index], head[p_index, r_index]
    o_array[which, at, to] = rows
    lse_array[which, at, to] = lse[p_index, r_index]
    traffic.move("registers->DRAM", rows.nbytes + len(p_index) * lse.itemsize)


def _scores(
    s: Fragments, scale_log2: Array, scale: Scale, k_rows: Any, batch: Array, kv_head: Array, key: Array, end: Array,
    features: Features, slope: Array | None, position: Array,
) -> tuple[Fragments, tuple[Array, Array] | None]:  # fmt: skip
    """Scores in units of log2, times the scales of their keys, capped, less ALiBi; and the two factors that they are
    products of, where nothing came behind the multiplication.
    """
    by = s.values, scale_log2
    s = s.with_values(s.values * scale_log2)
    if scale.tokens is not None:
        by = s.values, by_column(s, token_scales(scale, k_rows, batch, kv_head, key, key < end[:, None]))
        s = s.with_values(by[0] * by[1])
    if features.softcap:
        s = cap(s, features.softcap)
    if slope is not None:
        s = distance(s, slope, position, key)
    return s, None if features.softcap or slope is not None else by


def _online(
    cta: Any, s: Fragments, m: Array, l: Array, o: Fragments, o_rest: Fragments, active: Array,
    by: tuple[Array, Array] | None = None,
) -> tuple[Fragments, Array, Array, Fragments, Fragments]:  # fmt: skip
    """New row maximum, exponentials, row sum, rescale; programs whose loop is over add nothing. ``by``: the factors of
    the scores, whose product and the maximum are subtracted in one operation.
    """
    m_new = np.maximum(m, cta.row_max(s))
    below = s.values - s.by_row(m_new) if by is None else multiply_add(*by, -s.by_row(m_new))
    p = s.with_values(exp2(np.where(active[:, None, None, None], below, np.float32(-np.inf))))
    alpha = exp2(m - m_new)
    same = o_rest is o
    o = o.with_values(o.values * o.by_row(alpha))
    o_rest = o if same else o_rest.with_values(o_rest.values * o_rest.by_row(alpha))
    return p, m_new, multiply_add(l, alpha, cta.row_sum(p)), o, o_rest


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
    if k.shape[1] == 0:  # no sequence has a key
        k, v = (np.zeros((len(x), 1, *x.shape[2:]), x.dtype) for x in (k, v))
        num_keys = np.zeros(problem.batch, np.int32)
    elif table is not None and seq_lens is not None:
        num_keys = seq_lens
    else:
        num_keys = np.full(problem.batch, k.shape[1]) if cu_k is None else np.diff(cu_k)
    rows: list[Any] = [SequenceRows(x, cu_k) for x in (k, v)]
    max_k = k.shape[1]
    if table is not None:
        max_k = most_keys(table.shape[1], k.shape[1])
        lengths = key_count(num_keys, max_k).astype(np.uint32), table, problem.max_q, max_k
        rows = [PagedKVCache(x, *lengths) for x in (k, v)]
    traffic = Traffic() if traffic is None else traffic
    scales, (k_rows, v_rows) = features.scales, rows
    with traffic.launch():
        attend(
            q, k_rows, v_rows, cu_q, num_keys, max_k, out, lse, scale * scales.q.number * scales.k.number * LOG2E,
            scales.v.number / (P_SCALE if problem.p_fp8 else 1), features, base2, problem, config, arch,
            traffic,
        )  # fmt: skip
    return out, lse
