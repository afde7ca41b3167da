"""Walks over a schedule that Hopper's kernels take, the ring of TMA boxes or prefill tiles: which, and their blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.hopper_config import (
    AT_ONCE,
    BLOCK,
    PANEL,
    HopperDecodeConstants,
    has_depths,
    neighbours,
    row_of,
)
from kvlab.attention.mha_decode.hopper_config import shared_bytes as ring_bytes
from kvlab.attention.mha_prefill.config import PrefillProblem
from kvlab.attention.mha_prefill.hopper_config import FP8_DIMS, HEAD_DIMS, listed_constants
from kvlab.attention.schedule.config import WIDE, ScheduleConfig, Sharing

from .config import LARGE_BLOCK, LARGE_ROWS, Walk, WalkConfig, schedule_problem

PROGRAMS = {16: 2, 32: 1}
"""Rows of a tile of up to 128 columns -> programs that a processor has room for, of one KV head each."""
RATIO = 14
"""Key blocks of 16 that a ring reads while a tile of 128 rows does one of 128, when each has its own processors: what
their speeds are then, not when all read at once.
"""
FLIGHT = 1 << 17
"""Bytes that are in flight on a processor."""
PARTS = 8
"""Parts at least in which processors are shared."""


class ListConstants(NamedTuple):
    """Constants of the walk of a list besides the ring's, as of ``WalkConstants``. EARLY: it is
    launched while the one before still runs, and waits for that before it begins, or BESIDE it before it ends.
    """

    BLOCK: int
    OVERHEAD: int
    REACH: int
    LISTED: bool
    EARLY: bool = False
    BESIDE: bool = False


def with_rings(config: WalkConfig, problem: DecodeProblem, longest: int, processors: int | None) -> WalkConfig:
    """The walks of sequences of up to so many new tokens, by Hopper's kernel where it walks their lists; unless
    ``processors`` is None, in as many programs as it has room for on these.
    """
    walks, alone = [], len(config.walks) == 1
    for one in config.walks:
        ring = ring_of(problem, max(1, min(longest, one.schedule.most)), one.schedule, alone=alone)
        if ring is not None and processors is not None:
            programs = room_for(ring) * ring.HEADS * processors
            one = replace(one, schedule=replace(one.schedule, programs=programs))
        walks.append(replace(one, ring=ring))
    return WalkConfig(tuple(walks))


def on_hopper(
    config: WalkConfig, problem: DecodeProblem, longest: int, processors: int, *, tiles: bool
) -> WalkConfig:
    """The walks of a call by Hopper's kernels; at the same time where they are two, unless large ``tiles`` are portable
    ones, beside which a ring does not begin. Tiles alone may have a team for each KV head.
    """
    rings = with_rings(config, problem, longest, processors)
    if len(rings.walks) == 1:
        return WalkConfig((heads_apart(rings.walks[0], problem),))
    return side_by_side(rings, problem, processors) if tiles else rings


def heads_apart(one: Walk, problem: DecodeProblem) -> Walk:
    """A walk by prefill tiles whose KV heads are items of their own, in as many groups as more programs have a place
    with, as teams are smaller. Others as they are.

    >>> from kvlab.attention.attend_paged.config import AttendProblem, choose_walks
    >>> problem = AttendProblem(16, 2048, 32, 8, 128, 128, itemsize=2, page_size=16, max_keys=32768, ragged=True)
    >>> (one,) = choose_walks(problem, 128, tiles=True).walks
    >>> [(walk.grid(problem), walk.schedule.teams(8)) for walk in (one, heads_apart(one, problem))]
    [((128,), 4), ((132,), 33)]
    """
    if not tiles_walk(one.schedule):
        return one
    most = max(apart(one.schedule, problem), key=lambda cut: (cut.grid(problem.kv_heads), -cut.heads))
    return replace(one, schedule=most)


def apart(schedule: ScheduleConfig, problem: DecodeProblem) -> list[ScheduleConfig]:
    """A schedule with its KV heads in one and in more groups, if a list of the items of each head is made in little
    time.
    """
    heads, listed = problem.kv_heads, schedule_problem(problem, UNLIMITED, 0)
    found = [replace(schedule, heads=n) for n in range(1, heads + 1) if heads % n == 0]
    return found if found[-1].most_items(listed) <= 4 * WIDE else found[:1]


def side_by_side(config: WalkConfig, problem: DecodeProblem, processors: int) -> WalkConfig:
    """Walks by the ring and by prefill tiles that run at the same time: programs that wait for memory beside others
    that multiply. The first and the last share the processors; what is between them takes those that get done.
    Unchanged where it is not these, or heads are so many that the processors have no parts to share.

    >>> from kvlab.attention.attend_paged.config import AttendProblem, choose_walks
    >>> problem = AttendProblem(64, 2108, 32, 8, 128, 128, itemsize=2, page_size=16, max_keys=32768, ragged=True)
    >>> found = choose_walks(problem, 512, tiles=True, beside=True)
    >>> found = side_by_side(with_rings(found, problem, 512, 132), problem, 132)
    >>> [(one.tiles.BM, one.schedule.fewest, one.schedule.together) for one in found.walks], found.beside
    ([(16, 1, 1), (32, 5, 1), (128, 9, 2)], True)
    """
    first, *between, second = config.walks if len(config.walks) > 1 else 2 * config.walks
    if any(one.ring is None for one in (first, *between)) or not tiles_walk(second.schedule):
        return config
    a, b, heads = first.schedule, second.schedule, problem.kv_heads
    together = max(n for n in (1, 2, 4) if n == 1 or (n <= b.together and n * heads * PARTS <= processors))
    b = replace(b, together=together)
    b = apart(b, problem)[-1]
    sharing = Sharing(
        processors, a.most, b.fewest, b.rows, a.block, b.block, a.overhead, b.overhead, RATIO * together,
        a.lanes(heads), b.lanes(heads), room_for(first.ring),
    )
    if sharing.most < 3:
        return config
    first = replace(first, schedule=replace(a, sharing=sharing))
    tiles = replace(second.tiles, row_tiles=together)
    return WalkConfig((first, *between, replace(second, tiles=tiles, schedule=replace(b, sharing=sharing))))


def ring_walks(schedule: ScheduleConfig) -> bool:
    """Tells whether Hopper's kernel walks such a list: items have 16 or 32 rows, boxes begin where key blocks do."""
    one = schedule.together == schedule.heads == 1 and schedule.BM in PROGRAMS
    return one and not schedule.unit and schedule.block % 8 == 0


def ring_of(
    problem: DecodeProblem, tokens: int, schedule: ScheduleConfig, *, alone: bool = False
) -> HopperDecodeConstants | None:
    """The ring of programs that walk a list of sequences of up to so many new tokens; None where there is none. One
    KV head a program, so that a list has as many teams as portable ones can walk, too; of a list that is walked
    ``alone``, several where their rows share lines. 128 KB in flight on a processor, 192 of 16 rows of 192 or 256
    columns; the narrowest rows in blocks of twice the keys.

    >>> problem = DecodeProblem(batch=64, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=64, max_keys=32768)
    >>> ring = ring_of(problem, 1, ScheduleConfig(264))
    >>> ring.HEADS, ring.BT, ring.BOX, ring.NB
    (1, 64, 16, 2)
    >>> ring_of(problem, 8, ScheduleConfig(132, BM=32)).ROWS, ring_of(problem, 9, ScheduleConfig(132, BM=64))
    (32, None)
    """
    rows = schedule.BM
    sized = problem.itemsize in (1, 2) and has_depths(problem) and problem.group * tokens <= rows
    if not sized or not ring_walks(schedule):
        return None
    row = row_of(problem)
    wide = row["W"] > AT_ONCE
    heads = neighbours(replace(problem, tokens=tokens)) if alone else 1
    keys = 2 * BLOCK if row["W"] < PANEL else BLOCK
    bt = keys // heads
    return HopperDecodeConstants(
        HEADS=heads, GROUP=problem.group, TOKENS=tokens, **row, PAGE=problem.page_size, BT=bt,
        BOX=math.gcd(problem.page_size, bt, schedule.block), PAIRS=problem.pairs, LONGEST_FIRST=0, PARTS=0,
        NB=(3 if rows == 16 else 2) if wide else FLIGHT // (4 * keys * row["W"]) // PROGRAMS[rows], BN=keys,
        PRODUCER=40 if wide or keys > BLOCK else 32, REGISTERS=168 if rows > 16 else 255 if wide else 128, ROWS=rows,
    )


def room_for(C: HopperDecodeConstants) -> int:
    """Programs of a ring that a processor has room for."""
    return 1 if C.W > AT_ONCE else PROGRAMS[C.ROWS]


def left_bytes(C: HopperDecodeConstants) -> int:
    """Bytes behind the ring in which the warps leave their sums, maxima and sums of weights."""
    return 4 * C.ROWS * 4 * (min(C.W, AT_ONCE) + 2)


def shared_bytes(C: HopperDecodeConstants) -> int:
    """Bytes of shared memory that the kernel takes at most."""
    return ring_bytes(C) + left_bytes(C)


def tiles_walk(schedule: ScheduleConfig) -> bool:
    """Tells whether the items and key blocks of a list are tiles and blocks of Hopper's prefill kernel."""
    return (schedule.BM, schedule.block, schedule.unit) == (LARGE_ROWS, LARGE_BLOCK, 0)


def prefill_problem(problem: DecodeProblem, itemsize: int) -> PrefillProblem:
    """The sizes of a call, as Hopper's prefill kernel has them."""
    return PrefillProblem(
        problem.batch, 0, problem.q_heads, problem.kv_heads, problem.head_dim, problem.v_dim, itemsize,
        int(problem.itemsize), ragged=True,
    )


def tiles_take(problem: DecodeProblem) -> bool:
    """Tells whether Hopper's prefill kernel has these sizes over a list."""
    known = HEAD_DIMS if problem.itemsize == 2 else FP8_DIMS if problem.itemsize == 1 else ()
    return (problem.head_dim, problem.v_dim) in known


def with_tiles(config: WalkConfig, problem: DecodeProblem, features: Features, itemsize: int) -> WalkConfig:
    """The walks of a call, those over lists of large tiles by Hopper's prefill kernel. itemsize : bytes of q's."""
    sizes = prefill_problem(problem, itemsize), problem.page_size, features
    walks = []
    for one in config.walks:
        schedule = one.schedule
        wide = listed_constants(
            *sizes, together=schedule.together, overhead=schedule.overhead, heads=schedule.heads
        )
        walks.append(replace(one, wide=wide if tiles_walk(schedule) else None))
    return WalkConfig(tuple(walks))
