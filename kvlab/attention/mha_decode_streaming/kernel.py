"""Streaming MHA decode as a portable Triton kernel: one buffer, K strip by strip, nothing fetched ahead."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays
from kvlab.attention.features.kernel import (
    adjust,
    head_scale,
    hide,
    in_pages,
    key_scales,
    log_sum,
    packed_rows,
    row_terms,
    scale_weights,
    split_keys,
    start_rows,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results
from kvlab.attention.mha_decode.config import problem_of
from kvlab.attention.mha_decode.kernel import launch_first
from kvlab.attention.tiles.kernel import load_columns, store_columns
from kvlab.triton_support.launching import Again, relaunched

from .config import StreamingConfig

load_q_strip = load_k_strip = load_v = load_columns


class StreamingConstants(NamedTuple):
    """Constants that the kernel is compiled for; UNIT as of MHA decode."""

    PAGE: int
    D: int
    BD: int
    BM: int
    BN: int
    BK: int
    BOUNDED: bool
    UNIT: int


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
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, features, o_ptr, lse_ptr, scale_log2, v_factor, numbers, problem,
    q_strides, k_strides, v_strides, o_strides, lse_strides, C: tl.constexpr,
):
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence. Products are in q's
    dtype, in bfloat16 for e4m3.
    """
    #: setup -> lo, hi, first, limit    this program's rows, the keys they see, its split of them
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    BK: tl.constexpr = C.BK
    D: tl.constexpr = C.D
    BD: tl.constexpr = C.BD
    batch, program, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    _, kv_head, token, head, is_row = packed_rows(program, problem, BM)
    position, lo, hi, first, limit, pad = split_keys(
        seq_lens_ptr, features, numbers, batch, token, split, problem, BN, C.BOUNDED
    )
    rows = batch, head, token, is_row, first, limit
    q_at = batch * q_strides.batch + token.to(tl.int64) * q_strides.token + head * q_strides.head  #- address
    dtype: tl.constexpr = tl.bfloat16 if q_ptr.dtype.element_ty == tl.float8e4nv else q_ptr.dtype.element_ty  #- launch
    factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
    m, l = start_rows(features.sinks, head, split == 0)
    o = tl.zeros([BM, BD], tl.float32)
    for start in range(lo, hi, BN):
        #: tile -> s    the pages of these keys; no score yet
        key = start + tl.arange(0, BN)
        exists = key < hi
        page, slot = in_pages(table_ptr + batch * problem.table_batch, key + pad, exists, C.PAGE)
        s = tl.zeros([BM, BN], tl.float32)
        for strip in range(0, D, BK):
            #: load_k -> k    BK columns of the keys, DRAM -> the one buffer of K
            k = load_k_strip(
                k_ptr + kv_head * k_strides.head * C.UNIT, (page * k_strides.page + slot * k_strides.token) * C.UNIT,
                exists, strip, D, BK, False,
            )
            #: scores -> s    S += Q K^T over these columns, float32
            q = load_q_strip(q_ptr, q_at * C.UNIT, is_row, strip, D, BK, False)
            s = add_scores(q, k, s, dtype)
        #: scale -> s    in units of log2; the features of scores
        scale = key_scales(features, numbers, page, slot, kv_head, exists)
        s = adjust(s, factor, slope, scale, features, numbers, position, key)
        #: mask -> s    keys that a row does not see
        s = hide(s, rows, key, features, numbers, C.BOUNDED)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, alpha, m, l = weigh(s, m, l)
        o = o * alpha[:, None]
        #: load_v -> v    the V tile of the same pages; the machine brings BK keys at a time
        v = load_v(
            v_ptr + kv_head * v_strides.head * C.UNIT, (page * v_strides.page + slot * v_strides.token) * C.UNIT,
            exists, 0, D, BD, False,
        )  # [BN, BD]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        p = scale_weights(p, features, numbers, page, slot, kv_head, exists)
        o = accumulate(p, v, o, dtype)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    factor = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
    lse = log_sum(m, l, sees)
    o = tl.where(sees[:, None], o * (factor / l)[:, None], 0.0)
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (problem.num_splits == 1))
    split = split.to(tl.int64)
    store_columns(
        o_ptr, (split * o_strides.split + batch * o_strides.batch + token.to(tl.int64) * o_strides.token
        + head * o_strides.head) * C.UNIT, writes_o, 0, D, o,
    )
    lse_at = split * lse_strides.split + batch * lse_strides.batch + token * lse_strides.token  #- address
    tl.store(lse_ptr + lse_at + head * lse_strides.head, lse, mask=is_row)


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    *, scale: float, config: StreamingConfig, features: Features | None = None, out: torch.Tensor | None = None,
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
    pointers = q, k_cache, v_cache, block_table, seq_lens, feature_arrays(f), part, part_lse
    if not relaunched(attend, pointers, again):
        problem = problem_of(q, k_cache, v_cache, block_table)
        constants = functools.partial(
            StreamingConstants, problem.page_size, problem.head_dim, config.BD, config.BM, config.BN, config.BK,
            f.mask.windowed,
        )
        launch_first(attend, pointers, again, problem, config, f, scale, constants)
    if config.num_splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
