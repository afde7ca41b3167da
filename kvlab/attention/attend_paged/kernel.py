"""Attention over a schedule as portable Triton kernels: programs that walk their units, and one that merges."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvlab.attention.call.results import results
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.kernel import (
    add_values_scores,
    adjust,
    given_positions,
    head_scale,
    hide,
    in_pages,
    key_count,
    key_range,
    key_scales,
    log_sum,
    nope_scales,
    over_minima,
    padding,
    row_count,
    row_terms,
    scale_weights,
    start_rows,
    value_scales,
    visible_end,
    weigh,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import block_strides
from kvlab.attention.merge_states.config import piece_of
from kvlab.attention.mha_decode.kernel import (
    accumulate,
    load_k,
    load_q,
    load_v,
    normalise,
    rescale,
    scores,
    store_rows,
    zeros,
)
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.schedule.kernel import item_blocks, team_items, unit_size, units_of
from kvlab.attention.schedule.kernel import launch as make_list
from kvlab.attention.tiles.four_bits.kernel import (
    add_minima,
    byte_numbers,
    key_blocks,
    row_at,
    row_sums,
    value_blocks,
)
from kvlab.attention.tiles.fp8_pairs.kernel import as_pairs, compiles_to_ptx
from kvlab.attention.tiles.strides import PageStrides, RowStrides, in_units, leading_strides
from kvlab.triton_support.dependents import let_next_begin, wait_for_launch_before
from kvlab.triton_support.launching import Again, first_launch, once, relaunched

from .config import AttendProblem, Walk, WalkConfig, of_walk, ragged_problem, register_limit, schedule_problem


class WalkSizes(NamedTuple):
    """What the kernels count: heads of a KV head, new tokens, most keys, programs of a team; strides of the table's
    rows and of the lengths; where the items' starts, sequences and tiles and the teams' first items lie in the list,
    which has ``room`` for items, and the keys that it takes a query to see before and behind its own.
    """

    group: int
    tokens: int
    max_keys: int
    lanes: int
    table_batch: int
    seq_lens_batch: int
    starts: int
    sequences: int
    tiles: int
    firsts: int
    room: int
    left: int
    right: int


class WalkConstants(NamedTuple):
    """What the walk is compiled for: as ``Constants`` of MHA decode; BLOCK keys of a key block, of which the beginning
    of a unit takes OVERHEAD, of which a team that has no more than REACH does nothing; ROWS of an item, in TOGETHER
    tiles, of one of HEADS groups of KV heads that are items of their own. PLACED: queries and keys have places that
    lengths do not tell. LISTED: items are others than the sequences, one each. FIXED: 0, or key blocks of a unit.
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
    PLACED: bool
    BLOCK: int
    OVERHEAD: int
    REACH: int
    ROWS: int
    TOGETHER: int
    HEADS: int
    LISTED: bool
    FIXED: int
    UNIT: int


@triton.jit
def item_of(sequences_ptr, tiles_ptr, item, LISTED: tl.constexpr):
    """(batch, tile): the sequence of an item, 64 bits, and which of its items it is."""
    batch, tile = tl.cast(item, tl.int64), 0
    if LISTED:
        batch = tl.load(sequences_ptr + item).to(tl.int64)
        tile = tl.load(tiles_ptr + item)
    return batch, tile


@triton.jit
def item_rows(lane, tile, nth, tokens, problem, BM: tl.constexpr, TOGETHER: tl.constexpr):
    """(kv_head, row, token, head, is_row): the KV head, 64 bits, and the first row of the program ``lane`` of a team in
    the ``tile``-th item of a sequence; of its ``nth`` rows, token-major, the new token and the query head, and whether
    there is such a row.
    """
    kv_head = (lane // TOGETHER).to(tl.int64)
    row = (tile * TOGETHER + lane % TOGETHER) * BM
    every = row + nth
    head = kv_head * problem.group + every % problem.group
    return kv_head, row, every // problem.group, head, every < problem.group * tokens


@triton.jit
def unit_keys(
    num_keys, tokens, tile, row, end, begin, until, start, stop, numbers, problem, BM: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr, PLACED: tl.constexpr = False,
):
    """(lo, hi): the keys of the ``tile``-th item of a sequence, whose key blocks have the places ``start ... stop``,
    that a team with the places ``begin ... until`` takes, and that the BM rows from ``row`` on see; none without rows.
    """
    low = 0
    origin = 0
    if BOUNDED:
        top = num_keys - tokens + tile * ROWS // problem.group
        low, _ = key_range(top, end, numbers.left, numbers.right, numbers.chunk)
        origin, _ = item_blocks(num_keys, tokens, tile, problem.group, numbers.left, numbers.right, ROWS, BLOCK)
    rows = tokens * problem.group
    bottom = num_keys - tokens + (tl.minimum(row + BM, rows) - 1) // problem.group
    _, high = key_range(bottom, end, numbers.left, numbers.right, numbers.chunk)
    if PLACED:
        low = 0
        origin = 0
        high = end
    high = tl.where(row < rows, high, 0)
    lo = tl.maximum((origin + tl.maximum(begin, start) - start) * BLOCK, low)
    hi = tl.minimum((origin + tl.minimum(until, stop) - start) * BLOCK, high)
    return lo, tl.maximum(hi, lo)


@triton.jit
def item_length(num_keys, tokens, tile, problem, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Key blocks that the ``tile``-th item of a sequence has in the list."""
    origin, last = item_blocks(num_keys, tokens, tile, problem.group, problem.left, problem.right, ROWS, BLOCK)
    return last - origin


@triton.jit
def team_units(blocks, place, begin, until, OVERHEAD: tl.constexpr, FIXED: tl.constexpr):
    """(first, last, size): the units ``first ... last`` of ``size`` key blocks that begin at the places ``begin ...
    until``, of an item of so many key blocks that begins at ``place``; one without a key is a unit.
    """
    size = unit_size(blocks, FIXED)
    first = tl.cdiv(tl.maximum(begin - place, 0), size + OVERHEAD)
    last = tl.cdiv(tl.maximum(until - place, 0), size + OVERHEAD)
    return first, tl.minimum(last, tl.maximum(units_of(blocks, FIXED), 1)), size


@triton.jit
def walk(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, cu_seqlens_ptr, list_ptr, features, o_ptr, lse_ptr, part_ptr,
    part_lse_ptr, scale_log2, v_factor, numbers, problem, q_strides, k_strides, v_strides, o_strides, lse_strides,
    C: tl.constexpr,
):
    """BM query rows (tokens x heads of one KV head) of item after item, against the keys of a team's units."""
    #: team -> begin, until, first_item, last_item    the places of this team, and the items that lie there
    BM: tl.constexpr = C.BM
    BN: tl.constexpr = C.BN
    starts_ptr, firsts_ptr = list_ptr + problem.starts, list_ptr + problem.firsts  #- address
    program = tl.program_id(0)
    team = program // problem.lanes
    begin, until, first_item, last_item = team_items(list_ptr, starts_ptr, firsts_ptr, team, C.REACH)
    for item in tl.range(first_item, last_item, 1, disable_licm=True):  # what is hoisted takes registers
        #: item -> num_keys, q_first, tokens, first_unit, last_unit    its rows, and the units of it that the team does
        batch, tile = item_of(list_ptr + problem.sequences, list_ptr + problem.tiles, item, C.LISTED)
        num_keys = key_count(tl.load(seq_lens_ptr + batch * problem.seq_lens_batch), problem.max_keys)
        q_first, tokens = row_count(cu_seqlens_ptr, batch, problem.tokens)
        never = (num_keys == 2147483647).to(tl.int32)  #- instruction: 0; what depends on it is not held between units
        lane = (program + never) % problem.lanes
        head_lane = lane + tile % C.HEADS * problem.lanes
        tile = tile // C.HEADS
        first_unit = 0
        last_unit = first_unit + 1
        if C.FIXED:
            blocks = item_length(num_keys, tokens, tile, problem, C.ROWS, C.BLOCK)
            first_unit, last_unit, size = team_units(
                blocks, tl.load(starts_ptr + item), begin, until, C.OVERHEAD, C.FIXED
            )
        pad = padding(num_keys, features.leftpad, batch)
        num_keys = num_keys - pad
        for nth_unit in range(first_unit, last_unit, 1):
            #: setup -> q, lo, hi, first, limit    a unit's rows, the keys they see, those of the unit, the query tile
            kv_head, row, token, head, is_row = item_rows(
                head_lane, tile, tl.arange(0, BM), tokens, problem, BM, C.TOGETHER
            )
            q_row = q_first + token
            top = num_keys - tokens + row // problem.group
            bottom = num_keys - tokens + (tl.minimum(row + BM, tokens * problem.group) - 1) // problem.group
            position, lowest, highest = given_positions(  # [BM]
                features.positions, numbers.positions_batch, batch, q_row, is_row, num_keys - tokens + token, top,
                bottom,
            )
            end = visible_end(num_keys, features.valid, batch)
            start = tl.load(starts_ptr + item) + C.OVERHEAD
            stop = tl.load(starts_ptr + item + 1)
            opens, closes = begin, until
            if C.FIXED:
                start, stop = blocks * 0, blocks
                opens = nth_unit * size
                closes = opens + size
            lo, hi = unit_keys(
                num_keys, tokens, tile, row, end, opens, closes, start, stop, numbers, problem, BM, C.BLOCK, C.ROWS,
                C.BOUNDED, C.PLACED,
            )
            if C.PLACED:
                low, _ = key_range(lowest, end, numbers.left, numbers.right, numbers.chunk)
                _, high = key_range(highest, end, numbers.left, numbers.right, numbers.chunk)
                lo = tl.maximum(lo, low)
                hi = tl.maximum(tl.minimum(hi, high), lo)
            first, limit = key_range(position, end, numbers.left, numbers.right, numbers.chunk)
            first, limit = tl.maximum(first, lo), tl.minimum(limit, hi)
            rows = batch, head, token, is_row, first, limit
            q, unit = load_q(
                q_ptr, (batch * q_strides.batch + q_row * q_strides.token + head * q_strides.head) * C.UNIT,
                is_row, C.D, C.W0, C.W1, C.EACH,
            )  # pieces [BM, W0] and [BM, W1]
            if features.qv is not None:
                qv_at = batch * numbers.qv_batch + q_row * numbers.qv_token + head * numbers.qv_head  #- address
                qv, second_unit = load_q(features.qv, qv_at, is_row, C.DV, C.V0, C.V1, C.EACH)
                if C.EACH == 1:
                    q = qv + q  # pieces of V's columns, then of K's
            factor, slope = row_terms(scale_log2, features, numbers, batch, kv_head, head)
            if C.EACH > 1 and features.qv is None:
                factor = factor * unit[:, None]
            by_head = 1.0
            if numbers.nope is not None:
                by_head = head_scale(
                    numbers.nope, features.nope_heads, numbers.nope_scale_batch, numbers.nope_scale_head, batch, kv_head
                )
            q_sum = row_sums(q, C.BLOCKS)
            m, l = start_rows(features.sinks, head, opens <= start)
            o = zeros(BM, C.V0, C.V1, C.EACH, C.BLOCKS)
            nth_byte = byte_numbers(table_ptr, team, C.BLOCKS)  #- layout
            for at in range(lo, hi, BN):
                #: load_k -> k    the K tile of these pages, DRAM -> shared memory
                key = at + tl.arange(0, BN)
                exists = key < hi
                page, slot = in_pages(table_ptr + batch * problem.table_batch, key + pad, exists, C.PAGE)
                k_at = (  #- address
                    k_ptr + kv_head * k_strides.head * C.UNIT, row_at(page, slot, k_strides, C.EACH, C.PTX) * C.UNIT
                )
                k = load_k(k_at[0], k_at[1], exists, C.D, C.W0, C.W1)
                if features.qv is not None:
                    v_at = (  #- address
                        v_ptr + kv_head * v_strides.head * C.UNIT, row_at(page, slot, v_strides, C.EACH, C.PTX) * C.UNIT
                    )
                    v = load_v(v_at[0], v_at[1], exists, C.DV, C.V0, C.V1)
                    if C.EACH == 1:
                        k = v + k
                by_block = key_blocks(features, numbers, page, slot, kv_head, exists, C)
                #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
                s = scores(q, k, by_block, nth_byte, C.EACH, C.BLOCKS, C.PTX)  # [BM, BN]
                if C.EACH > 1 and features.qv is not None:
                    second = scores(qv, v, by_block, nth_byte, C.EACH, C.BLOCKS, C.PTX)  # [BM, BN]
                    by_key = by_head * nope_scales(features, numbers, page, slot, kv_head, exists)
                    by_value = head_scale(
                        v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head
                    )
                    by_value = by_value * value_scales(features, numbers, page, slot, kv_head, exists)
                    s = add_values_scores(s, second, unit, second_unit, by_key, by_value)
                scale = key_scales(features, numbers, page, slot, kv_head, exists)
                s = over_minima(s, scale, q_sum, features, numbers, page, slot, kv_head, exists)
                s = adjust(s, factor, slope, scale, features, numbers, position, key)
                #: mask -> s    keys that a row does not see
                s = hide(s, rows, key, features, numbers, C.BOUNDED)
                #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
                p, alpha, m, l = weigh(s, m, l)
                o = rescale(o, alpha)
                #: load_v -> v    the V tile of the same pages, unless it is here for the scores of qv
                if features.qv is None:
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
                sees = sees & (first < limit)
            factor = head_scale(v_factor, features.v_heads, numbers.v_scale_batch, numbers.v_scale_head, batch, kv_head)
            lse = log_sum(m, l, sees)
            l = tl.where(sees, factor / l, 0.0)  # what the sums of a row are multiplied by
            #: store    the result, or a partial one where the item is cut; one without a key is left alone
            whole = (opens <= start) & (stop <= closes)
            o = normalise(o, l, sees, C.BLOCKS)
            store_rows(
                o_ptr, (batch * o_strides.batch + q_row * o_strides.token + head * o_strides.head) * C.UNIT,
                is_row & whole, o, C.DV, C.EACH,
            )
            tl.store(
                lse_ptr + batch * lse_strides.batch + q_row * lse_strides.token + head * lse_strides.head, lse,
                mask=is_row & whole,
            )
            place = 2 * program + (start > begin).to(tl.int32)
            if C.FIXED:
                place = (nth_unit * problem.room + item) * problem.lanes + lane
            of_part = place.to(tl.int64) * BM + tl.arange(0, BM)  #- address
            store_rows(part_ptr, of_part * (C.DV * C.EACH), is_row & sees & ~whole, o, C.DV, C.EACH)
            tl.store(part_lse_ptr + of_part, lse, mask=is_row & ~whole)


@triton.jit
def join(
    list_ptr, part_ptr, part_lse_ptr, seq_lens_ptr, cu_seqlens_ptr, o_ptr, lse_ptr, problem, o_strides, lse_strides,
    BLOCK: tl.constexpr, OVERHEAD: tl.constexpr, FIXED: tl.constexpr, BM: tl.constexpr, TOGETHER: tl.constexpr,
    HEADS: tl.constexpr, USED: tl.constexpr, LISTED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, EACH: tl.constexpr, EARLY: tl.constexpr, BESIDE: tl.constexpr = False,
):
    """Put BD columns of the partial results of ROWS rows of an item together: of EACH, or of that whose first part a
    team has done last; USED rows of a tile may exist. EARLY: launched while the walk still runs,
    which has waited for the list; or BESIDE another join, which has waited for the walks: this one ends behind it.
    """
    #: setup -> batch, q_row, head, is_row, count    rows of an item, and how many parts it has: none, if it is whole
    starts_ptr, firsts_ptr = list_ptr + problem.starts, list_ptr + problem.firsts  #- address
    one, lane_rows, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = lane_rows // tl.cdiv(USED, ROWS)
    nth = lane_rows % tl.cdiv(USED, ROWS) * ROWS + tl.arange(0, ROWS)
    share = tl.load(list_ptr)
    items = tl.load(list_ptr + 2)
    item = one
    if not EACH:
        item = tl.load(firsts_ptr + one + 1)
    exists = item < items
    item = tl.where(exists, item, 0)
    start = tl.load(starts_ptr + item) + OVERHEAD
    stop = tl.load(starts_ptr + item + 1)
    team = start // share
    num_parts = tl.maximum(stop - 1, start) // share - team + 1
    batch, tile = item_of(list_ptr + problem.sequences, list_ptr + problem.tiles, item, LISTED)
    batch = tl.where(exists, batch, 0)
    q_first, tokens = row_count(cu_seqlens_ptr, batch, problem.tokens)
    head_lane = lane + tile % HEADS * problem.lanes
    tile = tile // HEADS
    _, _, token, head, is_row = item_rows(head_lane, tile, nth, tokens, problem, BM, TOGETHER)
    cut = exists & (EACH or team == one) & (num_parts > 1)
    late = (start > team * share).to(tl.int32)
    base = 2 * (team * problem.lanes + lane)
    step = 2 * problem.lanes
    if FIXED:
        num_keys = key_count(tl.load(seq_lens_ptr + batch * problem.seq_lens_batch), problem.max_keys)
        num_parts = units_of(item_length(num_keys, tokens, tile, problem, BM * TOGETHER, BLOCK), FIXED)
        cut = exists & (num_parts > 1)
        late = num_parts * 0
        base = item * problem.lanes + lane
        step = problem.room * problem.lanes
    none = num_parts * 0
    count = tl.where(cut, num_parts, none)
    q_row = q_first + token
    is_row = is_row & cut
    d = piece * BD + tl.arange(0, BD)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, BD], tl.float32)
    wait_for_launch_before(EARLY and not BESIDE), let_next_begin(EARLY)  #- wait
    for first in range(none, count, CHUNK):
        #: load_parts -> lse_parts, parts    the next ones in the order of the keys; what has no key is not read
        n = first + tl.arange(0, CHUNK)
        place = base + n * step + tl.where(n == 0, late, 0)
        of_parts = place.to(tl.int64)[None, :] * BM + nth[:, None]  #- address
        is_part = is_row[:, None] & (n < count)[None, :]
        lse_parts = tl.load(part_lse_ptr + of_parts, mask=is_part, other=-float("inf"))  # [ROWS, CHUNK]
        has = (lse_parts > -float("inf"))[:, :, None] & (d < D)[None, None, :]
        parts = tl.load(part_ptr + of_parts[:, :, None] * D + d[None, None, :], mask=has, other=0.0)
        #: weights -> w, alpha, total, top    relative to the largest so far, so that nothing overflows
        highest = tl.maximum(top, tl.max(lse_parts, 1))
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        w = tl.exp(lse_parts - shift[:, None])
        alpha = tl.exp(top - shift)
        total = total * alpha + tl.sum(w, 1)
        top = highest
        #: add -> o
        o = o * alpha[:, None] + tl.sum(parts * w[:, :, None], 1)
    #: combine -> l, o, lse    weighted mean; no key at all gives 0 and -inf
    l = tl.where(total == 0, 0.0, 1.0 / total)
    o = o * l[:, None]
    lse = tl.where(total == 0, -float("inf"), top + tl.log(total))
    #: store
    o_at = o_ptr + batch * o_strides.batch + q_row * o_strides.token + head * o_strides.head  #- address
    tl.store(
        o_at[:, None] + d[None, :], o.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & (d < D)[None, :]
    )
    tl.store(
        lse_ptr + batch * lse_strides.batch + q_row * lse_strides.token + head * lse_strides.head, lse,
        mask=is_row & (piece == 0),
    )
    wait_for_launch_before(BESIDE)  #- wait


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None, *, scale: float, config: WalkConfig, features: Features | None = None,
    out: torch.Tensor | None = None, works: Sequence[torch.Tensor] | None = None, again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32, with cu_seqlens ``[1, total, ..]``.
    works : the list of each walk, made here if None. The arguments are valid; ``again`` as of
    :mod:`kvlab.triton_support.launching`.
    """
    f = Features() if features is None else of_walk(features, k_cache)
    problem = once(again, "problem", lambda: ragged_problem(q, k_cache, v_cache, block_table, cu_seqlens))
    out, lse = results(q, out, (*q.shape[:3], problem.v_dim))
    if out.numel() == 0:
        return out, lse
    arrays = q, *as_pairs(k_cache, v_cache), block_table, seq_lens, cu_seqlens
    kept = [None if again is None else again.setdefault(i, {}) for i in range(len(config.walks))]
    beside = config.beside and q.is_cuda
    early = q.is_cuda and len(config.walks) == 1 and config.walks[0].module is not None
    if works is None:
        listed = once(again, "listed", lambda: schedule_problem(problem, *f.mask.by_length))
        lists = partial(make_list, seq_lens, cu_seqlens, problem=listed, early=early or beside)
        works = [
            lists(config=one.schedule, beside=beside and one is not config.walks[0], again=known)[0]
            for one, known in zip(config.walks, kept, strict=True)
        ]
    launches = [
        partial(_launch_walk, one, (*arrays, work), (out, lse), problem, f, scale, known, early, beside)
        for one, work, known in zip(config.walks, works, kept, strict=True)
    ]
    if beside:  # the tiles first: each of their programs wants an SM for itself
        joins = [launch_one() for launch_one in (launches[-1], *launches[:-1])]
        for join_one in joins:
            join_one(beside=join_one is not joins[0])
        return out, lse
    for launch_one in launches:
        launch_one()()
    return out, lse


def _launch_walk(
    one: Walk, arrays: tuple[Any, ...], into: tuple[torch.Tensor, torch.Tensor],
    problem: AttendProblem, f: Features, scale: float, again: Again, early: bool, beside: bool,
) -> Callable[..., Any]:
    """Launch a walk over the list behind ``arrays``: a function that launches its join, ``beside`` another. early :
    both begin while the launch before still runs, of tiles the join alone; beside : all do, the ring ends behind it.
    """
    (q, k, v, block_table, seq_lens, cu_seqlens, work), (out, lse), tiles = arrays, into, one.tiles
    schedule, places = one.schedule, once(again, "places", lambda: one.places(problem))
    part = out.new_empty((places, tiles.BM, problem.v_dim), dtype=torch.float32)
    part_lse = lse.new_empty((places, tiles.BM))
    written = out, lse, part, part_lse
    name = f"kvlab.attention.attend_paged.{one.module}"
    hopper = None if one.module is None else sys.modules.get(name) or importlib.import_module(name)
    if hopper is None:
        kernel, pointers = walk, (*arrays, feature_arrays(f), *written)
    else:
        kernel, pointers = hopper.walk, hopper.pointers_of(one, arrays, written, f, again)
    joined = work, part, part_lse, seq_lens, cu_seqlens, out, lse
    if relaunched(kernel, pointers, again):
        return lambda **_: relaunched(join, joined, again)
    sizes = WalkSizes(
        problem.group, problem.tokens, problem.max_keys, schedule.lanes(problem.kv_heads), block_table.stride(0),
        seq_lens.stride(0), *list_parts(one.items(problem)), one.items(problem), *f.mask.by_length,
    )
    ptx, ragged, listed = compiles_to_ptx(q), problem.ragged, one.lists_items(problem)
    o_strides, lse_strides = (RowStrides(*leading_strides(x, ragged=ragged)) for x in into)
    if hopper is None:
        steps = leading_strides(q, ragged=ragged), k.stride()[:-1], v.stride()[:-1], [*o_strides]
        unit, (of_q, of_k, of_v, of_o) = in_units(*steps, sees=problem.each < 4)
        constants = WalkConstants(
            problem.page_size, problem.each, block_strides(f.scales)[0], *problem.widths, *tiles.columns,
            *tiles.v_columns, tiles.BM, tiles.BN, ptx, f.mask.windowed, f.mask.placed, schedule.block,
            schedule.overhead, schedule.reach, schedule.rows, schedule.together, schedule.heads, listed, schedule.unit,
            unit,
        )
        numbers: tuple[Any, ...] = (
            f.scales.factor_log2(scale), f.scales.v_factor, feature_numbers(f), sizes, RowStrides(*of_q),
            PageStrides(*of_k), PageStrides(*of_v), RowStrides(*of_o), lse_strides,
        )
        options = {"C": constants, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        options |= register_limit(tiles, problem) if ptx else {}
    else:
        when = {"early": early or beside, "beside": beside}
        numbers, options = hopper.numbers_of(
            one, arrays, into, sizes, f, scale, ragged=ragged, listed=listed, **when
        )
    first_launch(kernel, one.grid(problem), pointers, again)(*numbers, **options)
    return partial(launch_join, one, problem, sizes, (o_strides, lse_strides), joined, again, early=early or beside)


def launch_join(
    one: Walk, problem: AttendProblem, sizes: WalkSizes, strides: tuple[RowStrides, RowStrides],
    joined: tuple[Any, ...], again: Again, *, early: bool = False, beside: bool = False,
) -> None:
    """Launch the join behind a walk of any operation. strides : those of out and lse; joined : its arrays; early : it
    begins while the walk still runs; beside : with another join.
    """
    schedule, (rows, chunk) = one.schedule, one.merged(problem)
    first_launch(join, one.join_grid(problem), joined, again)(
        sizes, *strides, BLOCK=schedule.block, OVERHEAD=schedule.overhead, FIXED=schedule.unit, BM=one.tiles.BM,
        TOGETHER=schedule.together, HEADS=schedule.heads, USED=one.rows(problem), LISTED=one.lists_items(problem),
        D=problem.v_dim, BD=piece_of(problem.v_dim), ROWS=rows, CHUNK=chunk, EACH=one.joins_each(problem), num_warps=4,
        EARLY=early, BESIDE=beside,
        **({"launch_pdl": True} if early else {}),
    )
