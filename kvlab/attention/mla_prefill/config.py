"""MLA prefill: tile sizes of each machine, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.attention.machines.gpu import shared_limit, traits
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.tiles.tile_bytes import tile_bytes
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "attend", kernel="kernel:attend", emulator="emulator:attend",
        synonyms={
            "problem.batch": "batch", "problem.value": "DV", "config.one_loop": "ONE_LOOP",
            "v_factor": "scales.v.number", "store_columns": "store",
        },
        held={
            "row_of": "k_ptr MASKED", "load_k": "k_ptr kv_head held exists", "load_rope": "rope_ptr page slot exists",
            "load_v": "v_ptr kv_head held exists",
        },
    ),
)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "result 0": OUTPUT_TIE}

REGISTERS = 170
"""Those of a thread that a tile may take; the others hold offsets, row sums and what the compiler needs."""


@dataclass(frozen=True)
class MLAPrefillProblem:
    """Sizes of one call: B sequences of up to max_q new tokens, H heads of K (nope + rope columns) and V (value).

    itemsize : bytes of an element of the products. heavy : scores are changed in a way that takes registers.
    converted : K and V are e4m3, which products take in q's dtype or bfloat16. biased : an array is added to the
    scores. paged : the rope part of K is in pages.
    """

    batch: int
    max_q: int
    heads: int
    nope: int
    rope: int
    value: int
    itemsize: int
    heavy: bool = False
    converted: bool = False
    biased: bool = False
    paged: bool = False


@dataclass(frozen=True)
class MLAPrefillConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows of one head, BN keys; BD nope, BR rope and BV value columns, each padded to a power of two.
    one_loop : all tiles are masked, so that there are registers for wide e4m3 with scales of tokens.
    """

    BM: int
    BN: int
    BD: int
    BR: int
    BV: int
    row_tiles: int
    num_warps: int = 8
    num_stages: int = 2
    one_loop: bool = False

    def grid(self, problem: MLAPrefillProblem) -> tuple[int, int]:
        """Programs (row tile and sequence, head), the last rows first: they see most keys. The lengths have no part
        in it.
        """
        return self.row_tiles * problem.batch, problem.heads


def choose_config(
    problem: MLAPrefillProblem, *, arch: str = "sm_90", shared: int | None = None, emulated: bool = False
) -> MLAPrefillConfig:
    """The configuration of a call on ``arch``; ``shared`` are the bytes of shared memory that a CTA may have (None: as
    on ``arch``).

    128 rows and as many keys as need no spills; float32, which has no tensor cores on NVIDIA: small tiles. gfx950 takes
    MAX's 128 x 64, but 64 x 32 where wide e4m3 has scales, unless it is ``emulated``, as MAX has no others. Wide e4m3
    with scales on Hopper: 64 rows with four warps, which lie along the rows, so that P stays in its registers. What a
    bias takes of the shared memory may leave room for half as many keys.

    >>> problem = MLAPrefillProblem(batch=2, max_q=1000, heads=128, nope=128, rope=64, value=128, itemsize=2)
    >>> choose_config(problem)
    MLAPrefillConfig(BM=128, BN=64, BD=128, BR=64, BV=128, row_tiles=8, num_warps=8, num_stages=3, one_loop=False)
    >>> choose_config(problem).grid(problem)
    (16, 128)
    """
    amd, products, of_max = traits(arch)
    wider = problem.converted or (of_max and problem.itemsize == 4)  # as of PrefillProblem.smallest_pieces
    least = 64 if wider else 32
    BD, BR, BV = (max(least, 1 << (n - 1).bit_length()) for n in (problem.nope, problem.rope, problem.value))
    wide = max(BD, BV)
    scaled = problem.converted and problem.heavy
    if problem.itemsize == 4:
        BM, BN, num_warps, num_stages = 16, 64 if amd else 16 if wide > 128 else 32, 8, 1
    elif of_max:
        BM, BN, num_warps, num_stages = *((64, 32) if wide > 128 and scaled and not emulated else (128, 64)), 4, 1
    elif amd:
        BM, BN = (64, 16) if wide > 128 and scaled else (128, 64 >> (wide > 128 or scaled))
        num_warps, num_stages = 4, 1
    elif products == "mma.sync":
        BM, BN, num_warps, num_stages = 64, 32 if wide > 128 else 64, 8, 2
    elif wide > 128 and problem.converted:
        BM, BN, num_warps, num_stages = 64, 16, 4 if problem.heavy else 8, 2
    else:
        BM, num_warps, num_stages = 128, 8, 3
        BN = _keys(64 if wide <= 128 else 32, BM, 32 * num_warps, (BD, BR, BV), problem.heavy, scaled)
    one_loop = products == "wgmma" and wide > 128 and problem.converted and problem.heavy
    config = MLAPrefillConfig(BM, BN, BD, BR, BV, -(-problem.max_q // BM), num_warps, num_stages, one_loop)
    while config.BN > 16 and shared_bytes(config, problem, arch) > (shared or shared_limit(arch)):
        config = replace(config, BN=config.BN // 2)
    return config


def shared_bytes(config: MLAPrefillConfig, problem: MLAPrefillProblem, arch: str) -> int:
    """Bytes of shared memory that the kernel takes on ``arch`` at most."""
    BM, BD, BR, BV, item = config.BM, config.BD, config.BR, config.BV, problem.itemsize
    amd, products, _ = traits(arch)
    k = max(BD, BR) if amd else BD + BR
    return tile_bytes(
        BM, config.BN, (k, BV), item, config.num_stages, arch=arch, hops=2 if problem.paged else 1,
        key_bytes=(BD + BV) * (1 if problem.converted else item) + BR * item,
        wgmma=products in ("wgmma", "tcgen05") and BM >= 64 and item == 2, biased=problem.biased,
    )


def _keys(most: int, BM: int, threads: int, columns: tuple[int, int, int], heavy: bool, scaled: bool) -> int:
    """Keys of a tile on Hopper: as many, up to ``most``, as leave a thread registers. It holds its part of O and of S
    in float32, of P in 16 bits, and an address of 64 bits for each 16 bytes that it copies. Changed scores take eight
    more, and e4m3 with scales two and a half for each score.

    >>> _keys(64, 128, 256, (128, 64, 128), False, False), _keys(32, 128, 256, (256, 128, 256), False, False)
    (64, 16)
    """
    BN = most
    while BN > 16:
        accumulators, scores, vectors = BM * columns[2], BM * BN, BN * sum(columns) // 8
        held = accumulators + scores * 3 // 2 + 2 * vectors + scaled * scores * 5 // 2
        if held // threads + 8 * heavy <= REGISTERS:
            break
        BN //= 2
    return BN
