"""Walks over a schedule that Hopper's ring of TMA boxes takes: which, and its blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.hopper_config import BLOCK, ROWS, HopperDecodeConstants, has_depths
from kvlab.attention.mha_decode.hopper_config import shared_bytes as ring_bytes
from kvlab.attention.schedule.config import ScheduleConfig

from .config import WalkConfig

PROGRAMS = 2
"""Programs of one KV head that the kernel has for a processor."""


class ListConstants(NamedTuple):
    """Constants of the walk of a list besides the ring's, as of ``WalkConstants``."""

    BLOCK: int
    OVERHEAD: int
    REACH: int
    LISTED: bool


def with_rings(config: WalkConfig, problem: DecodeProblem, longest: int, processors: int | None) -> WalkConfig:
    """The walks of sequences of up to so many new tokens, by Hopper's kernel where it walks their lists; unless
    ``processors`` is None, in as many programs as it has room for on these.
    """
    walks = []
    for one in config.walks:
        ring = ring_of(problem, max(1, min(longest, one.schedule.most)), one.schedule)
        if ring is not None and processors is not None:
            one = replace(one, schedule=replace(one.schedule, programs=PROGRAMS * processors))
        walks.append(replace(one, ring=ring))
    return WalkConfig(tuple(walks))


def ring_walks(schedule: ScheduleConfig) -> bool:
    """Tells whether Hopper's kernel walks such a list: items have 16 rows, boxes begin where key blocks do."""
    return schedule.rows == ROWS and not schedule.unit and schedule.block % 8 == 0


def ring_of(problem: DecodeProblem, tokens: int, schedule: ScheduleConfig) -> HopperDecodeConstants | None:
    """The ring of programs that walk a list of sequences of up to so many new tokens; None where there is none. One
    KV head a program, so that a list has as many teams as portable ones can walk, too; 64 KB in flight.

    >>> problem = DecodeProblem(batch=64, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=64, max_keys=32768)
    >>> ring = ring_of(problem, 1, ScheduleConfig(264))
    >>> ring.HEADS, ring.BT, ring.BOX, ring.NB
    (1, 64, 16, 2)
    >>> ring_of(problem, 5, ScheduleConfig(264, BM=32)) is None
    True
    """
    rows = problem.group * tokens
    if rows > ROWS or not (has_depths(problem) and ring_walks(schedule)):
        return None
    return HopperDecodeConstants(
        HEADS=1, GROUP=problem.group, TOKENS=tokens, W=problem.widths[0], PAGE=problem.page_size, BT=BLOCK,
        BOX=math.gcd(problem.page_size, BLOCK, schedule.block), NB=4 if problem.pairs else 2, PAIRS=problem.pairs,
        LONGEST_FIRST=0, PARTS=0,
    )


def left_bytes(C: HopperDecodeConstants) -> int:
    """Bytes behind the ring in which the four warps leave their sums, maxima and sums of weights."""
    return 4 * ROWS * 4 * (C.W + 2)


def shared_bytes(C: HopperDecodeConstants) -> int:
    """Bytes of shared memory that the kernel takes at most."""
    return ring_bytes(C) + left_bytes(C)
