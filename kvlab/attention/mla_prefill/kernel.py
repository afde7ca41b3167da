"""MLA prefill as a portable Triton kernel: K and V of each head, the rope part of K from the pages of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.intervals import most_keys
from kvlab.attention.features.kernel import row_count
from kvlab.attention.features.masks import UNLIMITED
from kvlab.attention.features.resolve import Features
from kvlab.attention.scoring.kernel import (
    LOG2E,
    LOWEST,
    add_bias,
    cap,
    distance,
    head_scale,
    key_count,
    key_range,
    sink_alone,
    token_scale,
    visible_end,
)
from kvlab.attention.scoring.launch import bias_arguments, scale_strides, slopes_batch
from kvlab.attention.tiles.online_softmax import LOG2E as _LOG2E
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import MLAPrefillConfig, MLAPrefillProblem, scale_kind

LN2 = tl.constexpr(0.6931471805599453)
NO_BOUND = tl.constexpr(UNLIMITED)
ROPE_HEAD = tl.constexpr(0)  # the only one


@triton.jit
def load_q(row_ptr, is_row, D: tl.constexpr, DR: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Nope and rope columns of query rows, ``[BM, BD]`` and ``[BM, BR]``; e4m3 as bfloat16."""
    d, r = tl.arange(0, BD), tl.arange(0, BR)
    q = tl.load(row_ptr + d[None, :], mask=is_row[:, None] & (d[None, :] < D), other=0.0)
    q_rope = tl.load(row_ptr + D + r[None, :], mask=is_row[:, None] & (r[None, :] < DR), other=0.0)
    if q.dtype == tl.float8e4nv:
        q, q_rope = q.to(tl.bfloat16), q_rope.to(tl.bfloat16)
    return q, q_rope


@triton.jit
def load_columns(ptr, row_at, exists, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """D columns of the rows at offsets ``row_at`` ``[BN, 1]``, padded to BD with 0; ``MASKED``: 0 for rows that do not
    exist.
    """
    d = tl.arange(0, BD)
    if MASKED:
        return tl.load(ptr + (row_at + d[None, :]), mask=exists[:, None] & (d[None, :] < D), other=0.0)
    if D == BD:
        return tl.load(ptr + (row_at + d[None, :]))
    return tl.load(ptr + (row_at + d[None, :]), mask=d[None, :] < D, other=0.0)


@triton.jit
def load_rows(at, key, end, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``key`` of one head of K or V, ``[BN, BD]``."""
    ptr, row_stride = at
    return load_columns(ptr, key.to(tl.int64)[:, None] * row_stride, key < end, D, BD, MASKED)


@triton.jit
def key_scales(scales, key, end):
    """The scales of keys of one head of K or V, ``[BN]``."""
    ptr, row_stride = scales  #- address
    return token_scale(ptr, key.to(tl.int64) * row_stride, key < end)


@triton.jit
def place(table_ptr, row, exists, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """(page, slot) of rows of a sequence; without pages, all are in one."""
    page, slot = tl.zeros_like(row), row
    if PAGE:
        page = tl.load(table_ptr + row // PAGE, mask=exists, other=0)
        if not MASKED:  #- address
            page = tl.load(table_ptr + row // PAGE)
        slot = row % PAGE
    return page.to(tl.int64), slot.to(tl.int64)


@triton.jit
def load_rope(at, key, end, DR: tl.constexpr, BR: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """The rope columns of keys, ``[BN, BR]``."""
    ptr, table_ptr, first, page_stride, token_stride = at
    page, slot = place(table_ptr, first + key, key < end, PAGE, MASKED)
    return load_columns(ptr, page[:, None] * page_stride + slot[:, None] * token_stride, key < end, DR, BR, MASKED)


@triton.jit
def scores(q, q_rope, k, k_rope, by_key, by_rope):
    """S = Q K^T in float32, K in q's dtype: one sum over nope and rope columns. ``by_key`` and ``by_rope`` are scales
    of the two parts of K, or None.
    """
    k_rope = k_rope.to(q_rope.dtype)
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if by_key is not None:
        s = s * by_key
    if by_rope is not None:
        s += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee") * by_rope
    else:
        s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")
    return s


@triton.jit
def accumulate(p, v, o, dtype: tl.constexpr):
    """O += P V in ``dtype``."""
    return tl.dot(p.to(dtype), v.to(dtype), o, input_precision="ieee")


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, rope_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, starts_ptr,
    sinks_ptr, slopes_ptr, valid_ptr, bias_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, rope_scale_ptr, o_ptr, lse_ptr,
    scale_log2, k_number, v_number, rope_number, softcap, batches, row_tiles, left, right, chunk,
    max_keys, bias_rows, bias_keys,
    q_token, q_head, k_token, k_head, v_token, v_head, rope_page, rope_token, table_batch, slopes_batch,
    bias_batch, bias_head, bias_row, bias_key, q_scale_head, k_scale_token, k_scale_head, v_scale_token, v_scale_head,
    rope_scale_page, rope_scale_token, o_token, o_head, lse_token, lse_head,
    PAGE: tl.constexpr, STARTS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
    VALID: tl.constexpr, CHUNKED: tl.constexpr, BIAS: tl.constexpr,
    Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, ROPE_SCALE: tl.constexpr,
    D: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ONE_LOOP: tl.constexpr,
):
    """BM query rows of one head against the keys that they see. Keys count from ``base``, the first that K holds.
    Products are in q's dtype, in bfloat16 for e4m3.
    """
    #: setup -> q, q_rope, lo, full, hi, first, limit    this program's rows, the keys they see, the query tiles
    tile_and_batch, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = row_tiles - 1 - tile_and_batch // batches
    batch = (tile_and_batch % batches).to(tl.int64)
    token = tile * BM + tl.arange(0, BM)  # [BM]
    q_first, num_q = row_count(cu_q_ptr, batch, 0)
    k_first, num_keys = row_count(cu_k_ptr, batch, 0)
    total = num_keys
    if PAGE:
        total = key_count(tl.load(lens_ptr + batch), max_keys)
    base = total - num_keys
    if STARTS:
        base = tl.load(starts_ptr + batch).to(tl.int32)
    end = visible_end(tl.minimum(base + num_keys, total), valid_ptr, batch, VALID)
    is_row = token < num_q
    position = token + total - num_q
    first, limit = key_range(position, end, left, right, chunk, CHUNKED)
    first = tl.maximum(first - base, 0)  # [BM], first key that a row sees
    limit = limit - base  # [BM], first key after it that a row does not see
    top = tile * BM + total - num_q  # positions of the tile's rows
    bottom = tl.minimum(tile * BM + BM - 1, num_q - 1) + total - num_q
    top_first, top_limit = key_range(top, end, left, right, chunk, CHUNKED)
    _, bottom_limit = key_range(bottom, end, left, right, chunk, CHUNKED)
    lo = tl.maximum(top_first - base, 0)
    hi = tl.where(bottom < top, lo, tl.maximum(bottom_limit - base, lo))
    full = tl.maximum(tl.minimum((top_limit - base) // BN * BN, hi), lo)
    if CHUNKED or BIAS or ONE_LOOP:
        full = lo
    full = tl.where((left < NO_BOUND) | (base < 0), lo, full)  # K may hold more keys than the sequence has
    q_row = q_first + token
    q, q_rope = load_q(q_ptr + q_row[:, None] * q_token + head * q_head, is_row, D, DR, BD, BR)  # [BM, BD], [BM, BR]
    k_at = k_ptr + k_first * k_token + head * k_head, k_token
    v_at = v_ptr + k_first * v_token + head * v_head, v_token
    rope_base = rope_ptr + (0 if PAGE else k_first * rope_token)  #- address
    rope_at = rope_base, table_ptr + batch * table_batch, base, rope_page, rope_token
    k_scales = k_scale_ptr + k_first * k_scale_token + head * k_scale_head, k_scale_token
    v_scales = v_scale_ptr + k_first * v_scale_token + head * v_scale_head, v_scale_token
    rope_scales = rope_scale_ptr + (0 if PAGE else k_first * rope_scale_token)  #- address
    unit = scale_log2 * head_scale(q_scale_ptr, head, q_scale_head, Q_SCALE == "head")
    k_scale = k_number * head_scale(k_scale_ptr, head, k_scale_head, K_SCALE == "head")
    v_scale = v_number * head_scale(v_scale_ptr, head, v_scale_head, V_SCALE == "head")
    rope_scale = rope_number * head_scale(rope_scale_ptr, ROPE_HEAD, 0, ROPE_SCALE == "head")
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head + tl.zeros([BM], tl.int32)).to(tl.float32)
        m, l = sink_alone(sink * LOG2E)
    if SLOPES:
        slope = tl.broadcast_to(tl.load(slopes_ptr + batch * slopes_batch + head), [BM])
    o = tl.zeros([BM, BV], tl.float32)
    for start in range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        k = load_rows(k_at, key, full, D, BD, False)  # [BN, BD]
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        k_rope = load_rope(rope_at, key, full, DR, BR, PAGE, False)  # [BN, BR]
        by_key = k_scale
        if K_SCALE == "token":
            by_key = k_scale * key_scales(k_scales, key, full)[None, :]
        by_rope = rope_scale
        if ROPE_SCALE == "token":
            page, slot = place(table_ptr + batch * table_batch, base + key, key < full, PAGE, False)
            by_rope = rope_scale * token_scale(
                rope_scales, page * rope_scale_page + slot * rope_scale_token, key < full
            )[None, :]
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = scores(
            q, q_rope, k, k_rope, by_key if K_SCALE != "none" else None, by_rope if ROPE_SCALE != "none" else None
        )  # [BM, BN]
        s = s * unit
        if CAPPED:
            s = cap(s, softcap)
        if SLOPES:
            s = distance(s, slope, position - base, key)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        if V_SCALE == "token":
            p = p * (v_scale * key_scales(v_scales, key, full))[None, :]
        #: load_v -> v    the V tile of the same keys
        v = load_rows(v_at, key, full, DV, BV, False)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = accumulate(p, v, o, q.dtype)
    for start in range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        key = start + tl.arange(0, BN)
        k = load_rows(k_at, key, hi, D, BD, True)  # [BN, BD]
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        k_rope = load_rope(rope_at, key, hi, DR, BR, PAGE, True)  # [BN, BR]
        by_key = k_scale
        if K_SCALE == "token":
            by_key = k_scale * key_scales(k_scales, key, hi)[None, :]
        by_rope = rope_scale
        if ROPE_SCALE == "token":
            page, slot = place(table_ptr + batch * table_batch, base + key, key < hi, PAGE, True)
            by_rope = rope_scale * token_scale(
                rope_scales, page * rope_scale_page + slot * rope_scale_token, key < hi
            )[None, :]
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = scores(
            q, q_rope, k, k_rope, by_key if K_SCALE != "none" else None, by_rope if ROPE_SCALE != "none" else None
        )  # [BM, BN]
        s = s * unit
        if CAPPED:
            s = cap(s, softcap)
        if SLOPES:
            s = distance(s, slope, position - base, key)
        #: mask -> s    keys that a row does not see
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
        if BIAS:
            bias_at = tl.zeros([BM], tl.int64) + batch * bias_batch + head * bias_head  #- address
            s, visible = add_bias(
                s, visible, bias_ptr, bias_at, token, base + key, bias_rows, bias_keys, bias_row, bias_key
            )
        s = tl.where(visible, s, -float("inf"))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        if V_SCALE == "token":
            p = p * (v_scale * key_scales(v_scales, key, hi))[None, :]
        #: load_v -> v    the V tile of the same keys
        v = load_rows(v_at, key, hi, DV, BV, True)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = accumulate(p, v, o, q.dtype)
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    sees = l != 0
    l = tl.where(sees, l, 1.0)
    o = o / l[:, None]
    if V_SCALE == "number" or V_SCALE == "head":
        o = o * v_scale
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    the rows of this sequence
    d = tl.arange(0, BV)
    o_mask = is_row[:, None] & (d[None, :] < DV)
    tl.store(
        o_ptr + q_row[:, None] * o_token + head * o_head + d[None, :], o.to(o_ptr.dtype.element_ty), mask=o_mask
    )
    tl.store(lse_ptr + q_row * lse_token + head * lse_head, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    *,
    scale: float,
    features: Features,
    problem: MLAPrefillProblem,
    config: MLAPrefillConfig,
    out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``: out ``[total, H, value]`` of q's dtype (bfloat16 for e4m3), lse
    ``[total, H]`` float32. The arguments are valid.
    """
    total, heads, _ = q.shape
    out, lse = results(q, out, (total, heads, problem.value))
    if q.numel() == 0 or problem.batch == 0:
        return out, lse
    mask, scales = features.mask, features.scales
    absent = q  # stands for a pointer that is not followed
    given = (
        table, seq_lens, starts, features.sinks, features.slopes, mask.valid, mask.bias, scales.q.array, scales.k.array,
        scales.v.array, scales.rope.array,
    )
    pointers = q, k, v, k_rope, cu_q, cu_k, *(absent if x is None else x for x in given), out, lse
    if not relaunched(attend, pointers, again):
        bias_sizes, bias_strides = bias_arguments(mask.bias)
        paged = table is not None
        rope_page, rope_token = k_rope.stride()[:2] if paged else (0, k_rope.stride(0))
        rope_scale = scales.rope.tokens
        by_rope = (0, 0) if rope_scale is None else rope_scale.stride()[:2] if paged else (0, rope_scale.stride(0))
        first_launch(attend, config.grid(problem), pointers, again)(
            scale * scales.q.number * _LOG2E, scales.k.number, scales.v.number, scales.rope.number, features.softcap,
            problem.batch, config.row_tiles, mask.left, mask.right, mask.chunk,
            0 if table is None else most_keys(table.shape[1], k_rope.shape[1]), *bias_sizes,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], rope_page, rope_token,
            0 if table is None else table.stride(0), slopes_batch(features.slopes), *bias_strides,
            *scale_strides(scales.q, 1), *scale_strides(scales.k, 2), *scale_strides(scales.v, 2), *by_rope,
            *out.stride()[:2], *lse.stride(),
            PAGE=0 if table is None else k_rope.shape[1], STARTS=starts is not None, CAPPED=features.softcap > 0,
            SINKS=features.sinks is not None, SLOPES=features.slopes is not None, VALID=mask.valid is not None,
            CHUNKED=mask.chunk > 0, BIAS=mask.bias is not None, Q_SCALE=scales.q.kind, K_SCALE=scale_kind(scales.k),
            V_SCALE=scale_kind(scales.v), ROPE_SCALE=scale_kind(scales.rope),
            D=problem.nope, DR=problem.rope, DV=problem.value, BD=config.BD, BR=config.BR, BV=config.BV, BM=config.BM,
            BN=config.BN, ONE_LOOP=config.one_loop, num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return out, lse
