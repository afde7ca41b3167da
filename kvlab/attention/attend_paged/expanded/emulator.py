"""MLA prefill over a schedule in NumPy: the kernel's twin, all programs of a launch at once, unit after unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.attention.attend_paged.emulator import WalkLists, WalkResults, item_of, item_rows, join, team_items
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import (
    UNLIMITED,
    given_positions,
    key_count,
    key_range,
    padding,
    visible_end,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale, nope_scales, rope_scales, scale_weights
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.mla_prefill import MLAPrefillCTA
from kvlab.attention.machines.rows import KeyRows, per_sequence
from kvlab.attention.mla_prefill.config import MLAPrefillProblem
from kvlab.attention.mla_prefill.emulator import ROPE_HEAD, launch_form
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.schedule.emulator import item_blocks
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.attention.tiles.pages import Sequences, row_count, row_of
from kvlab.hardware.chip import divide
from kvlab.staging import Traffic, program_ids, ragged_range

from .config import ExpandedWalk, walked

Array = np.ndarray[Any, Any]


def walk(
    q_array: Array, keys: KeyRows, sequences: Sequences, lists: WalkLists, results: WalkResults, scale_log2: Any,
    features: Features, problem: MLAPrefillProblem, config: ExpandedWalk, arch: str, traffic: Traffic,
) -> None:
    """BM query rows of one head of item after item, against the keys of a team's units. K and V hold a sequence's keys
    from ``base`` on.
    """
    #: team -> begin, until, first_item, last_item    the places of this team, and the items that lie there
    work = lists.work  #- launch
    o_array, lse_array, part_array, part_lse_array = results  #- launch
    mask, scales, schedule, of_tiles = features.mask, features.scales, config.schedule, config.tiles  #- launch
    BM, BN, sizes = of_tiles.BM, of_tiles.BN, walked(problem, len(q_array))  #- launch
    k_rows, v_rows, max_k, rope_rows = keys  #- launch
    cu_q_array, cu_k_array, _, lens_array, first_key_array = sequences  #- launch
    left, right = mask.by_length if first_key_array is None else (UNLIMITED, UNLIMITED)  #- launch
    starts, item_sequences, tiles, firsts = (work[at:] for at in list_parts(config.items(sizes)))  #- address
    lanes, most = schedule.lanes(problem.heads), max(work[2] - 1, 0)  #- launch
    (program,) = program_ids(config.grid(sizes))  # [P]
    team = program // lanes
    begin, until, first_item, last_item = team_items(work, starts, firsts, team, schedule.overhead)
    for item in ragged_range(first_item, last_item, 1):
        #: setup -> q, q_rope, lo, full, hi, first, limit    a unit's rows, the keys they see, the query tiles
        walks = item < last_item  #- programs
        item = np.minimum(item, most)  #- programs
        batch, tile = item_of(item_sequences, tiles, item, True)
        q_first, num_q = row_count(cu_q_array, batch, 0)
        k_first, num_keys = row_count(cu_k_array, batch, 0)
        lane = program % lanes
        nth = np.arange(BM, dtype=np.int32)[None]
        kv_head, row, token, head, is_row = item_rows(lane, tile, nth, num_q, sizes, BM, schedule.together)
        is_row = is_row & walks[:, None]  #- programs
        total = num_keys
        if lens_array is not None:
            total = key_count(lens_array[batch], max_k)
        base = total - num_keys
        if first_key_array is not None:
            base = first_key_array[batch].astype(np.int32)
        pad = padding(total, mask.leftpad, batch)
        total, base = total - pad, base - pad
        end = visible_end(np.minimum(base + num_keys, total), mask.valid, batch)
        position = token + total[:, None] - num_q[:, None]
        top = row + total - num_q  # positions of the tile's rows
        bottom = np.minimum(row + BM, num_q) - 1 + total - num_q
        q_row = q_first[:, None] + token
        position, top, bottom = given_positions(mask.positions, batch, q_row, is_row, position, top, bottom)
        start = starts[item] + schedule.overhead
        stop = starts[item + 1]
        origin, _ = item_blocks(
            num_keys, num_q, tile, sizes.group, left, right, schedule.rows, schedule.block
        )
        opens = (origin + np.maximum(begin, start) - start) * schedule.block
        closes = (origin + np.minimum(until, stop) - start) * schedule.block
        first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)  # [P, BM]
        top_first, top_limit = key_range(top, end, mask.left, mask.right, mask.chunk)
        _, bottom_limit = key_range(bottom, end, mask.left, mask.right, mask.chunk)
        lo = np.maximum(np.maximum(top_first - base, opens), 0)
        hi = np.where(bottom < top, lo, np.maximum(np.minimum(bottom_limit - base, closes), lo))
        hi = np.where(walks, hi, lo)  #- programs
        full = np.maximum(np.minimum((top_limit - base) // BN * BN, hi), lo)
        if mask.bounded or of_tiles.one_loop:
            full = lo
        full = np.where(base < 0, lo, full)  # K may hold more keys than the sequence has
        first, limit = np.maximum(first, (base + lo)[:, None]), np.minimum(limit, (base + hi)[:, None])
        rows = batch, head, token, is_row, first, limit
        bounds = lo, full, hi
        cta = MLAPrefillCTA(  #- programs
            arch, of_tiles, problem, q_array.dtype, k_rows, v_rows, rope_rows, batch, kv_head, traffic
        )
        q, q_rope = cta.load_q(q_array, (q_row, head), is_row)
        cta.follow(k_first, base + pad, *bounds)  #- programs
        factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
        if scales.nope.scaled:
            nope = head_scale(scales.nope.number, scales.nope.heads, batch, kv_head)[:, None]
        if scales.rope.scaled:
            rope = head_scale(scales.rope.number, scales.rope.heads, batch, ROPE_HEAD)[:, None]
        m, l = start_rows(features.sinks, head, begin <= start)
        o = cta.zeros()
        for MASKED in range(2):
            for at in ragged_range(bounds[MASKED], bounds[MASKED + 1], BN):
                #: load_k -> k    a K tile, DRAM -> shared memory: those that every row sees, then those seen in part
                active = at < bounds[MASKED + 1]  #- programs
                held = at[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN], rows of K
                exists = held < bounds[MASKED + 1][:, None]
                k = cta.load_k(MASKED, active)
                #: load_rope -> k_rope    the rope part of the same keys, from their pages
                key = base[:, None] + held
                page, slot = row_of(rope_rows, batch[:, None], k_first[:, None], key + pad[:, None], exists)
                k_rope = cta.load_rope(MASKED, active)
                #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
                if scales.nope.scaled:
                    by_key = nope * nope_scales(features, batch[:, None], k_first[:, None] + held, kv_head, exists)
                if scales.rope.scaled:
                    by_rope = rope * rope_scales(features, page, slot, ROPE_HEAD, exists)
                s = cta.scores(
                    q, q_rope, k, k_rope, by_key if scales.nope.scaled else None,
                    by_rope if scales.rope.scaled else None, active,
                )
                s = adjust(s, factor, slope, 1.0, features, position, key)
                s = s.only(active[:, None, None, None])  #- programs
                #: mask -> s    keys that a row does not see; the bias of those that it sees
                if MASKED:
                    s = hide(s, rows, key, features, True)
                #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale; scales of tokens
                p, alpha, m, l = weigh(cta, s, m, l)
                o = o.times(alpha)
                p = scale_weights(p, features, batch[:, None], k_first[:, None] + held, kv_head, exists)
                #: load_v -> v    the V tile of the same keys
                v = cta.load_v(MASKED, active)
                #: accumulate -> o    O += P V, P rounded once to the dtype of the product
                o = cta.accumulate(p, v, o, active)
        #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
        sees = l != 0
        factor = head_scale(scales.v.number, scales.v.heads, batch, kv_head)[:, None]
        lse = log_sum(m, l, sees)
        with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
            o = o.with_values(np.where(o.by_row(sees), o.values * o.by_row(divide(factor, l)), np.float32(0)))
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        whole = ((begin <= start) & (stop <= until))[:, None]
        columns = o.tile()[:, :, : problem.value]  #- address
        store(o_array, (q_row, head), columns, mask=is_row & whole)
        store(lse_array, (q_row, head), lse, mask=is_row & whole)
        at_part = 2 * program + (start > begin).astype(np.int32)
        store(part_array, (at_part[:, None], nth), columns, mask=is_row & sees & ~whole)
        store(part_lse_array, (at_part[:, None], nth), lse, mask=is_row & ~whole)
        traffic.move("registers->DRAM", int((is_row & whole).sum()) * (o_array[0, 0].nbytes + lse.itemsize))
        traffic.move("registers->DRAM", int((is_row & sees & ~whole).sum()) * part_array[0, 0].nbytes)


def launch(
    q: Array, k: Array, v: Array, k_rope: Array, sequences: Sequences, *, scale: float, problem: MLAPrefillProblem,
    config: ExpandedWalk, features: Features, works: Sequence[Array], out: Array | None = None, arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins over the list of a plan, ``works``; the rest as of
    :func:`kvlab.attention.mla_prefill.emulator.launch`.
    """
    out = np.empty((*q.shape[:2], problem.value), result_dtype(q)) if out is None else out
    lse = np.empty(q.shape[:2], np.float32)
    if q.size == 0 or problem.batch == 0:
        return out, lse
    query, keys, scale_log2, features = launch_form(q, k, v, k_rope, sequences, scale, problem, features)
    traffic, sizes = Traffic() if traffic is None else traffic, walked(problem, len(q))
    shape = config.places(sizes), config.tiles.BM
    part, part_lse = np.full((*shape, problem.value), np.nan, np.float32), np.full(shape, np.nan, np.float32)
    lists, results = WalkLists(sequences.cu_k, sequences.cu_q, works[0]), WalkResults(out, lse, part, part_lse)
    with traffic.launch():
        walk(query, keys, sequences, lists, results, scale_log2, features, problem, config, arch, traffic)
    o_rows, lse_rows = (per_sequence(x[None], sequences.cu_q) for x in (out, lse))
    join(lists, WalkResults(o_rows, lse_rows, part, part_lse), features, sizes, config, traffic)
    return out, lse
