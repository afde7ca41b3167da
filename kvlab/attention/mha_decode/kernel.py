"""MHA decode as a portable Triton kernel: paged cache, packed query heads, split over the keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
    key_count,
    key_scales,
    log_sum,
    over_minima,
    packed_rows,
    row_terms,
    scale_weights,
    split_keys,
    start_rows,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import block_strides, columns_of
from kvlab.attention.merge_states.kernel import merge_partial_results as merge
from kvlab.attention.merge_states.kernel import partial_results, partial_strides
from kvlab.attention.tiles.four_bits.kernel import (
    add_minima,
    byte_numbers,
    key_blocks,
    of_elements,
    quarters_of_e2m1,
    quarters_of_int4,
    row_at,
    row_sums,
    value_blocks,
)
from kvlab.attention.tiles.fp8_pairs.kernel import as_pairs, compiles_to_ptx, halves, narrow
from kvlab.attention.tiles.kernel import load_tile, normalise, rescale, store_rows, zeros
from kvlab.attention.tiles.rows import DecodeSizes
from kvlab.attention.tiles.strides import PageStrides, PartStrides, RowStrides, in_units
from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import CLASSES as _CLASSES
from .config import DecodeConfig, DecodeProblem, problem_of

CLASSES = tl.constexpr(_CLASSES)
load_k = load_v = load_tile


class Constants(NamedTuple):
    """Constants that the kernel is compiled for.

    Columns come in pieces of W0 and W1 (V0 and V1 of V) elements of 16 bits or more; an element is EACH neighbouring
    columns, two of fp8 or four of 4 bits, and D and DV count such elements. BOUNDED: rows
    see no keys before some first one. PTX: compiled for NVIDIA. Strides of q, K, V and the output count UNIT elements
    as one. BLOCKS: 0, of e2m1 with scales of blocks what their strides count as one, or -1 of integers over minima.
    """

    PAGE: int
    EACH: int
    BLOCKS: int
    D: int
    DV: int
    W0: int
    W1: int
    V0: int
    V1: int
    BM: int
    BN: int
    PTX: int
    BOUNDED: bool
    LONGEST_FIRST: int
    UNIT: int


@triton.jit
def nth_longest(seq_lens_ptr, seq_lens_batch, batches, max_keys, n, BATCH: tl.constexpr):
    """The sequence that is the ``n``-th of those ordered by the class of their length, the longest first, and in a
    class by number; both 64 bits. BATCH: a power of two that holds them all.
    """
    at = tl.arange(0, BATCH)
    there = at < batches  #- launch
    length = key_count(tl.load(seq_lens_ptr + at * seq_lens_batch, mask=there, other=0), max_keys).to(tl.int64)
    longest = tl.maximum(tl.max(length, 0), 1)
    kind = ((longest - length) * (CLASSES - 1) // longest).to(tl.int32)  # 0: the longest
    counts = tl.histogram(kind, CLASSES, mask=there)
    found = tl.sum((tl.cumsum(counts, 0) <= n.to(tl.int32)).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, CLASSES) < found, counts, 0), 0)
    member = there & (kind == found)
    place = tl.cumsum(member.to(tl.int32), 0)
    return tl.sum(tl.where(member & (place == n - before + 1), at, 0), 0).to(tl.int64)


@triton.jit
def load_parts(ptr, at, exists, first, columns, WIDTH: tl.constexpr, EACH: tl.constexpr):
    """The columns of a piece by their number in elements of EACH columns, which it counts: of two the even, then the
    odd ones.
    """
    column = first + tl.arange(0, WIDTH)
    inside = exists[:, None] & (column < columns)[None, :]
    even = ptr + at[:, None] + EACH * column[None, :]
    parts = (tl.load(even, mask=inside, other=0.0),)[:EACH]
    for i in tl.static_range(1, EACH):
        parts = parts + (tl.load(even + i, mask=inside, other=0.0),)
    return parts


@triton.jit
def load_q(ptr, at, is_row, COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, EACH: tl.constexpr):
    """(q, unit): the query rows in pieces as those of K; of EACH columns an element the EACH parts of each, in float16
    and divided by ``unit``, a power of two for each row.
    """
    if EACH > 1:
        q = load_parts(ptr, at, is_row, 0, COLUMNS, FIRST, EACH)
        if REST:
            q = q + load_parts(ptr, at, is_row, FIRST, COLUMNS, REST, EACH)
        return narrow_all(q)
    else:
        return load_tile(ptr, at, is_row, COLUMNS, FIRST, REST), 1.0


@triton.jit
def narrow_all(q):
    """(q / unit in float16, unit): as of ``narrow``, all tiles of the rows by one ``unit``."""
    top = tl.max(tl.abs(q[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(q)):
        top = tl.maximum(top, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    tiles = q[:0]
    for i in tl.static_range(len(q)):
        tile, unit = narrow(q[i], top)
        tiles = tiles + (tile,)
    return tiles, unit


@triton.jit
def scores(q, k, blocks, nth_byte, EACH: tl.constexpr, BLOCKS: tl.constexpr, PTX: tl.constexpr):
    """S = Q K^T in float32: the sum over the pieces; of fewer than 16 rows as S^T = K Q^T. ``blocks``: scales of K,
    with BLOCKS, and ``nth_byte`` as of ``byte_numbers``.
    """
    s = tl.zeros([q[0].shape[0], k[0].shape[0]], tl.float32)
    for i in tl.static_range(len(k)):
        if EACH > 1:
            parts = parts_of(k[i], blocks, nth_byte, i, EACH, BLOCKS, PTX, False)
            for j in tl.static_range(EACH):
                if q[0].shape[0] < 16:
                    s = tl.trans(tl.dot(parts[j], tl.trans(q[EACH * i + j]), tl.trans(s)))
                else:
                    s = tl.dot(q[EACH * i + j], tl.trans(parts[j]), s)
        else:
            s = tl.dot(q[i], tl.trans(k[i]), s, input_precision="ieee")
    return s


@triton.jit
def parts_of(
    elements, blocks, nth_byte, i: tl.constexpr, EACH: tl.constexpr, BLOCKS: tl.constexpr, PTX: tl.constexpr,
    TURNED: tl.constexpr,
):
    """EACH tiles in float16 of the columns of a tile of 16-bit elements, the ``i``-th piece; TURNED: transposed, as
    they were loaded.
    """
    if EACH == 2:
        return halves(elements, PTX)
    else:
        tile = tl.trans(elements) if TURNED else elements
        if BLOCKS > 0:
            return quarters_of_e2m1(tile, of_elements(blocks[i], nth_byte, elements.shape[1], PTX, TURNED), PTX)
        else:
            return quarters_of_int4(tile, PTX, BLOCKS < 0)


@triton.jit
def add_values(p, v, o):
    """O + P V of a piece of V's columns; P is rounded once to the dtype of the product. Of fewer than 16 rows, with
    V^T for V, as O^T + V^T P^T.
    """
    if p.shape[0] < 16:
        return tl.trans(tl.dot(v, tl.trans(p.to(v.dtype)), tl.trans(o)))
    else:
        return tl.dot(p.to(v.dtype), v, o, input_precision="ieee")


@triton.jit
def accumulate(p, v, o, blocks, nth_byte, EACH: tl.constexpr, BLOCKS: tl.constexpr, PTX: tl.constexpr):
    """O + P V, piece by piece. ``blocks``: as of ``scores``, of V."""
    parts = o[:0]
    for i in tl.static_range(len(v)):
        if EACH > 1:
            values = parts_of(v[i], blocks, nth_byte, i, EACH, BLOCKS, PTX, p.shape[0] < 16)
            for j in tl.static_range(EACH):
                parts = parts + (add_values(p, values[j], o[EACH * i + j]),)
        else:
            parts = parts + (add_values(p, v[i], o[i]),)
    return parts + o[len(parts) :]


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, features, o_ptr, lse_ptr, scale_log2, v_factor, numbers, problem,
    q_strides, k_strides, v_strides, o_strides, lse_strides, C: tl.constexpr,
):
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence."""
    #: setup -> q, lo, hi, first, limit    this program's rows, the keys they see, its split of them, the query tile
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    program, split = tl.program_id(0), tl.program_id(1)
    batch, kv_head, token, head, is_row = packed_rows(program, problem, BM)
    if C.LONGEST_FIRST:
        batch = nth_longest(
            seq_lens_ptr, problem.seq_lens_batch, problem.batches, problem.max_keys, batch, C.LONGEST_FIRST
        )
    position, lo, hi, first, limit, pad = split_keys(
        seq_lens_ptr, features, numbers, batch, token, split, problem, BN, C.BOUNDED
    )
    rows = batch, head, token, is_row, first, limit
    q, unit = load_q(
        q_ptr, (batch * q_strides.batch + token.to(tl.int64) * q_strides.token + head * q_strides.head) * C.UNIT,
        is_row, C.D, C.W0, C.W1, C.EACH,
    )  # pieces [BM, W0] and [BM, W1]
    factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
    if C.EACH > 1:
        factor = factor * unit[:, None]
    q_sum = row_sums(q, C.BLOCKS)
    m, l = start_rows(features.sinks, head, split == 0)
    o = zeros(BM, C.V0, C.V1, C.EACH, C.BLOCKS)
    nth_byte = byte_numbers(table_ptr, split, C.BLOCKS)  #- layout
    for start in range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        exists = key < hi
        page, slot = in_pages(table_ptr + batch * problem.table_batch, key + pad, exists, C.PAGE)
        k_at = (  #- address
            k_ptr + kv_head * k_strides.head * C.UNIT, row_at(page, slot, k_strides, C.EACH, C.PTX) * C.UNIT
        )
        k = load_k(k_at[0], k_at[1], exists, C.D, C.W0, C.W1)
        by_block = key_blocks(features, numbers, page, slot, kv_head, exists, C)
        #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
        s = scores(q, k, by_block, nth_byte, C.EACH, C.BLOCKS, C.PTX)  # [BM, BN]
        scale = key_scales(features, numbers, page, slot, kv_head, exists)
        s = over_minima(s, scale, q_sum, features, numbers, page, slot, kv_head, exists)
        s = adjust(s, factor, slope, scale, features, numbers, position, key)
        #: mask -> s    keys that a row does not see
        s = hide(s, rows, key, features, numbers, C.BOUNDED)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, alpha, m, l = weigh(s, m, l)
        o = rescale(o, alpha)
        #: load_v -> v    the V tile of the same pages
        v_at = (  #- address
            v_ptr + kv_head * v_strides.head * C.UNIT, row_at(page, slot, v_strides, C.EACH, C.PTX) * C.UNIT
        )
        v = load_v(v_at[0], v_at[1], exists, C.DV, C.V0, C.V1, True, BM < 16)
        by_block = value_blocks(features, numbers, page, slot, kv_head, exists, C)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        o = add_minima(p, o, features, numbers, page, slot, kv_head, exists)
        p = scale_weights(p, features, numbers, page, slot, kv_head, exists)
        o = accumulate(p, v, o, by_block, nth_byte, C.EACH, C.BLOCKS, C.PTX)
    #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)  # known before the loop: ptxas then spills nothing
    factor = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
    lse = log_sum(m, l, sees)
    l = tl.where(sees, factor / l, 0.0)  # what the sums of a row are multiplied by
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (problem.num_splits == 1))
    o = normalise(o, l, sees, C.BLOCKS)
    split = split.to(tl.int64)
    store_rows(
        o_ptr, (split * o_strides.split + batch * o_strides.batch + token.to(tl.int64) * o_strides.token
        + head * o_strides.head) * C.UNIT, writes_o, o, C.DV, C.EACH,
    )
    lse_at = split * lse_strides.split + batch * lse_strides.batch + token * lse_strides.token  #- address
    tl.store(lse_ptr + lse_at + head * lse_strides.head, lse, mask=is_row)


def launch_first(
    kernel: Any, pointers: tuple[Any, ...], again: Again, problem: DecodeProblem, config: Any, f: Features,
    scale: float, constants: Callable[[int], Any],
) -> None:
    """Launch a decode kernel for the first time. ``constants(unit)``: what it is compiled for, where strides count
    ``unit`` elements as one.
    """
    (q, k, v, block_table, seq_lens), (part, part_lse), scales = pointers[:5], pointers[-2:], f.scales
    steps, lse_steps = partial_strides(part, part_lse, config.num_splits)
    unit, (of_q, of_k, of_v, of_part) = in_units(*(x.stride()[:-1] for x in (q, k, v)), steps, sees=problem.each < 4)
    sizes = DecodeSizes(
        problem.group, problem.tokens, config.num_splits, problem.max_keys, problem.batch, problem.kv_heads,
        block_table.stride(0), seq_lens.stride(0),
    )
    first_launch(kernel, config.grid(problem), pointers, again)(
        scales.factor_log2(scale), scales.v_factor, feature_numbers(f), sizes,
        RowStrides(*of_q), PageStrides(*of_k), PageStrides(*of_v), PartStrides(*of_part), PartStrides(*lse_steps),
        C=constants(unit), num_warps=config.num_warps, num_stages=config.num_stages,
    )


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    *, scale: float, config: DecodeConfig, features: Features | None = None, out: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32. The arguments are valid; ``again`` as of
    :mod:`kvlab.triton_support.launching`.
    """
    f = Features() if features is None else features
    out, lse = results(q, out, (*q.shape[:3], columns_of(v_cache)))
    if out.numel() == 0:
        return out, lse
    part, part_lse = partial_results(out, lse, config.num_splits)
    pointers = q, *as_pairs(k_cache, v_cache), block_table, seq_lens, feature_arrays(f), part, part_lse
    if not relaunched(attend, pointers, again):
        problem = problem_of(q, k_cache, v_cache, block_table)
        constants = functools.partial(
            Constants, problem.page_size, problem.each, block_strides(f.scales)[0], *problem.widths, *config.columns,
            *config.v_columns, config.BM, config.BN, compiles_to_ptx(q), f.mask.windowed, config.longest_first,
        )
        launch_first(attend, pointers, again, problem, config, f, scale, constants)
    if config.num_splits > 1:
        merge(part, part_lse, out, lse, again)
    return out, lse
