"""MLA decode as a portable Triton kernel: paged latent cache, packed heads, K tile reused as V, split keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.kernel import (
    adjust,
    head_scale,
    hide,
    in_pages,
    in_slots,
    log_sum,
    packed_rows,
    row_terms,
    split_keys,
    start_rows,
    value_scales,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
from kvlab.attention.tiles.kernel import load_columns, store_columns
from kvlab.attention.tiles.kernel import load_parts as load_q
from kvlab.attention.tiles.rows import DecodeSizes
from kvlab.attention.tiles.strides import PageStrides, PartStrides, RowStrides
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import MLADecodeConfig, MLADecodeProblem


class MLAConstants(NamedTuple):
    """Constants that the kernel is compiled for. ONE: the keys of a tile are in one page. BOUNDED: rows see no keys
    before some first one.
    """

    PAGE: int
    ONE: bool
    DV: int
    DR: int
    BV: int
    BR: int
    BM: int
    BN: int
    BOUNDED: bool


@triton.jit
def place(table_ptr, start, key, pad, exists, slots, PAGE: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr):
    """(page, slot, key, exists) of the keys of a tile, which ``pad`` others are before; ``slots``: of the cache, which
    the table lists. ``ONE``: they are all in one page, whose number is read once, and ``pad`` is 0.
    """
    if slots is not None:
        page, slot, key, exists = in_slots(table_ptr, key, exists, slots, PAGE)
    else:
        page, slot = in_pages(table_ptr, key + pad, exists, PAGE)
    if ONE:  #- address
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        slot = (start % PAGE + tl.arange(0, BN)).to(tl.int64)
    return page, slot, key, exists


@triton.jit
def load_k(
    kv_ptr, rope_ptr, by_block_ptr, kv_at, rope_at, scale_at, exists, dtype: tl.constexpr, DV: tl.constexpr,
    DR: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):
    """Latent and rope columns of keys, ``[BN, BV]`` and ``[BN, BR]`` in ``dtype``. ``by_block_ptr``: float32 scales of
    128 latents each.
    """
    if by_block_ptr is not None:
        block = tl.arange(0, BV // 128)
        inside = exists[:, None] & (block < DV // 128)[None, :]
        by_block = tl.load(by_block_ptr + scale_at[:, None] + block[None, :], mask=inside, other=0.0)
        column = 128 * block[:, None] + tl.arange(0, 128)[None, :]
        blocks = tl.load(kv_ptr + kv_at[:, None, None] + column[None, :, :], mask=inside[:, :, None], other=0.0)
        blocks = (blocks.to(tl.float32) * by_block[:, :, None]).to(dtype)
        k = tl.reshape(blocks, [blocks.shape[0], BV])
    else:
        k = load_columns(kv_ptr, kv_at, exists, 0, DV, BV, DV == BV).to(dtype)
    k_rope = load_columns(rope_ptr, rope_at, exists, 0, DR, BR, DR == BR).to(dtype)
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
    """V: the latent part of the K tile, where it lies."""
    return k


@triton.jit
def accumulate(p, v, o):
    """O += P V, P in V's dtype."""
    return tl.dot(p.to(v.dtype), v, o, input_precision="ieee")


@triton.jit
def attend(
    q_ptr, kv_ptr, rope_ptr, by_block_ptr, table_ptr, seq_lens_ptr, features, o_ptr, lse_ptr, slots, scale_log2,
    v_factor, numbers, problem, q_strides, kv_strides, rope_strides, by_block_strides, o_strides, lse_strides,
    C: tl.constexpr,
):
    """BM query rows (tokens x heads) against the keys of one split of one sequence. Products are in q's dtype, in
    bfloat16 for e4m3.
    """
    #: setup -> q, q_rope, lo, hi, first, limit    this program's rows, its split of the keys, the query tile
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    BV: tl.constexpr = C.BV
    program, split = tl.program_id(0), tl.program_id(1)
    batch, kv_head, token, head, is_row = packed_rows(program, problem, BM)
    position, lo, hi, first, limit, pad = split_keys(
        seq_lens_ptr, features, numbers, batch, token, split, problem, BN, C.BOUNDED
    )
    rows = batch, head, token, is_row, first, limit
    q_at = batch * q_strides.batch + token.to(tl.int64) * q_strides.token + head * q_strides.head  #- address
    q, q_rope = load_q(q_ptr, q_at, is_row, C.DV, C.DR, BV, C.BR)  # [BM, BV], [BM, BR]
    factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
    latent = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
    m, l = start_rows(features.sinks, head, split == 0)
    o = tl.zeros([BM, BV], tl.float32)
    for start in range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        exists = key < hi
        page, slot, key, exists = place(
            table_ptr + batch * problem.table_batch, start, key, pad, exists, slots, C.PAGE, BN, C.ONE
        )
        k, k_rope = load_k(
            kv_ptr, rope_ptr, by_block_ptr, page * kv_strides.page + slot * kv_strides.token,
            page * rope_strides.page + slot * rope_strides.token,
            page * by_block_strides.page + slot * by_block_strides.token, exists, q.dtype, C.DV, C.DR, BV, C.BR,
        )
        #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
        scale = value_scales(features, numbers, page, slot, kv_head, exists)
        by_key = latent * scale
        s = scores(q, q_rope, k, k_rope, by_key if numbers.nope is not None else None)  # [BM, BN]
        s = adjust(s, factor, slope, scale, features, numbers, position, key)
        #: mask -> s    keys that a row does not see
        s = hide(s, rows, key, features, numbers, C.BOUNDED)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, alpha, m, l = weigh(s, m, l)
        o = o * alpha[:, None]
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = load_v(k)  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        if features.v_tokens is not None:
            p = p * scale[None, :]
        o = accumulate(p, v, o)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    lse = log_sum(m, l, sees)
    o = tl.where(sees[:, None], o * (latent / l)[:, None], 0.0)
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (problem.num_splits == 1))
    split = split.to(tl.int64)
    o_at = split * o_strides.split + batch * o_strides.batch + token.to(tl.int64) * o_strides.token  #- address
    store_columns(o_ptr, o_at + head * o_strides.head, writes_o, 0, C.DV, o)
    lse_at = split * lse_strides.split + batch * lse_strides.batch + token * lse_strides.token  #- address
    tl.store(lse_ptr + lse_at + head * lse_strides.head, lse, mask=is_row)


def launch(
    q: torch.Tensor, kv_cache: torch.Tensor, k_rope: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor | None, *, scale: float, features: Features, config: MLADecodeConfig,
    row_scales: torch.Tensor | None = None, out: torch.Tensor | None = None, again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, H, v_dim]`` of q's dtype and lse ``[B, S, H]`` float32. The arguments are valid.

    q ``[B, S, H, v_dim + rope]``; the windows of the cache, kv_cache ``[pages, page_size, v_dim]`` and k_rope.
    row_scales ``[pages, page_size, v_dim / 128]``: of the latents of rows.
    """
    out, lse = results(q, out, (*q.shape[:3], kv_cache.shape[2]))
    if q.numel() == 0:
        return out, lse
    f = features.of_latents(k_rope.dtype == kv_cache.dtype)
    part, part_lse = partial_results(out, lse, config.num_splits)
    pointers = q, kv_cache, k_rope, row_scales, block_table, seq_lens, feature_arrays(f), part, part_lse
    if not relaunched(attend, pointers, again):
        problem, scales = MLADecodeProblem.of(q, kv_cache, k_rope, block_table, seq_lens, row_scales), f.scales
        steps, lse_steps = partial_strides(part, part_lse, config.num_splits)
        sizes = DecodeSizes(
            problem.heads, problem.tokens, config.num_splits, problem.max_keys, problem.batch, 1,
            block_table.stride(0), 0 if seq_lens is None else seq_lens.stride(0),
        )
        constants = MLAConstants(
            problem.page_size, config.one_page and not f.mask.windowed and f.mask.leftpad is None, problem.latent,
            problem.rope, config.BV, config.BR, config.BM, config.BN, f.mask.windowed,
        )
        first_launch(attend, config.grid(problem), pointers, again)(
            kv_cache.shape[0] * kv_cache.shape[1] if problem.listed else None, scales.factor_log2(scale),
            scales.v.number, feature_numbers(f), sizes,
            RowStrides(*q.stride()[:3]),
            *(PageStrides(*[*((0, 0) if x is None else x.stride()[:2]), 0]) for x in (kv_cache, k_rope, row_scales)),
            PartStrides(*steps), PartStrides(*lse_steps), C=constants, num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    if config.num_splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
