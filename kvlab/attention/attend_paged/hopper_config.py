"""Walks over a schedule that Hopper's ring of TMA boxes takes: which, and its blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.hopper_config import BLOCK, ROWS, HopperDecodeConstants
from kvlab.attention.mha_decode.hopper_config import shared_bytes as ring_bytes
from kvlab.attention.schedule.config import ScheduleConfig

CTAS_PER_PROCESSOR = 2


class ListConstants(NamedTuple):
    """What the walk of a list is compiled for besides the ring, as ``WalkConstants``."""

    BLOCK: int
    OVERHEAD: int
    REACH: int
    LISTED: bool


def ring_of(problem: DecodeProblem, tokens: int, schedule: ScheduleConfig) -> HopperDecodeConstants | None:
    """The ring of programs that walk a list of sequences of up to so many new tokens; None where it cannot: its tiles
    have 16 rows, and boxes begin where key blocks do.

    >>> problem = DecodeProblem(batch=64, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=64, max_keys=32768)
    >>> ring = ring_of(problem, 1, ScheduleConfig(264))
    >>> ring.HEADS, ring.BT, ring.BOX, ring.NB
    (2, 32, 16, 2)
    >>> ring_of(problem, 5, ScheduleConfig(264, BM=32)) is None
    True
    """
    rows = problem.group * tokens
    if rows > ROWS or schedule.rows != ROWS or schedule.unit or schedule.block % 8:
        return None
    heads = 2 if problem.kv_heads % 2 == 0 and 2 * rows <= ROWS else 1
    bt = BLOCK // heads
    return HopperDecodeConstants(
        HEADS=heads, GROUP=problem.group, TOKENS=tokens, W=problem.widths[0], PAGE=problem.page_size, BT=bt,
        BOX=math.gcd(problem.page_size, bt, schedule.block), NB=2, PAIRS=problem.pairs, LONGEST_FIRST=0, PARTS=0,
    )


def left_bytes(C: HopperDecodeConstants) -> int:
    """Bytes behind the ring in which the four warps leave their sums, maxima and sums of weights."""
    return 4 * ROWS * 4 * (C.W + 2)


def shared_bytes(C: HopperDecodeConstants) -> int:
    """Bytes of shared memory that the kernel takes at most."""
    return ring_bytes(C) + left_bytes(C)
