"""The work list in NumPy: the kernel's twin."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.features.intervals import key_count, key_range
from kvlab.attention.tiles.masked import load, store
from kvlab.staging import ceildiv

from .config import HEAD, MOST_UNITS, ScheduleConfig, ScheduleProblem, Sharing, list_parts, wide

Array = np.ndarray[Any, Any]


def item_blocks(
    num_keys: Array, tokens: Any, item: Any, group: int, left: int, right: int, ROWS: int, BLOCK: int
) -> tuple[Array, Array]:
    """(first, last): the key blocks ``first ... last`` that the rows of the ``item``-th item of each sequence see."""
    row = item * ROWS
    last_row = np.minimum(row + ROWS, tokens * group) - 1
    begin, _ = key_range(num_keys - tokens + row // group, num_keys, left, right, 0)
    _, end = key_range(num_keys - tokens + last_row // group, num_keys, left, right, 0)
    first = begin // BLOCK
    last = np.maximum(ceildiv(end, BLOCK), first)
    return first, last


def unit_size(blocks: Array, UNIT: int) -> Array:
    """Key blocks of the units of items of so many: UNIT, more where these would be above 64."""
    return np.maximum(ceildiv(blocks, MOST_UNITS), UNIT)


def units_of(blocks: Array, UNIT: int) -> Array:
    """Units of items of so many key blocks: one, or with UNIT as many as the item's own length says, at most 64."""
    units = np.minimum(blocks, 1)
    if UNIT:
        units = ceildiv(blocks, unit_size(blocks, UNIT))
    return units


def new_tokens_of(cu_seqlens: Array | None, batch: Array, tokens: int, inside: Array) -> Array:
    """New tokens of each sequence."""
    count = np.zeros_like(batch) + np.int32(tokens)
    if cu_seqlens is not None:
        begin = load(cu_seqlens, (batch,), mask=inside, other=0)
        end = load(cu_seqlens, (batch + 1,), mask=inside, other=0)
        count = np.maximum(end - begin, 0).astype(np.int32)
    return count


def work_of(num_keys: Array, new: Array, inside: Array, group: int, sharing: Sharing) -> tuple[int, int]:
    """(few, many): key blocks of the sequences of the first of two lists, and of the items of the second, together."""
    few = ceildiv(num_keys, sharing.block) + sharing.overhead
    many = ceildiv(new * group, sharing.rows) * (ceildiv(num_keys, sharing.wide_block) + sharing.wide_overhead)
    few = np.where(inside & (new > 0) & (new <= sharing.few), few, 0)
    return np.sum(few), np.sum(np.where(inside & (new >= sharing.many), many, 0))


def teams_at_work(few: Any, many: Any, fewest: int, most_wide: int, sharing: Sharing) -> int:
    """Teams of a list that have a share, beside another list: the second's so many of the processors as its part of
    all work is, ``most_wide`` at most; the first's on the others.
    """
    both = max(int(many) * sharing.ratio + int(few), 1)
    asked = 2 * int(many) * sharing.ratio * sharing.processors + both * sharing.wide_lanes
    wide_teams = min(max(asked // (2 * both * sharing.wide_lanes), 1), most_wide)
    wide_teams = sharing.processors // sharing.wide_lanes if few == 0 else wide_teams
    wide_teams = 0 if many == 0 else wide_teams
    teams = (sharing.processors - wide_teams * sharing.wide_lanes) * sharing.room // sharing.lanes
    return max(wide_teams if fewest > sharing.few else teams, 1)


def add_at(array: Array, index: Array, value: Any, mask: Array) -> None:
    """Add to elements, several of which may be the same one."""
    np.add.at(array, index[mask], np.broadcast_to(value, mask.shape)[mask].astype(array.dtype))  #- instruction


def work_list(
    seq_lens: Array, cu_seqlens: Array | None, list_array: Array, problem: ScheduleProblem, config: ScheduleConfig
) -> None:
    """Write the work list of a step: which items there are, what they cost, and where each team begins."""
    #: setup    where the parts of the list lie
    batches, tokens, group = problem.batch, problem.tokens, problem.group  #- launch
    BATCHES, WIDE, ROWS = wide(batches), config.wide(problem), config.rows  #- launch
    LISTED = config.lists_items(problem)  #- launch
    left, right, max_keys = problem.left, problem.right, problem.max_keys  #- launch
    teams, least = config.teams(problem.kv_heads), config.least  #- launch
    most_items = config.most_items(problem)  #- launch
    parts = list_parts(most_items)  #- address
    fields, starts, sequences, tiles, firsts = (list_array[at:] for at in (0, *parts))  #- address
    sharing = config.sharing  #- launch
    most_wide = 0 if sharing is None else sharing.most  #- launch
    for at in range(0, 2 * most_items + teams + 1, WIDE):
        #: clear    sequences, tiles and firsts, in which ends and beginnings are counted
        index = at + np.arange(WIDE, dtype=np.int32)
        store(sequences, (index,), 0, mask=index <= 2 * most_items + teams)
    #: begin -> items, uncounted, few_work, many_work    each sequence an item, or none yet
    items = np.int32(0) if LISTED else np.int32(batches)
    uncounted = np.int32(batches) if LISTED else np.int32(0)
    few_work = np.int32(0)
    many_work = np.int32(0)
    for at in range(0, uncounted, BATCHES):
        #: sequences -> count, behind, items    where sequences end: at each place how many do, with how many items
        batch = at + np.arange(BATCHES, dtype=np.int32)
        inside = batch < batches
        num_keys = key_count(load(seq_lens, (batch,), mask=inside, other=0), max_keys)
        new = new_tokens_of(cu_seqlens, batch, tokens, inside)
        wanted = inside & (new >= config.fewest) & (new <= config.most)
        count = np.where(wanted, ceildiv(new * group, ROWS) * config.heads, 0)
        behind = np.cumsum(count) + items
        add_at(sequences, behind, 1, inside & (behind < most_items))
        add_at(tiles, behind, count, wanted & (behind < most_items))
        items = items + np.sum(count)
        if sharing is not None:
            few, many = work_of(num_keys, new, inside, group, sharing)
            few_work = few_work + few
            many_work = many_work + many
    #: at_work -> at_work    teams that have a share
    at_work = teams
    if sharing is not None:
        at_work = np.minimum(teams_at_work(few_work, many_work, config.fewest, most_wide, sharing), teams)
    #: zero -> total, ended, passed
    total = np.int32(0)
    ended = np.int32(0)
    passed = np.int32(0)
    for at in range(0, items, WIDE):
        #: items -> batch, item, cost, total    each in its sequence; costs become places of first units
        index = at + np.arange(WIDE, dtype=np.int32)
        there = index < items
        batch = index
        item = index * 0
        if LISTED:
            ends = load(sequences, (index,), mask=there, other=0)
            counts = load(tiles, (index,), mask=there, other=0)
            batch = np.cumsum(ends) + ended
            item = index - np.cumsum(counts) - passed
            if at + WIDE < items:
                ended = ended + np.sum(ends)
                passed = passed + np.sum(counts)
        store(sequences, (index,), batch, mask=there)
        store(tiles, (index,), item, mask=there)
        num_keys = key_count(load(seq_lens, (batch,), mask=there, other=0), max_keys)
        new = new_tokens_of(cu_seqlens, batch, tokens, there)
        first, last = item_blocks(num_keys, new, item // config.heads, group, left, right, ROWS, config.block)
        # key blocks, and its units' beginnings; 1 without a key
        cost = np.where(there, np.maximum(last - first + config.overhead * units_of(last - first, config.unit), 1), 0)
        store(starts, (index,), np.cumsum(cost) - cost + total, mask=there)
        total = total + np.sum(cost)
    #: share -> share    what a team takes
    share = np.maximum(ceildiv(total, at_work), least)
    field = np.arange(HEAD)
    value = np.where(field == 0, share, np.where(field == 1, total, np.where(field == 2, items, 0)))
    store(fields, (field,), value, mask=field < HEAD)
    store(starts, (items,), total, mask=items >= 0)
    for at in range(0, items, WIDE):
        #: begins -> team    the first team whose share begins in an item or behind it
        index = at + np.arange(WIDE, dtype=np.int32)
        start = load(starts, (index,), mask=index < items, other=0)
        team = start // share
        team = team + (team * share < start).astype(np.int32)
        add_at(firsts, team, 1, (index < items) & (team <= teams))
    #: before -> begun
    begun = np.int32(-1)
    for at in range(0, teams + 1, WIDE):
        #: teams -> found, begun    teams, and the one behind the last: the last item that begins there or before
        team = at + np.arange(WIDE, dtype=np.int32)
        beginning = load(firsts, (team,), mask=team <= teams, other=0)
        found = np.cumsum(beginning) + begun
        if at + WIDE <= teams:
            begun = begun + np.sum(beginning)
        #: first_item    of each; that behind the last item where no unit is left
        store(firsts, (team,), np.where(team * share < total, found, items), mask=team <= teams)


def team_items(
    work: Array, starts: Array, firsts: Array, team: Array, REACH: int
) -> tuple[Array, Array, Array, Array]:
    """(begin, until, first, last) ``[P]``: the places of each team, and the items ``first ... last`` that lie there;
    one of which it has no more than REACH places is left to the next team.
    """
    share = work[0]
    begin = team * share
    until = np.minimum(begin + share, work[1])
    first = firsts[team]
    last = firsts[team + 1]
    return begin, until, first, last + (starts[last] + REACH < until).astype(np.int32)


def launch(
    seq_lens: Array, cu_seqlens: Array | None = None, *, problem: ScheduleProblem, config: ScheduleConfig,
    out: Array | None = None,
) -> tuple[Array]:
    """Run the twin on lengths ``[B]`` and ``cu_seqlens [B + 1]`` or None: the list, int32. The arguments are valid."""
    size = config.list_size(problem)
    out = np.zeros(size, np.int32) if out is None else out
    work_list(seq_lens, cu_seqlens, out, problem, config)
    return (out,)


