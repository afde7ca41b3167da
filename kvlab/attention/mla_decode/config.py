"""MLA decode: tile sizes of each machine, the split of the keys, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.merge_states.config import MERGE
from kvlab.attention.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.splits import check_splits, choose_splits
from kvlab.mirror.twin import Twin

__all__ = [
    "LAUNCH",
    "LOCKSTEP_TOLERANCE",
    "TWINS",
    "MLADecodeConfig",
    "MLADecodeProblem",
    "choose_config",
]

TWINS = (Twin("attend", kernel="kernel:attend", emulator="emulator:attend"), MERGE)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}


@dataclass(frozen=True)
class MLADecodeProblem:
    """Sizes of one call: B sequences, S new tokens each, H heads, rows of latent and rope columns."""

    batch: int
    tokens: int
    heads: int
    latent: int
    rope: int
    itemsize: int
    max_keys: int

    @property
    def rows(self) -> int:
        """Query rows of a sequence; all of them see the same keys and values."""
        return self.tokens * self.heads


@dataclass(frozen=True)
class MLADecodeConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows (tokens x heads), BN keys, BV latent and BR rope columns, each padded to a power of two.
    """

    BM: int
    BN: int
    BV: int
    BR: int
    row_tiles: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2

    def grid(self, problem: MLADecodeProblem) -> tuple[int, int]:
        """Programs (sequence and row tile, split). The row tiles of a sequence are neighbours: they read the same
        keys. The lengths have no part in it: a CUDA graph may be replayed.
        """
        return problem.batch * self.row_tiles, self.num_splits


def choose_config(
    problem: MLADecodeProblem,
    *,
    processors: int = 132,
    num_splits: int | None = None,
    arch: str = "sm_90",
    emulated: bool = False,
) -> MLADecodeConfig:
    """The configuration of a call on ``arch``, which has ``processors`` SMs (132 on an H100).

    16 or 32 rows x 32 keys with mma.sync or MFMA: 64 rows on sm_90 would compile to wgmma, but spill with Triton 3.9.
    float32 has no tensor cores on NVIDIA: 16 rows x 32 keys with eight warps (16 keys on sm_80, or registers spill).
    ``emulated``: the tiles that the emulator has machines for: 16 rows x 32 keys on
    NVIDIA, mma.sync or float32; MAX's 16 rows x 128 keys on gfx950.

    >>> problem = MLADecodeProblem(batch=1, tokens=1, heads=128, latent=512, rope=64, itemsize=2, max_keys=32768)
    >>> choose_config(problem)
    MLADecodeConfig(BM=32, BN=32, BV=512, BR=64, row_tiles=4, num_splits=61, num_warps=8, num_stages=2)
    >>> choose_config(problem, num_splits=1).grid(problem)
    (4, 1)
    """
    num_splits = check_splits(num_splits)
    BV, BR = (max(32, 1 << (n - 1).bit_length()) for n in (problem.latent, problem.rope))
    amd = arch.startswith("gfx")
    if emulated and arch == "gfx950":
        BM, BN, num_warps, num_stages = 16, 128, 4, 1
    elif problem.itemsize == 4:
        BM, BN, num_warps, num_stages = (16, 16, 4, 1) if amd else (16, 32, 8, 1)
        if arch == "sm_80" and not emulated:
            BN = 16
    elif problem.rows <= 16 or emulated:
        BM, BN, num_warps, num_stages = 16, 32, 4, 1 if amd else 2
    elif amd:
        BM, BN, num_warps, num_stages = 32, 32, 4, 1
    else:
        BM, BN, num_warps, num_stages = 32, 32, 8, 2
    row_tiles = -(-problem.rows // BM)
    if num_splits is None:
        num_splits = choose_splits(problem.batch * row_tiles, problem.max_keys, 2 * processors)
    return MLADecodeConfig(BM, BN, BV, BR, row_tiles, num_splits, num_warps, num_stages)
