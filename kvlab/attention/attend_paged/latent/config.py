"""MLA decode over a schedule: tiles, how units are cut, and the twin beside ``join``, which all walks have."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.attend_paged.config import LISTS, AttendProblem, Walk
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mla_decode.config import LOCKSTEP_TOLERANCE as LOCKSTEP_TOLERANCE
from kvlab.attention.mla_decode.config import MLADecodeConfig, MLADecodeProblem
from kvlab.attention.mla_decode.hopper_config import HopperMLAConstants
from kvlab.attention.schedule.config import ScheduleConfig
from kvlab.mirror.twin import Twin

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


@dataclass(frozen=True)
class LatentWalk(Walk):
    """A fixed grid of programs over one work list: tiles of MLA decode, and how units are cut."""

    tiles: MLADecodeConfig  # type: ignore[assignment]

    def grid(self, problem: DecodeProblem) -> tuple[int]:
        """Programs."""
        return self.schedule.grid(problem.kv_heads)


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
    ((132,), (132, 4, 4), (4, 8))
    """
    if ctas is None:
        ctas = 2 if tiles.num_warps == 4 else 1
    overhead = 1 if tiles.BM <= 16 else 2
    together = min(tiles.row_tiles, 4)
    schedule = ScheduleConfig(processors * ctas, tiles.BM, together, tiles.BN, overhead, overhead + 2)
    return LatentWalk(tiles, schedule)
