"""Calls that the Hopper kernel of MLA decode takes, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvlab.attention.features.resolve import Features
from kvlab.attention.hopper.choice import decode_lacks, tma_takes
from kvlab.attention.tiles.splits import check_splits, invariant_splits
from kvlab.attention.tiles.tile_bytes import BARRIER_BYTES
from kvlab.common.arrays import dtype_of
from kvlab.memory import bfloat16

from .config import MLADecodeProblem, MLAInputs

SUPPORTED = (
    "bf16 or fp16 with a cache of that dtype, bf16 with rows of 656 bytes, 512 + 64 columns, no mask but the causal "
    "one, no softcap, sinks or ALiBi, scale > 0, pages of 16, 32 or multiples of 64 tokens (any "
    "with indices or rows of 656 bytes), arrays that start at 16 bytes and whose strides are multiples of 16 bytes"
)


class HopperMLAConstants(NamedTuple):
    """Compile-time constants of the Hopper kernel: a tile of BM = TB tokens x HB heads, NB stages of BN keys of DV
    latent and DR rope columns, in boxes of BOX keys of pages of PAGE.

    MASKED: others than the last block of keys may need a mask. LATE: the follower multiplies P V while the leader does
    the next softmax, not before, and the next block is brought into L2; the rows of a page lie one after the other.
    BOXED: the output, of a work list the partial one, passes through shared memory and leaves by TMA, as whole rows.
    LISTED: keys are those that a list names, one by one.
    SCALED: rows are e4m3 latents, their scales and a rope part of 16 bits, multiplied out on their way.
    WALK: items are those of a work list, of which the beginning of a unit takes OVERHEAD key blocks of BN.
    WARPS of the producer, or of each of two where SCALED. Registers of a thread of the FOLLOWER and of a PRODUCER; the
    leader has the others.
    """

    TB: int
    HB: int
    BOX: int
    PAGE: int
    MASKED: bool
    LATE: bool = False
    BOXED: bool = False
    LISTED: bool = False
    SCALED: bool = False
    WALK: bool = False
    OVERHEAD: int = 2
    WARPS: int = 1
    FOLLOWER: int = 192
    PRODUCER: int = 32
    NB: int = 2
    DV: int = 512
    DR: int = 64
    BM: int = 64
    BN: int = 64

    @property
    def GATHERED(self) -> bool:
        """Tells whether rows are brought one by one, by threads, not in boxes by TMA."""
        return self.LISTED or self.SCALED

    @property
    def COLUMNS(self) -> int:
        """Columns of O of an instruction: at 16 warps ptxas compiles none whose operands take 158 registers."""
        return 128 if self.SCALED else self.DV // 2

    @property
    def LEFT_COPIES(self) -> int:
        """Threads that tell when their copies of what the leader reads have landed."""
        return 32 * self.WARPS if self.GATHERED else 0

    @property
    def RIGHT_COPIES(self) -> int:
        """Threads that tell when their copies of the follower's half have landed; latents with scales are stored."""
        return 0 if self.SCALED else self.LEFT_COPIES


@dataclass(frozen=True)
class HopperMLAConfig:
    """The constants, and the items: ``row_tiles`` of each sequence, of which ``head_tiles`` belong to the same tokens,
    times ``num_splits``. ``programs`` take them in turn. The lengths have no part in it.
    """

    constants: HopperMLAConstants
    row_tiles: int
    head_tiles: int
    num_splits: int
    items: int
    programs: int

    def grid(self, problem: MLADecodeProblem | None = None) -> tuple[int]:
        """Programs."""
        return (self.programs,)


def hopper_lacks(inputs: MLAInputs, problem: MLADecodeProblem, features: Features, scale: float) -> str | None:
    """Feature of a call that the Hopper kernel lacks, None if it takes the call."""
    page = problem.page_size
    scaled = problem.scaled and dtype_of(inputs.q, "q") == bfloat16
    if problem.itemsize != 2 or (problem.fp8 and not scaled):
        return f"q of dtype {inputs.q.dtype} and a cache of {inputs.kv_cache.dtype}"
    if (problem.latent, problem.rope) != (512, 64):
        return f"{problem.latent} + {problem.rope} columns"
    if lacks := decode_lacks(features):
        return lacks
    if not scale > 0:
        return f"scale {scale}"
    if problem.batch == 0:
        return "no sequences"
    if not (problem.listed or scaled or page % 64 == 0 or page in (16, 32)):
        return f"page size {page}"
    for name, array in (("q", inputs.q), ("kv_cache", inputs.kv_cache), ("out", inputs.out)):
        if array is not None and not tma_takes(array, name):
            return f"the strides or the alignment of {name}"
    return None


def choose_hopper(
    problem: MLADecodeProblem, *, processors: int = 132, num_splits: int | None = None, batch_invariant: bool = False,
    adjacent: bool = True,
) -> HopperMLAConfig:
    """The configuration of a call that the kernel can do, on ``processors`` SMs, one program on each at most.

    ``num_splits`` None takes those of ``invariant_splits``, or as few as make the time shortest, up to one for each of
    the processors. The time is counted in what an SM takes for a block of 64 keys (1.9 us on an H100). It is that of
    its own blocks and no less than DRAM takes for all rows, of whose rate each of the processors has its share; and two
    for the beginning and the end of an item. Merging adds two, one for each 8 MB of partial outputs, and one for each
    64 parts of a row. ``adjacent``: the rows of a page lie one after the other.

    >>> problem = MLADecodeProblem(1, 1, 128, 512, 64, 2, 64, 65536)
    >>> choose_hopper(problem).num_splits, choose_hopper(problem).grid()
    (64, (128,))
    >>> choose_hopper(MLADecodeProblem(1, 1, 16, 512, 64, 2, 64, 131072)).num_splits
    132
    >>> choose_hopper(MLADecodeProblem(128, 1, 128, 512, 64, 2, 64, 4096)).num_splits
    1
    """
    HB = min(64, 1 << (problem.heads - 1).bit_length())
    page = problem.page_size
    gathered = problem.listed or problem.scaled
    box = 64 if gathered else min(page, 64)
    masked, follower, producer = problem.tokens > 1, 192, 64 if box < 64 else 32
    if gathered:
        follower, producer = (160, 72) if problem.scaled else (184, 64)
    boxed = problem.rows > 32  # with fewer rows DRAM decides, and they leave sooner without the detour
    late = adjacent and box == 64 and boxed and not gathered  # 15 % slower where rows come one by one
    constants = HopperMLAConstants(
        64 // HB, HB, BOX=box, PAGE=page, MASKED=masked, LATE=late, BOXED=boxed, LISTED=problem.listed,
        SCALED=problem.scaled, WARPS=4 if gathered else 1, FOLLOWER=follower, PRODUCER=producer,
    )
    head_tiles = -(-problem.heads // HB)
    row_tiles = head_tiles * -(-problem.tokens // constants.TB)
    programs, blocks = problem.batch * row_tiles, max(-(-problem.max_keys // constants.BN), 1)
    dram = problem.batch * blocks / 110  # 4.3 TB/s

    def cost(n: int) -> float:
        turns = -(-programs * n // processors)
        rows = max(turns * -(-blocks // n), dram * max(processors / (programs * n), 1))
        return rows + 2 * turns + (0 if n == 1 else 2 + problem.batch * problem.rows * n / 4096 + n / 64)

    splits = check_splits(num_splits)
    if splits is None and batch_invariant:
        splits = invariant_splits(problem.max_keys)
    if splits is None:
        splits = min(range(1, min(blocks, processors) + 1), key=cost)
    items = programs * splits
    return HopperMLAConfig(constants, row_tiles, head_tiles, splits, items, min(items, processors))


def walk_ring(problem: MLADecodeProblem) -> HopperMLAConstants | None:
    """The constants of programs that walk a work list; None where rows of a tile are not those of an item, there are
    lists of slots, or rows have scales.

    >>> walk_ring(MLADecodeProblem(1, 1, 128, 512, 64, 2, 64, 65536)).HB
    64
    >>> walk_ring(MLADecodeProblem(1, 2, 80, 512, 64, 2, 64, 65536))
    """
    powers = problem.heads & (problem.heads - 1) == 0
    if problem.listed or problem.scaled or not (powers or problem.tokens == 1):
        return None
    few = problem.rows <= 16
    constants = choose_hopper(problem, num_splits=1).constants
    return constants._replace(WALK=True, OVERHEAD=2 if few else 3, FOLLOWER=192, PRODUCER=56)


def shared_bytes(C: HopperMLAConstants) -> int:
    """Bytes of shared memory that the kernel takes at most: Q, stages of keys, P, two numbers of each row, and one of
    each listed key. The output leaves from where keys were.
    """
    rows = (C.BM + C.NB * C.BN) * (C.DV + C.DR)
    numbers = C.BM * (2 + C.NB if C.LISTED else 2)
    return (rows + C.BM * C.BN) * 2 + 4 * numbers + BARRIER_BYTES
