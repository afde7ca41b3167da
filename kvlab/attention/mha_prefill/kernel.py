"""MHA prefill as a portable Triton kernel: dense, ragged or paged keys, full tiles first, then those with a mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.features import Features
from kvlab.attention.intervals import most_keys
from kvlab.attention.online_softmax import LOG2E
from kvlab.attention.results import results
from kvlab.attention.scales import P_SCALE, Scale
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
from kvlab.attention.scoring.launch import bias_arguments, in_units, scale_strides, slopes_batch
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import PrefillConfig, PrefillProblem

LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(LOG2E)
TO_FP8 = tl.constexpr(P_SCALE)


@triton.jit
def row_of(table_ptr, page, first, key, exists, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """(page, row in it) of keys: of the page that the table names, or of one piece whose first row is ``first``."""
    slot = first + key
    if PAGE:
        if MASKED:
            page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + key // PAGE).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
    return page, slot


@triton.jit
def load_tile(
    ptr, table_ptr, page, first, key, end, page_stride, token_stride,
    PAGE: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Columns ``FROM .. FROM + WIDTH`` of the rows ``key`` of one KV head; past D they are 0."""
    page, slot = row_of(table_ptr, page, first, key, key < end, PAGE, MASKED)
    d = FROM + tl.arange(0, WIDTH)
    if PAGE:
        page = page[:, None]
    at = page * page_stride + slot[:, None] * token_stride + d[None, :]
    if MASKED:
        return tl.load(ptr + at, mask=(key < end)[:, None] & (d[None, :] < D), other=0.0)
    if FROM + WIDTH <= D:
        return tl.load(ptr + at)
    return tl.load(ptr + at, mask=d[None, :] < D, other=0.0)


@triton.jit
def by_token(
    x, scale_ptr, table_ptr, page, first, key, end, page_stride, token_stride,
    PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Columns of ``x`` times the scales of their keys."""
    page, slot = row_of(table_ptr, page, first, key, key < end, PAGE, MASKED)
    return x * token_scale(scale_ptr, page * page_stride + slot * token_stride, key < end)[None, :]


@triton.jit
def qk(q, q_rest, k, k_rest, scale_log2, REST: tl.constexpr):
    """Scores in units of log2; K in q's dtype."""
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if REST:
        s = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), s, input_precision="ieee")
    return s * scale_log2


@triton.jit
def online(s, m, l, o, o_rest, REST: tl.constexpr):
    """New row maximum, exponentials, row sum, rescale."""
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    o = o * alpha[:, None]
    if REST:
        o_rest = o_rest * alpha[:, None]
    else:
        o_rest = o
    return p, m_new, l, o, o_rest


@triton.jit
def pv(p, v, v_rest, o, o_rest, dtype: tl.constexpr, REST: tl.constexpr):
    """O += P V in ``dtype``: P rounded to it once, times 2^8 where it is e4m3."""
    if dtype == tl.float8e4nv:
        p = p * TO_FP8
    p = p.to(dtype)
    o = tl.dot(p, v.to(dtype), o, input_precision="ieee")
    if REST:
        o_rest = tl.dot(p, v_rest.to(dtype), o_rest, input_precision="ieee")
    else:
        o_rest = o
    return o, o_rest


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, valid_ptr, bias_ptr, sinks_ptr, slopes_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr,
    scale_log2, o_scale, softcap, batches, row_tiles, pack, group, max_q, max_k, left, right, chunk,
    bias_rows, bias_keys,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch,
    o_batch, o_token, o_head, lse_batch, lse_token, lse_head, bias_batch, bias_head, bias_row, bias_key, slopes_batch,
    q_scale_head, k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, PAGE: tl.constexpr, BOUNDED: tl.constexpr, CHUNKED: tl.constexpr,
    VALID: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, P_FP8: tl.constexpr, BASE2: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see."""
    #: setup -> q, q_rest, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    if UNIT > 1:
        q_batch, q_token, q_head = q_batch * UNIT, q_token * UNIT, q_head * UNIT
        k_page, k_token, k_head = k_page * UNIT, k_token * UNIT, k_head * UNIT
        v_page, v_token, v_head = v_page * UNIT, v_token * UNIT, v_head * UNIT
        o_batch, o_token, o_head = o_batch * UNIT, o_token * UNIT, o_head * UNIT
    tile = row_tiles - 1 - tl.program_id(0) // batches
    batch = (tl.program_id(0) % batches).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)  # [BM], token-major
    token = row // pack
    head = (tl.program_id(1) * pack + row % pack).to(tl.int64)
    kv_head = (tl.program_id(1) * pack // group).to(tl.int64)
    q_first = tl.zeros([], tl.int64)
    num_q = max_q
    if RAGGED_Q:
        q_first = tl.load(cu_q_ptr + batch).to(tl.int64)
        num_q = (tl.load(cu_q_ptr + batch + 1) - tl.load(cu_q_ptr + batch)).to(tl.int32)
    k_first = tl.zeros([], tl.int64)
    num_keys = max_k
    if RAGGED_K:
        k_first = tl.load(cu_k_ptr + batch).to(tl.int64)
        num_keys = (tl.load(cu_k_ptr + batch + 1) - tl.load(cu_k_ptr + batch)).to(tl.int32)
    if PAGE:
        num_keys = key_count(tl.load(lens_ptr + batch), max_k)
    end = visible_end(num_keys, valid_ptr, batch, VALID)
    is_row = token < num_q
    position = token + num_keys - num_q
    first, limit = key_range(position, end, left, right, chunk, CHUNKED)  # [BM], the keys that a row sees
    top = tile * BM // pack + num_keys - num_q  # positions of the tile's rows
    bottom = tl.minimum((tile * BM + BM - 1) // pack, num_q - 1) + num_keys - num_q
    lo, every = key_range(top, end, left, right, chunk, CHUNKED)
    if not BOUNDED:
        lo = lo // BN * BN  # it is 0; that it is a multiple of BN tells the compiler which keys share a page
    _, hi = key_range(bottom, end, left, right, chunk, CHUNKED)
    hi = tl.where(bottom < top, lo, tl.maximum(hi, lo))
    full = tl.maximum(tl.minimum(every // BN * BN, hi), lo)
    if BOUNDED:
        full = lo
    d = tl.arange(0, D0)
    q_row = q_ptr + (batch * q_batch + (q_first + token) * q_token + head * q_head)[:, None]
    q = tl.load(q_row + d[None, :], mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, D0]
    q_rest = q
    if D1:
        d = D0 + tl.arange(0, D1)
        q_rest = tl.load(q_row + d[None, :], mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, D1]
    k_base, v_base, pages = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, table_ptr + batch * table_batch
    k_scales, v_scales = k_scale_ptr + kv_head * k_scale_head, v_scale_ptr + kv_head * v_scale_head
    scale_log2 = scale_log2 * head_scale(q_scale_ptr, kv_head, q_scale_head, Q_SCALE == "head")
    scale_log2 = scale_log2 * head_scale(k_scale_ptr, kv_head, k_scale_head, K_SCALE == "head")
    dtype: tl.constexpr = tl.float8e4nv if P_FP8 else tl.bfloat16 if q.dtype == tl.float8e4nv else q.dtype
    slope = head
    bias_at = head
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * slopes_batch + head)
    if BIAS:
        bias_at = batch * bias_batch + head * bias_head
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        m, l = sink_alone(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E)
    o = tl.zeros([BM, V0], tl.float32)
    o_rest = tl.zeros([BM, V1 if V1 else V0], tl.float32)
    for start in range(lo, full, BN):
        #: load_k -> k, k_rest    a K tile that every row sees, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        k = load_tile(k_base, pages, batch, k_first, key, full, k_page, k_token, PAGE, 0, D0, D, False)
        k_rest = k
        if D1:
            k_rest = load_tile(k_base, pages, batch, k_first, key, full, k_page, k_token, PAGE, D0, D1, D, False)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = qk(q, q_rest, k, k_rest, scale_log2, D1 > 0)  # [BM, BN]
        if K_SCALE == "token":
            s = by_token(s, k_scales, pages, batch, k_first, key, full, k_scale_page, k_scale_token, PAGE, False)
        if CAPPED:
            s = cap(s, softcap)
        if ALIBI:
            s = distance(s, slope, position, key)
        #: softmax -> p, m, l, o, o_rest    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o, o_rest = online(s, m, l, o, o_rest, V1 > 0)
        if V_SCALE == "token":
            p = by_token(p, v_scales, pages, batch, k_first, key, full, v_scale_page, v_scale_token, PAGE, False)
        #: load_v -> v, v_rest    the V tile of the same keys
        v = load_tile(v_base, pages, batch, k_first, key, full, v_page, v_token, PAGE, 0, V0, DV, False)
        v_rest = v
        if V1:
            v_rest = load_tile(v_base, pages, batch, k_first, key, full, v_page, v_token, PAGE, V0, V1, DV, False)
        #: accumulate -> o, o_rest    O += P V, P rounded once
        o, o_rest = pv(p, v, v_rest, o, o_rest, dtype, V1 > 0)
    for start in range(full, hi, BN):
        #: load_k -> k, k_rest    a K tile that some rows see in part
        key = start + tl.arange(0, BN)
        k = load_tile(k_base, pages, batch, k_first, key, hi, k_page, k_token, PAGE, 0, D0, D, True)
        k_rest = k
        if D1:
            k_rest = load_tile(k_base, pages, batch, k_first, key, hi, k_page, k_token, PAGE, D0, D1, D, True)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = qk(q, q_rest, k, k_rest, scale_log2, D1 > 0)  # [BM, BN]
        if K_SCALE == "token":
            s = by_token(s, k_scales, pages, batch, k_first, key, hi, k_scale_page, k_scale_token, PAGE, True)
        if CAPPED:
            s = cap(s, softcap)
        if ALIBI:
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see; the bias of those that it sees
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
        if BIAS:
            s, visible = add_bias(
                s, visible, bias_ptr, bias_at, token, key, bias_rows, bias_keys, bias_row, bias_key
            )  # fmt: skip
        s = tl.where(visible, s, -float("inf"))
        #: softmax -> p, m, l, o, o_rest    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o, o_rest = online(s, m, l, o, o_rest, V1 > 0)
        if V_SCALE == "token":
            p = by_token(p, v_scales, pages, batch, k_first, key, hi, v_scale_page, v_scale_token, PAGE, True)
        #: load_v -> v, v_rest    the V tile of the same keys
        v = load_tile(v_base, pages, batch, k_first, key, hi, v_page, v_token, PAGE, 0, V0, DV, True)
        v_rest = v
        if V1:
            v_rest = load_tile(v_base, pages, batch, k_first, key, hi, v_page, v_token, PAGE, V0, V1, DV, True)
        #: accumulate -> o, o_rest    O += P V, P rounded once
        o, o_rest = pv(p, v, v_rest, o, o_rest, dtype, V1 > 0)
    #: normalise -> o, o_rest, lse    rows without a sum have seen no key: 0 and -inf; with a sink, its logit
    sees = l != 0
    if not SINKS:
        sees = sees & (first < limit)  # known before the loops: ptxas then spills nothing
    l = tl.where(sees, l, 1.0)
    factor = o_scale * head_scale(v_scale_ptr, kv_head, v_scale_head, V_SCALE == "head") / l
    o = tl.where(sees[:, None], o * factor[:, None], 0.0)
    if V1:
        o_rest = tl.where(sees[:, None], o_rest * factor[:, None], 0.0)
    else:
        o_rest = o
    lse = tl.where(sees, m + tl.math.log2(l), -float("inf"))
    if not BASE2:
        lse = lse * LN2
    #: store    the rows of this sequence
    o_row = o_ptr + (batch * o_batch + (q_first + token) * o_token + head * o_head)[:, None]
    d = tl.arange(0, V0)
    tl.store(o_row + d[None, :], o.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & (d[None, :] < DV))
    if V1:
        d = V0 + tl.arange(0, V1)
        tl.store(o_row + d[None, :], o_rest.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & (d[None, :] < DV))
    lse_rows = lse_ptr + batch * lse_batch + q_first * lse_token
    tl.store(lse_rows + token.to(tl.int64) * lse_token + head * lse_head, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    scale: float,
    problem: PrefillProblem,
    config: PrefillConfig,
    features: Features,
    base2: bool = False,
    out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``: out ``[.., Hq, Dv]`` of q's dtype (bfloat16 for e4m3) and lse
    ``[.., Hq]`` float32. The arguments are valid.
    """
    batch, tokens, heads, _ = q.shape
    out, lse = results(q, out, (batch, tokens, heads, v.shape[3]))
    if out.numel() == 0:
        return out, lse
    ragged_q, ragged_k, paged = cu_q is not None, cu_k is not None, table is not None
    mask, scales = features.mask, features.scales
    absent = q  # stands for a pointer that is not followed
    arrays = cu_q, cu_k, table, seq_lens, mask.valid, mask.bias, features.sinks, features.slopes
    by_scale = scales.q.array, scales.k.array, scales.v.array
    pointers = q, k, v, *(absent if x is None else x for x in (*arrays, *by_scale)), out, lse
    if not relaunched(attend, pointers, again):
        bias_sizes, bias_strides = bias_arguments(mask.bias)
        max_k = k.shape[1] if table is None else most_keys(table.shape[1], k.shape[1])
        both = (q, ragged_q), (k, ragged_k), (v, ragged_k), (out, ragged_q)
        unit, (of_q, of_k, of_v, of_out) = in_units(*(_strides(x, 3, ragged) for x, ragged in both))
        first_launch(attend, config.grid(problem), pointers, again)(
            scale * scales.q.number * scales.k.number * LOG2E, scales.v.number / (P_SCALE if problem.p_fp8 else 1),
            features.softcap, problem.batch, config.row_tiles, config.pack, problem.group, q.shape[1],
            max_k, mask.left, mask.right, mask.chunk, *bias_sizes,
            *of_q, *of_k, *of_v, *_strides(table, 1), *of_out, *_strides(lse, 3, ragged_q), *bias_strides,
            slopes_batch(features.slopes), *_strides(scales.q.heads, 1),
            *_scale_strides(scales.k, ragged_k), *_scale_strides(scales.v, ragged_k),
            RAGGED_Q=ragged_q, RAGGED_K=ragged_k, PAGE=k.shape[1] if paged else 0, BOUNDED=mask.bounded,
            CHUNKED=mask.chunk > 0, VALID=mask.valid is not None, BIAS=mask.bias is not None,
            CAPPED=features.softcap > 0, SINKS=features.sinks is not None, ALIBI=features.slopes is not None,
            Q_SCALE=scales.q.kind, K_SCALE=scales.k.kind, V_SCALE=scales.v.kind, P_FP8=problem.p_fp8, BASE2=base2,
            D=q.shape[3], D0=config.D0, D1=config.D1, DV=v.shape[3], V0=config.V0, V1=config.V1,
            BM=config.BM, BN=config.BN, UNIT=unit, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse


def _strides(array: torch.Tensor | None, axes: int, ragged: bool = False) -> list[int]:
    """Strides of the leading axes; 0 for the first of ragged arrays."""
    if array is None:
        return [0] * axes
    steps = list(array.stride()[:axes])
    return [0, *steps[1:]] if ragged else steps


def _scale_strides(scale: Scale, ragged: bool) -> tuple[int, ...]:
    """Strides (page or sequence, token, head) of the scales of tokens or heads; 0 for the first of ragged ones."""
    steps = scale_strides(scale, 3)
    return (0, *steps[1:]) if ragged else steps
