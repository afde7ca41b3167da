"""Attention of any new tokens over pages: the walks over a schedule that a call takes, their tiles, and the twins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.machines.gpu import shared_limit, traits
from kvlab.attention.merge_states.config import piece_of
from kvlab.attention.mha_decode.config import (
    CTAS_OF_ONE_WARP,
    DecodeConfig,
    DecodeProblem,
    choose_config,
    problem_of,
    shared_bytes,
)
from kvlab.attention.schedule.config import FEW_ROWS, INVARIANT_KEYS, MOST_UNITS, ScheduleConfig, ScheduleProblem
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.tiles.pieces import pieces
from kvlab.attention.tiles.tile_bytes import tile_bytes
from kvlab.mirror.twin import Twin

LISTS = {
    "work": "list_ptr",
    "starts": "starts_ptr",
    "firsts": "firsts_ptr",
    "sequences": "sequences_ptr",
    "tiles": "tiles_ptr",
    "seq_lens": "seq_lens_ptr",
    "cu_seqlens": "cu_seqlens_ptr",
    "schedule.block": "BLOCK",
    "schedule.unit": "FIXED",
    "schedule.overhead": "OVERHEAD",
    "schedule.reach": "REACH",
    "mask.placed": "PLACED",
    "schedule.rows": "ROWS",
    "schedule.together": "TOGETHER",
    "schedule.heads": "HEADS",
}
TWINS = (
    Twin(
        "walk",
        kernel="kernel:walk",
        emulator="emulator:walk",
        synonyms={
            **LISTS,
            "problem.each": "EACH",
            "load_tile": "load",
            "v_factor": "scales.v_factor",
            "cache.page_size_": "PAGE",
            "load_q": "load_rows",
            "store_rows": "store",
        },
        held={
            "load_k": "k_ptr kv_head page slot exists",
            "load_v": "v_ptr kv_head page slot exists",
            "in_pages": "k_ptr",
        },
    ),
    Twin(
        "join",
        kernel="kernel:join",
        emulator="emulator:join",
        synonyms={
            **LISTS, "part_array": "part_ptr", "part_lse_array": "part_lse_ptr",
        },
    ),
    Twin("hopper", kernel="hopper:find_unit,produce,consume", emulator="hopper_emulator:find_unit,produce,consume"),
)
LAUNCH = ("kernel:launch", "emulator:launch")
LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}

FEW_BESIDE = 16
"""Rows of a tile of which two programs of an SM have room."""
MOST_TOGETHER = 4
MERGED = 32
"""Partial results of 128 columns that a program of four warps merges at a time: 32 registers of a thread."""
SHORT_KEYS = 512
"""Keys of a sequence that stay in L2: its tiles need not be walked side by side to read them once."""
PROMPT_KEYS = 2048
"""The same of sequences of many new tokens but not as many of each: tiles side by side would often have no rows."""
LARGE_ROWS, LARGE_BLOCK, LARGE_OVERHEAD = 128, 128, 2
"""Rows of the largest tile, keys of the key blocks of its units, and of how many the beginning takes as long as."""


@dataclass(frozen=True)
class AttendProblem(DecodeProblem):
    """Sizes of one call, as of :class:`~kvlab.attention.mha_decode.config.DecodeProblem`. ragged : ``tokens`` are the
    new tokens of all sequences together, of which each has as many as it has.
    """

    ragged: bool = False


@dataclass(frozen=True)
class Walk:
    """A fixed grid of programs over one work list: tiles as of
    :class:`~kvlab.attention.mha_decode.config.DecodeConfig`, and how units are cut.
    """

    tiles: DecodeConfig
    schedule: ScheduleConfig
    ring: Any = None
    """The :class:`~kvlab.attention.mha_decode.hopper_config.HopperDecodeConstants` of the ring of TMA boxes where
    Hopper's kernel walks the list, in programs of HEADS KV heads.
    """
    wide: Any = None
    """The :class:`~kvlab.attention.mha_prefill.hopper_config.HopperPrefillConstants` where Hopper's prefill
    tiles do.
    """

    @property
    def module(self) -> str | None:
        """Name of the module whose kernel walks the list on Hopper, None of the portable walk."""
        return "hopper" if self.ring is not None else "wide.hopper" if self.wide is not None else None

    def grid(self, problem: DecodeProblem) -> tuple[int]:
        """Programs. The lengths have no part in it: a CUDA graph may be replayed."""
        heads = 1 if self.ring is None else self.ring.HEADS
        return (self.schedule.grid(problem.kv_heads)[0] // heads,)

    def rows(self, problem: DecodeProblem) -> int:
        """Rows of a tile that any sequence may have."""
        return min(self.tiles.BM, problem.tokens * problem.group)

    def items(self, problem: DecodeProblem) -> int:
        """Items that the list has room for."""
        return self.schedule.most_items(schedule_problem(problem, UNLIMITED, 0))

    def places(self, problem: DecodeProblem) -> int:
        """Partial results of BM rows that there is room for: two of each program or, with units of a fixed size, one of
        each unit that the keys of a row of the table may have.
        """
        schedule = self.schedule
        if not schedule.unit:
            return 2 * schedule.grid(problem.kv_heads)[0]
        units = min(MOST_UNITS, max(1, -(-problem.max_keys // (schedule.unit * schedule.block))))
        return units * self.items(problem) * schedule.lanes(problem.kv_heads)

    def merged(self, problem: DecodeProblem) -> tuple[int, int]:
        """(rows, parts of each) that a program merges at a time: where tiles have few rows many parts, none of which
        waits for another; where they have many, programs of more rows are fewer. The tile and the group of heads
        decide, so that calls in other forms have the same order of sums.
        """
        rows = max(1, min(8, max(self.tiles.BM // 16, problem.group // 4)))
        rows = 1 << rows.bit_length() - 1
        return rows, MERGED // rows

    def joins_each(self, problem: DecodeProblem) -> bool:
        """Tells whether there are programs to merge each item, not for each team that of which it has the first part:
        units have a fixed size, or items are fewer.
        """
        return self.schedule.unit > 0 or self.items(problem) < self.schedule.teams(problem.kv_heads)

    def join_grid(self, problem: DecodeProblem) -> tuple[int, int, int]:
        """Programs that merge: for each team or item one for some rows of each of its programs, and a piece of
        columns.
        """
        schedule, pieces = self.schedule, -(-problem.v_dim // piece_of(problem.v_dim))
        first = self.items(problem) if self.joins_each(problem) else schedule.teams(problem.kv_heads)
        rows = -(-self.rows(problem) // self.merged(problem)[0])
        return first, schedule.lanes(problem.kv_heads) * rows, pieces

    def lists_items(self, problem: DecodeProblem) -> bool:
        """Tells whether items are others than the sequences, one each in their order."""
        return self.schedule.lists_items(schedule_problem(problem, UNLIMITED, 0))


@dataclass(frozen=True)
class WalkConfig:
    """The walks of a call, one after the other or at the same time: each has the sequences of some numbers of new
    tokens.
    """

    walks: tuple[Walk, ...]

    @property
    def beside(self) -> bool:
        """Tells whether the walks share the processors, so that they run at the same time."""
        return all(one.schedule.sharing is not None for one in (self.walks[0], self.walks[-1]))

    def grid(self, problem: DecodeProblem) -> tuple[int]:
        """Programs of the first walk."""
        return self.walks[0].grid(problem)


def ragged_problem(q: Any, k_cache: Any, v_cache: Any, block_table: Any, cu_seqlens: Any) -> AttendProblem:
    """The sizes of a call on q ``[B, S, Hq, D]``, or ``[1, total, Hq, D]`` with cu_seqlens ``[B + 1]``."""
    problem = problem_of(q, k_cache, v_cache, block_table)
    batch = problem.batch if cu_seqlens is None else int(cu_seqlens.shape[0]) - 1
    return AttendProblem(**vars(problem) | {"batch": batch}, ragged=cu_seqlens is not None)


def of_walk(features: Features, k_cache: Any) -> Features:
    """Features as the walk takes them: the products of Q and of Qv with K and V that have scales are two sums, of which
    the first alone has K's.
    """
    return features if features.qv is None or not is_fp8(k_cache) else features.of_parts()


def schedule_problem(problem: DecodeProblem, left: int, right: int) -> ScheduleProblem:
    """Sizes of the work list of a call."""
    ragged = isinstance(problem, AttendProblem) and problem.ragged
    return ScheduleProblem(
        problem.batch, problem.tokens, problem.group, problem.kv_heads, problem.max_keys, ragged, left, right
    )


def walk_of(
    tiles: DecodeConfig, problem: DecodeProblem, *, processors: int = 132, ctas: int | None = None, block: int = 16,
    overhead: int | None = None, least: int | None = None,
) -> Walk:
    """The walk of tiles that were chosen: ``ctas`` programs for each of the processors, by default three where
    registers have room for them, two of other small tiles, and one of eight warps. The beginning of a unit takes as
    long as 64 keys of 256 bytes.

    >>> problem = DecodeProblem(batch=64, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=16, max_keys=32768)
    >>> tiles = DecodeConfig(BM=16, BN=64, columns=(128, 0), v_columns=(128, 0), row_tiles=1, num_splits=1)
    >>> walk = walk_of(tiles, problem)
    >>> walk.grid(problem), walk.join_grid(problem), walk.merged(problem)
    ((392,), (49, 32, 1), (1, 32))
    """
    if ctas is None:
        ctas = 3 if register_limit(tiles, problem) else {1: CTAS_OF_ONE_WARP, 4: 2}.get(tiles.num_warps, 1)
    if overhead is None:
        overhead = max(1, round(4 * 256 / (problem.head_dim * problem.itemsize)))
    least = overhead + 8 if least is None else least
    schedule = ScheduleConfig(processors * ctas, tiles.BM, tiles.row_tiles, block, overhead, least)
    return Walk(tiles, schedule)


def choose_walks(
    problem: DecodeProblem, longest: int, *, processors: int = 132, arch: str = "sm_90", shared: int | None = None,
    heavy: bool = False, biased: bool = False, batch_invariant: bool = False, qv: bool = False, tiles: bool = False,
    beside: bool = False,
) -> WalkConfig:
    """The walks of a call in which no sequence has more than ``longest`` new tokens: where these are ragged and many,
    one over the sequences whose rows fit a tile of 32, and one over the others, whose tiles are larger; this one alone,
    if all have as many. The rows of a tile depend on the sizes and the architecture alone, so that layers of other
    features share a plan. ``tiles``: large ones are by Hopper's prefill kernel, and of so few keys, for so many new
    tokens, that another walk would not pay all are; ``beside``: while the ring walks the others, of which up to 16 rows
    have a walk of their own, as two programs of an SM have room.
    ``batch_invariant``: what others have decides nothing; units of 2048 keys, of so many more as the rows of an item
    are more than 32. ``qv``: V has a query, too, and tiles have room for rows of K and V side by side.

    >>> problem = AttendProblem(64, 2108, 32, 8, 128, 128, itemsize=2, page_size=16, max_keys=32768, ragged=True)
    >>> few, many = choose_walks(problem, 512).walks
    >>> few.tiles.BM, few.schedule.most, many.tiles.BM, many.schedule.fewest, many.schedule.together
    (32, 8, 128, 9, 4)
    >>> [walk.tiles.BM for walk in choose_walks(problem, 4).walks]
    [16]
    >>> [walk.tiles.BM for walk in choose_walks(replace(problem, tokens=64 * 128), 128).walks]
    [128]
    """
    few = max(1, FEW_ROWS // problem.group)
    ragged = isinstance(problem, AttendProblem) and problem.ragged
    longest = UNLIMITED // problem.group if ragged and batch_invariant else longest
    large_ones = ragged and longest > few
    uniform = problem.tokens == problem.batch * longest
    prompts = tiles and not uniform and problem.tokens * problem.group > problem.batch * FEW_ROWS
    short = problem.max_keys <= (PROMPT_KEYS if prompts else SHORT_KEYS)
    alone = uniform or (tiles and short)
    several = large_ones and not alone
    fewer = FEW_BESIDE // problem.group
    bounds = [*([fewer] if beside and several and 0 < fewer < few else []), *([few] if several else []), longest]
    columns, walks = pieces(problem.widths[0]), []
    problem = replace(problem, head_dim=problem.head_dim + problem.v_dim) if qv else problem
    depth = max(problem.widths)
    for tokens in bounds:
        rows = tokens * problem.group
        deep = depth > 128 and rows > 16
        one = choose_config(
            replace(problem, tokens=tokens), num_splits=1, processors=processors, arch=arch, shared=shared,
            heavy=heavy or deep, biased=biased,
        )
        if deep and depth <= 256 and problem.itemsize == 2 and traits(arch).products == "wgmma":
            one = replace(one, BM=FEW_ROWS, num_warps=8)
        if rows > (FEW_ROWS if large_ones else MOST_TOGETHER * FEW_ROWS):
            one = _large(one, problem, max(rows, LARGE_ROWS) if tiles else rows, arch, shared, biased)
        together = max(1, min(MOST_TOGETHER, -(-rows // one.BM)))
        if one.BM == LARGE_ROWS and short and not batch_invariant:
            together = 1
        large = {}
        if one.BM == LARGE_ROWS:
            large = {"block": LARGE_BLOCK, "overhead": LARGE_OVERHEAD, "least": LARGE_OVERHEAD + 1}
        one = replace(one, row_tiles=together, longest_first=0)
        one = _read_twice(replace(one, columns=columns), problem, arch, shared, biased) if qv else one
        walk = walk_of(one, problem, processors=processors, **large)
        unit = INVARIANT_KEYS // walk.schedule.block * max(1, walk.schedule.rows // FEW_ROWS) if batch_invariant else 0
        walks.append(replace(walk, schedule=replace(walk.schedule, unit=unit)))
    for i, tokens in enumerate(bounds[:-1]):
        below, above = walks[i : i + 2]
        walks[i] = replace(below, schedule=replace(below.schedule, most=tokens))
        walks[i + 1] = replace(above, schedule=replace(above.schedule, fewest=tokens + 1))
    return WalkConfig(tuple(walks))


def _large(
    tiles: DecodeConfig, problem: DecodeProblem, rows: int, arch: str, shared: int | None, biased: bool
) -> DecodeConfig:
    """Tiles of 64 or 128 rows, their columns in one piece, where products are wgmma's and registers hold them, those of
    e4m3 beside what it becomes; the others as they are. Of 256 columns with half the keys.
    """
    deepest = {1: 128, 2: 256}.get(int(problem.itemsize), 0)
    if traits(arch).products != "wgmma" or max(problem.head_dim, problem.v_dim) > deepest:
        return tiles
    k, v = (1 << (width - 1).bit_length() for width in problem.widths)
    BM = 64 if rows <= 64 else LARGE_ROWS
    BN, warps = (64, BM // 16) if max(k, v) <= 128 else (32, 8)
    large = replace(tiles, BM=BM, BN=BN, columns=(k, 0), v_columns=(v, 0), num_warps=warps, num_stages=2)
    fits = shared_bytes(large, problem, arch, biased=biased) <= (shared or shared_limit(arch))
    return large if fits else replace(large, num_stages=1)


def _read_twice(
    tiles: DecodeConfig, problem: DecodeProblem, arch: str, shared: int | None, biased: bool
) -> DecodeConfig:
    """Tiles whose V lies in shared memory once for both products, so that several are in flight there; float32 without
    tensor cores has fewer keys on AMD, or its registers spill.
    """
    if traits(arch).amd or problem.itemsize == 4:
        return replace(tiles, BN=16) if traits(arch).amd and problem.itemsize == 4 else tiles
    v = sum(tiles.v_columns)
    row = sum(tiles.columns) + v
    room = [
        tile_bytes(tiles.BM, 64, (row, 0), 2, stages, arch=arch, q_columns=(row, v), hops=2, biased=biased)
        for stages in (5, 2)
    ]
    deep = room[0] <= (shared or shared_limit(arch))
    return replace(tiles, BN=64, num_warps=8, num_stages=5 if deep else 2)


def register_limit(tiles: DecodeConfig, problem: DecodeProblem) -> dict[str, int]:
    """Registers of a thread, where three programs of four warps shall find room on an SM: what does not fit is put
    aside between units, not in the loop over the keys.
    """
    small = tiles.num_warps == 4 and tiles.BM <= FEW_ROWS and max(problem.widths) <= 128 and problem.itemsize <= 2
    return {"maxnreg": 168} if small else {}
