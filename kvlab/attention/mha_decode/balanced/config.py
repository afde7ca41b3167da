"""MHA decode over a schedule: tile sizes and the twins."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.merge_states.config import merge_grid
from kvlab.attention.mha_decode.config import DecodeConfig, DecodeProblem
from kvlab.attention.schedule.config import ScheduleConfig, ScheduleProblem
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.mirror.twin import Twin

LISTS = {
    "work": "list_ptr",
    "starts": "starts_ptr",
    "firsts": "firsts_ptr",
    "seq_lens": "seq_lens_ptr",
    "schedule.block": "BLOCK",
    "schedule.overhead": "OVERHEAD",
    "schedule.rows": "ROWS",
}
TWINS = (
    Twin(
        "walk",
        kernel="kernel:walk",
        emulator="emulator:walk",
        synonyms={
            **LISTS,
            "problem.pairs": "PAIRS",
            "v_factor": "scales.v.number",
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
        synonyms={**LISTS, "part_array": "part_ptr", "part_lse_array": "part_lse_ptr", "lane_sum": "sum"},
    ),
)
LAUNCH = ("kernel:launch", "emulator:launch")
LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}


@dataclass(frozen=True)
class BalancedConfig:
    """Tiles as of :class:`~kvlab.attention.mha_decode.config.DecodeConfig`, and how units are cut.

    An item is a sequence: the programs of a team have its KV heads and tiles of rows.
    """

    tiles: DecodeConfig
    schedule: ScheduleConfig

    def grid(self, problem: DecodeProblem) -> tuple[int]:
        """Programs. The lengths have no part in it: a CUDA graph may be replayed."""
        return self.schedule.grid(problem.kv_heads)

    def join_grid(self, problem: DecodeProblem) -> tuple[int, int, int]:
        """Programs that merge: one for each token, query head, and piece of columns."""
        return merge_grid(problem.batch, problem.tokens, problem.q_heads, problem.v_dim)

    def parts(self, problem: DecodeProblem) -> int:
        """Power of two that holds the partial results of a sequence."""
        return 1 << max(self.schedule.teams(problem.kv_heads) - 1, 1).bit_length()


def schedule_problem(problem: DecodeProblem, left: int, right: int) -> ScheduleProblem:
    """Sizes of the work list of a decode call."""
    return ScheduleProblem(
        problem.batch, problem.tokens, problem.group, problem.kv_heads, problem.max_keys, False, left, right
    )


def balanced_config(
    tiles: DecodeConfig, problem: DecodeProblem, *, processors: int = 132, ctas: int | None = None, block: int = 16,
    overhead: int = 4, least: int = 12,
) -> BalancedConfig:
    """The configuration for tiles that were chosen: ``ctas`` programs for each of the processors, by default three
    where registers have room for them, two of other small tiles, and one of eight warps.

    >>> problem = DecodeProblem(batch=64, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=16, max_keys=32768)
    >>> tiles = DecodeConfig(BM=16, BN=64, columns=(128, 0), v_columns=(128, 0), row_tiles=1, num_splits=1)
    >>> config = balanced_config(tiles, problem)
    >>> config.grid(problem), config.join_grid(problem), config.parts(problem)
    ((392,), (64, 32, 1), 64)
    """
    if ctas is None:
        ctas = 3 if register_limit(tiles, problem) else 2 if tiles.num_warps == 4 else 1
    schedule = ScheduleConfig(processors * ctas, tiles.BM, tiles.row_tiles, block, overhead, least)
    return BalancedConfig(tiles, schedule)


def register_limit(tiles: DecodeConfig, problem: DecodeProblem) -> dict[str, int]:
    """Registers of a thread, where three programs of four warps shall find room on an SM: what does not fit is put
    aside between units, not in the loop over the keys.
    """
    small = tiles.num_warps == 4 and max(problem.widths) <= 128 and problem.itemsize <= 2
    return {"maxnreg": 168} if small else {}
