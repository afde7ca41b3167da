"""MHA decode: tile sizes, the split of the keys, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.attention.features.intervals import most_keys
from kvlab.attention.features.scales import columns_of, is_four_bits
from kvlab.attention.machines.gpu import shared_limit, traits
from kvlab.attention.merge_states.config import MERGE
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.tiles.pieces import pieces
from kvlab.attention.tiles.splits import decode_splits
from kvlab.attention.tiles.tile_bytes import tile_bytes
from kvlab.common.arrays import dtype_of
from kvlab.mirror.twin import Twin

HOPPER_ROLES = "produce,attend_keys,other_columns,normalise,consume,join"
TWINS = (
    Twin(
        "attend", kernel="kernel:attend", emulator="emulator:attend",
        synonyms={
            "problem.each": "EACH", "load_tile": "load", "config.longest_first": "LONGEST_FIRST",
            "seq_lens": "seq_lens_ptr",
            "v_factor": "scales.v_factor", "cache.page_size_": "PAGE", "bincount": "histogram", "load_q": "load_rows",
            "store_rows": "store",
        },
        held={
            "load_k": "k_ptr kv_head page slot exists", "load_v": "v_ptr kv_head page slot exists", "in_pages": "k_ptr",
        },
    ),
    Twin("hopper", kernel=f"hopper_roles:{HOPPER_ROLES}", emulator=f"hopper_emulator:{HOPPER_ROLES}"),
    MERGE,
)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}

FEW_ROWS = 8
MAX_ROWS = 32
CTAS_PER_PROCESSOR = 3
CTAS_OF_ONE_WARP = 8
ORDERED = 1024
CLASSES = 64
"""Classes of lengths in the order of the sequences."""


@dataclass(frozen=True)
class DecodeProblem:
    """Sizes of one call: B sequences, S new tokens each, Hq query and Hkv key heads of dimension D (values: v_dim)."""

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    itemsize: float
    """Bytes of an element of K and V: 0.5 of 4 bits."""
    page_size: int
    max_keys: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def pairs(self) -> bool:
        """Tells whether K and V are fp8, whose columns move in pairs: elements of 16 bits."""
        return self.itemsize == 1

    @property
    def each(self) -> int:
        """Columns of an element as the kernel counts them: of 16 bits or more."""
        return max(int(2 / self.itemsize), 1)

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a row of K and of V, as the kernel counts them."""
        return self.head_dim // self.each, self.v_dim // self.each


def problem_of(q: Any, k_cache: Any, v_cache: Any, block_table: Any) -> DecodeProblem:
    """The sizes of a call on q ``[B, S, Hq, D]`` and pages; arrays of either library."""
    (batch, tokens, q_heads, head_dim), (_, page_size, kv_heads, _) = (map(int, x.shape) for x in (q, v_cache))
    max_keys, v_dim = most_keys(int(block_table.shape[1]), page_size), columns_of(v_cache)
    itemsize = 0.5 if is_four_bits(k_cache) else dtype_of(k_cache, "k_cache").itemsize
    return DecodeProblem(batch, tokens, q_heads, kv_heads, head_dim, v_dim, itemsize, page_size, max_keys)


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    BM query rows (tokens x heads of one KV head), BN keys. Columns of Q and K, and those of V and the output, come in
    one or two pieces, powers of two, in elements of 16 bits or more (two columns of fp8, four of 4 bits).
    """

    BM: int
    BN: int
    columns: tuple[int, int]
    v_columns: tuple[int, int]
    row_tiles: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2
    longest_first: int = field(default=0, repr=False)
    """0, or a power of two that holds the batch: the programs of the longest sequences begin."""

    @property
    def BD(self) -> int:
        """Elements of a row of K in shared memory, padding included."""
        return sum(self.columns)

    def grid(self, problem: DecodeProblem) -> tuple[int, int]:
        """Programs (sequence, KV head and row tile; split). Those that read neighbouring rows are neighbours. The
        lengths have no part in it: a CUDA graph may be replayed.
        """
        return problem.batch * problem.kv_heads * self.row_tiles, self.num_splits


def choose_config(
    problem: DecodeProblem, *, processors: int = 132, num_splits: int | None = None, arch: str = "sm_90",
    shared: int | None = None, heavy: bool = False, biased: bool = False, batch_invariant: bool = False,
) -> DecodeConfig:
    """The configuration of a call; ``processors`` are the SMs of the device (132 on an H100), ``shared``
    the bytes of shared memory that a CTA may have (None: as on ``arch``). ``heavy``: what is done to the scores takes
    registers; ``biased``: an array is added to them.

    Tiles of 64 keys in two buffers leave room for three CTAs on an SM, which keeps the memory busy; gfx950 takes MAX's
    128 keys. 4 bits are many instructions a byte: a warp alone has 32 keys and waits for none, or four have 128; two
    tiles are in flight. Of up to 8 rows it has 8, the columns of mma.sync: of its 16 rows half would be idle. Large
    depths take small tiles or more warps, or the registers spill; so does float32, which has
    no tensor cores to hold its accumulators: more warps, and fewer keys before sm_90.
    Where a tile has no room there are half as many keys and eight warps, or one stage of float32. Beyond 256 columns
    the wide piece of V is the last one, whose columns the warps share out: along the rows each would hold all of them.
    One split where the programs fill 0.6 of the device's places; otherwise the smallest number of splits that comes
    within 0.95 of the best use of them, each of at least 256 keys. ``batch_invariant``: a split for every 2048 keys
    that a row of the table holds, whatever the batch and the device.

    >>> problem = DecodeProblem(batch=1, tokens=1, q_heads=32, kv_heads=8, head_dim=128, v_dim=128, itemsize=2,
    ...                         page_size=16, max_keys=32768)
    >>> choose_config(problem)
    DecodeConfig(BM=16, BN=64, columns=(128, 0), v_columns=(128, 0), row_tiles=1, num_splits=47, \
num_warps=4, num_stages=3)
    >>> choose_config(problem, num_splits=1).grid(problem), choose_config(problem, batch_invariant=True).num_splits
    ((8, 1), 16)
    """
    rows = problem.tokens * problem.group
    columns, v_columns = (pieces(width) for width in problem.widths)
    widths = sum(columns), sum(v_columns)
    if v_columns[1] and max(widths) > 256 and problem.itemsize <= 2 and not traits(arch).amd:
        v_columns = v_columns[::-1]
    one = columns[1] == v_columns[1] == 0
    itemsize = max(int(problem.itemsize), 2)
    BM, BN, warps, num_stages = _tile(widths, itemsize, arch, heavy or not one, rows)
    if problem.each == 4 and max(widths) <= 64:
        narrow = BM == 16 and max(widths) <= 32
        BM = FEW_ROWS if narrow and rows <= FEW_ROWS and not traits(arch).amd else BM
        BN, warps, num_stages = (32, 1, 5) if narrow else (128, 4, 5)
    row_tiles = -(-rows // BM)
    programs = problem.batch * problem.kv_heads * row_tiles
    places = processors * (CTAS_OF_ONE_WARP if warps == 1 else CTAS_PER_PROCESSOR)
    num_splits = decode_splits(num_splits, programs, problem.max_keys, places, batch_invariant=batch_invariant)
    ordered = longest_first(problem.batch, programs, places) if num_splits == 1 else 0
    config = DecodeConfig(BM, BN, columns, v_columns, row_tiles, num_splits, warps, num_stages, ordered)
    if shared_bytes(config, problem, arch, biased=biased) > (shared or shared_limit(arch)):
        return replace(config, num_stages=1) if itemsize == 4 else replace(config, BN=BN // 2, num_warps=8)
    return config


def longest_first(batch: int, programs: int, places: int) -> int:
    """See ``DecodeConfig``: where the programs of unsplit sequences fill the device's places more than once, those that
    begin last end last. Each finds its place in the order by itself, which is quick for up to 1024 sequences.

    >>> longest_first(256, 2048, 396), longest_first(64, 256, 396), longest_first(1, 512, 396)
    (256, 0, 0)
    """
    return 1 << (batch - 1).bit_length() if 1 < batch <= ORDERED and programs > places else 0


def _tile(widths: tuple[int, int], itemsize: int, arch: str, heavy: bool, rows: int) -> tuple[int, int, int, int]:
    """(query rows, keys, warps, stages) of a tile of K and V of so many elements of ``itemsize`` bytes."""
    depth, BM = max(widths), 16 if rows <= 16 else MAX_ROWS
    amd, products, of_max = traits(arch)
    if of_max and itemsize == 2:
        return (16, 128, 4, 2 if depth <= 128 else 1) if depth <= 256 or depth == 512 else (16, 32, 4, 1)
    if of_max:
        return (BM, 128, 4, 2) if depth <= 128 else (16, 64, 4, 1)
    if amd:
        return 16, 64 if depth <= 128 else 32 if depth <= 256 else 16, 4, 1
    if itemsize == 4 and depth > 256:
        return 16, 16 if products == "mma.sync" else 32, 16, 2
    if itemsize == 4:
        return (16, 32, 8, 2) if depth >= 128 else (BM, 64, BM // 4, 2)
    if depth > 256:
        return 16, 64, 8, 1
    if depth > 128:
        return (16, 32, 4, 2) if heavy else (BM, 64, 4, 2)
    return BM, 64, 4, 3


def shared_bytes(config: DecodeConfig, problem: DecodeProblem, arch: str, *, biased: bool = False) -> int:
    """Bytes of shared memory that the kernel takes on ``arch`` at most; ``biased``: an array is added to the scores."""
    k, v = config.BD, sum(config.v_columns)
    each = problem.each  # Q and the output have all columns of an element
    bytes_of_blocks = config.num_stages * config.BN * (k + v) // 4 if each == 4 else 0
    return bytes_of_blocks + tile_bytes(
        config.BM, config.BN, (k, v), max(int(problem.itemsize), 2), config.num_stages, arch=arch,
        q_columns=(each * k, each * v), hops=2, biased=biased,
    )
