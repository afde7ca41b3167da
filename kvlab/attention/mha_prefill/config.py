"""MHA prefill: tile sizes, what a row sees, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.mirror.twin import Twin

__all__ = ["LAUNCH", "LOCKSTEP_TOLERANCE", "TWINS", "UNLIMITED", "PrefillConfig", "PrefillProblem",
           "choose_config"]  # fmt: skip

TWINS = (
    Twin("attend", kernel="kernel:attend", emulator="emulator:attend"),
    Twin("hopper", kernel="hopper_roles:produce,consume", emulator="hopper_emulator:produce,consume"),
)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "result 0": OUTPUT_TIE}

UNLIMITED = 1 << 30
"""A window side without a bound."""


@dataclass(frozen=True)
class PrefillProblem:
    """Sizes of one call: B sequences of up to max_q new tokens, Hq query and Hkv key heads of dimension D.

    A query at position p of its sequence sees the keys from ``p - left`` to ``p + right``; causal is ``right = 0``.
    softcap is 0 or the bound of the scores; ragged calls (paged ones, too) find their rows through cu_seqlens.
    """

    batch: int
    max_q: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    left: int = UNLIMITED
    right: int = 0
    softcap: float = 0.0
    ragged: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def tight(self) -> bool:
        """Whether addresses and masks take registers that the largest tile of keys would need."""
        bounded = self.left < UNLIMITED or self.softcap > 0
        return self.ragged or bounded or self.head_dim & (self.head_dim - 1) != 0


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows, BN keys, BD the head dimension padded to a power of two. ``pack`` query heads of one KV head share a
    tile: row r is token ``r // pack``, head ``r % pack``.
    """

    BM: int
    BN: int
    BD: int
    pack: int
    row_tiles: int
    num_warps: int = 8
    num_stages: int = 2

    def grid(self, problem: PrefillProblem) -> tuple[int, int]:
        """Programs (row tile and sequence, query heads / pack), the last rows first: they see most keys. The lengths
        have no part in it.
        """
        return self.row_tiles * problem.batch, problem.q_heads // self.pack


def choose_config(problem: PrefillProblem, *, arch: str = "sm_90") -> PrefillConfig:
    """The configuration of a call.

    The query heads of a KV head share a tile where all their new tokens fit into one. float32 has no tensor cores on
    NVIDIA: small tiles. gfx950 takes MAX's 128 x 64 tile.

    >>> problem = PrefillProblem(batch=2, max_q=1000, q_heads=32, kv_heads=8, head_dim=128, itemsize=2)
    >>> choose_config(problem)
    PrefillConfig(BM=128, BN=128, BD=128, pack=1, row_tiles=8, num_warps=8, num_stages=2)
    >>> choose_config(problem).grid(problem)
    (16, 32)
    """
    BD = max(32, 1 << (problem.head_dim - 1).bit_length())
    amd = arch.startswith("gfx")
    if problem.itemsize == 4:
        BM, BN, num_warps, num_stages = 64 if BD < 128 else 16, 64 if amd else 32, 8, 1
    elif amd:
        BM, BN, num_warps, num_stages = 128, 64 if BD <= 128 or arch == "gfx950" else 32, 4, 1
    elif arch == "sm_80":
        few = BD > 128 or (BD == 128 and problem.tight)
        BM, BN, num_warps, num_stages = 128 if BD <= 128 else 64, 32 if few else 64, 8, 2
    else:
        BM, BN, num_warps, num_stages = 128, _keys(BD, problem.tight), 8, 2
    pack = problem.group if problem.max_q * problem.group <= BM else 1
    return PrefillConfig(BM, BN, BD, pack, -(-problem.max_q * pack // BM), num_warps, num_stages)


def _keys(BD: int, tight: bool) -> int:
    """Keys of a tile of 128 rows on Hopper: the most that needs no spills."""
    if BD <= 64:
        return 64
    return {(128, False): 128, (128, True): 64, (256, False): 64, (256, True): 32}[BD, tight]
