"""The work list as a portable Triton kernel: one program makes it from the lengths, which the host never sees."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.features.kernel import key_count, key_range
from kvlab.triton_support.dependents import let_next_begin, wait_for_launch_before
from kvlab.triton_support.launching import Again, first_launch, once, relaunched

from .config import HEAD as _HEAD
from .config import MOST_UNITS as _MOST_UNITS
from .config import ScheduleConfig, ScheduleProblem, wide

HEAD = tl.constexpr(_HEAD)
MOST_UNITS = tl.constexpr(_MOST_UNITS)


@triton.jit
def item_blocks(num_keys, tokens, item, group, left, right, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(first, last): the key blocks ``first ... last`` that the rows of the ``item``-th item of each sequence see."""
    row = item * ROWS
    last_row = tl.minimum(row + ROWS, tokens * group) - 1
    begin, _ = key_range(num_keys - tokens + row // group, num_keys, left, right, None)
    _, end = key_range(num_keys - tokens + last_row // group, num_keys, left, right, None)
    first = begin // BLOCK
    last = tl.maximum(tl.cdiv(end, BLOCK), first)
    return first, last


@triton.jit
def unit_size(blocks, UNIT: tl.constexpr):
    """Key blocks of the units of items of so many: UNIT, more where these would be above 64."""
    return tl.maximum(tl.cdiv(blocks, MOST_UNITS), UNIT)


@triton.jit
def units_of(blocks, UNIT: tl.constexpr):
    """Units of items of so many key blocks: one, or with UNIT as many as the item's own length says, at most 64."""
    units = tl.minimum(blocks, 1)
    if UNIT:
        units = tl.cdiv(blocks, unit_size(blocks, UNIT))
    return units


@triton.jit
def new_tokens_of(cu_seqlens_ptr, batch, tokens, inside, CUMULATIVE: tl.constexpr):
    """New tokens of each sequence."""
    count = tl.zeros_like(batch) + tokens
    if CUMULATIVE:
        begin = tl.load(cu_seqlens_ptr + batch, mask=inside, other=0)
        end = tl.load(cu_seqlens_ptr + batch + 1, mask=inside, other=0)
        count = tl.maximum(end - begin, 0).to(tl.int32)
    return count


@triton.jit
def work_of(num_keys, new, inside, group, sharing):
    """(few, many): key blocks of the sequences of the first of two lists, and of the items of the second, together."""
    few = tl.cdiv(num_keys, sharing.block) + sharing.overhead
    many = tl.cdiv(new * group, sharing.rows) * (tl.cdiv(num_keys, sharing.wide_block) + sharing.wide_overhead)
    few = tl.where(inside & (new > 0) & (new <= sharing.few), few, 0)
    return tl.sum(few, 0), tl.sum(tl.where(inside & (new >= sharing.many), many, 0), 0)


@triton.jit
def teams_at_work(few, many, fewest, most_wide, sharing):
    """Teams of a list that have a share, beside another list: the second's so many of the processors as its part of
    all work is, ``most_wide`` at most; the first's on the others.
    """
    both = tl.maximum(tl.cast(many, tl.int64) * sharing.ratio + few, 1)
    asked = 2 * tl.cast(many, tl.int64) * sharing.ratio * sharing.processors + both * sharing.wide_lanes
    wide_teams = tl.minimum(tl.maximum(asked // (2 * both * sharing.wide_lanes), 1), most_wide)
    wide_teams = tl.where(few == 0, sharing.processors // sharing.wide_lanes, wide_teams)
    wide_teams = tl.where(many == 0, 0, wide_teams).to(tl.int32)
    teams = (sharing.processors - wide_teams * sharing.wide_lanes) * sharing.room // sharing.lanes
    return tl.maximum(tl.where(fewest > sharing.few, wide_teams, teams), 1)


@triton.jit
def add_at(ptr, index, value, mask):
    """Add to elements, several of which may be the same one."""
    tl.atomic_add(ptr + index, value, mask=mask, sem="relaxed")  #- instruction


@triton.jit
def work_list(
    seq_lens_ptr, cu_seqlens_ptr, list_ptr, seq_lens_batch, batches, most_items, max_keys, tokens, fewest, most, group,
    left, right, teams, least, sharing, most_wide,
    ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, OVERHEAD: tl.constexpr, UNIT: tl.constexpr,
    CUMULATIVE: tl.constexpr, LISTED: tl.constexpr, BATCHES: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Write the work list of a step: which items there are, what they cost, and where each team begins; BATCHES
    sequences and WIDE items or teams are looked at together. EARLY: the launch behind this one begins meanwhile.
    BESIDE: this one did so, too, and ends behind the one before.
    """
    #: setup    where the parts of the list lie
    let_next_begin(EARLY)  #- wait
    starts_ptr = list_ptr + HEAD  #- address
    sequences_ptr = starts_ptr + most_items + 1  #- address
    tiles_ptr = sequences_ptr + most_items  #- address
    firsts_ptr = tiles_ptr + most_items  #- address
    for at in range(0, 2 * most_items + teams + 1, WIDE):
        #: clear    sequences, tiles and firsts, in which ends and beginnings are counted
        index = at + tl.arange(0, WIDE)
        tl.store(sequences_ptr + index, 0, mask=index <= 2 * most_items + teams)
    #: begin -> items, uncounted, few_work, many_work    each sequence an item, or none yet
    tl.debug_barrier()  #- wait
    items = 0 if LISTED else batches
    uncounted = batches if LISTED else 0
    few_work = 0
    many_work = 0
    for at in range(0, uncounted, BATCHES):
        #: sequences -> count, behind, items    where sequences end: at each place how many do, with how many items
        batch = at + tl.arange(0, BATCHES)
        inside = batch < batches
        num_keys = key_count(tl.load(seq_lens_ptr + batch * seq_lens_batch, mask=inside, other=0), max_keys)
        new = new_tokens_of(cu_seqlens_ptr, batch, tokens, inside, CUMULATIVE)
        wanted = inside & (new >= fewest) & (new <= most)
        count = tl.where(wanted, tl.cdiv(new * group, ROWS) * HEADS, 0)
        behind = tl.cumsum(count, 0) + items
        add_at(sequences_ptr, behind, 1, inside & (behind < most_items))
        add_at(tiles_ptr, behind, count, wanted & (behind < most_items))
        items = items + tl.sum(count, 0)
        if sharing is not None:
            few, many = work_of(num_keys, new, inside, group, sharing)
            few_work = few_work + few
            many_work = many_work + many
    #: at_work -> at_work    teams that have a share
    at_work = teams
    if sharing is not None:
        at_work = tl.minimum(teams_at_work(few_work, many_work, fewest, most_wide, sharing), teams)
    #: zero -> total, ended, passed
    tl.debug_barrier()  #- wait
    total = 0
    ended = 0
    passed = 0
    for at in range(0, items, WIDE):
        #: items -> batch, item, cost, total    each in its sequence; costs become places of first units
        index = at + tl.arange(0, WIDE)
        there = index < items
        batch = index
        item = index * 0
        if LISTED:
            ends = tl.load(sequences_ptr + index, mask=there, other=0)
            counts = tl.load(tiles_ptr + index, mask=there, other=0)
            batch = tl.cumsum(ends, 0) + ended
            item = index - tl.cumsum(counts, 0) - passed
            if at + WIDE < items:
                ended = ended + tl.sum(ends, 0)
                passed = passed + tl.sum(counts, 0)
            tl.debug_barrier()  #- wait; several threads have read a place
        tl.store(sequences_ptr + index, batch, mask=there)
        tl.store(tiles_ptr + index, item, mask=there)
        num_keys = key_count(tl.load(seq_lens_ptr + batch * seq_lens_batch, mask=there, other=0), max_keys)
        new = new_tokens_of(cu_seqlens_ptr, batch, tokens, there, CUMULATIVE)
        first, last = item_blocks(num_keys, new, item // HEADS, group, left, right, ROWS, BLOCK)
        # key blocks, and its units' beginnings; 1 without a key
        cost = tl.where(there, tl.maximum(last - first + OVERHEAD * units_of(last - first, UNIT), 1), 0)
        tl.store(starts_ptr + index, tl.cumsum(cost, 0) - cost + total, mask=there)
        total = total + tl.sum(cost, 0)
    #: share -> share    what a team takes
    wait_for_launch_before(BESIDE)  #- wait
    share = tl.maximum(tl.cdiv(total, at_work), least)
    field = tl.arange(0, HEAD)
    value = tl.where(field == 0, share, tl.where(field == 1, total, tl.where(field == 2, items, 0)))
    tl.store(list_ptr + field, value, mask=field < HEAD)
    tl.store(starts_ptr + items, total, mask=items >= 0)
    tl.debug_barrier()  #- wait
    for at in range(0, items, WIDE):
        #: begins -> team    the first team whose share begins in an item or behind it
        index = at + tl.arange(0, WIDE)
        start = tl.load(starts_ptr + index, mask=index < items, other=0)
        team = start // share
        team = team + (team * share < start).to(tl.int32)
        add_at(firsts_ptr, team, 1, (index < items) & (team <= teams))
    #: before -> begun
    tl.debug_barrier()  #- wait
    begun = -1
    for at in range(0, teams + 1, WIDE):
        #: teams -> found, begun    teams, and the one behind the last: the last item that begins there or before
        team = at + tl.arange(0, WIDE)
        beginning = tl.load(firsts_ptr + team, mask=team <= teams, other=0)
        found = tl.cumsum(beginning, 0) + begun
        if at + WIDE <= teams:
            begun = begun + tl.sum(beginning, 0)
        #: first_item    of each; that behind the last item where no unit is left
        tl.debug_barrier()  #- wait; several threads have read a place
        tl.store(firsts_ptr + team, tl.where(team * share < total, found, items), mask=team <= teams)


@triton.jit
def team_items(list_ptr, starts_ptr, firsts_ptr, team, REACH: tl.constexpr):
    """(begin, until, first, last): the places of a team, and the items ``first ... last`` that lie there; one of which
    it has no more than REACH places is left to the next team.
    """
    share = tl.load(list_ptr)
    begin = team * share
    until = tl.minimum(begin + share, tl.load(list_ptr + 1))
    first = tl.load(firsts_ptr + team)
    last = tl.load(firsts_ptr + team + 1)
    return begin, until, first, last + (tl.load(starts_ptr + last) + REACH < until).to(tl.int32)


def launch(
    seq_lens: torch.Tensor, cu_seqlens: torch.Tensor | None = None, *, problem: ScheduleProblem,
    config: ScheduleConfig, out: torch.Tensor | None = None, early: bool = False, beside: bool = False,
    again: Again = None,
) -> tuple[torch.Tensor]:
    """Run the kernel on lengths ``[B]`` and, or None, ``cu_seqlens [B + 1]``: the list, int32. The arguments are valid;
    early, beside : as of ``work_list``; ``again`` as of :mod:`kvlab.triton_support.launching`. Nothing waits for the
    GPU.
    """
    size = once(again, "list_size", lambda: config.list_size(problem))
    out = torch.empty(size, dtype=torch.int32, device=seq_lens.device) if out is None else out
    pointers = seq_lens, seq_lens if cu_seqlens is None else cu_seqlens, out
    if not relaunched(work_list, pointers, again):
        first_launch(work_list, (1,), pointers, again)(
            seq_lens.stride(0), problem.batch, config.most_items(problem), problem.max_keys, problem.tokens,
            config.fewest, config.most, problem.group, problem.left, problem.right, config.teams(problem.kv_heads),
            config.least, config.sharing, 0 if config.sharing is None else config.sharing.most, ROWS=config.rows,
            HEADS=config.heads, BLOCK=config.block, OVERHEAD=config.overhead, UNIT=config.unit,
            CUMULATIVE=cu_seqlens is not None, LISTED=config.lists_items(problem), BATCHES=wide(problem.batch),
            WIDE=config.wide(problem), EARLY=early, BESIDE=beside, num_warps=max(4, config.wide(problem) // 32),
            **({"launch_pdl": True} if beside else {}),
        )
    return (out,)
