"""MLA decode over a schedule in NumPy: the kernel's twin, all programs of a launch at once, unit after unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.attention.attend_paged.config import schedule_problem
from kvlab.attention.attend_paged.emulator import (
    WalkLists,
    WalkResults,
    item_of,
    item_rows,
    join,
    team_items,
    unit_keys,
)
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count, key_range, visible_end
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale, value_scales
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.mla_decode import LatentCaches, mla_cta
from kvlab.attention.mla_decode.config import MLADecodeProblem
from kvlab.attention.mla_decode.emulator import place
from kvlab.attention.mla_decode.hopper_emulator import walk as ring_walk
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.schedule.emulator import launch as make_list
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.hardware.chip import divide
from kvlab.memory import Memory, bfloat16
from kvlab.staging import Traffic, program_ids, ragged_range, row_offsets

from .config import LatentWalk, walked

Array = np.ndarray[Any, Any]


def walk(
    q_array: Array, caches: LatentCaches, lists: WalkLists, results: WalkResults, scale_log2: float,
    features: Features, problem: MLADecodeProblem, config: LatentWalk, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads) of item after item, against the keys of a team's units."""
    #: team -> begin, until, first_item, last_item    the places of this team, and the items that lie there
    seq_lens, _, work = lists  #- launch
    o_array, lse_array, part_array, part_lse_array = results  #- launch
    mask, scales, schedule, of_tiles = features.mask, features.scales, config.schedule, config.tiles  #- launch
    BM, BN, sizes = of_tiles.BM, of_tiles.BN, walked(problem)  #- launch
    parts = list_parts(schedule.most_items(schedule_problem(sizes, mask.left, mask.right)))  #- address
    starts, sequences, tiles, firsts = (work[at:] for at in parts)  #- address
    lanes, LISTED, most = schedule.lanes(1), config.lists_items(sizes), max(work[2] - 1, 0)  #- launch
    dram = Memory.over(q_array, name="q")  #- address
    (program,) = program_ids(config.grid(sizes))  # [P]
    team = program // lanes
    begin, until, first_item, last_item = team_items(work, starts, firsts, team, schedule.overhead)
    for item in ragged_range(first_item, last_item, 1):
        #: setup -> q, q_rope, lo, hi, first, limit    a unit's rows, their keys, those of the unit, the query tile
        walks = item < last_item  #- programs
        item = np.minimum(item, most)  #- programs
        batch, tile = item_of(sequences, tiles, item, LISTED)
        num_keys = key_count(seq_lens[batch], problem.max_keys)
        tokens = np.full(len(batch), problem.tokens, np.int32)
        lane = program % lanes
        nth = np.arange(BM, dtype=np.int32)[None]
        kv_head, row, token, head, is_row = item_rows(lane, tile, nth, tokens, sizes, BM, schedule.together)
        is_row = is_row & walks[:, None]  #- programs
        position = num_keys[:, None] - tokens[:, None] + token  # [P, BM]
        end = visible_end(num_keys, mask.valid, batch)
        start = starts[item] + schedule.overhead
        stop = starts[item + 1]
        lo, hi = unit_keys(
            num_keys, tokens, tile, row, end, begin, until, start, stop, mask, sizes, schedule
        )
        hi = np.where(walks, hi, lo)  #- programs
        first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)
        first, limit = np.maximum(first, lo[:, None]), np.minimum(limit, hi[:, None])
        rows = batch, head, token, is_row, first, limit
        cta = mla_cta(  #- programs
            arch, BM, BN, (of_tiles.BV, of_tiles.BR), caches, batch, hi, traffic, dtype=q_array.dtype,
            num_warps=of_tiles.num_warps, num_stages=of_tiles.num_stages,
        )
        rows_at = row_offsets(q_array, (batch[:, None], token, head), is_row)  #- address
        q, q_rope = cta.load_q(dram, rows_at, is_row)
        factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
        latent = head_scale(scales.v.number, scales.v.heads, batch, kv_head)[:, None]
        m, l = start_rows(features.sinks, head, begin <= start)
        o = cta.zeros()
        for at in ragged_range(lo, hi, BN):
            #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
            active = at < hi  #- programs
            key = at[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
            exists = key < hi[:, None]
            page, slot, key, exists = place(caches.latent, batch[:, None], key, 0, exists, None)
            k, k_rope = cta.load_k(at, active)
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            scale = value_scales(features, page, slot, kv_head, exists)
            by_key = np.broadcast_to(latent * scale, key.shape)
            s = cta.scores((q, q_rope), (k, k_rope), active, by_key if scales.nope.scaled else None)
            s = adjust(s, factor, slope, scale, features, position, key)
            #: mask -> s    keys that a row does not see
            s = hide(s, rows, key, features, mask.windowed)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
            p, alpha, m, l = weigh(cta, s, m, l)
            o = o.times(alpha)
            #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
            v = cta.load_v(active)
            #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
            if features.scales.v.tokens is not None:
                p = p.with_values(p.values * p.by_column(scale))
            o = cta.accumulate(p, v, o, active)
        #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
        sees = l != 0
        if features.sinks is None:
            sees = sees & (first < limit)
        lse = log_sum(m, l, sees)
        with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
            o = o.with_values(np.where(o.by_row(sees), o.values * o.by_row(divide(latent, l)), np.float32(0)))
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        whole = ((begin <= start) & (stop <= until))[:, None]
        columns = o.tile()[:, :, : problem.latent]  #- address
        store(o_array, (batch[:, None], token, head), columns, mask=is_row & whole)
        store(lse_array, (batch[:, None], token, head), lse, mask=is_row & whole)
        at_part = 2 * program + (start > begin).astype(np.int32)
        store(part_array, (at_part[:, None], nth), columns, mask=is_row & sees & ~whole)
        store(part_lse_array, (at_part[:, None], nth), lse, mask=is_row & ~whole)
        traffic.move("registers->DRAM", int((is_row & whole).sum()) * (o_array[0, 0, 0].nbytes + lse.itemsize))
        traffic.move("registers->DRAM", int((is_row & sees & ~whole).sum()) * part_array[0, 0].nbytes)


def launch(
    q: Array, kv_cache: Array, k_rope: Array, block_table: Array, seq_lens: Array, *, scale: float, features: Features,
    config: LatentWalk, row_scales: Array | None = None, out: Array | None = None,
    works: Sequence[Array] | None = None, arch: str = "sm_90", traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins; arguments and results as of :func:`kvlab.attention.mla_decode.emulator.launch`. works : the list,
    made here if None.
    """
    problem = MLADecodeProblem.of(q, kv_cache, k_rope, block_table, seq_lens, row_scales)
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((*q.shape[:3], problem.latent), result_dtype(q)) if out is None else out
    lse = np.empty(q.shape[:3], np.float32)
    if q.size == 0:
        return out, lse
    features = features.of_latents(k_rope.dtype == kv_cache.dtype)
    mask, sizes = features.mask, walked(problem)
    items = schedule_problem(sizes, mask.left, mask.right)
    (work,) = works or make_list(seq_lens, problem=items, config=config.schedule)
    shape = 2 * config.grid(sizes)[0], config.tiles.BM
    part, part_lse = np.full((*shape, problem.latent), np.nan, np.float32), np.full(shape, np.nan, np.float32)
    lists, into = WalkLists(seq_lens, None, work), WalkResults(out, lse, part, part_lse)
    factor = features.scales.factor_log2(scale)
    if config.ring is not None:
        places = list_parts(config.schedule.most_items(items))
        arrays, listed = (q, kv_cache, k_rope), (block_table, seq_lens, work)
        ring_walk(arrays, listed, into, factor, features, config, places, *config.grid(sizes), traffic)
    else:
        keys = key_count(seq_lens, problem.max_keys)
        caches = LatentCaches.of((kv_cache, k_rope, row_scales), block_table, keys, problem)
        query = q if q.dtype.itemsize > 1 else q.astype(bfloat16)
        with traffic.launch():
            walk(query, caches, lists, into, factor, features, problem, config, arch, traffic)
    join(lists, into, features, sizes, config, traffic)
    return out, lse
