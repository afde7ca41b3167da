"""MHA prefill: tile sizes, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlab.attention.machines.gpu import shared_limit, traits
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.tiles.pages import Sequences
from kvlab.attention.tiles.pieces import pieces
from kvlab.attention.tiles.tile_bytes import tile_bytes
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "attend", kernel="kernel:attend", emulator="emulator:attend",
        synonyms={
            "lens_array": "lens_ptr", "base2": "BASE2", "o_scale": "o_scale", "store_rows": "store",
            "q_array.dtype": "q_ptr.dtype.element_ty", "float8_e4m3fn": "float8e4nv",
        },
        held={
            "row_of": "k_ptr MASKED", "load_k": "k_ptr kv_head page slot exists",
            "load_v": "v_ptr kv_head page slot exists",
        },
    ),
    Twin(
        "hopper", kernel="hopper_roles:produce,change,consume", emulator="hopper_emulator:produce,change,consume",
    ),
)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "result 0": OUTPUT_TIE}


class PrefillInputs(NamedTuple):
    """Launch arguments of the siblings: q and out ``[B, S, Hq, ..]`` or ``[1, total, Hq, ..]``; k and v alike, or in
    pages. out None: a new one.
    """

    q: Any
    k: Any
    v: Any
    sequences: Sequences
    out: Any
    features: Any


@dataclass(frozen=True)
class PrefillProblem:
    """Sizes of one call: B sequences of up to max_q new tokens, Hq query and Hkv key heads of ``head_dim`` columns of
    ``itemsize`` bytes, values of ``value_dim`` columns.

    kv_itemsize : bytes of an element of K and V. heavy : scores are changed, or rows see other keys than the first
    ones. biased : an array is added to the scores. ragged : rows are found through cu_seqlens (in paged calls, too).
    p_fp8 : P V contracts e4m3. base2 : lse to base 2.
    """

    batch: int
    max_q: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    kv_itemsize: int
    heavy: bool = False
    biased: bool = False
    ragged: bool = False
    p_fp8: bool = False
    base2: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def converted(self) -> bool:
        """Tells whether K and V are e4m3 and q is not."""
        return self.kv_itemsize < self.itemsize

    @property
    def smallest_pieces(self) -> tuple[int, int]:
        """Columns of the least products with K and with V: e4m3 contracts 32 at a time, float32 tiles fill the lanes of
        a warp. Converted e4m3 takes 64 (V of e4m3 is converted beside a q of it, too, unless ``p_fp8``), whose rows of
        128 bytes have one swizzle: beside narrower ones, ptxas of CUDA 12.8 makes descriptors of registers that nobody
        wrote (see :mod:`kvlab.triton_support.sass`).
        """
        least = 16 if self.itemsize == 2 else 32
        return 64 if self.converted else least, 64 if self.kv_itemsize == 1 and not self.p_fp8 else least

    @property
    def smallest_of_max(self) -> int:
        """Columns of the least piece on gfx950, whose tiles are MAX's: MFMA 32x32 has 32 columns of V, e4m3 contracts
        64 at a time, and four warps share out 64 columns of float32.
        """
        return 32 if self.itemsize == self.kv_itemsize == 2 else 64


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows, BN keys; the columns of Q and K in pieces of D0 and D1 (or 0), those of V in V0 and V1. ``pack``
    query heads of one KV head share a tile: row r is token ``r // pack``, head ``r % pack``.
    """

    BM: int
    BN: int
    D0: int
    D1: int
    V0: int
    V1: int
    pack: int
    row_tiles: int
    num_warps: int = 8
    num_stages: int = 2

    def grid(self, problem: PrefillProblem) -> tuple[int, int]:
        """Programs (row tile and sequence, query heads / pack), the last rows first: they see most keys. The lengths
        have no part in it.
        """
        return self.row_tiles * problem.batch, problem.q_heads // self.pack


def choose_config(
    problem: PrefillProblem, *, arch: str = "sm_90", shared: int | None = None, batch_invariant: bool = False,
    emulated: bool = False,
) -> PrefillConfig:
    """The configuration of a call; ``shared`` are the bytes of shared memory that a CTA may have (None: as on
    ``arch``).

    The query heads of a KV head share a tile where all their new tokens fit into one, unless ``batch_invariant``.
    float32 has no tensor cores on NVIDIA: small tiles. gfx950 takes MAX's 128 x 64 tile, beyond 256 columns 32 rows
    unless it is ``emulated``: MAX has no others.

    The products of 64 rows and more are wgmma's on Hopper. Beyond 256 columns the output of 64 rows takes half of the
    registers, and what else a thread holds does not fit: 32 rows, products by mma.sync, whose warps share out the
    columns of the last piece; it is the wide one, so that none lies along the rows, where each would hold all
    columns. sm_80 multiplies so beyond 128 columns. Beyond 256, float32 with MFMA begins with the narrow piece of K,
    whose registers are free early. A bias, with an address for each score, and e4m3 with scales of tokens halve the
    rows. There is one stage where two have no room.

    >>> problem = PrefillProblem(2, 1000, 32, 8, head_dim=128, value_dim=128, itemsize=2, kv_itemsize=2)
    >>> choose_config(problem)
    PrefillConfig(BM=128, BN=128, D0=128, D1=0, V0=128, V1=0, pack=1, row_tiles=8, num_warps=8, num_stages=2)
    >>> choose_config(problem).grid(problem)
    (16, 32)
    """
    amd, products, of_max = traits(arch)
    of_k, of_v = (problem.smallest_of_max,) * 2 if of_max else problem.smallest_pieces
    (D0, D1), (V0, V1) = pieces(problem.head_dim, of_k), pieces(problem.value_dim, of_v)
    depth = max(D0 + D1, V0 + V1)
    tight = problem.ragged or problem.heavy or D1 > 0 or V1 > 0
    num_warps, num_stages = 8, 2
    if amd:
        (BM, BN, num_warps), num_stages = _amd_tile(depth, problem.itemsize, of_max, emulated), 1
        if problem.itemsize == 4 and depth > 256 and D1:
            D0, D1 = D1, D0
    elif problem.itemsize == 4:
        BM, BN, num_stages = 64 if depth < 128 else 16, 32 if depth <= 128 else 16, 1
    elif products == "mma.sync":
        few = depth > 128 or (depth == 128 and tight)
        BM, BN = 128 if depth <= 128 else 64 if depth <= 256 else _wide_rows(problem), 32 if few else 64
    else:
        few = problem.max_q * problem.group <= 128  # rows for one tile: half the keys need no spills
        padded = D0 + D1 > problem.head_dim or V0 + V1 > problem.value_dim
        BM, BN = _hopper_tile(depth, tight or few or padded, problem)
    if not amd and problem.itemsize < 4 and (BM < 64 or (products == "mma.sync" and depth > 128)):
        V0, V1 = (V1, V0) if V1 else (V0, V1)
        columns, limit = (D0 + D1, V0 + V1), shared or shared_limit(arch)
        num_stages = 2 if tile_bytes(BM, BN, columns, problem.itemsize, 2, biased=problem.biased) <= limit else 1
    pack = problem.group if problem.max_q * problem.group <= BM and not batch_invariant else 1
    return PrefillConfig(BM, BN, D0, D1, V0, V1, pack, -(-problem.max_q * pack // BM), num_warps, num_stages)


def shared_bytes(config: PrefillConfig, problem: PrefillProblem, arch: str) -> int:
    """Bytes of shared memory that the kernel takes on ``arch`` at most."""
    amd, products, _ = traits(arch)
    widest = max if amd else sum
    k, v = widest((config.D0, config.D1)), widest((config.V0, config.V1))
    of_v = problem.kv_itemsize == 1 and not problem.p_fp8  # products of 16 bits
    return tile_bytes(
        config.BM, config.BN, (k, v), max(problem.itemsize, 2 * of_v), config.num_stages, arch=arch,
        key_bytes=(k + v) * problem.kv_itemsize, biased=problem.biased,
        wgmma=products in ("wgmma", "tcgen05") and config.BM >= 64 and problem.itemsize <= 2,
    )


def _amd_tile(depth: int, itemsize: int, of_max: bool, emulated: bool) -> tuple[int, int, int]:
    """Rows, keys and warps of a tile with MFMA."""
    if itemsize == 4:
        if depth < 128 or emulated:
            return 64 if depth < 128 else 16, 64, 8
        return (16, 32, 8) if depth <= 256 else (16, 16, 4)
    few = depth > 128 and not of_max
    if depth <= 256 or emulated:
        return 128, 32 if few else 64, 4
    return 32, 16 if few else 32, 4


def _wide_rows(problem: PrefillProblem) -> int:
    """Rows of a tile beyond 256 columns with products by mma.sync."""
    return 16 if problem.biased or (problem.converted and problem.heavy) else 32


def _hopper_tile(depth: int, tight: bool, problem: PrefillProblem) -> tuple[int, int]:
    """Rows and keys of a tile on Hopper: the most that needs no spills."""
    if depth > 256:
        return (64, 32 if problem.p_fp8 else 16) if problem.itemsize == 1 else (_wide_rows(problem), 32)
    if depth > 128 and tight and problem.converted:
        return 64, 16 if problem.heavy else 32
    if depth > 128:
        return 64 if problem.biased else 128, 32 if tight or problem.converted else 64
    if depth > 64:
        small = problem.biased or (problem.converted and problem.heavy)
        return 128, 32 if small else 64 if tight or problem.converted else 128
    return 128, 64
