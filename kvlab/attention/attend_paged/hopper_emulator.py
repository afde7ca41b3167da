"""Decode over a schedule on Hopper in NumPy: the roles of each program as they meet at mbarriers, unit after unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import key_count
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.sinks import add_sink
from kvlab.attention.hopper.turns import Role, Wait, run_roles
from kvlab.attention.mha_decode.hopper_config import AT_ONCE
from kvlab.attention.mha_decode.hopper_cta import HopperDecodeCTA, boxes_of, places_of
from kvlab.attention.mha_decode.hopper_emulator import attend_keys, normalise, other_columns, rows_of
from kvlab.attention.mha_decode.hopper_emulator import produce as bring
from kvlab.attention.schedule.config import list_parts
from kvlab.attention.tiles.masked import store
from kvlab.staging import Traffic, ceildiv

from .config import AttendProblem, Walk
from .emulator import WalkLists, WalkResults, item_of, team_items
from .hopper_config import ListConstants, left_bytes

Array = np.ndarray[Any, Any]
Walked = tuple[int, int, int, int, int, int]


@dataclass
class HopperWalkLaunch:
    """Common part of all programs: the list, where sequences lie, and the results."""

    L: ListConstants
    problem: AttendProblem
    lanes: int
    pages: int
    q: Array
    table: Array
    lists: WalkLists
    parts: tuple[int, int, int, int]
    features: Features
    results: WalkResults
    scale_log2: np.float32


def find_unit(item: int, begin: int, until: int, x: HopperWalkLaunch) -> tuple[int, ...]:
    """A unit of a team with the places ``begin ... until``: the sequence, where its new tokens begin and how many, its
    keys; the places of the item's key blocks; the unit's first key and the one behind the last.
    """
    #: find -> batch, num_keys, start, stop, lo, hi    of an item
    seq_lens, cu_seqlens, work = x.lists
    L, problem = x.L, x.problem  #- launch
    starts, sequences, tiles, _ = (work[at:] for at in x.parts)  #- address
    batch, _ = item_of(sequences, tiles, np.array(item, np.int32), L.LISTED)
    num_keys = int(key_count(seq_lens[batch], problem.max_keys))
    q_first = batch * 0
    tokens = problem.tokens
    if cu_seqlens is not None:
        q_first = cu_seqlens[batch]
        tokens = cu_seqlens[batch + 1] - q_first
    start = int(starts[item]) + L.OVERHEAD
    stop = int(starts[item + 1])
    lo = (max(begin, start) - start) * L.BLOCK
    hi = min((min(until, stop) - start) * L.BLOCK, num_keys)
    return int(batch), int(q_first), int(tokens), num_keys, start, stop, lo, max(hi, lo)


def produce(cta: HopperDecodeCTA, x: HopperWalkLaunch, walked: Walked) -> Iterator[Wait]:
    """One warp brings the blocks of unit after unit."""
    #@ producer
    #: begin -> done    blocks
    C = cta.C  #- launch
    _, kv_head, begin, until, first_item, last_item = walked
    done = 0
    for item in range(first_item, last_item):
        #: unit -> lo, hi, done    its keys
        batch, _, _, num_keys, _, _, lo, hi = find_unit(item, begin, until, x)
        unit = batch, kv_head, 0, lo, hi, num_keys
        yield from bring(cta, x.table[batch], x.pages, unit, done)
        done = done + ceildiv(hi - lo, C.BT)


def consume(cta: HopperDecodeCTA, x: HopperWalkLaunch, walked: Walked) -> Iterator[Wait]:
    """Warps, each with 16 rows, do unit after unit."""
    #@ consumer
    #: begin -> done    blocks
    C, features, scale_log2 = cta.C, x.features, x.scale_log2  #- launch
    team, kv_head, begin, until, first_item, last_item = walked
    out, lse_out, part, part_lse = x.results  #- launch
    COLS = min(C.W, AT_ONCE)
    NEXT = 1 if C.PAIRS else COLS  # columns until those that are put together next
    done = 0
    for item in range(first_item, last_item):
        #: unit -> o, top, total, done    its rows against its keys
        batch, q_first, tokens, num_keys, start, stop, lo, hi = find_unit(item, begin, until, x)
        rows = x.q[batch, q_first:]
        unit = batch, kv_head, lo, hi, num_keys
        o, o_odd, top, total = yield from attend_keys(cta, unit, tokens, rows, features, scale_log2, done)
        done = done + ceildiv(hi - lo, C.BT)
        #: store    the result, or a partial one where the item is cut; one without a key is left alone
        kv, token, head = rows_of(np.arange(C.ROWS), C)
        highest, weight = top, np.ones_like(total)
        if features.sinks is not None:  # counted by the unit that begins at the first key
            is_first = (begin <= start) & (kv >= 0)
            of_row = (kv_head + np.minimum(kv, C.HEADS - 1)) * C.GROUP + head
            highest, with_sink, less = add_sink(top, total, features.sinks, of_row)
            highest, total = np.where(is_first, highest, top), np.where(is_first, with_sink, total)
            weight = np.where(is_first, less, weight)
        some, lse, l = normalise(highest, total, batch, kv_head, kv, features, C)
        l = l * weight
        is_row = (kv < C.HEADS) & (token < tokens)
        heads = (kv_head + kv) * C.GROUP + head
        q_row = q_first + token
        whole = (begin <= start) & (stop <= until)
        ends = is_row & whole
        cut = is_row & (not whole)
        place = 2 * (team * x.lanes + kv_head + kv) + int(start > begin)
        of_part = place, token * C.GROUP + head
        store(lse_out, (batch, q_row, heads), lse, mask=ends)
        store(part_lse, of_part, lse, mask=cut)
        at: tuple[Any, ...] = batch, q_row[:, None], heads[:, None]
        parts: tuple[Any, ...] = place[:, None], of_part[1][:, None]
        cols = np.arange(COLS) * (2 if C.PAIRS else 1)
        cut = cut & some
        o = np.where(some[:, None], o * l[:, None], np.float32(0))
        ends_of_o, cut_of_o = ends[:, None], cut[:, None]
        if C.COLUMNS:
            ends_of_o, cut_of_o = ends_of_o & (cols < C.COLUMNS), cut_of_o & (cols < C.COLUMNS)
        store(out, (*at, cols), o, mask=ends_of_o)
        store(part, (*parts, cols), o, mask=cut_of_o)
        if C.PAIRS or C.W > AT_ONCE:
            o_odd = other_columns(cta, o_odd, top)
            o_odd = np.where(some[:, None], o_odd * l[:, None], np.float32(0))
            cols += NEXT
            ends_of_o, cut_of_o = ends[:, None], cut[:, None]
            if C.COLUMNS:
                ends_of_o, cut_of_o = ends_of_o & (cols < C.COLUMNS), cut_of_o & (cols < C.COLUMNS)
            store(out, (*at, cols), o_odd, mask=ends_of_o)
            store(part, (*parts, cols), o_odd, mask=cut_of_o)
        cta.traffic.move("registers->DRAM", int(ends.sum()) * (out[0, 0, 0].nbytes + lse.itemsize))
        cta.traffic.move("registers->DRAM", int(cut.sum()) * part[0, 0].nbytes)


def walk(
    q_array: Array, k_cache: Array, v_cache: Array, table: Array, lists: WalkLists, results: WalkResults,
    scale_log2: float, features: Features, problem: AttendProblem, config: Walk, traffic: Traffic,
) -> None:
    """The query rows of HEADS KV heads of item after item, against the keys of a team's units."""
    C, schedule, work = config.ring, config.schedule, lists.work
    L = ListConstants(schedule.block, schedule.overhead, schedule.reach, config.lists_items(problem))
    boxes = boxes_of(k_cache, v_cache, C)
    parts, lanes = list_parts(config.items(problem)), schedule.lanes(problem.kv_heads)
    x = HopperWalkLaunch(
        L, problem, lanes, len(k_cache), q_array, table, lists, parts, features, results, np.float32(scale_log2)
    )
    dtype = np.dtype(np.float16) if C.PAIRS else q_array.dtype
    starts, firsts = work[parts[0] :], work[parts[3] :]
    roles: list[Role] = []
    for program in range(*config.grid(problem)):
        team, kv_head = np.array(program // (lanes // C.HEADS)), program % (lanes // C.HEADS) * C.HEADS
        begin, until, first, last = map(int, team_items(work, starts, firsts, team, L.REACH))
        walked = int(team), kv_head, begin, until, first, last
        cta = HopperDecodeCTA(C, places_of(C, left_bytes(C)), dtype, boxes, traffic, traced=program == 0)
        roles += [(cta.producer, produce(cta, x, walked)), (cta.consumers, consume(cta, x, walked))]
    run_roles(roles)
