"""MLA prefill as a portable Triton kernel: K and V of each head, the rope part of K from the pages of the cache."""

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
    log_sum,
    nope_scales,
    padding,
    rope_scales,
    row_count,
    row_of,
    row_terms,
    scale_weights,
    start_rows,
    visible_end,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_prefill.kernel import PrefillSizes
from kvlab.attention.tiles.kernel import load_columns, store_columns
from kvlab.attention.tiles.kernel import load_parts as load_q
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.pages import Sequences
from kvlab.attention.tiles.strides import PageStrides, RowStrides
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import MLAPrefillConfig, MLAPrefillProblem

ROPE_HEAD = tl.constexpr(0)  # the only one
load_k = load_v = load_rope = load_columns


class MLAPrefillConstants(NamedTuple):
    """Constants that the kernel is compiled for. PAGE: slots of a page, 0 without pages. BOUNDED: rows of a tile see
    other keys than its last. ONE_LOOP: all tiles are masked.
    """

    PAGE: int
    BOUNDED: bool
    ONE_LOOP: bool
    D: int
    DR: int
    DV: int
    BD: int
    BR: int
    BV: int
    BM: int
    BN: int


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
    q_ptr, k_ptr, v_ptr, rope_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, starts_ptr, features, o_ptr, lse_ptr,
    scale_log2, v_factor, numbers, problem, q_strides, k_strides, v_strides, rope_strides, o_strides, lse_strides,
    C: tl.constexpr,
):
    """BM query rows of one head against the keys that they see. K and V hold a sequence's keys from ``base`` on.
    Products are in q's dtype, in bfloat16 for e4m3.
    """
    #: setup -> q, q_rope, lo, full, hi, first, limit    this program's rows, the keys they see, the query tiles
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    BV: tl.constexpr = C.BV
    tile_and_batch, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = problem.row_tiles - 1 - tile_and_batch // problem.batch
    batch = (tile_and_batch % problem.batch).to(tl.int64)
    token = tile * BM + tl.arange(0, BM)  # [BM]
    head = tl.broadcast_to(kv_head, [BM])
    q_first, num_q = row_count(cu_q_ptr, batch, 0)
    k_first, num_keys = row_count(cu_k_ptr, batch, 0)
    total = num_keys
    if lens_ptr is not None:
        total = key_count(tl.load(lens_ptr + batch), problem.max_k)
    base = total - num_keys
    if starts_ptr is not None:
        base = tl.load(starts_ptr + batch).to(tl.int32)
    pad = padding(total, features.leftpad, batch)
    total, base = total - pad, base - pad
    end = visible_end(tl.minimum(base + num_keys, total), features.valid, batch)
    is_row = token < num_q
    position = token + total - num_q
    top = tile * BM + total - num_q  # positions of the tile's rows
    bottom = tl.minimum(tile * BM + BM - 1, num_q - 1) + total - num_q
    q_row = q_first + token
    position, top, bottom = given_positions(
        features.positions, numbers.positions_batch, batch, q_row, is_row, position, top, bottom
    )
    first, limit = key_range(position, end, numbers.left, numbers.right, numbers.chunk)  # [BM], keys that a row sees
    rows = batch, head, token, is_row, first, limit
    top_first, top_limit = key_range(top, end, numbers.left, numbers.right, numbers.chunk)
    _, bottom_limit = key_range(bottom, end, numbers.left, numbers.right, numbers.chunk)
    lo = tl.maximum(top_first - base, 0)
    hi = tl.where(bottom < top, lo, tl.maximum(bottom_limit - base, lo))
    full = tl.maximum(tl.minimum((top_limit - base) // BN * BN, hi), lo)
    if C.BOUNDED or C.ONE_LOOP:
        full = lo
    full = tl.where(base < 0, lo, full)  # K may hold more keys than the sequence has
    bounds = lo, full, hi
    q, q_rope = load_q(
        q_ptr, q_row * q_strides.token + head * q_strides.head, is_row, C.D, C.DR, C.BD, C.BR
    )  # [BM, BD], [BM, BR]
    k_at = k_ptr + k_first * k_strides.token + kv_head * k_strides.head  #- address
    v_at = v_ptr + k_first * v_strides.token + kv_head * v_strides.head  #- address
    factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
    if numbers.nope is not None:
        nope = head_scale(
            numbers.nope, features.nope_heads, numbers.nope_scale_batch, numbers.nope_scale_head, batch, kv_head
        )
    if numbers.rope is not None:
        rope = head_scale(
            numbers.rope, features.rope_heads, numbers.rope_scale_batch, numbers.rope_scale_head, batch, ROPE_HEAD
        )
    m, l = start_rows(features.sinks, head, True)
    o = tl.zeros([BM, BV], tl.float32)
    for MASKED in tl.static_range(2):
        for start in range(bounds[MASKED], bounds[MASKED + 1], BN):
            #: load_k -> k    a K tile, DRAM -> shared memory: those that every row sees, then those seen in part
            held = start + tl.arange(0, BN)  # rows of K
            exists = held < bounds[MASKED + 1]
            k = load_k(
                k_at, held.to(tl.int64) * k_strides.token, exists, 0, C.D, C.BD, C.D == C.BD, MASKED
            )  # [BN, BD]
            #: load_rope -> k_rope    the rope part of the same keys, from their pages
            key = base + held
            page, slot = row_of(table_ptr, problem.table_batch, batch, k_first, key + pad, exists, C.PAGE, MASKED)
            k_rope = load_rope(
                rope_ptr, page * rope_strides.page + slot * rope_strides.token, exists, 0, C.DR, C.BR, C.DR == C.BR,
                MASKED,
            )  # [BN, BR]
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            if numbers.nope is not None:
                by_key = nope * nope_scales(features, numbers, batch, k_first + held, kv_head, exists)
            if numbers.rope is not None:
                by_rope = rope * rope_scales(features, numbers, page, slot, ROPE_HEAD, exists)
            s = scores(
                q, q_rope, k, k_rope, by_key if numbers.nope is not None else None,
                by_rope if numbers.rope is not None else None,
            )  # [BM, BN]
            s = adjust(s, factor, slope, 1.0, features, numbers, position, key)
            #: mask -> s    keys that a row does not see; the bias of those that it sees
            if MASKED:
                s = hide(s, rows, key, features, numbers, True)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale; scales of tokens
            p, alpha, m, l = weigh(s, m, l)
            o = o * alpha[:, None]
            p = scale_weights(p, features, numbers, batch, k_first + held, kv_head, exists)
            #: load_v -> v    the V tile of the same keys
            v = load_v(
                v_at, held.to(tl.int64) * v_strides.token, exists, 0, C.DV, BV, C.DV == BV, MASKED
            )  # [BN, BV]
            #: accumulate -> o    O += P V, P rounded once to the dtype of the product
            o = accumulate(p, v, o, q.dtype)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    factor = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
    lse = log_sum(m, l, sees)
    o = tl.where(sees[:, None], o * (factor / l)[:, None], 0.0)
    #: store    the rows of this sequence
    store_columns(o_ptr, q_row * o_strides.token + head * o_strides.head, is_row, 0, C.DV, o)
    tl.store(lse_ptr + q_row * lse_strides.token + head * lse_strides.head, lse, mask=is_row)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor, sequences: Sequences, *, scale: float,
    problem: MLAPrefillProblem, config: MLAPrefillConfig, features: Features, out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``: out ``[total, H, value]`` of q's dtype (bfloat16 for e4m3), lse
    ``[total, H]`` float32. The arguments are valid.
    """
    out, lse = results(q, out, (*q.shape[:2], problem.value))
    if q.numel() == 0 or problem.batch == 0:
        return out, lse
    f = features.of_parts()
    pointers = q, k, v, k_rope, *sequences, feature_arrays(f), out, lse
    if not relaunched(attend, pointers, again):
        scales, (PAGE, max_k, table_batch, rope_strides) = f.scales, rope_pages(k_rope, sequences)
        constants = MLAPrefillConstants(
            PAGE, f.mask.bounded, config.one_loop, problem.nope, problem.rope, problem.value, config.BD, config.BR,
            config.BV, config.BM, config.BN,
        )
        first_launch(attend, config.grid(problem), pointers, again)(
            scale * LOG2E * scales.q.number, scales.v.number, feature_numbers(f),
            PrefillSizes(problem.batch, config.row_tiles, 1, 1, problem.max_q, max_k, table_batch),
            *(RowStrides(0, *x.stride()[:2]) for x in (q, k, v)), rope_strides,
            *(RowStrides(0, *x.stride()[:2]) for x in (out, lse)), C=constants, num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, lse


def rope_pages(k_rope: torch.Tensor, sequences: Sequences) -> tuple[int, int, int, PageStrides]:
    """Slots of a page (0: rows one after the other), most keys of a sequence, the table's stride, those of k_rope."""
    if sequences.table is None:
        return 0, 0, 0, PageStrides(0, k_rope.stride(0), 0)
    page, token = k_rope.stride()[:2]
    return k_rope.shape[1], sequences.most_keys(k_rope), sequences.table.stride(0), PageStrides(page, token, 0)
