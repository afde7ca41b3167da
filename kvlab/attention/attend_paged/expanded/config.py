"""MLA prefill over a schedule: tiles, how units are cut, and the twin beside ``join``, which all walks have."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.attend_paged.config import LISTS, AttendProblem, Walk
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.mla_prefill.config import LOCKSTEP_TOLERANCE as OF_PREFILL
from kvlab.attention.mla_prefill.config import TWINS as PREFILL
from kvlab.attention.mla_prefill.config import MLAPrefillConfig, MLAPrefillProblem, choose_config
from kvlab.attention.schedule.config import ScheduleConfig
from kvlab.attention.schedule.schedule import Schedule
from kvlab.common.checks import require
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "walk",
        kernel="kernel:walk",
        emulator="emulator:walk",
        synonyms={**LISTS, **(PREFILL[0].synonyms or {}), "of_tiles.one_loop": "ONE_LOOP"},
        held=PREFILL[0].held,
    ),
)
LAUNCH = ("kernel:launch", "emulator:launch")
LOCKSTEP_TOLERANCE = {**OF_PREFILL, "parts": OF_PREFILL["o"]}

BLOCK, OVERHEAD = 64, 2
"""Keys of a key block, and of how many the beginning of a unit takes as long as."""


@dataclass(frozen=True)
class ExpandedWalk(Walk):
    """A fixed grid of programs over one work list: tiles of MLA prefill, and how units are cut."""

    tiles: MLAPrefillConfig  # type: ignore[assignment]


def walked(problem: MLAPrefillProblem, total: int) -> AttendProblem:
    """The sizes of a call over ``total`` new tokens as those of one whose heads have K and V of their own."""
    columns = problem.nope + problem.rope, problem.value
    sizes = problem.batch, total, problem.heads, problem.heads, *columns, problem.itemsize, 1, UNLIMITED
    return AttendProblem(*sizes, ragged=True)


def schedule_of_tiles(BM: int, *, processors: int = 132) -> ScheduleConfig:
    """The cut of units for tiles of BM rows of one head: a program for each of the processors.

    >>> config = schedule_of_tiles(128)
    >>> config.grid(16), config.teams(16), config.grid(128)
    ((128,), 8, (128,))
    """
    return ScheduleConfig(processors, BM, 1, BLOCK, OVERHEAD, OVERHEAD + 2)


def schedule_for(
    heads: int, wide: int, rope: int, itemsize: int, *, processors: int, arch: str, shared: int | None
) -> ScheduleConfig:
    """The cut of units of a step over heads of ``wide`` columns of K before those for rope, or of V.

    >>> schedule_for(16, 128, 64, 2, processors=132, arch="sm_90", shared=None).BM
    128
    """
    sizes = MLAPrefillProblem(1, 1, heads, wide, rope, wide, max(itemsize, 2), converted=itemsize == 1)
    return schedule_of_tiles(choose_config(sizes, arch=arch, shared=shared).BM, processors=processors)


def walk_of(tiles: MLAPrefillConfig, schedules: tuple[Schedule, ...]) -> ExpandedWalk:
    """The walk of a plan by the tiles of a call; ValueError where its units are not made of them."""
    schedule = schedules[-1].config
    require(not schedule.unit, "plan has units of a fixed size", "one without unit, batch_invariant")
    by = "as with head_dim (nope, rope)"
    accepted = f"of {tiles.BM} for this call, {by}"
    require(schedule.BM == tiles.BM, f"plan has tiles of {schedule.BM} rows", accepted)
    require(len(schedules) == 1, f"plan has {len(schedules)} lists", f"one list of all sequences, {by}")
    fits = schedule.block % tiles.BN == 0
    require(fits, f"plan has key blocks of {schedule.block} keys", f"a multiple of {tiles.BN} for this call")
    return ExpandedWalk(tiles, schedule)
