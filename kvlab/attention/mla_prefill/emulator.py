"""MLA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.intervals import UNLIMITED, most_keys
from kvlab.attention.mha_prefill.rows import SequenceRows, by_token, token_scales
from kvlab.attention.online_softmax import LOG2E, LOWEST
from kvlab.attention.operands import result_dtype
from kvlab.attention.scales import Scale
from kvlab.attention.scoring.emulator import (
    add_bias,
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
from kvlab.memory import Memory, bfloat16
from kvlab.staging import Fragments, KVCacheIterator, Traffic, program_ids, ragged_range, row_offsets

from .config import MLAPrefillConfig, MLAPrefillProblem
from .cta import MLAPrefillCTA

if TYPE_CHECKING:
    from kvlab.attention.features import Features

Array = np.ndarray[Any, Any]
LN2, HIDDEN = np.float32(0.6931471805599453), np.float32(-np.inf)


def attend(
    q_array: Array, k_rows: Any, v_rows: Any, rope_rows: Any, cu_q: Array, cu_k: Array, total: Array,
    starts: Array | None, max_keys: int, o_array: Array, lse_array: Array, scale_log2: float, features: Features,
    problem: MLAPrefillProblem, config: MLAPrefillConfig, arch: str, traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows of one head against the keys that they see, for each program. Keys count from ``base``, the first
    that K holds.
    """
    #: setup -> q, q_rope, lo, full, hi, first, limit    this program's rows, the keys they see, the query tiles
    BM, BN, mask, scales = config.BM, config.BN, features.mask, features.scales
    bounds = mask.left, mask.right, mask.chunk
    tile_and_batch, head = program_ids(config.grid(problem))  # [P]
    tile, batch = config.row_tiles - 1 - tile_and_batch // problem.batch, tile_and_batch % problem.batch
    token = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    num_q, num_keys = np.diff(cu_q).astype(np.int32)[batch], np.diff(cu_k).astype(np.int32)[batch]
    total = key_count(total[batch], max_keys)
    base = total - num_keys if starts is None else starts.astype(np.int32)[batch]
    end = visible_end(np.minimum(base + num_keys, total), mask.valid, batch)
    is_row = token < num_q[:, None]
    position = token + (total - num_q)[:, None]
    first, limit = key_range(position, end[:, None], *bounds)
    first = np.maximum(first - base[:, None], 0)  # [P, BM], first key that a row sees
    limit = limit - base[:, None]  # [P, BM], first key after it that a row does not see
    top = tile * BM + total - num_q  # positions of the tile's rows
    bottom = np.minimum(tile * BM + BM - 1, num_q - 1) + total - num_q
    (top_first, top_limit), (_, bottom_limit) = key_range(top, end, *bounds), key_range(bottom, end, *bounds)
    lo = np.maximum(top_first - base, 0)
    hi = np.where(bottom < top, lo, np.maximum(bottom_limit - base, lo))
    full = np.maximum(np.minimum((top_limit - base) // BN * BN, hi), lo)
    full = lo if mask.bounded or config.one_loop else np.where(base < 0, lo, full)  # K may hold more than there are
    q_row = cu_q.astype(np.int64)[batch][:, None] + token
    q_at = row_offsets(q_array, (q_row, head[:, None]), is_row)
    cta = MLAPrefillCTA(arch, config, problem, q_array.dtype, k_rows, v_rows, rope_rows, batch, head, traffic)
    q, q_rope = cta.load_q(Memory.over(q_array, name="q"), q_at, is_row)
    by_program = _each(np.float32(scale_log2) * head_scale(scales.q.heads, head))
    m = np.full(token.shape, LOWEST, np.float32)
    l = np.zeros(token.shape, np.float32)
    if features.sinks is not None:
        sinks = np.broadcast_to(features.sinks.astype(np.float32)[head][:, None], token.shape)
        m, l = sink_alone(sinks * np.float32(LOG2E))
    slope = None
    if features.slopes is not None:
        slopes = np.broadcast_to(features.slopes, (problem.batch, problem.heads))[batch, head]
        slope = np.broadcast_to(slopes[:, None], token.shape)
    o = cta.zeros()
    walks = [_walk(rows, BN, batch, head, at, base, stop)
             for at, stop in ((lo, full), (full, hi)) for rows in (k_rows, v_rows, rope_rows)]  # fmt: skip
    cta.follow(*walks)
    k_tiles, v_tiles, rope_tiles, k_rest, v_rest, rope_rest = walks
    for start in ragged_range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        active = start < full  # [P], programs whose range is not over
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k = cta.load_k(k_tiles.next_tile(), active)
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        k_rope = cta.load_rope(rope_tiles.next_tile(), active)
        exists = key < full[:, None]
        by_key = _by_key(scales.k, k_rows, batch, head, key, exists)
        by_rope = _by_key(scales.rope, rope_rows, batch, 0 * head, base[:, None] + key, exists)
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        sums = cta.scores(q, q_rope, k, k_rope, by_key, by_rope, active)
        s = _scores(sums, by_program, features.softcap)
        if slope is not None:
            s = distance(s, slope, position - base[:, None], key)
        s = s.with_values(np.where(_each(active), s.values, HIDDEN))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        below = s.values - s.by_row(m_new)
        if slope is None and not features.softcap:  # one operation with the multiplication
            below = multiply_add(sums.values, by_program, -s.by_row(m_new))
        p = s.with_values(exp2(np.where(_each(active), below, np.float32(-np.inf))))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.with_values(o.values * o.by_row(alpha))
        m = m_new
        p = by_token(p, scales.v, v_rows, batch, head, key, exists)
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_tiles.next_tile(), active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = cta.accumulate(p, v, o, active)
    for start in ragged_range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        active = start < hi
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k = cta.load_k(k_rest.next_tile(), active)
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        k_rope = cta.load_rope(rope_rest.next_tile(), active)
        exists = key < hi[:, None]
        by_key = _by_key(scales.k, k_rows, batch, head, key, exists)
        by_rope = _by_key(scales.rope, rope_rows, batch, 0 * head, base[:, None] + key, exists)
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = _scores(cta.scores(q, q_rope, k, k_rope, by_key, by_rope, active), by_program, features.softcap)
        if slope is not None:
            s = distance(s, slope, position - base[:, None], key)
        #: mask -> s    keys that a row does not see
        at = start[:, None, None, None] + s.map.col  # [P, threads, registers, elements]
        seen = (at >= s.by_row(first)) & (at < s.by_row(limit)) & _each(active)
        if mask.bias is not None:
            s, seen = add_bias(s, seen, mask.bias, batch, np.tile(head[:, None], BM), token, base[:, None] + key)
        s = s.with_values(np.where(seen, s.values, HIDDEN))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2(s.values - s.by_row(m_new)))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.with_values(o.values * o.by_row(alpha))
        m = m_new
        p = by_token(p, scales.v, v_rows, batch, head, key, exists)
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_rest.next_tile(), active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    some = l != 0
    l = np.where(some, l, np.float32(1))
    o = o.with_values(divide(o.values, o.by_row(l)))
    if scales.v.tokens is None:
        o = o.with_values(o.values * _each(np.float32(scales.v.number) * head_scale(scales.v.heads, head)))
    lse = np.where(some, (m + log2(l)) * LN2, np.float32(-np.inf))
    #: store    the rows of this sequence
    p_index, r_index = np.nonzero(is_row)
    rows = o.tile()[p_index, r_index, : problem.value].astype(o_array.dtype)  # [rows to write, value]
    o_array[q_row[p_index, r_index], head[p_index]] = rows
    lse_array[q_row[p_index, r_index], head[p_index]] = lse[p_index, r_index]
    traffic.move("registers->DRAM", rows.nbytes + len(p_index) * lse.itemsize)


def _each(programs: Array) -> Array:
    """``[P]`` against registers ``[P, threads, registers, elements]``."""
    return programs[:, None, None, None]


def _scores(s: Fragments, scale_log2: Array, softcap: float) -> Fragments:
    s = s.with_values(s.values * scale_log2)
    return cap(s, softcap) if softcap else s


def _by_key(scale: Scale, rows: Any, batch: Array, head: Array, key: Array, exists: Array) -> Array | None:
    """What the columns of each key of ``rows`` are multiplied by ``[P, BN]``, None for 1."""
    if scale.tokens is None:
        if scale.array is None and scale.number == 1:
            return None
        return np.broadcast_to((np.float32(scale.number) * head_scale(scale.heads, head))[:, None], key.shape)
    return token_scales(scale, rows, batch, head, key, exists)


def _walk(rows: Any, BN: int, batch: Array, head: Array, start: Array, base: Array, stop: Array) -> KVCacheIterator:
    """Tiles of keys ``[start, stop)``: of K and V as they are held, of the cache from ``base`` on."""
    in_pages = isinstance(rows, PagedKVCache)
    shift = base if in_pages else 0
    kv_head = head if rows.kv_params.num_heads > 1 else 0 * head
    walk = KVCacheIterator(rows, BN, batch, kv_head, shift + stop, bounded=True)
    walk.tile_start_row = shift + start
    return walk


def launch(
    q: Array,
    k: Array,
    v: Array,
    k_rope: Array,
    cu_q: Array,
    cu_k: Array,
    table: Array | None = None,
    seq_lens: Array | None = None,
    starts: Array | None = None,
    *,
    scale: float,
    features: Features,
    problem: MLAPrefillProblem,
    config: MLAPrefillConfig,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twin; arrays as in ``reference``: out ``[total, H, value]`` of q's dtype (bfloat16 for e4m3), lse
    ``[total, H]`` float32. The arguments are valid.
    """
    total, heads, _ = q.shape
    out = np.empty((total, heads, problem.value), result_dtype(q)) if out is None else out
    lse = np.empty((total, heads), np.float32)
    if q.size == 0 or problem.batch == 0:
        return out, lse
    if len(k) == 0:  # no sequence has a key here: rows that nobody reads
        k, v = (np.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))
    num = np.diff(cu_k).astype(np.int64)
    keys = num if seq_lens is None else seq_lens.astype(np.int64)
    q = q if q.dtype.itemsize > 1 else q.astype(bfloat16)
    features = features.with_leading_axis(rope=table is None)
    k_rows, v_rows = (SequenceRows(x[None], cu_k) for x in (k, v))
    rope_rows: Any
    max_keys = UNLIMITED
    if table is None:
        k_rope = k_rope if len(k_rope) else np.zeros((1, problem.rope), k_rope.dtype)
        rope_rows = SequenceRows(k_rope[None, :, None], cu_k)
    else:
        max_keys = most_keys(table.shape[1], k_rope.shape[1])
        lengths = key_count(keys, max_keys).astype(np.uint32)
        rope_rows = PagedKVCache(k_rope[:, :, None], lengths, table, problem.max_q, max_keys)
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        attend(
            q, k_rows, v_rows, rope_rows, cu_q, cu_k, keys, starts, max_keys, out, lse,
            scale * features.scales.q.number * LOG2E, features, problem, config, arch, traffic,
        )  # fmt: skip
    return out, lse
