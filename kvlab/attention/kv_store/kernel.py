"""KV store as a portable Triton kernel: K and V of the new tokens into their slots, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.features.kernel import rotate
from kvlab.attention.tiles.four_bits.kernel import (
    SIDE_BY_SIDE,
    code_of_float,
    code_of_int4,
    code_of_uint4,
    halves_joined,
    number_of_e4m3,
)
from kvlab.attention.tiles.strides import AngleStrides, PageStrides, RowStrides, ScaleStrides
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import (
    NO_ANGLES,
    SMALLEST,
    BlockScales,
    CosSin,
    StoreConfig,
    StoreScales,
    StoreSide,
    StoreSizes,
    StoreTables,
)

SMALLEST_TOP = tl.constexpr(SMALLEST)
LARGEST_TOP = tl.constexpr(3.4028234663852886e38)
NO_TOKEN = tl.constexpr(2**31 - 1)


class StoreConstants(NamedTuple):
    """Constants that the kernel is compiled for besides its sides; see ``StoreConfig``."""

    form: str
    heads: int
    page_size: int
    rope: str
    rope_dim: int
    rope_first: int
    interleaved: bool
    BB: int
    BITS: int


class TableStrides(NamedTuple):
    """Of the arrays that say where tokens go."""

    where: int
    lens: int
    table: int
    positions: int


@triton.jit
def source(token, head, dim, problem, strides, C: tl.constexpr, VEC: tl.constexpr):
    """Element offset of each row's dim in k or v; steps in vectors."""
    at = head.to(tl.int64) * strides.head
    if C.form == "padded":
        at = at + (token // problem.seq_tokens).to(tl.int64) * strides.batch
        token = token % problem.seq_tokens
    return (at + token.to(tl.int64) * strides.token) * VEC + dim


@triton.jit
def target(page, slot, head, last, strides, last_step, VEC: tl.constexpr):
    """Element offset of each row in the cache, ``last`` the dim, or in its scales, ``last`` the block; other steps in
    vectors.
    """
    at = page * strides.page + slot * strides.token + head.to(tl.int64) * strides.head
    return at * VEC + last.to(tl.int64) * last_step


@triton.jit
def scale_target(page, slot, head, block, strides, side: tl.constexpr):
    """Element offset of the scale of each row's block; those of four slots may lie side by side."""
    at = target(page, slot // SIDE_BY_SIDE if side.fours else slot, head, block, strides, strides.block, 1)
    if side.fours:
        at = at + slot % SIDE_BY_SIDE
    return at


@triton.jit
def stored(row, side: tl.constexpr):
    """Number of the first element of each row in its head, numbers of the others from there, and which exist: an
    element holds ``side.pack`` dims.
    """
    first, element = row % side.blocks * (side.G // side.pack), tl.arange(0, side.BG // side.pack)[None, :]
    exists = (element < side.G // side.pack) & (first[:, None] + element < side.D // side.pack)
    return first, element, exists


@triton.jit
def convert(x, dtype: tl.constexpr, side: tl.constexpr):
    """Rounded once to ``dtype``; an 8-bit format saturates, and so do those of 4 bits, of which two become a byte."""
    if side.quant == "e2m1":
        sign = x.to(tl.int32, bitcast=True) >> 28 & 8
        code = code_of_float(tl.minimum(tl.abs(x), side.limit), 1, 1) | sign
        return halves_joined(code)
    elif side.quant == "int4":
        return halves_joined(code_of_int4(x, side.limit))
    elif side.quant == "uint4":
        return halves_joined(code_of_uint4(x, side.limit))
    else:
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
def place(token, where_ptr, lens_ptr, table_ptr, positions_ptr, problem, steps, C: tl.constexpr):
    """Page, slot and position of each token, and whether it is stored (else the other three mean nothing)."""
    live = token < problem.tokens
    if positions_ptr is not None:
        position = tl.load(positions_ptr + token.to(tl.int64) * steps.positions, mask=live, other=0).to(tl.int64)
    if C.form == "slots":
        at = tl.load(where_ptr + token.to(tl.int64) * steps.where, mask=live, other=0).to(tl.int64)
        live = live & (at >= 0)
        at = tl.maximum(at, 0)
        page = at // C.page_size
    else:
        if C.form == "ragged":
            sequence = sequence_of(token, where_ptr, problem.batch, steps.where, C.BB, C.BITS)
            live = live & (sequence < problem.batch)
            start = tl.load(where_ptr + sequence.to(tl.int64) * steps.where, mask=live, other=0).to(tl.int64)
            new = token - start
        else:
            sequence = token // problem.seq_tokens
            new = (token % problem.seq_tokens).to(tl.int64)
            valid = tl.load(where_ptr + sequence.to(tl.int64) * steps.where, mask=live, other=0).to(tl.int64)
            live = live & (new < valid)
        before = tl.load(lens_ptr + sequence.to(tl.int64) * steps.lens, mask=live, other=0).to(tl.int64)
        at = new + before
        live = live & (new >= 0) & (at >= 0)
        at = tl.maximum(at, 0)
        column = at // C.page_size
        live = live & (column < problem.columns)
        page = tl.load(table_ptr + sequence.to(tl.int64) * steps.table + column, mask=live, other=0).to(tl.int64)
        live = live & (page >= 0)
    live = live & (page < problem.pages)
    return page, at % C.page_size, position if positions_ptr is not None else at, live


@triton.jit
def given(scale_ptr, strides, head, side: tl.constexpr):
    """The scale that is given for each row, 1 where there is none; it waits for nothing."""
    scale = tl.full(head.shape, 1.0, tl.float32)
    if side.quant == "tensor":
        scale = tl.load(scale_ptr + head * strides.head).to(tl.float32)
    return scale


@triton.jit
def quantise(x, inside, scale, scale_ptr, least_ptr, number, side: tl.constexpr):
    """``x`` divided by its scale, and the scale and the minimum of "uint4", which are computed here for "block" and 4
    bits, as they are stored. ``inside``: the dims that there are.
    """
    least = scale
    if side.quant == "number":
        x = x.to(tl.float32) * number
    elif side.quant == "tensor":
        x = x.to(tl.float32) * tl.div_rn(1.0, scale)[:, None]
    elif side.quant == "block":
        x = x.to(tl.float32)
        magnitude = tl.abs(x)
        finite = tl.where(magnitude <= LARGEST_TOP, magnitude, 0.0)  # infinities and NaN have no part in the scale
        top = tl.maximum(tl.max(finite, 1), SMALLEST_TOP)
        scale = tl.div_rn(top, side.limit).to(scale_ptr.dtype.element_ty).to(tl.float32)
        x = x * tl.div_rn(1.0, scale)[:, None]
    elif side.pack == 2:
        x = x.to(tl.float32)
        if side.quant == "e2m1":
            if side.loads:
                number = tl.load(number)  #- launch
            x = tl.div_rn(x, number)
        magnitude = tl.abs(x)
        finite = tl.where(magnitude <= LARGEST_TOP, magnitude, 0.0)
        lost = tl.max((x != x).to(tl.int32), 1) > 0  # a row with a NaN, which 4 bits do not hold: its scale is one
        if side.quant == "uint4":
            some = inside & (magnitude <= LARGEST_TOP)
            low = tl.min(tl.where(some, x, LARGEST_TOP), 1)
            high = tl.max(tl.where(some, x, -LARGEST_TOP), 1)
            low, high = tl.where(low <= high, low, 0.0), tl.where(low <= high, high, 0.0)
            x = tl.where(magnitude <= LARGEST_TOP, x, tl.where(x > 0, high[:, None], low[:, None]))
            least = low.to(least_ptr.dtype.element_ty).to(tl.float32)
            x = x - least[:, None]
            top = tl.max(tl.where(inside, tl.abs(x), 0.0), 1)
            least = tl.where(lost, float("nan"), least)
        else:
            top = tl.max(finite, 1)
            x = tl.where(magnitude <= LARGEST_TOP, x, tl.where(x > 0, top[:, None], -top[:, None]))
        step = tl.div_rn(top, side.limit)
        if side.quant == "e2m1":
            code = tl.minimum(code_of_float(step, 3, 7), 126)
            step = number_of_e4m3(code)
            scale = tl.where(lost, 127, code)
        else:
            scale = tl.where(lost, float("nan"), step)
        x = x * tl.where(step != 0, tl.div_rn(1.0, step), 0.0)[:, None]
    return x, scale, least


@triton.jit
def append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, k_min_ptr, v_min_ptr, cos_ptr, sin_ptr,
    where_ptr, lens_ptr, table_ptr, positions_ptr, k_number, v_number, problem, steps,
    k_strides, v_strides, k_cache_strides, v_cache_strides, k_scale_strides, v_scale_strides, k_min_strides,
    v_min_strides, angle_strides,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
):
    """K and V of the rows of one program, to where their tokens belong. A row: one block of one head of one token."""
    #: setup -> k_token_idx, k_head_idx, k_dim, v_token_idx, v_head_idx, v_dim    the rows of this program
    program = tl.program_id(0)
    k_row = program * K.BR + tl.arange(0, K.BR)
    v_row = program * V.BR + tl.arange(0, V.BR)
    k_token_idx, k_head_idx = k_row // (C.heads * K.blocks), k_row // K.blocks % C.heads
    v_token_idx, v_head_idx = v_row // (C.heads * V.blocks), v_row // V.blocks % C.heads
    k_dim, v_dim = k_row % K.blocks * K.G, v_row % V.blocks * V.G
    k_col, v_col = tl.arange(0, K.BG)[None, :], tl.arange(0, V.BG)[None, :]
    k_inside = (k_col < K.G) & (k_dim[:, None] + k_col < K.D)
    v_inside = (v_col < V.G) & (v_dim[:, None] + v_col < V.D)
    #: load -> k, v, k_scale, v_scale    the new tokens and the scales that are given; no need to wait for their slots
    k_scale = given(k_scale_ptr, k_scale_strides, k_head_idx, K)  # [BR]
    v_scale = given(v_scale_ptr, v_scale_strides, v_head_idx, V)
    k_new, v_new = k_token_idx < problem.tokens, v_token_idx < problem.tokens
    k_from = source(k_token_idx, k_head_idx, k_dim, problem, k_strides, C, K.vec_in)
    v_from = source(v_token_idx, v_head_idx, v_dim, problem, v_strides, C, V.vec_in)
    k = tl.load(k_ptr + k_from[:, None] + k_col, mask=k_new[:, None] & k_inside, other=0.0)  # [BR, BG]
    v = tl.load(v_ptr + v_from[:, None] + v_col, mask=v_new[:, None] & v_inside, other=0.0)
    #: place -> k_page, k_slot, k_live, v_page, v_slot, v_live    where each row belongs, and whether anywhere
    k_page, k_slot, k_position, k_live = place(
        k_token_idx, where_ptr, lens_ptr, table_ptr, positions_ptr, problem, steps, C
    )
    v_page, v_slot, v_position, v_live = place(
        v_token_idx, where_ptr, lens_ptr, table_ptr, positions_ptr, problem, steps, C
    )
    #: rope_v -> v    where V is the roped side: in float32
    if C.rope == "v":
        v = rotate(
            v, v_ptr, v_from, v_dim, v_inside, v_position, v_new, cos_ptr, sin_ptr, problem.angles,
            angle_strides, C,
        )
    #: quantise_v -> v, v_scale    divided by the scale, rounded once to the cache's format
    v, v_scale, v_least = quantise(v, v_inside, v_scale, v_scale_ptr, v_min_ptr, v_number, V)
    v = convert(v, v_cache_ptr.dtype.element_ty, V)
    #: store_v    registers -> DRAM, before K, which may wait for its angles; rows without a slot write nothing
    v_first, v_element, v_exists = stored(v_row, V)
    v_to = target(v_page, v_slot, v_head_idx, v_first, v_cache_strides, 1, V.vec_out)
    tl.store(v_cache_ptr + v_to[:, None] + v_element, v, mask=v_live[:, None] & v_exists)
    if V.quant == "block" or V.pack == 2:
        v_scale_at = scale_target(v_page, v_slot, v_head_idx, v_row % V.blocks, v_scale_strides, V)
        tl.store(v_scale_ptr + v_scale_at, v_scale.to(v_scale_ptr.dtype.element_ty), mask=v_live)
    if V.quant == "uint4":
        v_least_at = scale_target(v_page, v_slot, v_head_idx, v_row % V.blocks, v_min_strides, V)
        tl.store(v_min_ptr + v_least_at, v_least.to(v_min_ptr.dtype.element_ty), mask=v_live)
    #: rope_k -> k    where K is the roped side
    if C.rope == "k":
        k = rotate(
            k, k_ptr, k_from, k_dim, k_inside, k_position, k_new, cos_ptr, sin_ptr, problem.angles,
            angle_strides, C,
        )
    #: quantise_k -> k, k_scale    as V
    k, k_scale, k_least = quantise(k, k_inside, k_scale, k_scale_ptr, k_min_ptr, k_number, K)
    k = convert(k, k_cache_ptr.dtype.element_ty, K)
    #: store_k    as V
    k_first, k_element, k_exists = stored(k_row, K)
    k_to = target(k_page, k_slot, k_head_idx, k_first, k_cache_strides, 1, K.vec_out)
    tl.store(k_cache_ptr + k_to[:, None] + k_element, k, mask=k_live[:, None] & k_exists)
    if K.quant == "block" or K.pack == 2:
        k_scale_at = scale_target(k_page, k_slot, k_head_idx, k_row % K.blocks, k_scale_strides, K)
        tl.store(k_scale_ptr + k_scale_at, k_scale.to(k_scale_ptr.dtype.element_ty), mask=k_live)
    if K.quant == "uint4":
        k_least_at = scale_target(k_page, k_slot, k_head_idx, k_row % K.blocks, k_min_strides, K)
        tl.store(k_min_ptr + k_least_at, k_least.to(k_min_ptr.dtype.element_ty), mask=k_live)


def launch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tables: StoreTables, *,
    config: StoreConfig, pages: int, cos_sin: CosSin = NO_ANGLES,
    k_scale: torch.Tensor | float | BlockScales | None = None,
    v_scale: torch.Tensor | float | BlockScales | None = None, again: Again = None,
) -> None:
    """Run the kernel on k, v ``[B, S, H, D]`` (``[1, T, H, D]`` unless padded). The arguments are valid."""
    if config.programs == 0:
        return
    scales = StoreScales.of(k_scale, v_scale)
    pointers = k, v, k_cache, v_cache, *scales[:4], *cos_sin, *tables, *scales[4:]
    if relaunched(append, pointers, again):
        return
    sides = config.k, config.v
    first_launch(append, config.grid(), pointers, again)(
        StoreSizes.of(k, pages, tables, cos_sin),
        TableStrides(*(0 if x is None else x.stride(0) for x in tables)),
        *(RowStrides(*_in_vectors(x, side.vec_in)) for x, side in zip((k, v), sides, strict=True)),
        *(PageStrides(*_in_vectors(x, side.vec_out)) for x, side in zip((k_cache, v_cache), sides, strict=True)),
        *(_scale_strides(scale, side) for scale, side in zip(scales[:2], sides, strict=True)),
        *(None if least is None else ScaleStrides(*least.stride()) for least in scales[2:4]),
        AngleStrides(*(step for x in cos_sin if x is not None for step in x.stride())),
        K=config.k, V=config.v, C=StoreConstants(*(getattr(config, name) for name in StoreConstants._fields)),
        num_warps=config.num_warps, enable_fp_fusion=False,
    )


def _in_vectors(x: torch.Tensor, vector: int) -> list[int]:
    """Strides of the first three axes in vectors of so many elements."""
    return [step // vector for step in x.stride()[:3]]


def _scale_strides(scale: torch.Tensor | None, side: StoreSide) -> ScaleStrides:
    """Strides of scales that are computed, or given for each head; 0 for one of all."""
    if scale is not None and (side.quant == "block" or side.pack == 2):
        return ScaleStrides(*scale.stride()[:4])
    return ScaleStrides(head=scale.stride(0) if scale is not None and len(scale) > 1 else 0)
