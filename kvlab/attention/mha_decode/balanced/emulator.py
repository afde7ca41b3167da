"""MHA decode over a schedule in NumPy: the kernels' twins, all programs of a launch at once, unit after unit."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count, key_range, visible_end
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale, key_scales, scale_weights
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.decode import decode_cta
from kvlab.attention.merge_states.config import piece_of
from kvlab.attention.merge_states.emulator import lane_sum
from kvlab.attention.mha_decode.config import DecodeProblem, problem_of
from kvlab.attention.mha_decode.emulator import load_rows
from kvlab.attention.schedule.config import ScheduleConfig, list_parts
from kvlab.attention.schedule.emulator import item_blocks
from kvlab.attention.schedule.emulator import launch as make_list
from kvlab.attention.tiles.masked import load, store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.attention.tiles.pages import in_pages, paged
from kvlab.attention.tiles.rows import packed_rows
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, exp, log
from kvlab.staging import Traffic, ceildiv, program_ids, ragged_range

from .config import BalancedConfig, schedule_problem

Array = np.ndarray[Any, Any]


def unit_keys(
    num_keys: Array, end: Array, begin: Array, until: Array, start: Array, stop: Array, mask: Any,
    problem: DecodeProblem, schedule: ScheduleConfig,
) -> tuple[Array, Array]:
    """(lo, hi): the keys of items, whose key blocks have the places ``start ... stop``, that teams with the places
    ``begin ... until`` take; all ``[P]``.
    """
    BLOCK, ROWS = schedule.block, schedule.rows  #- launch
    low = np.zeros_like(num_keys)
    origin = np.zeros_like(num_keys)
    if mask.windowed:
        low, _ = key_range(num_keys - problem.tokens, end, mask.left, mask.right, mask.chunk)
        origin, _ = item_blocks(num_keys, problem.tokens, 0, problem.group, mask.left, mask.right, ROWS, BLOCK)
    _, high = key_range(num_keys - 1, end, mask.left, mask.right, mask.chunk)
    lo = np.maximum((origin + np.maximum(begin, start) - start) * BLOCK, low)
    hi = np.minimum((origin + np.minimum(until, stop) - start) * BLOCK, high)
    return lo, np.maximum(hi, lo)


def walk(
    q_array: Array, k_cache: PagedKVCache, v_cache: PagedKVCache, seq_lens: Array, work: Array,
    o_array: Array, lse_array: Array, part_array: Array, part_lse_array: Array, scale_log2: float, features: Features,
    problem: DecodeProblem, config: BalancedConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads of one KV head) of sequence after sequence, against the keys of a team's units."""
    #: team -> begin, until, first_item, last_item    the places of this team, and the items that lie there
    tiles, schedule, mask, scales = config.tiles, config.schedule, features.mask, features.scales  #- launch
    BM, BN = tiles.BM, tiles.BN  #- launch
    parts = list_parts(schedule.most_items(schedule_problem(problem, mask.left, mask.right)))  #- address
    starts, firsts = work[parts[0] :], work[parts[3] :]  #- address
    (program,) = program_ids(config.grid(problem))  # [P]
    team = program // (problem.kv_heads * ceildiv(problem.group * problem.tokens, BM))
    share = work[0]
    begin = team * share
    until = np.minimum(begin + share, work[1])
    first_item = firsts[team]
    next_item = firsts[team + 1]
    last_item = next_item + (starts[next_item] + schedule.overhead < until).astype(np.int32)
    for item in ragged_range(first_item, last_item, 1):
        #: setup -> q, lo, hi, first, limit    a unit's rows, the keys they see, those of the unit, the query tile
        walks = item < last_item  #- programs
        item = np.minimum(item, problem.batch - 1)  #- programs
        batch = item.astype(np.int64)
        num_keys = key_count(seq_lens[batch], problem.max_keys)
        _, kv_head, token, head, is_row = packed_rows(program, problem, BM)
        is_row = is_row & walks[:, None]  #- programs
        position = num_keys[:, None] - problem.tokens + token  # [P, BM]
        end = visible_end(num_keys, mask.valid, batch)
        start = starts[item] + schedule.overhead
        stop = starts[item + 1]
        lo, hi = unit_keys(num_keys, end, begin, until, start, stop, mask, problem, schedule)
        hi = np.where(walks, hi, lo)  #- programs
        first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)
        first, limit = np.maximum(first, lo[:, None]), np.minimum(limit, hi[:, None])
        rows = batch, head, token, is_row, first, limit
        cta = decode_cta(  #- programs
            arch, BM, BN, tiles.columns, tiles.v_columns, k_cache, v_cache, batch, kv_head, (lo, hi), traffic,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )
        q, unit = load_rows(cta, q_array, (batch[:, None], token, head), is_row, problem.pairs)
        factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
        if problem.pairs:
            factor = factor * unit  # [P, BM]
        m, l = start_rows(features.sinks, head, begin <= start)
        o = cta.zeros()
        for at in ragged_range(lo, hi, BN):
            #: load_k -> k    the K tile of these pages, DRAM -> shared memory
            active = at < hi  #- programs
            key = at[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
            exists = key < hi[:, None]
            page, slot = in_pages(k_cache, batch[:, None], key, exists)
            k = cta.load_k(active)
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            s = cta.scores(q, k, active)
            scale = key_scales(features, page, slot, kv_head, exists)
            s = adjust(s, factor, slope, scale, features, position, key)
            #: mask -> s    keys that a row does not see
            s = hide(s, rows, key, features, mask.windowed)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
            p, alpha, m, l = weigh(cta, s, m, l)
            o = o.rescale(alpha)
            #: load_v -> v    the V tile of the same pages
            v = cta.load_v(active)
            #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
            p = scale_weights(p, features, page, slot, kv_head, exists)
            o = cta.accumulate(p, v, o, active)
        #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
        sees = l != 0
        if features.sinks is None:
            sees = sees & (first < limit)
        factor = head_scale(scales.v.number, scales.v.heads, batch, kv_head)[:, None]
        lse = log_sum(m, l, sees)
        with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
            l = np.where(sees, divide(factor, l), np.float32(0))  # what the sums of a row are multiplied by
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        whole = ((begin <= start) & (stop <= until))[:, None]
        o = o.normalise(l, sees)
        store(o_array, (batch[:, None], token, head), o.rows(), mask=is_row & whole)
        store(lse_array, (batch[:, None], token, head), lse, mask=is_row & whole)
        place = (2 * team + (start > begin).astype(np.int32))[:, None]
        store(part_array, (place, 0, token, head), o.rows(), mask=is_row & sees & ~whole)
        store(part_lse_array, (place, 0, token, head), lse, mask=is_row & ~whole)
        traffic.move("registers->DRAM", int((is_row & whole).sum()) * (o_array[0, 0, 0].nbytes + lse.itemsize))
        traffic.move("registers->DRAM", int((is_row & sees & ~whole).sum()) * part_array[0, 0, 0, 0].nbytes)


@np.errstate(divide="ignore", invalid="ignore")  # of a program whose rows have no key at all
def join(
    work: Array, part_array: Array, part_lse_array: Array, o_array: Array, lse_array: Array, problem: DecodeProblem,
    config: BalancedConfig, traffic: Traffic,
) -> None:
    """Put BD columns of the partial results of one head of one token together, where its sequence is cut."""
    #: setup -> lse_parts    each part's lse, in the order of the keys
    schedule, D, BD, PARTS = config.schedule, problem.v_dim, piece_of(problem.v_dim), config.parts(problem)  #- launch
    CHUNK = min(16, PARTS)  #- launch
    starts = work[list_parts(0)[0] :]  #- address
    program, head, piece = program_ids(config.join_grid(problem))  # [P]
    batch = program // problem.tokens
    token = program % problem.tokens
    share = work[0]
    start = starts[batch] + schedule.overhead
    stop = starts[batch + 1]
    team = start // share
    num_parts = np.maximum(stop - 1, start) // share - team + 1
    cut = num_parts > 1
    late = (start > team * share).astype(np.int32)
    every = np.arange(PARTS)
    place = 2 * (team[:, None] + every) + np.where(every == 0, late[:, None], 0)  # [P, PARTS]
    row = 0, token[:, None], head[:, None]  #- address
    lse_parts = load(part_lse_array, (place, *row), mask=cut[:, None] & (every < num_parts[:, None]), other=-np.inf)
    #: total -> top, total, none, count    weights relative to the largest, so that nothing overflows
    top = lse_parts.max(axis=1)
    shift = np.where(top == -np.inf, np.float32(0), top)
    total = lane_sum(exp(lse_parts - shift[:, None]))
    none = num_parts * 0
    count = np.where(cut, num_parts, none)
    d = piece[:, None] * BD + np.arange(BD)  # [P, BD]
    o = np.zeros((len(batch), BD), np.float32)
    for first in ragged_range(none, count, CHUNK):
        #: weights -> w    of the next parts
        n = first[:, None] + np.arange(CHUNK)  # [P, CHUNK]
        nth = 2 * (team[:, None] + n) + np.where(n == 0, late[:, None], 0)
        lse_chunk = load(part_lse_array, (nth, *row), mask=n < count[:, None], other=-np.inf)
        w = exp(lse_chunk - shift[:, None])
        #: add -> o    those that count; what a part without a key left behind is not read
        has = (w > 0)[:, :, None] & (d < D)[:, None]
        at = 0, token[:, None, None], head[:, None, None], d[:, None]  #- address
        parts = load(part_array, (nth[:, :, None], *at), mask=has, other=0.0)
        o = o + (parts * w[:, :, None]).sum(axis=1)
        traffic.move("DRAM->registers", np.count_nonzero(has) * parts.itemsize)
    #: combine -> o, lse    weighted mean; no key at all gives 0 and -inf
    o = np.where((total == 0)[:, None], np.float32(0), divide(o, total[:, None]))
    lse = np.where(total == 0, np.float32(-np.inf), top + log(total))
    #: store
    store(o_array, (batch[:, None], token[:, None], head[:, None], d), o, mask=cut[:, None] & (d < D))
    store(lse_array, (batch, token, head), lse, mask=cut & (piece == 0))


def launch(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, *, scale: float,
    config: BalancedConfig, features: Features | None = None, out: Array | None = None, work: Array | None = None,
    arch: str = "sm_90", traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32. The arguments are valid."""
    features = Features() if features is None else features
    problem = problem_of(q, k_cache, v_cache, block_table)
    batch, tokens, q_heads = q.shape[:3]
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((batch, tokens, q_heads, problem.v_dim), result_dtype(q)) if out is None else out
    lse = np.empty((batch, tokens, q_heads), np.float32)
    if out.size == 0:
        return out, lse
    mask = features.mask
    if work is None:
        (work,) = make_list(seq_lens, problem=schedule_problem(problem, mask.left, mask.right), config=config.schedule)
    slots = 2 * config.schedule.teams(problem.kv_heads)
    part, part_lse = (np.full((slots, 1, *x.shape[1:]), np.nan, np.float32) for x in (out, lse))
    num_keys = key_count(seq_lens, problem.max_keys)
    keys, values = paged((k_cache, v_cache), block_table, num_keys, tokens, problem.max_keys)
    scale_log2 = features.scales.factor_log2(scale)
    with traffic.launch():
        walk(
            q, keys, values, seq_lens, work, out, lse, part, part_lse, scale_log2, features, problem, config,
            arch=arch, traffic=traffic,
        )
    join(work, part, part_lse, out, lse, problem, config, traffic)
    return out, lse
