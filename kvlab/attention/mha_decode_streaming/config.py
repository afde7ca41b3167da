"""Streaming MHA decode: tile sizes and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.machines.gpu import traits
from kvlab.attention.merge_states.config import MERGE
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.tiles.splits import decode_splits
from kvlab.attention.tiles.tile_bytes import tile_bytes
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "attend", kernel="kernel:attend", emulator="emulator:attend",
        synonyms={
            "seq_lens": "seq_lens_ptr", "v_factor": "scales.v.number", "cache.page_size_": "PAGE",
            "zero_scores": "zeros", "store_columns": "store",
        },
        held={
            "load_k_strip": "k_ptr kv_head page slot exists", "load_q_strip": "q_ptr is_row",
            "load_v": "v_ptr kv_head page slot exists", "in_pages": "k_ptr",
        },
    ),
    MERGE,
)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}

CTAS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class StreamingConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows (tokens x heads of one KV head), BN keys, strips of BK columns of K, BD the head dimension padded to a
    power of two.
    """

    BM: int
    BN: int
    BK: int
    BD: int
    row_tiles: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 1

    def grid(self, problem: DecodeProblem) -> tuple[int, int, int]:
        """Programs (batch, KV head and row tile, split); the lengths have no part in it."""
        return problem.batch, problem.kv_heads * self.row_tiles, self.num_splits


def choose_config(
    problem: DecodeProblem, *, processors: int = 132, num_splits: int | None = None, arch: str = "gfx950",
    batch_invariant: bool = False,
) -> StreamingConfig:
    """The configuration of a call: MAX's tile of 16 rows and 128 keys on gfx950, fewer keys elsewhere. The
    splits as for MHA decode.

    >>> problem = DecodeProblem(batch=1, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=16, max_keys=4096)
    >>> choose_config(problem, num_splits=1)
    StreamingConfig(BM=16, BN=128, BK=32, BD=128, row_tiles=1, num_splits=1, num_warps=4, num_stages=1)
    """
    BD = max(32, 1 << (problem.head_dim - 1).bit_length())
    row = BD * max(problem.itemsize, 2)  # e4m3 is converted to 16 bits
    BN = (128 if row <= 1024 else 64) if traits(arch).of_max else 64 if row <= 512 else 32 if row <= 1024 else 16
    row_tiles = -(-problem.tokens * problem.group // 16)
    programs, places = problem.batch * problem.kv_heads * row_tiles, CTAS_PER_PROCESSOR * processors
    num_splits = decode_splits(num_splits, programs, problem.max_keys, places, batch_invariant=batch_invariant)
    return StreamingConfig(16, BN, 32, BD, row_tiles, num_splits, 8 if BN == 16 else 4)


def shared_bytes(config: StreamingConfig, problem: DecodeProblem, arch: str) -> int:
    """Bytes of shared memory that the kernel takes on ``arch`` at most: strips of K take less than a tile."""
    item = max(int(problem.itemsize), 2)
    return tile_bytes(config.BM, config.BN, (config.BD,) * 2, item, config.num_stages, arch=arch)
