"""Calls that the Hopper kernel of MHA decode takes, and their tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlab.attention.features.resolve import Features
from kvlab.attention.hopper.choice import decode_lacks, tma_takes
from kvlab.attention.tiles.splits import decode_splits, fitting_splits
from kvlab.attention.tiles.tile_bytes import BARRIER_BYTES
from kvlab.common.arrays import dtype_of

from .config import DecodeProblem, longest_first

SUPPORTED = (
    "bf16 or fp16 with a cache of that dtype or of float8_e4m3fn, whose scales are numbers or of heads, and D = Dv of "
    "64, 80, 96, 112 or 128 (of 16 bits 192 or 256, too), at most 16 query rows of a KV head (32 over a schedule), no "
    "mask but the causal one, no softcap or ALiBi, sinks over a schedule alone, pages of multiples of 8 tokens, caches "
    "that start at 16 bytes and whose strides are multiples of 16 bytes"
)
PAIR_DEPTHS = (64, 80, 96, 112, 128)
WIDE_DEPTHS = (192, 256)
DEPTHS = (*PAIR_DEPTHS, *WIDE_DEPTHS)
AT_ONCE = 128
"""Columns of the warps' sums that are put together at a time."""
ROWS = 16
BLOCK = 64
PANEL = 64
"""Columns of 16 bits of a box, unless rows are narrower."""
CTAS_PER_PROCESSOR = 2
LINE = 128
"""Bytes of a line of L2: one that two programs read parts of may come twice from DRAM."""
WIDE_REGISTERS = {"PRODUCER": 40, "REGISTERS": 255}
"""Of a thread of a producer and of others, with more than 128 columns of 16 rows."""


class HopperDecodeConstants(NamedTuple):
    """Compile-time constants of the Hopper kernel: a ring of NB stages of BN rows of K and of V, HEADS KV heads of BT
    tokens, in boxes of BOX tokens of pages of PAGE; GROUP query heads of each, TOKENS new tokens.

    W          elements of 16 bits of a row: PAIRS of e4m3, or one each
    COLUMNS    that a row of the caches has; 0: all of these. The others arrive as zeros
    LONGEST_FIRST      0, or a power of two that the batch fits: the longest sequences begin
    ROWS       of the tile; each 16 have four warps
    PARTS      0, or how many splits the last program of a sequence's heads to arrive takes at a time
    """

    HEADS: int
    GROUP: int
    TOKENS: int
    W: int
    PAGE: int
    BT: int
    BOX: int
    NB: int
    PAIRS: bool
    LONGEST_FIRST: int
    PARTS: int
    BN: int = BLOCK
    PRODUCER: int = 32
    REGISTERS: int = 128
    ROWS: int = ROWS
    COLUMNS: int = 0


@dataclass(frozen=True)
class HopperDecodeConfig:
    """The constants, and the programs: ``groups`` of HEADS KV heads x ``num_splits`` x sequences. The lengths have no
    part in it.
    """

    constants: HopperDecodeConstants
    groups: int
    num_splits: int
    batch: int

    def grid(self, problem: DecodeProblem | None = None) -> tuple[int]:
        """Programs."""
        return (self.groups * self.num_splits * self.batch,)


def hopper_lacks(
    q: Any, k_cache: Any, v_cache: Any, problem: DecodeProblem, features: Features, rows: int = ROWS
) -> str | None:
    """Feature of a call that the Hopper kernel lacks, None if it takes the call; ``rows`` of a tile, more than 16 where
    it is over a schedule.
    """
    kinds = [dtype_of(x, "q") for x in (q, k_cache, v_cache)]
    if kinds[0].itemsize != 2 or kinds[1] != kinds[2] or (kinds[1] != kinds[0] and not problem.pairs):
        return f"q of dtype {q.dtype} and caches of {k_cache.dtype} and {v_cache.dtype}"
    if not has_depths(problem):
        return f"head dimensions {problem.head_dim} and {problem.v_dim}"
    if problem.group * problem.tokens > rows:
        return f"{problem.tokens} new tokens of {problem.group} query heads a KV head"
    if lacks := decode_lacks(features, listed=rows > ROWS):
        return lacks
    if "token" in features.scales.kinds:
        return "scales of tokens"
    if problem.page_size % 8:
        return f"page size {problem.page_size}"
    if problem.batch == 0 or len(k_cache) == 0:
        return "no sequences or no pages"
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not tma_takes(array, name):
            return f"the strides or the alignment of {name}"
    return None


def has_depths(problem: DecodeProblem) -> bool:
    """Tells whether the Hopper kernel has the problem's head dimensions."""
    known = PAIR_DEPTHS if problem.pairs else DEPTHS
    return problem.head_dim == problem.v_dim and problem.head_dim in known


def row_of(problem: DecodeProblem) -> dict[str, int]:
    """W and COLUMNS of a problem's rows: a power of two, and how many columns there are where that is not all.

    >>> [row_of(DecodeProblem(64, 1, 32, 8, 80, 80, size, 16, 4096)) for size in (2, 1)]
    [{'W': 128, 'COLUMNS': 80}, {'W': 64, 'COLUMNS': 80}]
    """
    columns = problem.widths[0]
    W = 1 << (columns - 1).bit_length()
    return {"W": W, "COLUMNS": problem.head_dim if columns < W else 0}


def neighbours(problem: DecodeProblem) -> int:
    """KV heads of a block for the lines' sake: four, or two, whose rows of a token lie side by side, as a tile holds; 1
    where a row is whole lines, or e4m3, which is not faster so.

    >>> [neighbours(DecodeProblem(1, 1, 32, 8, d, d, 2, 16, 4096)) for d in (64, 80, 96, 112, 128)]
    [1, 4, 4, 4, 1]
    >>> [neighbours(DecodeProblem(1, 2, 32, 8, d, d, 2, 16, 4096)) for d in (80, 96)]
    [2, 1]
    """
    row, rows = int(problem.head_dim * problem.itemsize), problem.group * problem.tokens
    if problem.pairs or row % LINE == 0:
        return 1
    several = (4, 2) if row % (LINE // 2) else (4,)  # two rows of 192 bytes are not faster than one
    return next((n for n in several if problem.kv_heads % n == 0 and n * rows <= ROWS), 1)


def hopper_declined(problem: DecodeProblem) -> str | None:
    """Reason why "auto" takes the portable kernel all the same, None if it does not."""
    if problem.page_size % 16:
        return f"pages of {problem.page_size} tokens, whose boxes are many"
    return None


def choose_hopper(
    problem: DecodeProblem, *, processors: int = 132, num_splits: int | None = None, batch_invariant: bool = False
) -> HopperDecodeConfig:
    """The configuration of a call that the kernel can do, on ``processors`` SMs.

    Two heads a block, whose rows in a page are neighbours; one where the programs then fit the device at once, since
    fewer splits are joined sooner; ``neighbours`` where the programs still put the splits together. Two CTAs an SM with
    64 KB in flight, 32 of rows of up to 128 bytes: more is slower. A CTA that has an SM to itself has 64 KB, 96 of
    rows of 256 bytes, 192 where heads have more than 128 columns, which always do.

    >>> problem = DecodeProblem(64, 1, 32, 8, 128, 128, 2, 16, 4096)
    >>> config = choose_hopper(problem)
    >>> config.grid(), config.constants.HEADS, config.constants.NB
    ((256,), 2, 2)
    >>> config = choose_hopper(DecodeProblem(1, 1, 32, 8, 128, 128, 2, 16, 131072))
    >>> config.grid(), config.constants.HEADS, config.num_splits
    ((128,), 1, 16)
    """
    rows, row = problem.group * problem.tokens, row_of(problem)
    wide = row["W"] > AT_ONCE
    places = processors if wide else CTAS_PER_PROCESSOR * processors
    free = num_splits is None and not batch_invariant
    few = free and problem.batch * problem.kv_heads <= places
    heads = neighbours(problem)
    if few:
        at_once = processors if problem.batch == 1 else places
        tried = [
            (n, fitting_splits(problem.kv_heads // n * problem.batch, problem.max_keys, at_once))
            for n in (4, 2, 1) if n <= heads
        ]
        heads, splits = next((n, s) for n, s in tried if n == 1 or s == 1 or parts_of(n * rows, s, row["W"]))
    else:
        heads = max(heads, 2 if problem.kv_heads % 2 == 0 and 2 * rows <= ROWS else 1)
        programs = problem.kv_heads // heads * problem.batch
        splits = decode_splits(num_splits, programs, problem.max_keys, places, batch_invariant=batch_invariant)
    groups, bt = problem.kv_heads // heads, BLOCK // heads
    programs = groups * problem.batch
    alone = programs * splits <= processors
    stages = max(2, (64 if alone else 32) * 1024 // (4 * BLOCK * row["W"]))
    if wide or (alone and row == {"W": AT_ONCE, "COLUMNS": 0}):
        stages = 3
    constants = HopperDecodeConstants(
        HEADS=heads, GROUP=problem.group, TOKENS=problem.tokens, **row, PAGE=problem.page_size, BT=bt,
        BOX=math.gcd(problem.page_size, bt), NB=stages, PAIRS=problem.pairs,
        LONGEST_FIRST=longest_first(problem.batch, programs, places) if splits == 1 else 0,
        PARTS=0 if batch_invariant else parts_of(heads * rows, splits, row["W"]), **(WIDE_REGISTERS if wide else {}),
    )
    return HopperDecodeConfig(constants, groups, splits, problem.batch)


def parts_of(rows: int, splits: int, columns: int = AT_ONCE) -> int:
    """Number of splits that the last program takes at a time, 64 rows of 128 columns in registers. 0 where that were
    more than two times: a launch that merges has many programs for it.

    >>> parts_of(4, 16), parts_of(8, 16), parts_of(8, 17), parts_of(4, 1), parts_of(4, 16, 256)
    (16, 8, 0, 0, 8)
    """
    parts = 64 * AT_ONCE // max(columns, AT_ONCE) // max(4, 1 << (rows - 1).bit_length())
    return parts if 1 < splits <= 2 * parts else 0


def shared_bytes(C: HopperDecodeConstants) -> int:
    """Bytes of shared memory that the kernel takes at most: stages of K and V."""
    return 2 * C.NB * C.BN * C.W * 2 + BARRIER_BYTES
