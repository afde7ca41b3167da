"""Attention over a schedule in NumPy: the kernels' twins, all programs of a launch at once, unit after unit."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import given_positions, key_count, key_range, padding, visible_end
from kvlab.attention.features.qv import add_values_scores
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import (
    head_scale,
    key_scales,
    nope_scales,
    over_minima,
    scale_weights,
    value_scales,
)
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.decode import decode_cta
from kvlab.attention.machines.rows import per_sequence
from kvlab.attention.merge_states.config import piece_of
from kvlab.attention.mha_decode.emulator import load_rows
from kvlab.attention.schedule.config import ScheduleConfig, list_parts
from kvlab.attention.schedule.emulator import item_blocks, team_items, unit_size, units_of
from kvlab.attention.schedule.emulator import launch as make_list
from kvlab.attention.tiles.four_bits.emulator import key_blocks, value_blocks
from kvlab.attention.tiles.masked import load, store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.attention.tiles.pages import in_pages, row_count
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp, log
from kvlab.staging import Traffic, ceildiv, program_ids, ragged_range

from .config import AttendProblem, Walk, WalkConfig, of_walk, ragged_problem, schedule_problem

Array = np.ndarray[Any, Any]


def item_of(sequences: Array, tiles: Array, item: Array, LISTED: bool) -> tuple[Array, Array]:
    """(batch, tile): the sequence of each item, 64 bits, and which of its items it is."""
    batch, tile = item.astype(np.int64), np.zeros_like(item)
    if LISTED:
        batch = sequences[item].astype(np.int64)
        tile = tiles[item]
    return batch, tile


def item_rows(
    lane: Array, tile: Array, nth: Array, tokens: Array, problem: AttendProblem, BM: int, TOGETHER: int
) -> tuple[Array, Array, Array, Array, Array]:
    """(kv_head, row ``[P]``, token, head, is_row ``[P, n]``): the KV head and the first row of the programs ``lane`` of
    a team in the ``tile``-th item of a sequence; of their ``nth`` rows ``[P or 1, n]``, token-major, the new token and
    the query head, and whether there is such a row.
    """
    kv_head = (lane // TOGETHER).astype(np.int64)
    row = (tile * TOGETHER + lane % TOGETHER) * BM
    every = row[:, None] + nth
    head = kv_head[:, None] * problem.group + every % problem.group
    return kv_head, row, every // problem.group, head, every < problem.group * tokens[:, None]


def unit_keys(
    num_keys: Array, tokens: Array, tile: Array, row: Array, end: Array, begin: Array, until: Array, start: Array,
    stop: Array, mask: Any, problem: AttendProblem, schedule: ScheduleConfig,
) -> tuple[Array, Array]:
    """(lo, hi): the keys of the ``tile``-th items of sequences, whose key blocks have the places ``start ... stop``,
    that teams with the places ``begin ... until`` take, and that the BM rows from ``row`` on see; none without rows;
    all ``[P]``.
    """
    BM, BLOCK, ROWS = schedule.BM, schedule.block, schedule.rows  #- launch
    low = np.zeros_like(num_keys)
    origin = np.zeros_like(num_keys)
    if mask.windowed:
        top = num_keys - tokens + tile * ROWS // problem.group
        low, _ = key_range(top, end, mask.left, mask.right, mask.chunk)
        origin, _ = item_blocks(num_keys, tokens, tile, problem.group, mask.left, mask.right, ROWS, BLOCK)
    rows = tokens * problem.group
    bottom = num_keys - tokens + (np.minimum(row + BM, rows) - 1) // problem.group
    _, high = key_range(bottom, end, mask.left, mask.right, mask.chunk)
    if mask.placed:
        low = np.zeros_like(num_keys)
        origin = np.zeros_like(num_keys)
        high = end
    high = np.where(row < rows, high, 0)
    lo = np.maximum((origin + np.maximum(begin, start) - start) * BLOCK, low)
    hi = np.minimum((origin + np.minimum(until, stop) - start) * BLOCK, high)
    return lo, np.maximum(hi, lo)


def item_length(
    num_keys: Array, tokens: Array, tile: Array, problem: AttendProblem, schedule: ScheduleConfig, mask: Any
) -> Array:
    """Key blocks that the ``tile``-th items of sequences have in the list."""
    ROWS, BLOCK = schedule.rows, schedule.block  #- launch
    left, right = mask.by_length  #- launch
    origin, last = item_blocks(num_keys, tokens, tile, problem.group, left, right, ROWS, BLOCK)
    return last - origin


def team_units(
    blocks: Array, place: Array, begin: Array, until: Array, OVERHEAD: int, FIXED: int
) -> tuple[Array, Array, Array]:
    """(first, last, size): the units ``first ... last`` of ``size`` key blocks that begin at the places ``begin ...
    until``, of items of so many key blocks that begin at ``place``; one without a key is a unit.
    """
    size = unit_size(blocks, FIXED)
    first = ceildiv(np.maximum(begin - place, 0), size + OVERHEAD)
    last = ceildiv(np.maximum(until - place, 0), size + OVERHEAD)
    return first, np.minimum(last, np.maximum(units_of(blocks, FIXED), 1)), size


class WalkLists(NamedTuple):
    """Keys of each sequence, offsets of its new tokens or None, and the work list."""

    seq_lens: Array
    cu_seqlens: Array | None
    work: Array


class WalkResults(NamedTuple):
    """Arrays that a walk writes: results of whole items, and partial ones of items that are cut."""

    out: Array
    lse: Array
    part: Array
    part_lse: Array


def walk(
    q_array: Array, k_cache: PagedKVCache, v_cache: PagedKVCache, lists: WalkLists, results: WalkResults,
    scale_log2: float, features: Features, problem: AttendProblem, config: Walk, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads of one KV head) of item after item, against the keys of a team's units."""
    #: team -> begin, until, first_item, last_item    the places of this team, and the items that lie there
    seq_lens, cu_seqlens, work = lists  #- launch
    o_array, lse_array, part_array, part_lse_array = results  #- launch
    mask, scales, schedule = features.mask, features.scales, config.schedule  #- launch
    BM, BN = config.tiles.BM, config.tiles.BN  #- launch
    parts = list_parts(config.items(problem))  #- address
    starts, sequences, tiles, firsts = (work[at:] for at in parts)  #- address
    lanes, LISTED, most = schedule.lanes(problem.kv_heads), config.lists_items(problem), max(work[2] - 1, 0)  #- launch
    room = config.items(problem)  #- launch
    (program,) = program_ids(config.grid(problem))  # [P]
    team = program // lanes
    begin, until, first_item, last_item = team_items(work, starts, firsts, team, schedule.reach)
    for item in ragged_range(first_item, last_item, 1):
        #: item -> num_keys, q_first, tokens, first_unit, last_unit    its rows, and the units of it that the team does
        walks = item < last_item  #- programs
        item = np.minimum(item, most)  #- programs
        batch, tile = item_of(sequences, tiles, item, LISTED)
        num_keys = key_count(seq_lens[batch], problem.max_keys)
        q_first, tokens = row_count(cu_seqlens, batch, problem.tokens)
        lane = program % lanes
        head_lane = lane + tile % schedule.heads * lanes
        tile = tile // schedule.heads
        first_unit = np.zeros_like(item)
        last_unit = first_unit + 1
        if schedule.unit:
            blocks = item_length(num_keys, tokens, tile, problem, schedule, mask)
            first_unit, last_unit, size = team_units(
                blocks, starts[item], begin, until, schedule.overhead, schedule.unit
            )
        pad = padding(num_keys, mask.leftpad, batch)
        num_keys = num_keys - pad
        last_unit = np.where(walks, last_unit, first_unit)  #- programs
        for nth_unit in ragged_range(first_unit, last_unit, 1):
            #: setup -> q, lo, hi, first, limit    a unit's rows, the keys they see, those of the unit, the query tile
            walks = nth_unit < last_unit  #- programs
            nth = np.arange(BM, dtype=np.int32)[None]  #- address
            kv_head, row, token, head, is_row = item_rows(head_lane, tile, nth, tokens, problem, BM, schedule.together)
            is_row = is_row & walks[:, None]  #- programs
            q_row = q_first[:, None] + token
            top = num_keys - tokens + row // problem.group
            bottom = num_keys - tokens + (np.minimum(row + BM, tokens * problem.group) - 1) // problem.group
            position, lowest, highest = given_positions(  # [P, BM]
                mask.positions, batch, q_row, is_row, num_keys[:, None] - tokens[:, None] + token, top, bottom
            )
            end = visible_end(num_keys, mask.valid, batch)
            start = starts[item] + schedule.overhead
            stop = starts[item + 1]
            opens, closes = begin, until
            if schedule.unit:
                start, stop = blocks * 0, blocks
                opens = nth_unit * size
                closes = opens + size
            lo, hi = unit_keys(
                num_keys, tokens, tile, row, end, opens, closes, start, stop, mask, problem, schedule
            )
            if mask.placed:
                low, _ = key_range(lowest, end, mask.left, mask.right, mask.chunk)
                _, high = key_range(highest, end, mask.left, mask.right, mask.chunk)
                lo = np.maximum(lo, low)
                hi = np.maximum(np.minimum(hi, high), lo)
            hi = np.where(walks, hi, lo)  #- programs
            first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)
            first, limit = np.maximum(first, lo[:, None]), np.minimum(limit, hi[:, None])
            rows = batch, head, token, is_row, first, limit
            where = lo + pad, hi + pad  #- programs
            cta: Any = decode_cta(  #- programs
                arch, config.tiles, k_cache, v_cache, batch, kv_head, where, traffic, qv=features.qv is not None,
                minima=scales.k.minima is not None,
            )
            q, unit = load_rows(cta, q_array, (batch[:, None], q_row, head), is_row, problem.each)
            if features.qv is not None:
                qv, second_unit = load_rows(
                    cta.values, features.qv, (batch[:, None], q_row, head), is_row, problem.each
                )
                if problem.each == 1:
                    q = qv + q
            factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
            if problem.each > 1 and features.qv is None:
                factor = factor * unit  # [P, BM]
            by_head = np.ones((len(batch), 1), np.float32)
            if scales.nope.scaled:
                by_head = head_scale(scales.nope.number, scales.nope.heads, batch, kv_head)[:, None]
            q_sum = cta.row_sums(q)
            m, l = start_rows(features.sinks, head, opens <= start)
            o = cta.zeros()
            for at in ragged_range(lo, hi, BN):
                #: load_k -> k    the K tile of these pages, DRAM -> shared memory
                active = at < hi  #- programs
                key = at[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
                exists = key < hi[:, None]
                page, slot = in_pages(k_cache, batch[:, None], key + pad[:, None], exists)
                k = cta.load_k(active)
                if features.qv is not None:
                    v = cta.load_v(active)
                    if problem.each == 1:
                        k = v + k
                by_block = key_blocks(features, page, slot, kv_head, exists)
                #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
                s = cta.scores(q, k, active, by_block)
                if problem.each > 1 and features.qv is not None:
                    second = cta.scores(qv, v, active, by_block)
                    by_key = by_head * nope_scales(features, page, slot, kv_head, exists)
                    by_value = head_scale(scales.v_factor, scales.v.heads, batch, kv_head)[:, None]
                    by_value = by_value * value_scales(features, page, slot, kv_head, exists)
                    s = add_values_scores(s, second, unit, second_unit, by_key, by_value)
                scale = key_scales(features, page, slot, kv_head, exists)
                s = over_minima(s, scale, q_sum, features, page, slot, kv_head, exists)
                s = adjust(s, factor, slope, scale, features, position, key)
                #: mask -> s    keys that a row does not see
                s = hide(s, rows, key, features, mask.windowed)
                #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
                p, alpha, m, l = weigh(cta, s, m, l)
                o = o.rescale(alpha)
                #: load_v -> v    the V tile of the same pages, unless it is here for the scores of qv
                if features.qv is None:
                    v = cta.load_v(active)
                by_block = value_blocks(features, page, slot, kv_head, exists)
                #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
                o = cta.add_minima(p, o, features, page, slot, kv_head, exists)
                p = scale_weights(p, features, page, slot, kv_head, exists)
                o = cta.accumulate(p, v, o, active, by_block)
            #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
            sees = l != 0
            if features.sinks is None:
                sees = sees & (first < limit)
            factor = head_scale(scales.v_factor, scales.v.heads, batch, kv_head)[:, None]
            lse = log_sum(m, l, sees)
            with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
                l = np.where(sees, divide(factor, l), np.float32(0))  # what the sums of a row are multiplied by
            #: store    the result, or a partial one where the item is cut; one without a key is left alone
            whole = ((opens <= start) & (stop <= closes))[:, None]
            o = o.normalise(l, sees)
            store(o_array, (batch[:, None], q_row, head), o.rows(), mask=is_row & whole)
            store(lse_array, (batch[:, None], q_row, head), lse, mask=is_row & whole)
            place = 2 * program + (start > begin).astype(np.int32)
            if schedule.unit:
                place = (nth_unit * room + item) * lanes + lane
            store(part_array, (place[:, None], nth), o.rows(), mask=is_row & sees & ~whole)
            store(part_lse_array, (place[:, None], nth), lse, mask=is_row & ~whole)
            traffic.move("registers->DRAM", int((is_row & whole).sum()) * (o_array[0, 0, 0].nbytes + lse.itemsize))
            traffic.move("registers->DRAM", int((is_row & sees & ~whole).sum()) * part_array[0, 0].nbytes)


@np.errstate(divide="ignore", invalid="ignore")  # of a program whose rows have no key at all
def join(
    lists: WalkLists, results: WalkResults, features: Features, problem: AttendProblem, config: Walk, traffic: Traffic
) -> None:
    """Put BD columns of the partial results of ROWS rows of an item together: of EACH, or of that whose first part a
    team has done last; USED rows of a tile may exist.
    """
    #: setup -> batch, q_row, head, is_row, count    rows of an item, and how many parts it has: none, if it is whole
    seq_lens, cu_seqlens, work = lists  #- launch
    o_array, lse_array, part_array, part_lse_array = results  #- launch
    schedule, D, BD = config.schedule, problem.v_dim, piece_of(problem.v_dim)  #- launch
    BM, USED, TOGETHER = schedule.BM, config.rows(problem), schedule.together  #- launch
    ROWS, CHUNK = config.merged(problem)  #- launch
    lanes, LISTED = schedule.lanes(problem.kv_heads), config.lists_items(problem)  #- launch
    room, EACH = config.items(problem), config.joins_each(problem)  #- launch
    starts, sequences, tiles, firsts = (work[at:] for at in list_parts(room))  #- address
    one, lane_rows, piece = program_ids(config.join_grid(problem))  # [P]
    lane = lane_rows // ceildiv(USED, ROWS)
    nth = (lane_rows % ceildiv(USED, ROWS) * ROWS)[:, None] + np.arange(ROWS, dtype=np.int32)  # [P, ROWS]
    share = work[0]
    items = work[2]
    item = one
    if not EACH:
        item = firsts[one + 1]
    exists = item < items
    item = np.where(exists, item, 0)
    start = starts[item] + schedule.overhead
    stop = starts[item + 1]
    team = start // share
    num_parts = np.maximum(stop - 1, start) // share - team + 1
    batch, tile = item_of(sequences, tiles, item, LISTED)
    batch = np.where(exists, batch, 0)
    q_first, tokens = row_count(cu_seqlens, batch, problem.tokens)
    head_lane = lane + tile % schedule.heads * lanes
    tile = tile // schedule.heads
    _, _, token, head, is_row = item_rows(head_lane, tile, nth, tokens, problem, BM, TOGETHER)
    cut = exists & (EACH | (team == one)) & (num_parts > 1)
    late = (start > team * share).astype(np.int32)
    base = 2 * (team * lanes + lane)
    step = 2 * lanes
    if schedule.unit:
        num_keys = key_count(seq_lens[batch], problem.max_keys)
        num_parts = units_of(item_length(num_keys, tokens, tile, problem, schedule, features.mask), schedule.unit)
        cut = exists & (num_parts > 1)
        late = num_parts * 0
        base = item * lanes + lane
        step = room * lanes
    none = num_parts * 0
    count = np.where(cut, num_parts, none)
    q_row = q_first[:, None] + token
    is_row = is_row & cut[:, None]
    d = piece[:, None] * BD + np.arange(BD)  # [P, BD]
    top = np.full(nth.shape, -np.inf, np.float32)
    total = np.zeros(nth.shape, np.float32)
    o = np.zeros((*nth.shape, BD), np.float32)
    for first in ragged_range(none, count, CHUNK):
        #: load_parts -> lse_parts, parts    the next ones in the order of the keys; what has no key is not read
        n = first[:, None] + np.arange(CHUNK, dtype=np.int32)  # [P, CHUNK]
        place = base[:, None] + n * step + np.where(n == 0, late[:, None], 0)
        at_lse = place[:, None, :], nth[:, :, None]  #- address
        is_part = is_row[:, :, None] & (n < count[:, None])[:, None, :]
        lse_parts = load(part_lse_array, at_lse, mask=is_part, other=-np.inf)  # [P, ROWS, CHUNK]
        has = (lse_parts > -np.inf)[:, :, :, None] & (d < D)[:, None, None, :]
        at = *(x[..., None] for x in at_lse), d[:, None, None, :]  #- address
        parts = load(part_array, at, mask=has, other=0.0)
        traffic.move("DRAM->registers", np.count_nonzero(has) * parts.itemsize)
        #: weights -> w, alpha, total, top    relative to the largest so far, so that nothing overflows
        highest = np.maximum(top, lse_parts.max(axis=2))
        shift = np.where(highest == -np.inf, np.float32(0), highest)
        w = exp(lse_parts - shift[:, :, None])
        alpha = exp(top - shift)
        total = total * alpha + w.sum(axis=2)
        top = highest
        #: add -> o
        o = o * alpha[:, :, None] + (parts * w[:, :, :, None]).sum(axis=2)
    #: combine -> l, o, lse    weighted mean; no key at all gives 0 and -inf
    l = np.where(total == 0, np.float32(0), divide(np.float32(1), total))
    o = o * l[:, :, None]
    lse = np.where(total == 0, np.float32(-np.inf), top + log(total))
    #: store
    rows = batch[:, None], q_row, head  #- address
    at_o = *(x[..., None] for x in rows), d[:, None, :]  #- address
    store(o_array, at_o, o, mask=is_row[:, :, None] & (d < D)[:, None, :])
    store(lse_array, rows, lse, mask=is_row & (piece == 0)[:, None])


def launch(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, cu_seqlens: Array | None = None, *,
    scale: float, config: WalkConfig, features: Features | None = None, out: Array | None = None,
    works: Sequence[Array] | None = None, arch: str = "sm_90", traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32, with cu_seqlens ``[1, total, ..]``.
    works : the list of each walk, made here if None. The arguments are valid.
    """
    features = Features() if features is None else of_walk(features, k_cache)
    problem, mask = ragged_problem(q, k_cache, v_cache, block_table, cu_seqlens), features.mask
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((*q.shape[:3], problem.v_dim), result_dtype(q)) if out is None else out
    lse = np.empty(q.shape[:3], np.float32)
    if out.size == 0:
        return out, lse
    lengths = key_count(seq_lens, problem.max_keys).astype(np.uint32), block_table, problem.tokens, problem.max_keys
    keys, values = (PagedKVCache(pages, *lengths) for pages in (k_cache, v_cache))
    q_rows, o_rows, lse_rows = (per_sequence(x, cu_seqlens) for x in (q, out, lse))
    scale_log2 = features.scales.factor_log2(scale)
    if features.qv is not None:
        features = replace(features, qv=per_sequence(features.qv, cu_seqlens))
    for i, one in enumerate(config.walks):
        if works is None:
            listed = schedule_problem(problem, *mask.by_length)
            (work,) = make_list(seq_lens, cu_seqlens, problem=listed, config=one.schedule)
        else:
            work = works[i]
        shape = one.places(problem), one.tiles.BM
        part, part_lse = np.full((*shape, problem.v_dim), np.nan, np.float32), np.full(shape, np.nan, np.float32)
        lists, results = WalkLists(seq_lens, cu_seqlens, work), WalkResults(o_rows, lse_rows, part, part_lse)
        with traffic.launch():
            if one.module is None:
                walk(q_rows, keys, values, lists, results, scale_log2, features, problem, one, arch, traffic)
            else:
                hopper = importlib.import_module(f"kvlab.attention.attend_paged.{one.module}_emulator")
                caches = k_cache, v_cache, block_table
                hopper.walk(q_rows, *caches, lists, results, scale_log2, features, problem, one, traffic)
        join(lists, results, features, problem, one, traffic)
    return out, lse
