"""MHA prefill as a portable Triton kernel: dense, ragged or paged keys, full tiles first, then those with a mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.intervals import most_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import P_SCALE, Scale
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
from kvlab.attention.scoring.launch import bias_arguments, in_units, scale_strides, slopes_batch
from kvlab.attention.tiles.online_softmax import LOG2E as _LOG2E
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import PrefillConfig, PrefillProblem

LN2 = tl.constexpr(0.6931471805599453)
TO_FP8 = tl.constexpr(P_SCALE)


@triton.jit
def row_of(table_ptr, page, first, key, exists, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """(page, row in it) of keys: of the page that the table names, or of one piece whose first row is ``first``."""
    slot = first + key
    if PAGE:  #- address
        if MASKED:
            page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + key // PAGE).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
    return page, slot


@triton.jit
def row_count(starts_ptr, batch, most, RAGGED: tl.constexpr):
    """(first row, rows) of a sequence: those from its start to the next one's, or ``most`` of its own piece."""
    first = tl.zeros([], tl.int64)
    count = most
    if RAGGED:
        first = tl.load(starts_ptr + batch).to(tl.int64)
        count = (tl.load(starts_ptr + batch + 1) - tl.load(starts_ptr + batch)).to(tl.int32)
    return first, count


@triton.jit
def load_q(row_ptr, exists, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """The rows at ``row_ptr``, columns in pieces of D0 and of D1 (or none); 0 past D and for rows that do not exist."""
    d = tl.arange(0, D0)
    q = tl.load(row_ptr[:, None] + d[None, :], mask=exists[:, None] & (d[None, :] < D), other=0.0)
    if D1:
        d = D0 + tl.arange(0, D1)
        return q, tl.load(row_ptr[:, None] + d[None, :], mask=exists[:, None] & (d[None, :] < D), other=0.0)
    else:
        return (q,)


@triton.jit
def load_columns(
    at, key, end, FROM: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr
):
    """Columns ``FROM .. FROM + WIDTH`` of the keys of one KV head; past D they are 0."""
    ptr, page_stride, token_stride, batch, first, pages = at
    page, slot = row_of(pages, batch, first, key, key < end, PAGE, MASKED)
    d = FROM + tl.arange(0, WIDTH)
    if PAGE:
        page = page[:, None]
    offset = page * page_stride + slot[:, None] * token_stride + d[None, :]
    if MASKED:
        return tl.load(ptr + offset, mask=(key < end)[:, None] & (d[None, :] < D), other=0.0)
    if FROM + WIDTH <= D:
        return tl.load(ptr + offset)
    return tl.load(ptr + offset, mask=d[None, :] < D, other=0.0)


@triton.jit
def load_tile(
    at, key, end, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr
):
    """The keys of one KV head, columns in pieces of D0 and of D1 (or none)."""
    tile = load_columns(at, key, end, 0, D0, D, PAGE, MASKED)
    if D1:
        return tile, load_columns(at, key, end, D0, D1, D, PAGE, MASKED)
    else:
        return (tile,)


@triton.jit
def key_scales(scales, at, key, end, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """The scales of keys, which stand as the rows ``at`` do."""
    ptr, page_stride, token_stride = scales  #- address
    _, _, _, batch, first, pages = at  #- address
    page, slot = row_of(pages, batch, first, key, key < end, PAGE, MASKED)
    return token_scale(ptr, page * page_stride + slot * token_stride, key < end)


@triton.jit
def scores(q, k):
    """Q K^T, the products of the pieces added up; K in q's dtype."""
    s = tl.dot(q[0], tl.trans(k[0].to(q[0].dtype)), input_precision="ieee")
    if len(q) > 1:
        s = tl.dot(q[1], tl.trans(k[1].to(q[1].dtype)), s, input_precision="ieee")
    return s


@triton.jit
def zeros(BM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    """The output accumulators."""
    if V1:
        return tl.zeros([BM, V0], tl.float32), tl.zeros([BM, V1], tl.float32)
    else:
        return (tl.zeros([BM, V0], tl.float32),)


@triton.jit
def rescale(o, alpha):
    """Rows of the pieces times ``alpha``."""
    if len(o) > 1:
        return o[0] * alpha[:, None], o[1] * alpha[:, None]
    else:
        return (o[0] * alpha[:, None],)


@triton.jit
def accumulate(p, v, o, dtype: tl.constexpr):
    """O + P V in ``dtype``: P rounded to it once, times 2^8 where it is e4m3."""
    if dtype == tl.float8e4nv:
        p = p * TO_FP8
    p = p.to(dtype)
    added = tl.dot(p, v[0].to(dtype), o[0], input_precision="ieee")
    if len(o) > 1:
        return added, tl.dot(p, v[1].to(dtype), o[1], input_precision="ieee")
    else:
        return (added,)


@triton.jit
def normalised(o, sees, factor):
    """Rows of the pieces times ``factor``; 0 where a row sees nothing."""
    final = tl.where(sees[:, None], o[0] * factor[:, None], 0.0)
    if len(o) > 1:
        return final, tl.where(sees[:, None], o[1] * factor[:, None], 0.0)
    else:
        return (final,)


@triton.jit
def store_rows(row_ptr, o, exists, DV: tl.constexpr):
    """The first DV columns of the pieces to the rows at ``row_ptr`` that exist."""
    d = tl.arange(0, o[0].shape[1])
    inside = exists[:, None] & (d[None, :] < DV)
    tl.store(row_ptr[:, None] + d[None, :], o[0].to(row_ptr.dtype.element_ty), mask=inside)
    if len(o) > 1:
        d = o[0].shape[1] + tl.arange(0, o[1].shape[1])
        inside = exists[:, None] & (d[None, :] < DV)
        tl.store(row_ptr[:, None] + d[None, :], o[1].to(row_ptr.dtype.element_ty), mask=inside)


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
):
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see."""
    #: setup -> q, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    tile_and_batch, heads = tl.program_id(0), tl.program_id(1)
    tile = row_tiles - 1 - tile_and_batch // batches
    batch = (tile_and_batch % batches).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)  # [BM], token-major
    token = row // pack
    head = (heads * pack + row % pack).to(tl.int64)
    kv_head = (heads * pack // group).to(tl.int64)
    q_first, num_q = row_count(cu_q_ptr, batch, max_q, RAGGED_Q)
    k_first, num_keys = row_count(cu_k_ptr, batch, max_k, RAGGED_K)
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
    q_dtype: tl.constexpr = q_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float8e4nv if P_FP8 else tl.bfloat16 if q_dtype == tl.float8e4nv else q_dtype
    q_row = q_first + token
    q = load_q(q_ptr + (batch * q_batch + q_row * q_token + head * q_head) * UNIT, is_row, D, D0, D1)
    pages = table_ptr + batch * table_batch  #- address
    k_at = k_ptr + kv_head * k_head * UNIT, k_page * UNIT, k_token * UNIT, batch, k_first, pages
    v_at = v_ptr + kv_head * v_head * UNIT, v_page * UNIT, v_token * UNIT, batch, k_first, pages
    k_scales = k_scale_ptr + kv_head * k_scale_head, k_scale_page, k_scale_token
    v_scales = v_scale_ptr + kv_head * v_scale_head, v_scale_page, v_scale_token
    scale_log2 = scale_log2 * head_scale(q_scale_ptr, kv_head, q_scale_head, Q_SCALE == "head")
    scale_log2 = scale_log2 * head_scale(k_scale_ptr, kv_head, k_scale_head, K_SCALE == "head")
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * slopes_batch + head)
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        m, l = sink_alone(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
    o = zeros(BM, V0, V1)
    for start in range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        k = load_tile(k_at, key, full, D, D0, D1, PAGE, False)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = scores(q, k) * scale_log2  # [BM, BN]
        if K_SCALE == "token":
            s = s * key_scales(k_scales, k_at, key, full, PAGE, False)[None, :]
        if CAPPED:
            s = cap(s, softcap)
        if ALIBI:
            s = distance(s, slope, position, key)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = rescale(o, alpha)
        m = m_new
        if V_SCALE == "token":
            p = p * key_scales(v_scales, v_at, key, full, PAGE, False)[None, :]
        #: load_v -> v    the V tile of the same keys
        v = load_tile(v_at, key, full, DV, V0, V1, PAGE, False)
        #: accumulate -> o    O += P V, P rounded once
        o = accumulate(p, v, o, dtype)
    for start in range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        key = start + tl.arange(0, BN)
        k = load_tile(k_at, key, hi, D, D0, D1, PAGE, True)
        #: scores -> s    S = Q K^T in float32, in units of log2; scales of tokens, softcap, ALiBi
        s = scores(q, k) * scale_log2
        if K_SCALE == "token":
            s = s * key_scales(k_scales, k_at, key, hi, PAGE, True)[None, :]
        if CAPPED:
            s = cap(s, softcap)
        if ALIBI:
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see; the bias of those that it sees
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
        if BIAS:
            s, visible = add_bias(
                s, visible, bias_ptr, batch * bias_batch + head * bias_head, token, key, bias_rows, bias_keys,
                bias_row, bias_key,
            )
        s = tl.where(visible, s, -float("inf"))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = rescale(o, alpha)
        m = m_new
        if V_SCALE == "token":
            p = p * key_scales(v_scales, v_at, key, hi, PAGE, True)[None, :]
        #: load_v -> v    the V tile of the same keys
        v = load_tile(v_at, key, hi, DV, V0, V1, PAGE, True)
        #: accumulate -> o    O += P V, P rounded once
        o = accumulate(p, v, o, dtype)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf; with a sink, its logit
    sees = l != 0
    if not SINKS:
        sees = sees & (first < limit)  # known before the loops: ptxas then spills nothing
    l = tl.where(sees, l, 1.0)
    factor = o_scale * head_scale(v_scale_ptr, kv_head, v_scale_head, V_SCALE == "head") / l
    o = normalised(o, sees, factor)
    lse = tl.where(sees, m + tl.math.log2(l), -float("inf"))
    if not BASE2:
        lse = lse * LN2
    #: store    the rows of this sequence
    store_rows(o_ptr + (batch * o_batch + q_row * o_token + head * o_head) * UNIT, o, is_row, DV)
    tl.store(lse_ptr + batch * lse_batch + q_row * lse_token + head * lse_head, lse, mask=is_row)


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
            scale * scales.q.number * scales.k.number * _LOG2E, scales.v.number / (P_SCALE if problem.p_fp8 else 1),
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
        )
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
