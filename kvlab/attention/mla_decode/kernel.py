"""MLA decode as a portable Triton kernel: paged latent cache, packed heads, K tile reused as V, split keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.resolve import Features
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
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
from kvlab.attention.scoring.launch import bias_arguments, slopes_batch
from kvlab.attention.tiles.online_softmax import LOG2E as _LOG2E
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import MLADecodeConfig, MLADecodeProblem

LN2 = tl.constexpr(0.6931471805599453)
KV_HEAD = tl.constexpr(0)  # the only one


@triton.jit
def load_columns(rows_at, exists, D: tl.constexpr, BD: tl.constexpr):
    """D columns of the rows at pointers ``rows_at``, padded to BD with 0; 0 for rows that do not exist."""
    d = tl.arange(0, BD)[None, :]
    inside = exists[:, None] if D == BD else exists[:, None] & (d < D)
    return tl.load(rows_at[:, None] + d, mask=inside, other=0.0)


@triton.jit
def load_q(q_at, is_row, DV: tl.constexpr, DR: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr):
    """Latent and rope columns of query rows, ``[BM, BV]`` and ``[BM, BR]``; e4m3 as bfloat16."""
    q, q_rope = load_columns(q_at, is_row, DV, BV), load_columns(q_at + DV, is_row, DR, BR)
    if q.dtype == tl.float8e4nv:
        q, q_rope = q.to(tl.bfloat16), q_rope.to(tl.bfloat16)
    return q, q_rope


@triton.jit
def place(table_ptr, start, key, exists, PAGE: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr):
    """(page, slot) of the keys of a tile. ``ONE``: they are all in one page, whose number is read once."""
    page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
    slot = (key % PAGE).to(tl.int64)
    if ONE:  #- address
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        slot = (start % PAGE + tl.arange(0, BN)).to(tl.int64)
    return page, slot


@triton.jit
def load_k(
    kv_ptr, rope_ptr, table_ptr, start, hi, kv_page, kv_token, rope_page, rope_token, dtype: tl.constexpr,
    PAGE: tl.constexpr, ONE: tl.constexpr, BN: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, BV: tl.constexpr,
    BR: tl.constexpr,
):
    """Latent and rope columns of the keys from ``start`` on, ``[BN, BV]`` and ``[BN, BR]`` in ``dtype``."""
    key = start + tl.arange(0, BN)
    page, slot = place(table_ptr, start, key, key < hi, PAGE, BN, ONE)
    k = load_columns(kv_ptr + (page * kv_page + slot * kv_token), key < hi, DV, BV).to(dtype)
    k_rope = load_columns(rope_ptr + (page * rope_page + slot * rope_token), key < hi, DR, BR).to(dtype)
    return k, k_rope


@triton.jit
def scores(q, q_rope, k, k_rope, by_key):
    """S = Q K^T in float32: the latent columns, times ``by_key`` unless that is None, then the rope columns."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if by_key is not None:
        s = s * by_key
    return tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")


@triton.jit
def load_v(k):
    """V: the latent part of the K tile, where it stands."""
    return k


@triton.jit
def accumulate(p, v, o):
    """O += P V, P in V's dtype."""
    return tl.dot(p.to(v.dtype), v, o, input_precision="ieee")


@triton.jit
def attend(
    q_ptr, kv_ptr, rope_ptr, table_ptr, seq_lens_ptr, sinks_ptr, slopes_ptr, valid_ptr, bias_ptr, scales_ptr,
    q_scale_ptr,
    o_ptr, lse_ptr,
    scale_log2, kv_number, softcap, heads, tokens, num_splits, max_keys, left, right, chunk,
    bias_rows, bias_keys,
    q_batch, q_token, q_head, kv_page, kv_token, rope_page, rope_token, table_batch, lens_batch, slopes_batch,
    bias_batch, bias_head, bias_row, bias_key, scales_page, scales_token,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    PAGE: tl.constexpr, ONE: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
    VALID: tl.constexpr, BOUNDED: tl.constexpr, CHUNKED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    ROPE_SCALED: tl.constexpr, Q_SCALE: tl.constexpr,
):
    """BM query rows (tokens x heads) against the keys of one split of one sequence. Products are in q's dtype, in
    bfloat16 for e4m3.
    """
    #: setup -> q, q_rope, lo, hi, first, limit    this program's rows, its split of the keys, the query tile
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(heads * tokens, BM)
    batch = (tile // row_tiles).to(tl.int64)
    row = (tile % row_tiles) * BM + tl.arange(0, BM)  # [BM], token-major
    num_keys = key_count(tl.load(seq_lens_ptr + batch * lens_batch), max_keys)
    end = visible_end(num_keys, valid_ptr, batch, VALID)
    token = row // heads
    head = row % heads
    is_row = row < heads * tokens
    position = num_keys - tokens + token
    first, limit = key_range(position, end, left, right, chunk, CHUNKED)
    seen, _ = key_range(num_keys - tokens, end, left, right, chunk, CHUNKED)
    _, stop = key_range(num_keys - 1, end, left, right, chunk, CHUNKED)
    seen = tl.where(BOUNDED, seen, 0)  # keys [seen, stop) are those that some row sees
    stop = tl.maximum(stop, seen)
    size = tl.cdiv(tl.cdiv(stop - seen, num_splits), BN) * BN
    lo = tl.minimum(seen + split * size, stop)
    hi = tl.minimum(lo + size, stop)
    limit = tl.minimum(limit, hi)  # [BM], first key after first that a row does not see
    q_at = q_ptr + batch * q_batch + token.to(tl.int64) * q_token + head.to(tl.int64) * q_head  #- address
    q, q_rope = load_q(q_at, is_row, DV, DR, BV, BR)  # [BM, BV], [BM, BR]
    scale_log2 = scale_log2 * head_scale(q_scale_ptr, KV_HEAD, 1, Q_SCALE)
    kv_scale = kv_number * head_scale(scales_ptr, KV_HEAD, 1, SCALE == "head")
    unit = scale_log2 * kv_scale if ROPE_SCALED and (SCALE == "number" or SCALE == "head") else scale_log2
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        sink, one = sink_alone(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
        m = tl.where(split == 0, sink, m)
        l = tl.where(split == 0, one, l)
    if SLOPES:
        slope = tl.load(slopes_ptr + batch * slopes_batch + head)
    o = tl.zeros([BM, BV], tl.float32)
    for start in range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        by_key = kv_scale
        if SCALE == "token":
            page, slot = place(table_ptr + batch * table_batch, start, key, key < hi, PAGE, BN, ONE)
            by_key = kv_scale * token_scale(scales_ptr, page * scales_page + slot * scales_token, key < hi)[None, :]
        k, k_rope = load_k(
            kv_ptr, rope_ptr, table_ptr + batch * table_batch, start, hi, kv_page, kv_token, rope_page, rope_token,
            q.dtype, PAGE, ONE, BN, DV, DR, BV, BR,
        )
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = scores(q, q_rope, k, k_rope, by_key if SCALE != "none" and not ROPE_SCALED else None)  # [BM, BN]
        s = s * unit
        if SCALE == "token" and ROPE_SCALED:
            s = s * by_key
        if CAPPED:
            s = cap(s, softcap)
        if SLOPES:
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see
        visible = key[None, :] < limit[:, None]
        if BOUNDED:
            visible = visible & (key[None, :] >= first[:, None])
        if BIAS:
            bias_at = batch * bias_batch + head.to(tl.int64) * bias_head  #- address
            s, visible = add_bias(s, visible, bias_ptr, bias_at, token, key, bias_rows, bias_keys, bias_row, bias_key)
        s = tl.where(visible, s, -float("inf"))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        if SCALE == "token":
            p = p * by_key
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = load_v(k)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        o = accumulate(p, v, o)
    #: normalise -> o, lse    a row whose sum is empty saw no key: 0 and -inf
    sees = l != 0
    l = tl.where(sees, l, 1.0)
    o = o / l[:, None]
    if SCALE == "number" or SCALE == "head":
        o = o * kv_scale
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    d = tl.arange(0, BV)
    part = split.to(tl.int64)
    o_mask = writes_o[:, None] & (d[None, :] < DV)
    tl.store(
        o_ptr + (part * o_split + batch * o_batch + token.to(tl.int64) * o_token + head.to(tl.int64) * o_head)[:, None]
        + d[None, :], o.to(o_ptr.dtype.element_ty), mask=o_mask,
    )
    tl.store(
        lse_ptr + part * lse_split + batch * lse_batch + token.to(tl.int64) * lse_token + head.to(tl.int64) * lse_head,
        lse, mask=is_row,
    )


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    k_rope: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    features: Features,
    config: MLADecodeConfig,
    out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, H, v_dim]`` of q's dtype and lse ``[B, S, H]`` float32. The arguments are valid.

    q ``[B, S, H, v_dim + rope]``; the windows of the cache, kv_cache ``[pages, page_size, v_dim]`` and k_rope.
    """
    batch, tokens, heads, _ = q.shape
    out, lse = results(q, out, (batch, tokens, heads, kv_cache.shape[2]))
    if q.numel() == 0:
        return out, lse
    splits = config.num_splits
    part, part_lse = partial_results(out, lse, splits)
    mask, by, q_by = features.mask, features.scales.k, features.scales.q
    absent = q  # stands for a pointer that is not followed
    given = (features.sinks, features.slopes, mask.valid, mask.bias, by.array, q_by.array)
    arrays = (absent if x is None else x for x in given)
    pointers = q, kv_cache, k_rope, block_table, seq_lens, *arrays, part, part_lse
    if not relaunched(attend, pointers, again):
        problem = MLADecodeProblem.of(q, kv_cache, k_rope, block_table)
        kind = by.kind if problem.fp8 else "none"
        bias_sizes, bias_strides = bias_arguments(mask.bias)
        steps, lse_steps = partial_strides(part, part_lse, splits)
        first_launch(attend, config.grid(problem), pointers, again)(
            scale * _LOG2E * q_by.number, by.number, features.softcap, heads, tokens, splits,
            problem.max_keys, mask.left, mask.right, mask.chunk, *bias_sizes,
            *q.stride()[:3], *kv_cache.stride()[:2], *k_rope.stride()[:2], block_table.stride(0), seq_lens.stride(0),
            slopes_batch(features.slopes), *bias_strides,
            *(by.tokens.stride()[:2] if kind == "token" else (0, 0)),
            *steps, *lse_steps,
            PAGE=problem.page_size, ONE=config.one_page and not mask.windowed, DV=problem.latent, DR=problem.rope,
            BV=config.BV, BR=config.BR, BM=config.BM, BN=config.BN, CAPPED=features.softcap > 0,
            SINKS=features.sinks is not None, SLOPES=features.slopes is not None, VALID=mask.valid is not None,
            BOUNDED=mask.windowed, CHUNKED=mask.chunk > 0, BIAS=mask.bias is not None, SCALE=kind,
            ROPE_SCALED=k_rope.dtype == kv_cache.dtype, Q_SCALE=q_by.array is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
    if splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
