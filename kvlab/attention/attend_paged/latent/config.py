"""MLA decode over a schedule: tiles, how units are cut, and the twin beside ``join``, which all walks have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.attention.attend_paged.config import LISTS, AttendProblem, Walk
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mla_decode.config import LOCKSTEP_TOLERANCE as LOCKSTEP_TOLERANCE
from kvlab.attention.mla_decode.config import MLADecodeConfig, MLADecodeProblem, choose_config
from kvlab.attention.mla_decode.hopper_config import HopperMLAConstants, walk_ring
from kvlab.attention.schedule.config import ScheduleConfig
from kvlab.attention.schedule.schedule import Schedule
from kvlab.common.checks import require
from kvlab.mirror.twin import Twin
from kvlab.triton_support.versions import holds_wgmma_rows

TWINS = (
    Twin(
        "walk",
        kernel="kernel:walk",
        emulator="emulator:walk",
        synonyms={
            **LISTS,
            "v_factor": "scales.v.number",
            "cache.page_size_": "PAGE",
            "store_columns": "store",
        },
        held={"place": "cache at", "load_k": "at page slot exists", "load_v": "k"},
    ),
)
LAUNCH = ("kernel:launch", "emulator:launch")
MERGED_ROWS, MERGED_PARTS = 4, 16


@dataclass(frozen=True)
class LatentWalk(Walk):
    """A fixed grid of programs over one work list: tiles of MLA decode, and how units are cut."""

    tiles: MLADecodeConfig  # type: ignore[assignment]

    def grid(self, problem: DecodeProblem) -> tuple[int]:
        """Programs."""
        return self.schedule.grid(problem.kv_heads)

    def merged(self, problem: DecodeProblem) -> tuple[int, int]:
        """(rows, parts of each) that a program merges at a time: a few of either, as items have many rows and a long
        one's parts may be those of all teams.
        """
        return MERGED_ROWS, MERGED_PARTS


def walked(problem: MLADecodeProblem) -> AttendProblem:
    """The sizes of a call as those of one with a KV head, whose units are cut."""
    columns = problem.latent + problem.rope, problem.latent
    sizes = problem.batch, problem.tokens, problem.heads, 1, *columns, problem.itemsize, problem.page_size
    return AttendProblem(*sizes, problem.max_keys)


def ring_walk(ring: HopperMLAConstants, problem: MLADecodeProblem, *, processors: int = 132) -> LatentWalk:
    """The walk of Hopper's kernel: a program for each of the processors, 64 rows and 64 keys.

    >>> from kvlab.attention.mla_decode.hopper_config import walk_ring
    >>> problem = MLADecodeProblem(batch=128, tokens=1, heads=128, latent=512, rope=64, itemsize=2, page_size=64,
    ...                            max_keys=32768)
    >>> walk = ring_walk(walk_ring(problem), problem)
    >>> walk.grid(walked(problem)), walk.schedule.lanes(1), walk.schedule.block
    ((132,), 2, 64)
    """
    row_tiles = -(-problem.rows // ring.BM)
    tiles = MLADecodeConfig(ring.BM, ring.BN, ring.DV, ring.DR, row_tiles, num_splits=1, num_warps=8)
    together, overhead = min(row_tiles, 4), ring.OVERHEAD
    return LatentWalk(
        tiles, ScheduleConfig(processors, ring.BM, together, ring.BN, overhead, overhead + 2), ring=ring
    )


def walk_of_plan(walk: LatentWalk, schedules: tuple[Schedule, ...]) -> LatentWalk:
    """The walk of a call with the units of a plan; ValueError where these are not made of the call's tiles."""
    own, given, by = walk.schedule, schedules[0].config, "as with v_dim"
    require(not given.unit, "plan has units of a fixed size", "one without unit, batch_invariant")
    require(len(schedules) == 1, f"plan has {len(schedules)} lists", f"one list of all sequences, {by}")
    require(given.BM == own.BM, f"plan has tiles of {given.BM} rows", f"of {own.BM} for this call, {by}")
    side, ours = given.together, own.together
    require(side == ours, f"plan has {side} tiles side by side", f"{ours} for this call, {by}")
    fits = given.block % own.block == 0 if walk.ring is None else given.block == own.block
    accepted = f"{own.block} for this call, {by}"
    require(fits, f"plan has key blocks of {given.block} keys", accepted)
    ring = None if walk.ring is None else walk.ring._replace(OVERHEAD=given.overhead)
    return replace(walk, schedule=given, ring=ring)


def schedule_for(sizes: AttendProblem, *, processors: int, arch: str, hopper: bool) -> ScheduleConfig:
    """The cut of units of a step over pages of 64 rows; ``hopper``: its kernel walks them where it has the sizes.

    >>> sizes = walked(MLADecodeProblem(8, 1, 16, latent=512, rope=64, itemsize=2, page_size=64, max_keys=64))
    >>> [schedule_for(sizes, processors=132, arch="sm_90", hopper=on).BM for on in (True, False)]
    [64, 16]
    """
    columns = sizes.v_dim, sizes.head_dim - sizes.v_dim
    problem = MLADecodeProblem(
        sizes.batch, sizes.tokens, sizes.q_heads, *columns, int(max(sizes.itemsize, 2)), 64, sizes.max_keys,
        fp8=sizes.itemsize < 2,
    )
    if hopper and columns == (512, 64) and sizes.itemsize == 2 and (ring := walk_ring(problem)) is not None:
        return ring_walk(ring, problem, processors=processors).schedule
    tiles = choose_config(problem, num_splits=1, processors=processors, arch=arch, wgmma=holds_wgmma_rows())
    return walk_of(tiles, processors=processors).schedule


def walk_of(tiles: MLADecodeConfig, *, processors: int = 132, ctas: int | None = None) -> LatentWalk:
    """The walk of tiles that were chosen: ``ctas`` programs for each of the processors, by default two of four warps
    and one of eight. Up to four tiles of a sequence are walked side by side, so that each row is read from DRAM once
    for them. Units are whole tiles of keys, of which the beginning and the partial results of one take as long as one
    or, with more than 16 rows, two.

    >>> tiles = MLADecodeConfig(BM=16, BN=64, BV=512, BR=64, row_tiles=1, num_splits=1, num_warps=8, num_stages=5)
    >>> problem = MLADecodeProblem(batch=128, tokens=1, heads=16, latent=512, rope=64, itemsize=2, page_size=64,
    ...                            max_keys=32768)
    >>> walk, sizes = walk_of(tiles), walked(problem)
    >>> walk.grid(sizes), walk.join_grid(sizes), walk.merged(sizes)
    ((132,), (128, 4, 4), (4, 16))
    """
    if ctas is None:
        ctas = 2 if tiles.num_warps == 4 else 1
    overhead = 1 if tiles.BM <= 16 else 2
    together = min(tiles.row_tiles, 4)
    schedule = ScheduleConfig(processors * ctas, tiles.BM, together, tiles.BN, overhead, overhead + 2)
    return LatentWalk(tiles, schedule)
