"""Decode over a schedule on Hopper in Gluon: the ring of TMA boxes of MHA decode, which goes on from unit to unit.

The producer fills the next unit's blocks while the consumers write this one's results; ``join`` merges as it does for
the portable walk.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.resolve import Features
from kvlab.attention.hopper.kernel import add_sink, barriers, box_descriptor, key_count, view
from kvlab.attention.mha_decode.hopper_roles import attend_keys, normalise, other_columns
from kvlab.attention.mha_decode.hopper_roles import produce as bring
from kvlab.attention.mha_decode.hopper_steps import AT_ONCE, panel, results_layout, rows_of, swizzled
from kvlab.attention.tiles.strides import RowStrides, leading_strides
from kvlab.triton_support.dependents import let_next_begin, wait_for_launch_before
from kvlab.triton_support.launching import Again
from kvlab.triton_support.twins import compiled

from .config import Walk
from .hopper_config import ListConstants
from .kernel import WalkSizes, item_of, team_items

globals().update(compiled(gluon.jit, gl, item_of.fn, team_items.fn, let_next_begin.fn, wait_for_launch_before.fn))


@gluon.jit
def find_unit(item, begin, until, lists, problem, L: gl.constexpr):
    """A unit of a team with the places ``begin ... until``: the sequence, where its new tokens begin and how many, its
    keys; the places of the item's key blocks; the unit's first key and the one behind the last.
    """
    #: find -> batch, num_keys, start, stop, lo, hi    of an item
    list_ptr, seq_lens_ptr, cu_seqlens_ptr = lists
    batch, _ = item_of(list_ptr + problem.sequences, list_ptr + problem.tiles, item, L.LISTED)
    num_keys = key_count(gl.load(seq_lens_ptr + batch * problem.seq_lens_batch), problem.max_keys)
    q_first = batch * 0
    tokens = problem.tokens
    if cu_seqlens_ptr is not None:
        q_first = gl.load(cu_seqlens_ptr + batch).to(gl.int64)
        tokens = (gl.load(cu_seqlens_ptr + batch + 1) - q_first).to(gl.int32)
    start = gl.load(list_ptr + problem.starts + item) + L.OVERHEAD
    stop = gl.load(list_ptr + problem.starts + item + 1)
    lo = (gl.maximum(begin, start) - start) * L.BLOCK
    hi = gl.minimum((gl.minimum(until, stop) - start) * L.BLOCK, num_keys)
    return batch, q_first, tokens, num_keys, start, stop, lo, gl.maximum(hi, lo)


@gluon.jit
def produce(walked, descs, boxes, bars, tables, lists, problem, C: gl.constexpr, L: gl.constexpr):
    """One warp brings the blocks of unit after unit."""
    #@ producer
    #: begin -> done    blocks
    _, kv_head, begin, until, first_item, last_item = walked
    table_ptr, pages = tables  #- launch
    full, free = bars  #- launch
    done = 0
    for item in range(first_item, last_item):
        #: unit -> lo, hi, done    its keys
        batch, _, _, num_keys, _, _, lo, hi = find_unit(item, begin, until, lists, problem, L)
        unit = batch, kv_head, 0, lo, hi, num_keys
        bring(unit, descs, boxes, full, free, table_ptr + batch * problem.table_batch, pages, done, C)
        done = done + gl.cdiv(hi - lo, C.BT)


@gluon.jit
def consume(walked, smem, bars, queries, terms, lists, problem, results, C: gl.constexpr, L: gl.constexpr):
    """Warps, each with 16 rows, do unit after unit."""
    #@ consumer
    #: begin -> done    blocks
    team, kv_head, begin, until, first_item, last_item = walked
    q_ptr, q_strides = queries  #- launch
    features, _, _, _ = terms  #- launch
    o_ptr, o_strides, lse_ptr, lse_strides, part_ptr, part_lse_ptr = results  #- launch
    COLS: gl.constexpr = min(C.W, AT_ONCE)
    NEXT: gl.constexpr = 1 if C.PAIRS else COLS  # columns until those that are put together next
    OUT: gl.constexpr = results_layout(C.ROWS, COLS)
    D: gl.constexpr = C.COLUMNS if C.COLUMNS else 2 * C.W if C.PAIRS else C.W
    done = 0
    for item in range(first_item, last_item):
        #: unit -> o, top, total, done    its rows against its keys
        batch, q_first, tokens, num_keys, start, stop, lo, hi = find_unit(item, begin, until, lists, problem, L)
        rows = q_ptr + q_first * q_strides.token, q_strides
        unit = batch, kv_head, lo, hi, num_keys
        o, o_odd, top, total = attend_keys(unit, tokens, smem, bars, rows, terms, done, C)
        done = done + gl.cdiv(hi - lo, C.BT)
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        kv, token, head = rows_of(gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, OUT)), C)
        highest, weight = top, gl.full([C.ROWS], 1.0, gl.float32, layout=total.type.layout)
        if features.sinks is not None:  # counted by the unit that begins at the first key
            is_first = (begin <= start) & (kv >= 0)
            of_row = (kv_head + gl.minimum(kv, C.HEADS - 1)) * C.GROUP + head
            highest, with_sink, less = add_sink(top, total, features.sinks, of_row)
            highest, total = gl.where(is_first, highest, top), gl.where(is_first, with_sink, total)
            weight = gl.where(is_first, less, weight)
        some, lse, l = normalise(highest, total, batch, kv_head, kv, terms, C)
        l = l * weight
        is_row = (kv < C.HEADS) & (token < tokens)
        heads = (kv_head + kv) * C.GROUP + head
        q_row = q_first + token
        whole = (begin <= start) & (stop <= until)
        ends = is_row & whole
        cut = is_row & (whole == 0)
        place = 2 * (team * problem.lanes + kv_head + kv) + (start > begin).to(gl.int32)
        of_part = place.to(gl.int64) * C.ROWS + token * C.GROUP + head
        at = batch * lse_strides.batch + q_row * lse_strides.token + heads * lse_strides.head
        gl.store(lse_ptr + at, lse, mask=ends)
        gl.store(part_lse_ptr + of_part, lse, mask=cut)
        at = o_ptr + batch * o_strides.batch + q_row * o_strides.token + heads * o_strides.head
        parts = part_ptr + of_part * D
        cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, OUT)) * (2 if C.PAIRS else 1)
        cut = cut & some
        o = gl.where(some[:, None], o * l[:, None], 0.0)
        ends_of_o, cut_of_o = ends[:, None], cut[:, None]
        if C.COLUMNS:
            ends_of_o, cut_of_o = ends_of_o & (cols < D)[None, :], cut_of_o & (cols < D)[None, :]
        gl.store(at[:, None] + cols[None, :], o.to(o_ptr.dtype.element_ty), mask=ends_of_o)
        gl.store(parts[:, None] + cols[None, :], o, mask=cut_of_o)
        if C.PAIRS or C.W > AT_ONCE:
            o_odd = other_columns(o_odd, smem, top, C)
            o_odd = gl.where(some[:, None], o_odd * l[:, None], 0.0)
            cols += NEXT
            ends_of_o, cut_of_o = ends[:, None], cut[:, None]
            if C.COLUMNS:
                ends_of_o, cut_of_o = ends_of_o & (cols < D)[None, :], cut_of_o & (cols < D)[None, :]
            gl.store(at[:, None] + cols[None, :], o_odd.to(o_ptr.dtype.element_ty), mask=ends_of_o)
            gl.store(parts[:, None] + cols[None, :], o_odd, mask=cut_of_o)


@gluon.jit
def walk(
    dk, dv, q_ptr, table_ptr, seq_lens_ptr, cu_seqlens_ptr, list_ptr, features, o_ptr, lse_ptr, part_ptr, part_lse_ptr,
    scale_log2, v_factor, numbers, problem, pages, q_strides, o_strides, lse_strides, C: gl.constexpr, L: gl.constexpr,
):
    """The query rows of HEADS KV heads of item after item, against the keys of a team's units."""
    PANEL: gl.constexpr = panel(C.W)
    PANELS: gl.constexpr = C.W // PANEL
    BOXED: gl.constexpr = swizzled(C.W, 4)
    TILE: gl.constexpr = swizzled(C.W, 3)
    BOXES: gl.constexpr = C.BT // C.BOX
    NB: gl.constexpr = C.NB
    KEYS: gl.constexpr = C.BN // 4
    W: gl.constexpr = C.W
    R: gl.constexpr = C.ROWS
    k_box = gl.allocate_shared_memory(dk.dtype, [NB * PANELS * BOXES, 1, C.BOX, C.HEADS, PANEL], BOXED)
    v_box = gl.allocate_shared_memory(dk.dtype, [NB * PANELS * BOXES, 1, C.BOX, C.HEADS, PANEL], BOXED)
    COLS: gl.constexpr = min(W, AT_ONCE)
    sums = gl.allocate_shared_memory(gl.float32, [4, R, COLS], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    tops = gl.allocate_shared_memory(gl.float32, [8, R], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = barriers(NB, 1)
    free = barriers(NB, 1)
    fence_async_shared()  # TMA arrives at these barriers
    wait_for_launch_before(L.EARLY and not L.BESIDE)
    let_next_begin(L.EARLY)  # what is behind this launch may read what it waited for
    k_s = view(k_box, [NB, 4, KEYS, W], TILE)
    v_s = view(v_box, [NB, 4, KEYS, W], TILE)
    groups = problem.lanes // C.HEADS
    team = gl.program_id(0) // groups
    kv_head = gl.program_id(0) % groups * C.HEADS
    begin, until, first_item, last_item = team_items(
        list_ptr, list_ptr + problem.starts, list_ptr + problem.firsts, team, L.REACH
    )
    walked = team, kv_head, begin, until, first_item, last_item
    lists = list_ptr, seq_lens_ptr, cu_seqlens_ptr
    terms = features, numbers, scale_log2, v_factor
    results = o_ptr, o_strides, lse_ptr, lse_strides, part_ptr, part_lse_ptr
    smem, bars = (k_s, v_s, sums, tops), (full, free)
    queries, tables, descs, rings = (q_ptr, q_strides), (table_ptr, pages), (dk, dv), (k_box, v_box)
    gl.warp_specialize(
        [
            (consume, (
                walked, smem, bars, queries, terms, lists, problem, results, gl.constexpr(C), gl.constexpr(L)
            )),
            (produce, (walked, descs, rings, bars, tables, lists, problem, gl.constexpr(C), gl.constexpr(L))),
        ],
        [1],
        [C.PRODUCER],
    )
    if gl.program_id(0) == 0:  # who waits for this launch waits for that beside it
        wait_for_launch_before(L.BESIDE)


def pointers_of(
    one: Walk, arrays: tuple[Any, ...], results: tuple[torch.Tensor, ...], f: Features, again: Again
) -> tuple[Any, ...]:
    """The pointers of a launch. arrays : q, K and V as words of 16 bits, table, lengths, cu_seqlens and list."""
    q, k, v, *others = arrays
    boxes, layout = (one.ring.BOX, one.ring.HEADS), gl.constexpr(swizzled(one.ring.W, 4))
    descriptors = (box_descriptor(x, boxes, layout, name, again) for name, x in (("k", k), ("v", v)))
    return *descriptors, q, *others, feature_arrays(f), *results


def numbers_of(
    one: Walk, arrays: tuple[Any, ...], into: tuple[torch.Tensor, torch.Tensor], sizes: WalkSizes, f: Features,
    scale: float, *, ragged: bool, listed: bool, early: bool, beside: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments behind the pointers: numbers, and constants and options by name."""
    q, k, schedule = *arrays[:2], one.schedule
    strides = (RowStrides(*leading_strides(x, ragged=ragged)) for x in (q, *into))
    numbers = f.scales.factor_log2(scale), f.scales.v.number, feature_numbers(f), sizes, k.shape[0], *strides
    lists = ListConstants(schedule.block, schedule.overhead, schedule.reach, listed, early, beside)
    options = {"num_warps": one.ring.ROWS // 4, "maxnreg": one.ring.REGISTERS} | ({"launch_pdl": True} if early else {})
    return numbers, {"C": one.ring, "L": lists} | options
