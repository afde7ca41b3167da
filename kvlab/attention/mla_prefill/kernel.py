"""MLA prefill as a portable Triton kernel: K and V of each head, the rope part of K from the pages of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.features import Features
from kvlab.attention.masks import UNLIMITED
from kvlab.attention.online_softmax import LOG2E, MASK_VALUE
from kvlab.attention.scoring.kernel import add_bias, cap, distance, head_scale, key_range, token_scale, visible_end
from kvlab.attention.scoring.launch import bias_arguments, slopes_batch

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
def qk(q, q_rope, k, k_rope, scale_log2, rope_scale, softcap, CAPPED: tl.constexpr, SCALED: tl.constexpr):
    """Scores in units of log2 of nope and rope columns, one sum; ``rope_scale`` is that of the stored rope part."""
    k_rope = k_rope.to(q_rope.dtype)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SCALED:
        s += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee") * rope_scale
    else:
        s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")
    s = s * scale_log2
    if CAPPED:
        s = cap(s, softcap)
    return s


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, rope_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, starts_ptr,
    sinks_ptr, slopes_ptr, valid_ptr, bias_ptr, scales_ptr, o_ptr, lse_ptr,
    scale_log2, rope_number, softcap, mask_value, batches, row_tiles, left, right, chunk, bias_rows, bias_keys,
    q_token, q_head, k_token, k_head, v_token, v_head, rope_page, rope_token, table_batch, slopes_batch,
    bias_batch, bias_head, bias_row, bias_key, scales_page, scales_token, o_token, o_head, lse_head, lse_token,
    PAGE: tl.constexpr, STARTS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
    VALID: tl.constexpr, CHUNKED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    D: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM query rows of one head against the keys that they see. Keys count from ``base``, the first that K holds."""
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
        total = tl.load(lens_ptr + batch).to(tl.int32)
    base = total - num_keys
    if STARTS:
        base = tl.load(starts_ptr + batch).to(tl.int32)
    end = visible_end(base + num_keys, valid_ptr, batch, VALID)
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
    if CHUNKED or BIAS:
        full = lo
    full = tl.where(left < NO_BOUND, lo, full)
    d, r = tl.arange(0, BD), tl.arange(0, BR)
    q_at = q_ptr + (q_first + token)[:, None] * q_token + head * q_head
    q = tl.load(q_at + d[None, :], mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, BD]
    q_rope = tl.load(q_at + D + r[None, :], mask=is_row[:, None] & (r[None, :] < DR), other=0.0)  # [BM, BR]
    k_base, v_base = k_ptr + k_first * k_token + head * k_head, v_ptr + k_first * v_token + head * v_head
    rope_base, pages = rope_ptr + (0 if PAGE else k_first * rope_token), table_ptr + batch * table_batch
    rope_scale = rope_number * head_scale(scales_ptr, 0, 1, SCALE == "head")
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        m = tl.load(sinks_ptr + head + tl.zeros([BM], tl.int32)).to(tl.float32) * 1.4426950408889634
        l += 1.0
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
        by_key = rope_scale
        if SCALE == "token":
            by_key = rope_scale * token_scale(scales_ptr, page * scales_page + slot * scales_token, key < full)[None, :]
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = qk(q, q_rope, k, k_rope, scale_log2, by_key, softcap, CAPPED, SCALE != "none")  # [BM, BN]
        if SLOPES:
            s = distance(s, slope, position - base, key)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        #: load_v -> v    the V tile of the same keys
        v = load_rows(v_base, key, full, v_token, DV, BV, False)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    for start in range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        key = start + tl.arange(0, BN)
        k = load_rows(k_base, key, hi, k_token, D, BD, True)  # [BN, BD]
        #: load_rope -> k_rope    the rope part of the same keys, from their pages
        page, slot = place(pages, key, base, hi, PAGE, True)
        k_rope = load_rope(rope_base, page, slot, key < hi, rope_page, rope_token, DR, BR, True)
        by_key = rope_scale
        if SCALE == "token":
            by_key = rope_scale * token_scale(scales_ptr, page * scales_page + slot * scales_token, key < hi)[None, :]
        #: scores -> s    S = Q K^T over nope and rope columns, in float32, in units of log2
        s = qk(q, q_rope, k, k_rope, scale_log2, by_key, softcap, CAPPED, SCALE != "none")  # [BM, BN]
        if SLOPES:
            s = distance(s, slope, position - base, key)
        #: mask -> s, visible    keys that a row does not see
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
        if BIAS:
            bias_at = tl.zeros([BM], tl.int64) + batch * bias_batch + head * bias_head
            s, visible = add_bias(
                s, visible, bias_ptr, bias_at, token, base + key, bias_rows, bias_keys, bias_row, bias_key
            )
        s = tl.where(visible, s, mask_value)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(visible, tl.math.exp2(s - m_new[:, None]), 0.0)
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        #: load_v -> v    the V tile of the same keys
        v = load_rows(v_base, key, hi, v_token, DV, BV, True)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    some = l > 0
    l = tl.where(some, l, 1.0)
    o = o / l[:, None]
    lse = tl.where(some, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    the rows of this sequence
    e = tl.arange(0, BV)
    o_at = (q_first + token)[:, None] * o_token + head * o_head + e[None, :]
    tl.store(o_ptr + o_at, o.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & (e[None, :] < DV))
    tl.store(lse_ptr + head * lse_head + (q_first + token) * lse_token, lse, mask=is_row)


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
    mask_value: float = MASK_VALUE,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``: out ``[total, H, value]`` of q's dtype, lse ``[H, total]`` float32.
    The arguments are valid.
    """
    total, heads, _ = q.shape
    out = torch.empty((total, heads, problem.value), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or problem.batch == 0:
        return out, lse
    mask, rope_scale = features.mask, features.scales.k
    scales, kind = rope_scale.array, "none" if rope_scale.array is None and rope_scale.number == 1 else rope_scale.kind
    bias_sizes, bias_strides = bias_arguments(mask.bias)
    absent = q  # stands for a pointer that is not followed
    rope_page, rope_token = (k_rope.stride(0), k_rope.stride(1)) if table is not None else (0, k_rope.stride(0))
    attend[config.grid(problem)](
        q, k, v, k_rope, cu_q, cu_k, *(absent if x is None else x for x in (
            table, seq_lens, starts, features.sinks, features.slopes, mask.valid, mask.bias, scales)), out, lse,
        scale * LOG2E, rope_scale.number, features.softcap, mask_value, problem.batch, config.row_tiles,
        mask.left, mask.right, mask.chunk, *bias_sizes,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], rope_page, rope_token,
        0 if table is None else table.stride(0), slopes_batch(features.slopes), *bias_strides,
        *(scales.stride()[:2] if kind == "token" else (0, 0)), *out.stride()[:2], *lse.stride(),
        PAGE=0 if table is None else k_rope.shape[1], STARTS=starts is not None, CAPPED=features.softcap > 0,
        SINKS=features.sinks is not None, SLOPES=features.slopes is not None, VALID=mask.valid is not None,
        CHUNKED=mask.chunk > 0, BIAS=mask.bias is not None, SCALE=kind,
        D=problem.nope, DR=problem.rope, DV=problem.value, BD=config.BD, BR=config.BR, BV=config.BV,
        BM=config.BM, BN=config.BN, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, lse
