"""MLA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import UNLIMITED, key_count, most_keys
from kvlab.attention.machines.mla_prefill import MLAPrefillCTA
from kvlab.attention.machines.rows import SequenceRows
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
from kvlab.attention.tiles.pages import row_count
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp2, log2, multiply_add
from kvlab.memory import bfloat16
from kvlab.staging import Traffic, program_ids, ragged_range

from .config import MLAPrefillConfig, MLAPrefillProblem, scale_kind

if TYPE_CHECKING:
    from kvlab.attention.features.resolve import Features

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)
ROPE_HEAD = np.zeros(1, np.int64)  # the only one


def key_scales(scales: tuple[Any, Array, Array], key: Array, end: Array) -> Array:
    """The scales of keys of one head of K or V, ``[P, BN]``."""
    tokens, first, head = scales  #- address
    row = first[:, None] + key  #- address
    return token_scale(tokens, (row, head[:, None]), key < end[:, None])


def place(rope_rows: Any, batch: Array, row: Array, exists: Array, PAGE: int) -> tuple[Array, Array]:
    """(page, slot) of rows of a sequence; without pages, all are in one."""
    page, slot = np.zeros_like(row), row
    if PAGE:
        page = load(np.asarray(rope_rows.lookup_table), (batch, row // PAGE), mask=exists)
        slot = row % PAGE
    return page.astype(np.int64), slot.astype(np.int64)


def attend(
    q_array: Array, k_rows: Any, v_rows: Any, rope_rows: Any, cu_q_array: Array, cu_k_array: Array,
    lens_array: Any, starts: Array | None, o_array: Array, lse_array: Array, scale_log2: Any,
    max_keys: int, PAGE: int, K_SCALE: str, V_SCALE: str, ROPE_SCALE: str, features: Features,
    problem: MLAPrefillProblem, config: MLAPrefillConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows of one head against the keys that they see, for each program. Keys count from ``base``, the first
    that K holds. ``K_SCALE``, ``V_SCALE``, ``ROPE_SCALE``: kinds of scales.
    """
    #: setup -> q, q_rope, lo, full, hi, first, limit    this program's rows, the keys they see, the query tiles
    BM, BN, mask, scales = config.BM, config.BN, features.mask, features.scales  #- launch
    tile_and_batch, head = program_ids(config.grid(problem))  # [P]
    tile = config.row_tiles - 1 - tile_and_batch // problem.batch
    batch = tile_and_batch % problem.batch
    token = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    q_first, num_q = row_count(cu_q_array, batch, 0)
    k_first, num_keys = row_count(cu_k_array, batch, 0)
    total = num_keys
    if PAGE:
        total = key_count(lens_array[batch], max_keys)
    base = total - num_keys
    if starts is not None:
        base = starts[batch].astype(np.int32)
    end = visible_end(np.minimum(base + num_keys, total), mask.valid, batch)
    is_row = token < num_q[:, None]
    position = token + total[:, None] - num_q[:, None]
    first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)
    first = np.maximum(first - base[:, None], 0)  # [P, BM], first key that a row sees
    limit = limit - base[:, None]  # [P, BM], first key after it that a row does not see
    top = tile * BM + total - num_q  # positions of the tile's rows
    bottom = np.minimum(tile * BM + BM - 1, num_q - 1) + total - num_q
    top_first, top_limit = key_range(top, end, mask.left, mask.right, mask.chunk)
    _, bottom_limit = key_range(bottom, end, mask.left, mask.right, mask.chunk)
    lo = np.maximum(top_first - base, 0)
    hi = np.where(bottom < top, lo, np.maximum(bottom_limit - base, lo))
    full = np.maximum(np.minimum((top_limit - base) // BN * BN, hi), lo)
    if mask.chunk > 0 or mask.bias is not None or config.one_loop:
        full = lo
    full = np.where((mask.left < UNLIMITED) | (base < 0), lo, full)  # K may hold more keys than the sequence has
    cta = MLAPrefillCTA(  #- programs
        arch, config, problem, q_array.dtype, k_rows, v_rows, rope_rows, batch, head, traffic
    )
    q_row = q_first[:, None] + token
    q, q_rope = cta.load_q(q_array, (q_row, head[:, None]), is_row)
    k_at = k_rows, 0, k_first, head
    v_at = v_rows, 0, k_first, head
    rope_at = rope_rows, batch, base, 0
    k_scales = scales.k.tokens, k_first, head
    v_scales = scales.v.tokens, k_first, head
    slot_first = 0 if PAGE else k_first[:, None]  #- address
    cta.follow(k_at, v_at, rope_at, lo, full, hi)  #- programs
    unit = np.float32(scale_log2) * head_scale(scales.q.heads, head)
    k_scale = np.float32(scales.k.number) * head_scale(scales.k.heads, head)
    v_scale = np.float32(scales.v.number) * head_scale(scales.v.heads, head)
    rope_scale = np.float32(scales.rope.number) * head_scale(scales.rope.heads, ROPE_HEAD)
    m = np.full(token.shape, LOWEST, np.float32)
    l = np.zeros(token.shape, np.float32)
    if features.sinks is not None:
        sink = np.broadcast_to(features.sinks.astype(np.float32)[head][:, None], token.shape)
        m, l = sink_alone(sink * np.float32(LOG2E))
    if features.slopes is not None:
        slopes = np.broadcast_to(features.slopes, (problem.batch, problem.heads))  #- address
        slope = np.broadcast_to(slopes[batch, head][:, None], token.shape)
    o = cta.zeros()
    for start in ragged_range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        active = start < full  # [P], programs whose range is not over  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k = cta.load_k(k_at, key, full, active)
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        k_rope = cta.load_rope(rope_at, key, full, active)
        by_key = np.broadcast_to(k_scale[:, None], key.shape)
        if K_SCALE == "token":
            by_key = k_scale[:, None] * key_scales(k_scales, key, full)
        by_rope = np.broadcast_to(rope_scale[:, None], key.shape)
        if ROPE_SCALE == "token":
            page, slot = place(rope_rows, batch[:, None], base[:, None] + key, key < full[:, None], PAGE)
            by_rope = rope_scale[:, None] * token_scale(
                scales.rope.tokens[..., 0], (page, slot_first + slot), key < full[:, None]
            )
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = cta.scores(
            q, q_rope, k, k_rope, by_key if K_SCALE != "none" else None, by_rope if ROPE_SCALE != "none" else None,
            active,
        )
        s = s * unit[:, None, None, None]
        if features.softcap > 0:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            s = distance(s, slope, position - base[:, None], key)
        s = s.only(active[:, None, None, None])  #- programs
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2((s - s.by_row(m_new)).values))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.times(alpha)
        m = m_new
        if V_SCALE == "token":
            p = p * by_column(p, v_scale[:, None] * key_scales(v_scales, key, full))
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_at, key, full, active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = cta.accumulate(p, v, o, active)
    for start in ragged_range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        active = start < hi  # [P], programs whose range is not over  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)
        k = cta.load_k(k_at, key, hi, active)
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        k_rope = cta.load_rope(rope_at, key, hi, active)
        by_key = np.broadcast_to(k_scale[:, None], key.shape)
        if K_SCALE == "token":
            by_key = k_scale[:, None] * key_scales(k_scales, key, hi)
        by_rope = np.broadcast_to(rope_scale[:, None], key.shape)
        if ROPE_SCALE == "token":
            page, slot = place(rope_rows, batch[:, None], base[:, None] + key, key < hi[:, None], PAGE)
            by_rope = rope_scale[:, None] * token_scale(
                scales.rope.tokens[..., 0], (page, slot_first + slot), key < hi[:, None]
            )
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = cta.scores(
            q, q_rope, k, k_rope, by_key if K_SCALE != "none" else None, by_rope if ROPE_SCALE != "none" else None,
            active,
        )
        s = s * unit[:, None, None, None]
        if features.softcap > 0:
            s = cap(s, features.softcap)
        if features.slopes is not None:
            s = distance(s, slope, position - base[:, None], key)
        #: mask -> s    keys that a row does not see
        visible = (by_column(s, key) >= s.by_row(first)) & (by_column(s, key) < s.by_row(limit))
        visible = visible & active[:, None, None, None]  #- programs
        if mask.bias is not None:
            row_head = np.broadcast_to(head[:, None], token.shape)  #- address
            s, visible = add_bias(s, visible, mask.bias, batch, row_head, token, base[:, None] + key)
        s = s.with_values(np.where(visible, s.values, np.float32(-np.inf)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = np.maximum(m, cta.row_max(s))
        p = s.with_values(exp2((s - s.by_row(m_new)).values))
        alpha = exp2(m - m_new)
        l = multiply_add(l, alpha, cta.row_sum(p))
        o = o.times(alpha)
        m = m_new
        if V_SCALE == "token":
            p = p * by_column(p, v_scale[:, None] * key_scales(v_scales, key, hi))
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_at, key, hi, active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    sees = l != 0
    l = np.where(sees, l, np.float32(1))
    o = o.with_values(divide(o.values, o.by_row(l)))
    if V_SCALE == "number" or V_SCALE == "head":
        o = o * v_scale[:, None, None, None]
    lse = np.where(sees, (m + log2(l)) * LN2, np.float32(-np.inf))
    #: store    the rows of this sequence
    d = np.arange(config.BV)
    o_mask = is_row[:, :, None] & (d < problem.value)
    store(o_array, (q_row[:, :, None], head[:, None, None], d), o.tile(), mask=o_mask)
    store(lse_array, (q_row, head[:, None]), lse, mask=is_row)
    traffic.move("registers->DRAM", int(is_row.sum()) * (problem.value * o_array.itemsize + lse.itemsize))


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
    q = q if q.dtype.itemsize > 1 else q.astype(bfloat16)
    scales = features.scales
    k_rows, v_rows = (SequenceRows(x[None]) for x in (k, v))
    rope_rows: Any
    page_size = max_keys = 0
    if table is None:
        if scales.rope.tokens is not None:
            rope = replace(scales.rope, tokens=scales.rope.tokens[None])
            features = replace(features, scales=replace(scales, rope=rope))
        k_rope = k_rope if len(k_rope) else np.zeros((1, problem.rope), k_rope.dtype)
        rope_rows = SequenceRows(k_rope[None, :, None], cu_k)
    else:
        page_size = k_rope.shape[1]
        max_keys = most_keys(table.shape[1], page_size)
        lengths = key_count(np.asarray(seq_lens), max_keys).astype(np.uint32)
        rope_rows = PagedKVCache(k_rope[:, :, None], lengths, table, problem.max_q, max_keys)
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        attend(
            q, k_rows, v_rows, rope_rows, cu_q, cu_k, seq_lens, starts, out, lse, scale * scales.q.number * LOG2E,
            max_keys, page_size, scale_kind(scales.k), scale_kind(scales.v), scale_kind(scales.rope), features, problem,
            config, arch, traffic,
        )
    return out, lse
