"""MHA decode: tile sizes, the split of the keys, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.merge_states.config import MERGE
from kvlab.attention.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.splits import check_splits, choose_splits
from kvlab.mirror.twin import Twin

__all__ = ["LAUNCH", "LOCKSTEP_TOLERANCE", "TWINS", "DecodeConfig", "DecodeProblem", "choose_config"]

TWINS = (Twin("attend", kernel="kernel:attend", emulator="emulator:attend"), MERGE)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}

MAX_ROWS = 32
TILE_BYTES = 16384
CTAS_PER_PROCESSOR = 3


@dataclass(frozen=True)
class DecodeProblem:
    """Sizes of one call: B sequences, S new tokens each, Hq query and Hkv key heads of dimension D."""

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    max_keys: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows (tokens x heads of one KV head), BN keys, BD the head dimension padded to a power of two.
    """

    BM: int
    BN: int
    BD: int
    row_tiles: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2

    def grid(self, problem: DecodeProblem) -> tuple[int, int, int]:
        """Programs (batch, KV head and row tile, split). The lengths have no part in it: a CUDA graph may be
        replayed.
        """
        return problem.batch, problem.kv_heads * self.row_tiles, self.num_splits


def choose_config(
    problem: DecodeProblem, *, processors: int = 132, num_splits: int | None = None, arch: str = "sm_90"
) -> DecodeConfig:
    """The configuration of a call; ``processors`` are the SMs of the device (132 on an H100).

    Tiles of 64 keys in two buffers leave room for three CTAs on an SM, which keeps the memory busy; gfx950 takes MAX's
    128 keys. float32 of depth 128 and more has no tensor cores to hold its accumulators: small tiles of eight warps, or
    the registers spill. One split where the programs fill 0.6 of the device's places; otherwise the smallest number of
    splits that comes within 0.95 of the best use of them, each of at least 256 keys.

    >>> problem = DecodeProblem(batch=1, tokens=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, max_keys=32768)
    >>> choose_config(problem)
    DecodeConfig(BM=16, BN=64, BD=128, row_tiles=1, num_splits=47, num_warps=4, num_stages=3)
    >>> choose_config(problem, num_splits=1).grid(problem)
    (1, 8, 1)
    """
    num_splits = check_splits(num_splits)
    rows = problem.tokens * problem.group
    BD = max(32, 1 << (problem.head_dim - 1).bit_length())
    wide = problem.itemsize == 4 and BD >= 128 and arch != "gfx950"
    BM = 16 if rows <= 16 or wide else MAX_ROWS
    BN = 128 if arch == "gfx950" else 32 if wide else 64
    num_stages = 3 if BN * BD * problem.itemsize <= TILE_BYTES else 2
    row_tiles = -(-rows // BM)
    if num_splits is None:
        programs = problem.batch * problem.kv_heads * row_tiles
        num_splits = choose_splits(programs, problem.max_keys, CTAS_PER_PROCESSOR * processors)
    return DecodeConfig(BM, BN, BD, row_tiles, num_splits, num_warps=8 if wide else 4, num_stages=num_stages)
