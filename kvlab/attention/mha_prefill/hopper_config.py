"""Calls that the Hopper kernel takes, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvlab.attention.features.masks import UNLIMITED
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.features.scores import beyond_rows, differs_by_head
from kvlab.attention.hopper.choice import tma_takes
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.tile_bytes import BARRIER_BYTES
from kvlab.common.arrays import dtype_of
from kvlab.memory import bfloat16
from kvlab.triton_support.versions import gluon_lacks

from .config import PrefillInputs, PrefillProblem

HEAD_DIMS = (
    (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256),
)
"""Head dimensions of q and k, and of v. Shared memory has whole panels of 64 columns: TMA fills those behind a row with
zeros.
"""
FP8_DIMS = ((128, 128),)
"""The same where K and V are e4m3."""

SUPPORTED = (
    "bf16 or fp16, no mask but causal and windows, no ALiBi, lse in base e, "
    "head dimension 64, 80, 96, 112, 128, 192 or 256 (128 with values of 64, 192 with values of 128, too), "
    "scale > 0, at least one key, pages of 16, "
    "32, 64 or multiples of 128 tokens, arrays that start at 16 bytes and whose strides are multiples of 16 bytes; "
    "float8_e4m3fn for k and v, or q, too, with a head dimension of 128, without scales of tokens, out bf16 or fp16"
)
LIST_SUPPORTED = (
    "bf16 or fp16, no mask but causal and windows (up to heads of 128), scores alike in all heads, "
    "head dimensions 64, 80, 96, 112, 128, 192 or 256 (128 with values of 64, 192 with values of 128, too), "
    "a sequence that may have more than 32 rows, scale > 0, pages of 16, 32, 64 or multiples of 128 tokens, arrays "
    "that start at 16 bytes and whose strides are multiples of 16 bytes, without batch_invariant; K and V, or q, too, "
    "of float8_e4m3fn with a head dimension of 128, without scales of tokens, q with 1, 2, 4 .. 64 heads to a KV head"
)
BOX_GROUPS = 1, 2, 4, 8, 16, 32, 64
"""Query heads to a KV head of which boxes of 64 rows hold whole tokens."""
FIXED_ABOVE, FIXED_MOST = 56.0, 80.0
"""Scores of a softcap are bounded. Up to FIXED_MOST (in units of log2, softcap 55) a row's weights have one top, which
its first block of keys decides: none weighs more than 2^FIXED_ABOVE, so that float32 holds their sums and those of V
times P, over 2^20 keys, V up to 2^51. No running maximum is wanted. Where all scores are equal the weights are powers
of two, whose rounding does not show.
"""
TANH = 0.99997744, -0.33169151, 0.11520976
"""tanh(y) = y (a + b y^2 + c y^4) for y up to 1/2, with the least relative error, 2^-15.4."""
FEW_KEYS = 512
"""Up to so many keys under a causal mask blocks have 64: fewer scores that no row sees count for more than what two
blocks cost beside one. Measured: ``benchmarks/NOTES.md``.
"""
SMS = 132  # of an H100
L2_SHARE = 16_000_000  # bytes of K and V that stay in L2 beside what else passes through


class Registers(NamedTuple):
    """Registers of a thread of a consumer, of the producer and of the changer."""

    REGISTERS: int
    PRODUCER: int
    CHANGER: int = 0


PAGED, MANY_PAGES = Registers(232, 48), Registers(224, 64)
"""Of K and V in pages, and in such of which a block has many."""
WIDENED, EIGHT, EIGHT_SEEN = Registers(208, 40, 56), Registers(192, 48, 80), Registers(208, 32, 64)
"""Of K and V that are widened, where all is e4m3, and where then no row needs a mask."""


class HopperPrefillConstants(NamedTuple):
    """Compile-time constants of the Hopper kernel. NC consumer warpgroups have BM query rows each, in NQ buffers; NB
    stages hold BN keys of D and values of DV, NR what comes from DRAM, in boxes of BOX keys. Of the D columns DEPTH are
    multiplied; of the DV, COLUMNS are the values', the others 0.

    FIRST: the first block of a tile may need a mask; MASKED: others, too. ALIGNED: tiles begin at positions that are
    multiples of their rows, with SKIP of a consumer's. SKIP: a consumer passes over blocks that only others see.
    WINDOW: bounded on the left.
    CLEAN: rows behind a sequence's end may be anything. FIXED: a softcap so low that a row's weights have one top. O
    leaves in ROUNDS parts. EQUAL: all tiles have as many keys. Q_REGISTERS: Q is read from shared memory once a tile,
    not by every product. HOLD: P V of the block before is waited for behind the row maxima (1), behind the exponentials
    (2), where the compiler likes (0). EARLY: O is rescaled beside Q K^T. ITEM: bytes of an element of Q, and of K and V
    as they are multiplied; STORED: as they are in DRAM; of 1, they pass through a warpgroup, the CHANGER.
    REGISTERS of a thread of a consumer, of the PRODUCER and of the CHANGER. PACK query heads of a KV head share a
    tile, token by token; ODD: so many that boxes hold no whole tokens, so that consumers copy Q and store O row by row.
    TOGETHER: 0, or tiles are those of a work list (:mod:`kvlab.attention.schedule`), so many of a sequence side by
    side, key blocks of LISTED keys, the beginning of a unit OVERHEAD of them, HEADS KV heads items of their own. WORDS
    tell of a tile.
    LAZY: a row's top stays until its maximum is 2^8 times as much. PRODUCTS: P V is so many, of 64 columns of V each,
    the last of what is left; or one, of DV columns. TURNS: the consumers issue their products in turn. CHAINS: a thread
    finds the maximum of a row in four registers and its sum in two, in which less waits. APART: P V of a block ends
    before Q K^T of the next begins, so that no registers hold P beside S, for which three consumers with O of 80 or 96
    columns have none.
    """

    D: int
    DV: int
    DEPTH: int
    COLUMNS: int
    NC: int
    NQ: int
    NB: int
    NR: int
    BN: int
    BOX: int
    PAGE: int
    RAGGED_Q: bool
    RAGGED_K: bool
    FIRST: bool
    MASKED: bool
    ALIGNED: bool
    SKIP: bool
    WINDOW: bool
    CLEAN: bool
    FIXED: bool
    HOLD: int
    EARLY: bool
    ROUNDS: int
    EQUAL: bool
    Q_REGISTERS: bool
    ITEM: int
    STORED: int
    REGISTERS: int
    PRODUCER: int
    CHANGER: int
    BM: int = 64
    PACK: int = 1
    ODD: bool = False
    TOGETHER: int = 0
    HEADS: int = 1
    OVERHEAD: int = 0
    LISTED: int = 128
    WORDS: int = 8
    LAZY: bool = False
    PRODUCTS: int = 1
    TURNS: bool = False
    CHAINS: bool = False
    APART: bool = False


@dataclass(frozen=True)
class HopperPrefillConfig:
    """The constants, and the order of the tiles: ``row_tiles`` tiles of each of ``heads`` heads, ``together`` heads
    alternating. The lengths of ragged sequences have no part in it.
    """

    constants: HopperPrefillConstants
    row_tiles: int
    heads: int
    together: int

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.heads

    def grid(self, problem: PrefillProblem) -> tuple[int]:
        """Tiles: one program an SM, at most as many, take them as they get done."""
        return (self.tiles,)


def is_page(size: int) -> bool:
    """Tells whether blocks of 128 keys are whole pages of so many tokens, or lie in one."""
    return size % 128 == 0 or size in (16, 32, 64)


def hopper_lacks(inputs: PrefillInputs, scale: float) -> str | None:
    """Feature of a call that the Hopper kernel lacks, None if it takes the call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    dims = int(q.shape[-1]), int(v.shape[-1])
    features, mask = inputs.features, inputs.features.mask
    eight = is_fp8(q)
    stored = is_fp8(k)
    for array, narrow in ((q, eight), (k, stored)):
        if dtype_of(array, "q").itemsize != (1 if narrow else 2) or (eight and not stored):
            return f"dtype {array.dtype}"
    if mask.chunk or mask.valid is not None or mask.bias is not None or min(mask.left, mask.right) < 0:
        return "a mask other than causal and windows around the query"
    if beyond := beyond_rows(features):
        return beyond
    if "token" in features.scales.kinds:
        return "scales of tokens"
    if inputs.out is not None and dtype_of(inputs.out, "out").itemsize != 2:
        return f"out of dtype {inputs.out.dtype}"
    if dims not in (FP8_DIMS if stored else HEAD_DIMS):
        return f"head dimensions {dims[0]} of q and {dims[1]} of v"
    if not scale * features.scales.q.number * features.scales.k.number > 0:
        return f"scale {scale}" + (", the numbers of q_scale and k_scale with it," if stored else "")
    if 0 in q.shape or 0 in k.shape:
        return "no queries or no keys"
    if inputs.sequences.table is not None:
        page = k.shape[1]
        if not is_page(page):
            return f"page size {page}"
    for name, array in (("q", q), ("k", k), ("v", v), ("out", inputs.out)):
        if array is not None and not tma_takes(array, name):
            return f"the strides or the alignment of {name}"
    return None


def hopper_declined(problem: PrefillProblem, left: int, *, batch_invariant: bool = False) -> str | None:
    """Reason why "auto" takes the portable kernel all the same, None if it does not. ``left`` is the window's left
    side. ``batch_invariant``: no heads share a tile, and the longest sequence, another's perhaps, decides nothing.
    """
    _, columns, _ = shared_columns(problem)
    if left < UNLIMITED and columns > 128:
        return f"a window with heads of {problem.value_dim}, for which there are not enough registers"
    if not batch_invariant and problem.group > 1 and problem.max_q * problem.group <= 128:
        return "the heads of a KV head fit one tile together"
    return gluon_lacks(wide=True) if columns > 192 else None


def shared_columns(problem: PrefillProblem) -> tuple[int, int, int]:
    """Columns of a row of K and of V in shared memory, and how many of K's are multiplied: 16 an instruction, and in
    the last panel a power of two.

    >>> sizes = {"itemsize": 2, "kv_itemsize": 2}
    >>> [shared_columns(PrefillProblem(1, 9, 1, 1, D, D, **sizes)) for D in (64, 80, 96, 112, 192)]
    [(64, 64, 64), (128, 128, 80), (128, 128, 96), (128, 128, 128), (192, 192, 192)]
    """
    of_k, of_v = (-(-columns // 64) * 64 for columns in (problem.head_dim, problem.value_dim))
    rest = problem.head_dim % 64
    return of_k, of_v, of_k if rest > 32 else problem.head_dim


def products_of(problem: PrefillProblem, *, apart: bool = False) -> int:
    """Number of products with V. A tile has a power of two of columns: 192 are three times 64. Of 80, 16 besides 64
    take less time than 128; of 96, 32 more, but where products are ``apart``.

    >>> [products_of(PrefillProblem(1, 9, 1, 1, D, D, itemsize=2, kv_itemsize=2)) for D in (64, 80, 96, 192)]
    [1, 2, 1, 3]
    """
    return {80: 2, 96: 1 + apart, 192: 3}.get(problem.value_dim, 1)


def tall_tiles(rows: int, *, bounded: bool, apart: bool = False) -> bool:
    """Tells whether tiles of 192 rows are faster than those of 128: a third consumer gains, less where rows see fewer
    keys than the last (``bounded``) or products are ``apart``, and rows that a last tile lacks are lost. Measured:
    ``benchmarks/NOTES.md``.

    >>> [tall_tiles(rows, bounded=False) for rows in (256, 512, 1024)]
    [False, True, True]
    >>> [tall_tiles(rows, bounded=True) for rows in (512, 1024, 1536, 2048, 4096)]
    [False, False, True, False, True]
    >>> [tall_tiles(rows, bounded=False, apart=True) for rows in (1152, 1536, 2048, 2500, 4096)]
    [False, True, True, False, True]
    """
    tall, low = (-(-rows // tile) * tile for tile in (192, 128))
    if bounded:
        return tall <= low or rows >= 4096
    return rows >= 1536 and 32 * tall <= 33 * low if apart else 8 * tall <= 9 * low


def choose_hopper(problem: PrefillProblem, inputs: PrefillInputs) -> HopperPrefillConfig:
    """The configuration of a call that the kernel can do."""
    (D, DV, depth), item, features = shared_columns(problem), problem.itemsize, inputs.features
    small, mask, widened = D == 64, features.mask, problem.converted
    window = mask.left < UNLIMITED
    page = inputs.k.shape[1] if inputs.sequences.table is not None else 0
    bounded = mask.right < UNLIMITED
    # Three consumers have 160 registers a thread, too few for what a window, a cap, ragged rows or Q keep. With a
    # causal mask each begins at its own last block, so that the loop needs no mask.
    sixteen = item == 2 and not widened
    apart = problem.head_dim == problem.value_dim and problem.head_dim in (80, 96) and not bounded
    three = (small or apart) and not (window or features.softcap > 0 or problem.ragged)
    three = three and (not bounded or (sixteen and mask.right % 128 == 0))
    three = three and tall_tiles(problem.max_q, bounded=bounded, apart=apart)
    apart, turns = apart and three, three and sixteen
    products = products_of(problem, apart=apart)
    num_keys = inputs.k.shape[1]
    ragged_k = inputs.sequences.cu_k is not None
    known = not (ragged_k or page or problem.ragged)  # the lengths are those of the arrays
    few = known and bounded and sixteen and num_keys <= FEW_KEYS and problem.head_dim == problem.value_dim <= 128
    few = few and mask.right % 64 == 0 and not (window or features.softcap > 0 or three)
    BM, NC, NB = 64, 3 if three else 2, (3 if small or products == 3 else 2) * (2 if few else 1)
    rows, BN = BM * NC, 64 if DV > 128 or widened or few else 128
    whole = known and num_keys % BN == 0
    # Tiles begin where blocks of keys do: the last keys of its rows lie in the first block of a tile, or of a consumer
    # that passes over those before. No other needs a mask. (Consumers that pass over blocks need registers, e4m3, too.)
    aligned = bounded and not (window or widened) and mask.right % BN == 0
    aligned = aligned and (three or rows == BN or BN <= BM) and (known or (DV <= 192 and item == 2))
    skip = aligned and (three or BN <= BM)
    fixed = D <= 128 and not widened and 0 < features.softcap * LOG2E <= FIXED_MOST
    fixed = fixed and bool(dtype_of(inputs.q, "q") == bfloat16)
    plain = aligned and not features.softcap > 0 and (known or D <= 64)
    overlap = small and not (fixed or plain or turns)
    late = D >= 128 >= DV and products == 1 and item == 2 and (bounded or window) and not features.softcap > 0
    late = late or products == 3
    step = BM if skip else rows
    before = (num_keys - problem.max_q) % step if known else step - 1  # rows a first tile lacks, at most
    many = 0 < page < 32 and BN > 64 and item == 2  # page numbers of a block
    in_registers = widened or products == 3 or (small and not (three or many or features.softcap > 0))
    if not sixteen:
        registers = WIDENED if widened else EIGHT_SEEN if whole and not bounded and not window else EIGHT
    else:
        registers = Registers(160, 32) if three else MANY_PAGES if many else PAGED if page else Registers(240, 32)
    total = inputs.q.shape[1] if problem.ragged else problem.max_q + before * aligned
    row_tiles = total // rows + (1 + aligned) * problem.batch if problem.ragged else -(-total // rows)
    heads = problem.q_heads * (1 if problem.ragged else problem.batch)
    constants = HopperPrefillConstants(
        D=D, DV=DV, DEPTH=depth, COLUMNS=problem.value_dim, NC=NC, NQ=1 if apart or D > 128 else 2, NB=NB, NR=NB,
        BN=BN, BOX=min(page, BN) if page else BN, PAGE=page,
        RAGGED_Q=problem.ragged, RAGGED_K=ragged_k, FIRST=bounded or window or not whole,
        MASKED=window or (bounded and not aligned), ALIGNED=aligned, SKIP=skip, WINDOW=window,
        CLEAN=ragged_k or page > 0, FIXED=fixed, HOLD=1 if late or (turns and small) else 2 * overlap,
        EARLY=overlap or item == 1, ROUNDS=3 if products == 3 else 2 if D > 128 else 1,
        EQUAL=known and not bounded and not window, Q_REGISTERS=in_registers, ITEM=item,
        STORED=problem.kv_itemsize, **registers._asdict(),
        LAZY=skip and not (three or few or products == 3), PRODUCTS=products, TURNS=products == 2 or turns,
        CHAINS=turns and small, APART=apart,
    )
    together = 1
    if bounded or problem.ragged:
        longest = inputs.sequences.most_keys(inputs.k)
        longest = num_keys // problem.batch if ragged_k else longest
        row = (problem.head_dim + problem.value_dim) * problem.kv_itemsize
        fit = max(1, L2_SHARE // (max(longest, 1) * row)) * problem.group
        groups = [g for g in range(1, heads + 1) if heads % g == 0]
        together = max(g for g in groups if g <= fit)
        if together * row_tiles < SMS:
            # The tiles at work read more heads than fit in any case, and a last group that is shorter than a round
            # begins its long tiles when it is too late to even them out.
            together = next((g for g in groups if g * row_tiles >= SMS), heads)
    return HopperPrefillConfig(constants, row_tiles, heads, together)


def list_lacks(inputs: PrefillInputs, scale: float) -> str | None:
    """Feature of a call over a work list that the Hopper kernel lacks, None if it takes the call."""
    q, k, v, features = inputs.q, inputs.k, inputs.v, inputs.features
    group = int(q.shape[2]) // int(k.shape[2])
    if features.mask.left < UNLIMITED and max(int(q.shape[3]), int(v.shape[3])) > 128:
        return f"a window with heads of {q.shape[3]}, for which there are not enough registers"
    if is_fp8(q) and group not in BOX_GROUPS:
        return f"q of e4m3 and {group} query heads to a KV head"
    if differs_by_head(features):
        return "features that differ between the query heads of a KV head"
    return hopper_lacks(inputs, scale)


def listed_constants(
    problem: PrefillProblem, page: int, features: Features, *, together: int, overhead: int, heads: int = 1
) -> HopperPrefillConstants:
    """Constants of the kernel that walks a work list whose key blocks have 128 keys: tiles of 128 rows. K and V that
    are widened lie in shared memory twice, and Q in registers, as the tensor cores' reads fill the banks: 64 keys. As
    many of heads of more than 128; of values of more than 128 with one buffer of Q, and O leaves in parts.

    >>> problem = PrefillProblem(1, 1, 32, 8, head_dim=128, value_dim=128, itemsize=2, kv_itemsize=2)
    >>> C = listed_constants(problem, 16, Features(), together=4, overhead=1)
    >>> C.PACK, C.BN, shared_bytes(C)
    (4, 128, 230400)
    """
    (D, DV, depth), item = shared_columns(problem), problem.itemsize
    mask, BN = features.mask, 64 if problem.converted or D > 128 else 128
    window, bounded = mask.left < UNLIMITED, mask.right < UNLIMITED
    small, many, full = D == 64, BN // page > 4, DV > 128
    products = products_of(problem)
    NB = 3 if small or products == 3 else 2
    registers = WIDENED if problem.converted else EIGHT if item == 1 else MANY_PAGES if many else PAGED
    return HopperPrefillConstants(
        D=D, DV=DV, DEPTH=depth, COLUMNS=problem.value_dim, NC=2, NQ=1 if full else 2, NB=NB, NR=NB, BN=BN,
        BOX=min(page, BN), PAGE=page, RAGGED_Q=True, RAGGED_K=False, FIRST=True, MASKED=bounded or window,
        ALIGNED=False, SKIP=False, WINDOW=window, CLEAN=True, FIXED=False,
        HOLD=2 if small else 1 if products == 3 or ((bounded or window) and not (full or features.softcap > 0)) else 0,
        EARLY=small or item == 1, ROUNDS=3 if products == 3 else 2 if full else 1, EQUAL=False,
        Q_REGISTERS=problem.converted or products == 3, ITEM=item,
        STORED=problem.kv_itemsize, **registers._asdict(), PACK=problem.group, ODD=problem.group not in BOX_GROUPS,
        TOGETHER=together, HEADS=heads, OVERHEAD=overhead, WORDS=16, PRODUCTS=products,
        TURNS=products == 2,
    )


def shared_bytes(C: HopperPrefillConstants) -> int:
    """Bytes of shared memory that the kernel takes at most: buffers of Q, stages of K and V (of e4m3 what is changed
    once more), and what of the output leaves at a time, in 16 bits.
    """
    q, o = C.NQ * C.NC * C.BM * C.D, C.NC * C.BM * C.DV // C.ROUNDS
    kv = C.NB * C.BN * (C.D + C.DV) * C.ITEM
    kv += C.NR * C.BN * (C.DV * (C.STORED == 1) + C.D * (C.STORED < C.ITEM))
    return q * C.ITEM + kv + o * 2 + BARRIER_BYTES
