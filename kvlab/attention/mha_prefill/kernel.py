"""MHA prefill as a portable Triton kernel: dense, ragged or paged keys, full tiles first, then those with a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.kernel import (
    adjust,
    given_positions,
    head_scale,
    hide,
    key_count,
    key_range,
    key_scales,
    padding,
    row_count,
    row_of,
    row_terms,
    scale_weights,
    start_rows,
    visible_end,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import P_SCALE
from kvlab.attention.tiles.kernel import load_tile, normalise, rescale, store_rows, zeros
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.pages import DENSE, Sequences
from kvlab.attention.tiles.strides import PageStrides, RowStrides, in_units, leading_strides
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import PrefillConfig, PrefillProblem

LN2 = tl.constexpr(0.6931471805599453)
TO_FP8 = tl.constexpr(P_SCALE)
load_q = load_k = load_v = load_tile


class PrefillSizes(NamedTuple):
    """Sizes of a launch: sequences, tiles of rows, query heads of a tile and of a KV head, most new tokens and
    keys of a sequence; the stride of the table's rows.
    """

    batch: int
    row_tiles: int
    pack: int
    group: int
    max_q: int
    max_k: int
    table_batch: int


class PrefillConstants(NamedTuple):
    """Constants that the kernel is compiled for.

    PAGE: slots of a page, 0 without pages. BOUNDED: rows of a tile see other keys than its last. P_FP8: P V in e4m3.
    Columns come in pieces of D0 and D1 (V0 and V1 of V). Strides of q, K, V and the output count UNIT elements as one.
    """

    PAGE: int
    BOUNDED: bool
    P_FP8: bool
    BASE2: bool
    D: int
    D0: int
    D1: int
    DV: int
    V0: int
    V1: int
    BM: int
    BN: int
    UNIT: int


@triton.jit
def scores(q, k):
    """Q K^T, the products of the pieces added up; K in q's dtype."""
    s = tl.dot(q[0], tl.trans(k[0].to(q[0].dtype)), input_precision="ieee")
    for i in tl.static_range(1, len(q)):
        s = tl.dot(q[i], tl.trans(k[i].to(q[i].dtype)), s, input_precision="ieee")
    return s


@triton.jit
def accumulate(p, v, o, dtype: tl.constexpr):
    """O + P V in ``dtype``: P rounded to it once, times 2^8 where it is e4m3."""
    if dtype == tl.float8e4nv:
        p = p * TO_FP8
    p = p.to(dtype)
    parts = o[:0]
    for i in tl.static_range(len(o)):
        parts = parts + (tl.dot(p, v[i].to(dtype), o[i], input_precision="ieee"),)
    return parts


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, features, o_ptr, lse_ptr, scale_log2, o_scale,
    numbers, problem, q_strides, k_strides, v_strides, o_strides, lse_strides, C: tl.constexpr,
):
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see."""
    #: setup -> q, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    tile_and_batch, heads = tl.program_id(0), tl.program_id(1)
    tile = problem.row_tiles - 1 - tile_and_batch // problem.batch
    batch = (tile_and_batch % problem.batch).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)  # [BM], token-major
    token = row // problem.pack
    head = (heads * problem.pack + row % problem.pack).to(tl.int64)
    kv_head = (heads * problem.pack // problem.group).to(tl.int64)
    q_first, num_q = row_count(cu_q_ptr, batch, problem.max_q)
    k_first, num_keys = row_count(cu_k_ptr, batch, problem.max_k)
    if lens_ptr is not None:
        num_keys = key_count(tl.load(lens_ptr + batch), problem.max_k)
    pad = padding(num_keys, features.leftpad, batch)
    num_keys = num_keys - pad
    end = visible_end(num_keys, features.valid, batch)
    is_row = token < num_q
    position = token + num_keys - num_q
    top = tile * BM // problem.pack + num_keys - num_q  # positions of the tile's rows
    bottom = tl.minimum((tile * BM + BM - 1) // problem.pack, num_q - 1) + num_keys - num_q
    q_row = q_first + token
    position, top, bottom = given_positions(
        features.positions, numbers.positions_batch, batch, q_row, is_row, position, top, bottom
    )
    first, limit = key_range(position, end, numbers.left, numbers.right, numbers.chunk)  # [BM], keys that a row sees
    rows = batch, head, token, is_row, first, limit
    lo, every = key_range(top, end, numbers.left, numbers.right, numbers.chunk)
    if not C.BOUNDED:
        lo = lo // BN * BN  # it is 0; that it is a multiple of BN tells the compiler which keys share a page
    _, hi = key_range(bottom, end, numbers.left, numbers.right, numbers.chunk)
    hi = tl.where(bottom < top, lo, tl.maximum(hi, lo))
    full = tl.maximum(tl.minimum(every // BN * BN, hi), lo)
    if C.BOUNDED:
        full = lo
    bounds = lo, full, hi
    q_dtype: tl.constexpr = q_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float8e4nv if C.P_FP8 else tl.bfloat16 if q_dtype == tl.float8e4nv else q_dtype
    q = load_q(
        q_ptr, (batch * q_strides.batch + q_row * q_strides.token + head * q_strides.head) * C.UNIT,
        is_row, C.D, C.D0, C.D1,
    )  # pieces [BM, D0] and [BM, D1]
    factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
    m, l = start_rows(features.sinks, head, True)
    o = zeros(BM, C.V0, C.V1)
    for MASKED in tl.static_range(2):
        for start in range(bounds[MASKED], bounds[MASKED + 1], BN):
            #: load_k -> k    a K tile, DRAM -> shared memory: those that every row sees, then those seen in part
            key = start + tl.arange(0, BN)
            exists = key < bounds[MASKED + 1]
            page, slot = row_of(table_ptr, problem.table_batch, batch, k_first, key + pad, exists, C.PAGE, MASKED)
            k = load_k(
                k_ptr + kv_head * k_strides.head * C.UNIT, (page * k_strides.page + slot * k_strides.token) * C.UNIT,
                exists, C.D, C.D0, C.D1, MASKED,
            )
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            s = scores(q, k)  # [BM, BN]
            scale = key_scales(features, numbers, page, slot, kv_head, exists)
            s = adjust(s, factor, slope, scale, features, numbers, position, key)
            #: mask -> s    keys that a row does not see; the bias of those that it sees
            if MASKED:
                s = hide(s, rows, key, features, numbers, True)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale; scales of tokens
            p, alpha, m, l = weigh(s, m, l)
            o = rescale(o, alpha)
            p = scale_weights(p, features, numbers, page, slot, kv_head, exists)
            #: load_v -> v    the V tile of the same keys
            v = load_v(
                v_ptr + kv_head * v_strides.head * C.UNIT, (page * v_strides.page + slot * v_strides.token) * C.UNIT,
                exists, C.DV, C.V0, C.V1, MASKED,
            )
            #: accumulate -> o    O += P V, P rounded once
            o = accumulate(p, v, o, dtype)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf; with a sink, its logit
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)  # known before the loops: ptxas then spills nothing
    l = tl.where(sees, l, 1.0)
    factor = head_scale(o_scale, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head) / l
    o = normalise(o, factor, sees)
    lse = tl.where(sees, m + tl.math.log2(l), -float("inf"))
    if not C.BASE2:
        lse = lse * LN2
    #: store    the rows of this sequence
    store_rows(
        o_ptr, (batch * o_strides.batch + q_row * o_strides.token + head * o_strides.head) * C.UNIT, is_row, o, C.DV
    )
    lse_at = batch * lse_strides.batch + q_row * lse_strides.token + head * lse_strides.head  #- address
    tl.store(lse_ptr + lse_at, lse, mask=is_row)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences = DENSE, *, scale: float,
    problem: PrefillProblem, config: PrefillConfig, features: Features, out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``: out ``[.., Hq, Dv]`` of q's dtype (bfloat16 for e4m3) and lse
    ``[.., Hq]`` float32. The arguments are valid.
    """
    batch, tokens, heads, _ = q.shape
    out, lse = results(q, out, (batch, tokens, heads, v.shape[3]))
    if out.numel() == 0:
        return out, lse
    cu_q, cu_k, table, seq_lens, _ = sequences
    pointers = q, k, v, cu_q, cu_k, table, seq_lens, feature_arrays(features), out, lse
    if relaunched(attend, pointers, again):
        return out, lse
    ragged_q, ragged_k, scales = cu_q is not None, cu_k is not None, features.scales
    both = (q, ragged_q), (k, ragged_k), (v, ragged_k), (out, ragged_q)
    unit, (of_q, of_k, of_v, of_out) = in_units(*(leading_strides(x, ragged=ragged) for x, ragged in both))
    max_k, table_batch, PAGE = sequences.most_keys(k), 0, 0
    if table is not None:
        table_batch, PAGE = table.stride(0), k.shape[1]
    sizes = PrefillSizes(problem.batch, config.row_tiles, config.pack, problem.group, q.shape[1], max_k, table_batch)
    constants = PrefillConstants(
        PAGE, features.mask.bounded, problem.p_fp8, problem.base2, q.shape[3], config.D0, config.D1, v.shape[3],
        config.V0, config.V1, config.BM, config.BN, unit,
    )
    first_launch(attend, config.grid(problem), pointers, again)(
        scale * scales.q.number * scales.k.number * LOG2E, scales.v.number / (P_SCALE if problem.p_fp8 else 1),
        feature_numbers(features, ragged=ragged_k), sizes, RowStrides(*of_q), PageStrides(*of_k), PageStrides(*of_v),
        RowStrides(*of_out), RowStrides(*leading_strides(lse, ragged=ragged_q)), C=constants,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )
    return out, lse
