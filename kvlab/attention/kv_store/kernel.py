"""KV store as a portable Triton kernel: K and V of the new tokens into their slots, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import SMALLEST, StoreConfig, StoreSide, reciprocal

SMALLEST_TOP = tl.constexpr(SMALLEST)
LARGEST_TOP = tl.constexpr(3.4028234663852886e38)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def source(token, head, dim, seq_tokens, batch_step, token_step, head_step, FORM: tl.constexpr, VEC: tl.constexpr):
    """Element offset of each row's dim in k or v; steps in vectors."""
    at = head.to(tl.int64) * head_step
    if FORM == "padded":
        at = at + (token // seq_tokens).to(tl.int64) * batch_step
        token = token % seq_tokens
    return (at + token.to(tl.int64) * token_step) * VEC + dim


@triton.jit
def target(page, slot, head, last, page_step, slot_step, head_step, last_step, VEC: tl.constexpr):
    """Element offset of each row in the cache, ``last`` the dim, or in its scales, ``last`` the block; other steps in
    vectors.
    """
    at = page * page_step + slot * slot_step + head.to(tl.int64) * head_step
    return at * VEC + last.to(tl.int64) * last_step


@triton.jit
def convert(x, dtype: tl.constexpr):
    """Rounded once to ``dtype``; an 8-bit format saturates."""
    return x.to(dtype)


@triton.jit
def sequence_of(token, where_ptr, batch, where_step, BB: tl.constexpr, BITS: tl.constexpr):
    """Each token's sequence, ``batch`` past the last: as many as end at it or before. First BB stretches of 2^BITS
    sequences at once, then one stretch by halves.
    """
    first = tl.arange(0, BB) << BITS
    last = tl.minimum(first + (1 << BITS), batch)
    end = tl.load(where_ptr + last.to(tl.int64) * where_step, mask=first < batch, other=NO_TOKEN)
    over = tl.sum((end[None, :].to(tl.int64) <= token[:, None]).to(tl.int32), 1)
    sequence = tl.minimum(over << BITS, batch)
    for bit in tl.static_range(BITS):
        later = sequence + (1 << (BITS - 1 - bit))
        start = tl.load(where_ptr + later.to(tl.int64) * where_step, mask=later <= batch, other=NO_TOKEN)
        sequence = tl.where(start.to(tl.int64) <= token, later, sequence)
    return sequence


@triton.jit
def place(
    token, where_ptr, lens_ptr, table_ptr, positions_ptr,
    tokens, seq_tokens, batch, pages, columns, where_step, lens_step, table_batch, positions_step,
    FORM: tl.constexpr, PAGE: tl.constexpr, POSITIONS: tl.constexpr, BB: tl.constexpr, BITS: tl.constexpr,
):
    """Page, slot and position of each token, and whether it is stored (else the other three mean nothing)."""
    live = token < tokens
    if POSITIONS:
        position = tl.load(positions_ptr + token.to(tl.int64) * positions_step, mask=live, other=0).to(tl.int64)
    if FORM == "slots":
        at = tl.load(where_ptr + token.to(tl.int64) * where_step, mask=live, other=0).to(tl.int64)
        live = live & (at >= 0)
        at = tl.maximum(at, 0)
        page = at // PAGE
    else:
        if FORM == "ragged":
            sequence = sequence_of(token, where_ptr, batch, where_step, BB, BITS)
            live = live & (sequence < batch)
            start = tl.load(where_ptr + sequence.to(tl.int64) * where_step, mask=live, other=0).to(tl.int64)
            new = token - start
        else:
            sequence = token // seq_tokens
            new = (token % seq_tokens).to(tl.int64)
            valid = tl.load(where_ptr + sequence.to(tl.int64) * where_step, mask=live, other=0).to(tl.int64)
            live = live & (new < valid)
        at = new + tl.load(lens_ptr + sequence.to(tl.int64) * lens_step, mask=live, other=0).to(tl.int64)
        live = live & (new >= 0) & (at >= 0)
        at = tl.maximum(at, 0)
        column = at // PAGE
        live = live & (column < columns)
        page = tl.load(table_ptr + sequence.to(tl.int64) * table_batch + column, mask=live, other=0).to(tl.int64)
        live = live & (page >= 0)
    live = live & (page < pages)
    return page, at % PAGE, position if POSITIONS else at, live


@triton.jit
def rotate(
    x, x_ptr, row, dim, inside, position, new, cos_ptr, sin_ptr, angles, cos_row, cos_col, sin_row, sin_col,
    R: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr,
):
    """``x`` [BR, BG] in float32, its dims FIRST .. FIRST + R rotated by the angles of the token's position."""
    x = x.to(tl.float32)
    known = (new & (position >= 0) & (position < angles))[:, None]
    if INTERLEAVED:
        one, two = tl.split(tl.reshape(x, [BR, BG // 2, 2]))
        pair = (dim[:, None] - FIRST) // 2 + tl.arange(0, BG // 2)[None, :]
        roped = known & (pair >= 0) & (pair < R // 2)
    else:
        j = dim[:, None] - FIRST + tl.arange(0, BG)[None, :]
        pair = j % (R // 2)
        roped = known & (j >= 0) & (j < R)
    cos = tl.load(cos_ptr + position[:, None] * cos_row + pair * cos_col, mask=roped, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position[:, None] * sin_row + pair * sin_col, mask=roped, other=0.0).to(tl.float32)
    if INTERLEAVED:
        turned_one = tl.where(roped, one * cos - two * sin, one)
        turned_two = tl.where(roped, two * cos + one * sin, two)
        return tl.reshape(tl.join(turned_one, turned_two), [BR, BG])
    else:
        near = j < R // 2
        partner_at = row[:, None] + (FIRST - dim)[:, None] + (j + R // 2) % R
        partner = tl.load(x_ptr + partner_at, mask=roped & inside, other=0.0).to(tl.float32)
        return tl.where(roped & inside, x * cos + partner * tl.where(near, -sin, sin), x)


@triton.jit
def given(scale_ptr, scale_head, head, QUANT: tl.constexpr, BR: tl.constexpr):
    """The scale that is given for each row, 1 where there is none; it waits for nothing."""
    scale = tl.full([BR], 1.0, tl.float32)
    if QUANT == "tensor":
        scale = tl.load(scale_ptr + head * scale_head).to(tl.float32)
    return scale


@triton.jit
def quantise(x, scale, scale_ptr, inverse, QUANT: tl.constexpr, LIMIT: tl.constexpr):
    """``x`` divided by its scale, and the scale, which is computed here for "block"."""
    if QUANT == "number":
        x = x.to(tl.float32) * inverse
    elif QUANT == "tensor":
        x = x.to(tl.float32) * tl.div_rn(1.0, scale)[:, None]
    elif QUANT == "block":
        x = x.to(tl.float32)
        magnitude = tl.abs(x)
        finite = tl.where(magnitude <= LARGEST_TOP, magnitude, 0.0)  # infinities and NaN have no part in the scale
        top = tl.maximum(tl.max(finite, 1), SMALLEST_TOP)
        scale = tl.div_rn(top, LIMIT).to(scale_ptr.dtype.element_ty).to(tl.float32)
        x = x * tl.div_rn(1.0, scale)[:, None]
    return x, scale


@triton.jit
def append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr,
    where_ptr, lens_ptr, table_ptr, positions_ptr, k_inverse, v_inverse,
    tokens, seq_tokens, batch, pages, columns, angles,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    kc_page, kc_slot, kc_head, vc_page, vc_slot, vc_head,
    ks_page, ks_slot, ks_head, ks_block, vs_page, vs_slot, vs_head, vs_block,
    cos_row, cos_col, sin_row, sin_col, where_step, lens_step, table_batch, positions_step,
    FORM: tl.constexpr, PAGE: tl.constexpr, H: tl.constexpr, POSITIONS: tl.constexpr,
    BB: tl.constexpr, BITS: tl.constexpr,
    KD: tl.constexpr, KG: tl.constexpr, KBG: tl.constexpr, KBR: tl.constexpr, KNB: tl.constexpr,
    VD: tl.constexpr, VG: tl.constexpr, VBG: tl.constexpr, VBR: tl.constexpr, VNB: tl.constexpr,
    K_QUANT: tl.constexpr, V_QUANT: tl.constexpr, K_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr,
    K_IN: tl.constexpr, V_IN: tl.constexpr, K_OUT: tl.constexpr, V_OUT: tl.constexpr,
    ROPE: tl.constexpr, R: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """K and V of the rows of one program, to where their tokens belong. A row: one block of one head of one token."""
    #: setup -> k_token_idx, k_head_idx, k_dim, v_token_idx, v_head_idx, v_dim    the rows of this program
    program = tl.program_id(0)
    k_row = program * KBR + tl.arange(0, KBR)
    v_row = program * VBR + tl.arange(0, VBR)
    k_token_idx, k_head_idx, k_dim = k_row // (H * KNB), k_row // KNB % H, k_row % KNB * KG
    v_token_idx, v_head_idx, v_dim = v_row // (H * VNB), v_row // VNB % H, v_row % VNB * VG
    k_col, v_col = tl.arange(0, KBG)[None, :], tl.arange(0, VBG)[None, :]
    k_inside = (k_col < KG) & (k_dim[:, None] + k_col < KD)
    v_inside = (v_col < VG) & (v_dim[:, None] + v_col < VD)
    #: load -> k, v, k_scale, v_scale    the new tokens and the scales that are given; no need to wait for their slots
    k_scale = given(k_scale_ptr, ks_head, k_head_idx, K_QUANT, KBR)  # [KBR]
    v_scale = given(v_scale_ptr, vs_head, v_head_idx, V_QUANT, VBR)
    k_new, v_new = k_token_idx < tokens, v_token_idx < tokens
    k_from = source(k_token_idx, k_head_idx, k_dim, seq_tokens, k_batch, k_token, k_head, FORM, K_IN)
    v_from = source(v_token_idx, v_head_idx, v_dim, seq_tokens, v_batch, v_token, v_head, FORM, V_IN)
    k = tl.load(k_ptr + k_from[:, None] + k_col, mask=k_new[:, None] & k_inside, other=0.0)  # [KBR, KBG]
    v = tl.load(v_ptr + v_from[:, None] + v_col, mask=v_new[:, None] & v_inside, other=0.0)  # [VBR, VBG]
    #: place -> k_page, k_slot, k_live, v_page, v_slot, v_live    where each row belongs, and whether anywhere
    k_page, k_slot, k_position, k_live = place(
        k_token_idx, where_ptr, lens_ptr, table_ptr, positions_ptr,
        tokens, seq_tokens, batch, pages, columns, where_step, lens_step, table_batch, positions_step,
        FORM, PAGE, POSITIONS, BB, BITS,
    )
    v_page, v_slot, v_position, v_live = place(
        v_token_idx, where_ptr, lens_ptr, table_ptr, positions_ptr,
        tokens, seq_tokens, batch, pages, columns, where_step, lens_step, table_batch, positions_step,
        FORM, PAGE, POSITIONS, BB, BITS,
    )
    #: rope_v -> v    where V is the roped side: in float32
    if ROPE == "v":
        v = rotate(
            v, v_ptr, v_from, v_dim, v_inside, v_position, v_new,
            cos_ptr, sin_ptr, angles, cos_row, cos_col, sin_row, sin_col, R, FIRST, INTERLEAVED, VBR, VBG,
        )
    #: quantise_v -> v, v_scale    divided by the scale, rounded once to the cache's format
    v, v_scale = quantise(v, v_scale, v_scale_ptr, v_inverse, V_QUANT, V_LIMIT)
    v = convert(v, v_cache_ptr.dtype.element_ty)
    #: store_v    registers -> DRAM, before K, which may wait for its angles; rows without a slot write nothing
    v_to = target(v_page, v_slot, v_head_idx, v_dim, vc_page, vc_slot, vc_head, 1, V_OUT)
    tl.store(v_cache_ptr + v_to[:, None] + v_col, v, mask=v_live[:, None] & v_inside)
    if V_QUANT == "block":
        v_block = v_row % VNB
        v_scale_at = target(v_page, v_slot, v_head_idx, v_block, vs_page, vs_slot, vs_head, vs_block, 1)
        tl.store(v_scale_ptr + v_scale_at, v_scale.to(v_scale_ptr.dtype.element_ty), mask=v_live)
    #: rope_k -> k    where K is the roped side
    if ROPE == "k":
        k = rotate(
            k, k_ptr, k_from, k_dim, k_inside, k_position, k_new,
            cos_ptr, sin_ptr, angles, cos_row, cos_col, sin_row, sin_col, R, FIRST, INTERLEAVED, KBR, KBG,
        )
    #: quantise_k -> k, k_scale    as V
    k, k_scale = quantise(k, k_scale, k_scale_ptr, k_inverse, K_QUANT, K_LIMIT)
    k = convert(k, k_cache_ptr.dtype.element_ty)
    #: store_k    as V
    k_to = target(k_page, k_slot, k_head_idx, k_dim, kc_page, kc_slot, kc_head, 1, K_OUT)
    tl.store(k_cache_ptr + k_to[:, None] + k_col, k, mask=k_live[:, None] & k_inside)
    if K_QUANT == "block":
        k_block = k_row % KNB
        k_scale_at = target(k_page, k_slot, k_head_idx, k_block, ks_page, ks_slot, ks_head, ks_block, 1)
        tl.store(k_scale_ptr + k_scale_at, k_scale.to(k_scale_ptr.dtype.element_ty), mask=k_live)


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    where: torch.Tensor,
    *,
    config: StoreConfig,
    pages: int,
    lens: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    again: Again = None,
) -> None:
    """Run the kernel on k, v ``[B, S, H, D]`` (``[1, T, H, D]`` unless padded). The arguments are valid."""
    if config.programs == 0:
        return
    scales = [scale if isinstance(scale, torch.Tensor) else k_cache for scale in (k_scale, v_scale)]
    angles, tables = (cos, sin), (lens, table, positions)  # k and where stand for pointers that are not followed
    pointers = (
        k, v, k_cache, v_cache, *scales, *(k if x is None else x for x in angles), where,
        *(where if x is None else x for x in tables),
    )
    if relaunched(append, pointers, again):
        return
    c, sides = config, (config.k, config.v)
    from_strides = [s // side.vec_in for x, side in zip((k, v), sides, strict=True) for s in x.stride()[:3]]
    to_strides = [s // side.vec_out for x, side in zip((k_cache, v_cache), sides, strict=True) for s in x.stride()[:3]]
    scale_strides = [s for scale, side in zip(scales, sides, strict=True) for s in _scale_strides(scale, side)]
    first_launch(append, config.grid(), pointers, again)(
        reciprocal(k_scale), reciprocal(v_scale), k.shape[0] * k.shape[1], max(1, k.shape[1]),
        0 if lens is None else lens.shape[0], pages, 0 if table is None else table.shape[1],
        0 if cos is None else cos.shape[0], *from_strides, *to_strides, *scale_strides,
        *((0, 0) if cos is None else cos.stride()), *((0, 0) if sin is None else sin.stride()),
        where.stride(0), *(0 if x is None else x.stride(0) for x in tables),
        FORM=c.form, PAGE=c.page_size, H=c.heads, POSITIONS=positions is not None, BB=c.BB,
        BITS=c.BITS,
        KD=c.k.D, KG=c.k.G, KBG=c.k.BG, KBR=c.k.BR, KNB=c.k.blocks,
        VD=c.v.D, VG=c.v.G, VBG=c.v.BG, VBR=c.v.BR, VNB=c.v.blocks,
        K_QUANT=c.k.quant, V_QUANT=c.v.quant, K_LIMIT=c.k.limit, V_LIMIT=c.v.limit,
        K_IN=c.k.vec_in, V_IN=c.v.vec_in, K_OUT=c.k.vec_out, V_OUT=c.v.vec_out,
        ROPE=c.rope, R=c.rope_dim, FIRST=c.rope_first, INTERLEAVED=c.interleaved,
        num_warps=c.num_warps, enable_fp_fusion=False,
    )


def _scale_strides(scale: torch.Tensor, side: StoreSide) -> tuple[int, ...]:
    """Of page, slot, head and block."""
    if side.quant == "block":
        return tuple(scale.stride())
    per_head = side.quant == "tensor" and len(scale) > 1
    return 0, 0, scale.stride(0) if per_head else 0, 0
