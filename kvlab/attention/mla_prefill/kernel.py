"""MLA prefill as a portable Triton kernel: K and V of each head, the rope part of K from the pages of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.features import Features
from kvlab.attention.intervals import most_keys
from kvlab.attention.masks import UNLIMITED
from kvlab.attention.online_softmax import LOG2E
from kvlab.attention.results import results
from kvlab.attention.scales import Scale
from kvlab.attention.scoring.kernel import (
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
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import MLAPrefillConfig, MLAPrefillProblem

LN2 = tl.constexpr(0.6931471805599453)
NO_BOUND = tl.constexpr(UNLIMITED)


@triton.jit
def load_rows(ptr, row, end, row_stride, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``row`` of one head, those from ``end`` on as 0."""
    d = tl.arange(0, BD)
    at = row.to(tl.int64)[:, None] * row_stride + d[None, :]
    if MASKED:
        return tl.load(ptr + at, mask=(row < end)[:, None] & (d[None, :] < D), other=0.0)
    if D == BD:
        return tl.load(ptr + at)
    return tl.load(ptr + at, mask=d[None, :] < D, other=0.0)


@triton.jit
def place(table_ptr, key, base, end, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Page and slot of the keys ``base + key`` of a sequence, as the table has it; ``base`` counts rows without one."""
    if PAGE:
        if MASKED:
            page = tl.load(table_ptr + (base + key) // PAGE, mask=key < end, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + (base + key) // PAGE).to(tl.int64)
        return page, ((base + key) % PAGE).to(tl.int64)
    else:
        return tl.zeros_like(key).to(tl.int64), (base + key).to(tl.int64)


@triton.jit
def load_rope(
    ptr, page, slot, exists, page_stride, token_stride, DR: tl.constexpr, BR: tl.constexpr, MASKED: tl.constexpr
):
    """The rope columns of keys at ``slot`` of ``page``; 0 for those that do not exist."""
    r = tl.arange(0, BR)
    at = page[:, None] * page_stride + slot[:, None] * token_stride + r[None, :]
    if MASKED:
        return tl.load(ptr + at, mask=exists[:, None] & (r[None, :] < DR), other=0.0)
    if DR == BR:
        return tl.load(ptr + at)
    return tl.load(ptr + at, mask=r[None, :] < DR, other=0.0)


@triton.jit
def qk(
    q, q_rope, k, k_rope, unit, k_scale, rope_scale, softcap,
    CAPPED: tl.constexpr, K_SCALED: tl.constexpr, ROPE_SCALED: tl.constexpr,
):  # fmt: skip
    """Scores times ``unit`` of nope and rope columns, one sum, K in q's dtype; ``k_scale`` and ``rope_scale`` are those
    of the stored columns.
    """
    k_rope = k_rope.to(q_rope.dtype)
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if K_SCALED:
        s = s * k_scale
    if ROPE_SCALED:
        s += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee") * rope_scale
    else:
        s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")
    s = s * unit
    if CAPPED:
        s = cap(s, softcap)
    return s


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
):  # fmt: skip
    """BM query rows of one head against the keys that they see. Keys count from ``base``, the first that K holds.
    Products are in q's dtype, in bfloat16 for e4m3.
    """
    #: setup -> q, q_rope, lo, full, hi, first, limit    this program's rows, the keys they see, the query tiles
    tile = row_tiles - 1 - tl.program_id(0) // batches
    batch = (tl.program_id(0) % batches).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tile * BM + tl.arange(0, BM)  # [BM]
    q_first, k_first = tl.load(cu_q_ptr + batch).to(tl.int64), tl.load(cu_k_ptr + batch).to(tl.int64)
    num_q = (tl.load(cu_q_ptr + batch + 1) - tl.load(cu_q_ptr + batch)).to(tl.int32)
    num_keys = (tl.load(cu_k_ptr + batch + 1) - tl.load(cu_k_ptr + batch)).to(tl.int32)
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
    d, r = tl.arange(0, BD), tl.arange(0, BR)
    q_at = q_ptr + (q_first + token)[:, None] * q_token + head * q_head
    q = tl.load(q_at + d[None, :], mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, BD]
    q_rope = tl.load(q_at + D + r[None, :], mask=is_row[:, None] & (r[None, :] < DR), other=0.0)  # [BM, BR]
    if q.dtype == tl.float8e4nv:
        q, q_rope = q.to(tl.bfloat16), q_rope.to(tl.bfloat16)
    k_base, v_base = k_ptr + k_first * k_token + head * k_head, v_ptr + k_first * v_token + head * v_head
    rope_base, pages = rope_ptr + (0 if PAGE else k_first * rope_token), table_ptr + batch * table_batch
    k_scales = k_scale_ptr + k_first * k_scale_token + head * k_scale_head
    v_scales = v_scale_ptr + k_first * v_scale_token + head * v_scale_head
    rope_scales = rope_scale_ptr + (0 if PAGE else k_first * rope_scale_token)
    unit = scale_log2 * head_scale(q_scale_ptr, head, q_scale_head, Q_SCALE == "head")
    k_scale = k_number * head_scale(k_scales, 0, 0, K_SCALE == "head")
    v_scale = v_number * head_scale(v_scales, 0, 0, V_SCALE == "head")
    rope_scale = rope_number * head_scale(rope_scales, 0, 0, ROPE_SCALE == "head")
    K_SCALED: tl.constexpr = K_SCALE != "none"
    ROPE_SCALED: tl.constexpr = ROPE_SCALE != "none"
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        sinks = tl.load(sinks_ptr + head + tl.zeros([BM], tl.int32)).to(tl.float32)
        m, l = sink_alone(sinks * 1.4426950408889634)
    slope = tl.zeros([BM], tl.float32)
    if SLOPES:
        slope += tl.load(slopes_ptr + batch * slopes_batch + head)
    o = tl.zeros([BM, BV], tl.float32)
    for start in range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        k = load_rows(k_base, key, full, k_token, D, BD, False)  # [BN, BD]
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        page, slot = place(pages, key, base, full, PAGE, False)
        k_rope = load_rope(rope_base, page, slot, key < full, rope_page, rope_token, DR, BR, False)
        by_key = k_scale
        by_rope = rope_scale
        if K_SCALE == "token":
            by_key = k_scale * token_scale(k_scales, key.to(tl.int64) * k_scale_token, key < full)[None, :]
        if ROPE_SCALE == "token":
            rope_at = page * rope_scale_page + slot * rope_scale_token
            by_rope = rope_scale * token_scale(rope_scales, rope_at, key < full)[None, :]
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = qk(q, q_rope, k, k_rope, unit, by_key, by_rope, softcap, CAPPED, K_SCALED, ROPE_SCALED)  # [BM, BN]
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
            p = p * (v_scale * token_scale(v_scales, key.to(tl.int64) * v_scale_token, key < full))[None, :]
        #: load_v -> v    the V tile of the same keys
        v = load_rows(v_base, key, full, v_token, DV, BV, False)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = tl.dot(p.to(q.dtype), v.to(q.dtype), o, input_precision="ieee")
    for start in range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        key = start + tl.arange(0, BN)
        k = load_rows(k_base, key, hi, k_token, D, BD, True)  # [BN, BD]
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        page, slot = place(pages, key, base, hi, PAGE, True)
        k_rope = load_rope(rope_base, page, slot, key < hi, rope_page, rope_token, DR, BR, True)
        by_key = k_scale
        by_rope = rope_scale
        if K_SCALE == "token":
            by_key = k_scale * token_scale(k_scales, key.to(tl.int64) * k_scale_token, key < hi)[None, :]
        if ROPE_SCALE == "token":
            rope_at = page * rope_scale_page + slot * rope_scale_token
            by_rope = rope_scale * token_scale(rope_scales, rope_at, key < hi)[None, :]
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = qk(q, q_rope, k, k_rope, unit, by_key, by_rope, softcap, CAPPED, K_SCALED, ROPE_SCALED)  # [BM, BN]
        if SLOPES:
            s = distance(s, slope, position - base, key)
        #: mask -> s    keys that a row does not see
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
        if BIAS:
            bias_at = tl.zeros([BM], tl.int64) + batch * bias_batch + head * bias_head
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
            p = p * (v_scale * token_scale(v_scales, key.to(tl.int64) * v_scale_token, key < hi))[None, :]
        #: load_v -> v    the V tile of the same keys
        v = load_rows(v_base, key, hi, v_token, DV, BV, True)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = tl.dot(p.to(q.dtype), v.to(q.dtype), o, input_precision="ieee")
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    some = l != 0
    l = tl.where(some, l, 1.0)
    o = o / l[:, None]
    if V_SCALE == "number" or V_SCALE == "head":
        o = o * v_scale
    lse = tl.where(some, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    the rows of this sequence
    e = tl.arange(0, BV)
    o_at = (q_first + token)[:, None] * o_token + head * o_head + e[None, :]
    tl.store(o_ptr + o_at, o.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & (e[None, :] < DV))
    tl.store(lse_ptr + (q_first + token) * lse_token + head * lse_head, lse, mask=is_row)


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
    )  # fmt: skip
    pointers = q, k, v, k_rope, cu_q, cu_k, *(absent if x is None else x for x in given), out, lse
    if not relaunched(attend, pointers, again):
        bias_sizes, bias_strides = bias_arguments(mask.bias)
        paged = table is not None
        rope_page, rope_token = k_rope.stride()[:2] if paged else (0, k_rope.stride(0))
        rope_scale = scales.rope.tokens
        by_rope = (0, 0) if rope_scale is None else rope_scale.stride()[:2] if paged else (0, rope_scale.stride(0))
        first_launch(attend, config.grid(problem), pointers, again)(
            scale * scales.q.number * LOG2E, scales.k.number, scales.v.number, scales.rope.number, features.softcap,
            problem.batch, config.row_tiles, mask.left, mask.right, mask.chunk,
            0 if table is None else most_keys(table.shape[1], k_rope.shape[1]), *bias_sizes,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], rope_page, rope_token,
            0 if table is None else table.stride(0), slopes_batch(features.slopes), *bias_strides,
            *scale_strides(scales.q, 1), *scale_strides(scales.k, 2), *scale_strides(scales.v, 2), *by_rope,
            *out.stride()[:2], *lse.stride(),
            PAGE=0 if table is None else k_rope.shape[1], STARTS=starts is not None, CAPPED=features.softcap > 0,
            SINKS=features.sinks is not None, SLOPES=features.slopes is not None, VALID=mask.valid is not None,
            CHUNKED=mask.chunk > 0, BIAS=mask.bias is not None, Q_SCALE=scales.q.kind, K_SCALE=_kind(scales.k),
            V_SCALE=_kind(scales.v), ROPE_SCALE=_kind(scales.rope),
            D=problem.nope, DR=problem.rope, DV=problem.value, BD=config.BD, BR=config.BR, BV=config.BV, BM=config.BM,
            BN=config.BN, ONE_LOOP=config.one_loop, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse


def _kind(scale: Scale) -> str:
    """The kind of a scale; "none" for 1."""
    return "none" if scale.array is None and scale.number == 1 else scale.kind
