"""Streaming MHA decode as a portable Triton kernel: one buffer, K strip by strip, nothing fetched ahead."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.resolve import Features
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results
from kvlab.attention.mha_decode.config import problem_of
from kvlab.attention.mha_decode.kernel import (
    LN2,
    followed,
    launch_first,
    load_columns,
    split_keys,
    start_rows,
    store_columns,
)
from kvlab.attention.scoring.kernel import (
    add_bias,
    cap,
    distance,
    head_scale,
    in_pages,
    key_count,
    token_scale,
    visible_end,
)
from kvlab.triton_support.launching import Again, relaunched

from .config import StreamingConfig

load_q_strip = load_k_strip = load_v = load_columns


@triton.jit
def add_scores(q, k, s, dtype: tl.constexpr):
    """S + Q K^T over the columns of a strip."""
    return tl.dot(q.to(dtype), tl.trans(k.to(dtype)), s, input_precision="ieee")


@triton.jit
def accumulate(p, v, o, dtype: tl.constexpr):
    """O + P V; P is rounded once to the dtype of the product."""
    return tl.dot(p.to(dtype), v.to(dtype), o, input_precision="ieee")


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, valid_ptr, bias_ptr, sinks_ptr, slopes_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr,
    scale_log2, v_factor, softcap, left, right, chunk, group, tokens, num_splits, max_keys,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch, seq_lens_batch,
    bias_batch, bias_head, bias_row, bias_key, bias_rows, bias_keys, slopes_batch, q_scale_head,
    k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BOUNDED: tl.constexpr, CHUNKED: tl.constexpr, VALID: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence. Products are in q's
    dtype, in bfloat16 for e4m3; K_SCALE and V_SCALE: "number", "head" or "token". UNIT as of MHA decode.
    """
    #: setup -> lo, hi, first, limit    this program's rows, the keys they see, its split of them
    batch, program, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row_tiles = tl.cdiv(group * tokens, BM)
    kv_head = (program // row_tiles).to(tl.int64)
    row = program % row_tiles * BM + tl.arange(0, BM)  # [BM], token-major
    num_keys = key_count(tl.load(seq_lens_ptr + batch * seq_lens_batch), max_keys)
    token = row // group
    head = kv_head * group + row % group
    is_row = row < group * tokens
    position = num_keys - tokens + token  # [BM]
    end = visible_end(num_keys, valid_ptr, batch, VALID)
    lo, hi, first, limit = split_keys(
        position, num_keys, tokens, end, split, num_splits, left, right, chunk, BN, BOUNDED, CHUNKED
    )
    q_at = (batch * q_batch + token.to(tl.int64) * q_token + head * q_head) * UNIT  #- address
    dtype: tl.constexpr = tl.bfloat16 if q_ptr.dtype.element_ty == tl.float8e4nv else q_ptr.dtype.element_ty  #- launch
    factor = scale_log2 * head_scale(q_scale_ptr, kv_head, q_scale_head, Q_SCALE)
    factor = factor * head_scale(k_scale_ptr, kv_head, k_scale_head, K_SCALE == "head")
    m, l = start_rows(sinks_ptr, head, split, BM, SINKS)
    o = tl.zeros([BM, BD], tl.float32)
    for start in range(lo, hi, BN):
        #: tile -> s    the pages of these keys; no score yet
        key = start + tl.arange(0, BN)
        exists = key < hi
        page, slot = in_pages(table_ptr + batch * table_batch, key, exists, PAGE)
        s = tl.zeros([BM, BN], tl.float32)
        for strip in range(0, D, BK):
            #: load_k -> k    BK columns of the keys, DRAM -> the one buffer of K
            k = load_k_strip(
                k_ptr + kv_head * k_head * UNIT, (page * k_page + slot * k_token) * UNIT, exists, strip, D, BK, False
            )
            #: scores -> s    S += Q K^T over these columns, float32
            q = load_q_strip(q_ptr, q_at, is_row, strip, D, BK, False)
            s = add_scores(q, k, s, dtype)
        #: scale -> s    in units of log2; scales, softcap, ALiBi
        s = s * factor
        if K_SCALE == "token":
            scale = token_scale(
                k_scale_ptr, page * k_scale_page + slot * k_scale_token + kv_head * k_scale_head, exists
            )
            s = s * scale[None, :]
        if CAPPED:
            s = cap(s, softcap)
        if SLOPES:
            slope = tl.load(slopes_ptr + batch * slopes_batch + head)
            s = distance(s, slope, position, key)
        #: mask -> s    keys that a row does not see
        visible = key[None, :] < limit[:, None]
        if BOUNDED:
            visible = visible & (key[None, :] >= first[:, None])
        if BIAS:
            visible = visible & is_row[:, None]
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
        o = o * alpha[:, None]
        m = m_new
        #: load_v -> v    the V tile of the same pages; the machine brings BK keys at a time
        v = load_v(
            v_ptr + kv_head * v_head * UNIT, (page * v_page + slot * v_token) * UNIT, exists, 0, D, BD, False
        )  # [BN, BD]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        if V_SCALE == "token":
            scale = token_scale(
                v_scale_ptr, page * v_scale_page + slot * v_scale_token + kv_head * v_scale_head, exists
            )
            p = p * scale[None, :]
        o = accumulate(p, v, o, dtype)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    factor = v_factor * head_scale(v_scale_ptr, kv_head, v_scale_head, V_SCALE == "head")
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    o = tl.where(sees[:, None], o * (factor / l)[:, None], 0.0)
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    split = split.to(tl.int64)
    store_columns(
        o_ptr, (split * o_split + batch * o_batch + token.to(tl.int64) * o_token + head * o_head) * UNIT, writes_o, 0,
        D, o,
    )
    tl.store(lse_ptr + split * lse_split + batch * lse_batch + token * lse_token + head * lse_head, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    config: StreamingConfig,
    features: Features | None = None,
    out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out of q's shape and dtype (bfloat16 for e4m3) and lse ``[B, S, Hq]`` float32. The arguments are
    valid.
    """
    f = Features() if features is None else features
    out, lse = results(q, out, q.shape)
    if q.numel() == 0:
        return out, lse
    part, part_lse = partial_results(out, lse, config.num_splits)
    pointers = q, k_cache, v_cache, block_table, seq_lens, *followed(f, q), part, part_lse
    if not relaunched(attend, pointers, again):
        problem = problem_of(q, k_cache, v_cache, block_table)
        launch_first(attend, pointers, again, problem, config, f, scale, D=problem.head_dim, BD=config.BD, BK=config.BK)
    if config.num_splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
