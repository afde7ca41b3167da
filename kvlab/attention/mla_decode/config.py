"""MLA decode: tile sizes of each machine, the split of the keys, and the twins of the operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlab.attention.features.intervals import most_keys
from kvlab.attention.machines.gpu import shared_limit, traits
from kvlab.attention.merge_states.config import MERGE
from kvlab.attention.tiles.online_softmax import OUTPUT_TIE, P_TIE
from kvlab.attention.tiles.splits import decode_splits
from kvlab.attention.tiles.tile_bytes import tile_bytes
from kvlab.common.arrays import dtype_of
from kvlab.mirror.twin import Twin

TWINS = (
    Twin(
        "attend", kernel="kernel:attend", emulator="emulator:attend",
        synonyms={
            "seq_lens": "seq_lens_ptr", "v_factor": "scales.v.number", "cache.page_size_": "PAGE",
            "store_columns": "store",
        },
        held={"place": "cache start", "load_k": "page slot exists", "load_v": "k"},
    ),
    Twin(
        "hopper", kernel="hopper_roles:produce,produce_half,lead,follow",
        emulator="hopper_emulator:produce,produce_half,lead,follow",
    ),
    MERGE,
)
LAUNCH = ("kernel:launch", "emulator:launch")

LOCKSTEP_TOLERANCE = {"o": P_TIE, "parts": P_TIE, "result 0": OUTPUT_TIE}


class MLAInputs(NamedTuple):
    """Launch arguments of the siblings: q and out ``[B, S, H, ..]``, the latent and the rope window of the cache
    ``[pages, page_size, ..]``. No seq_lens: block_table is a list of slots for each of B tokens, S = 1. None: a new
    out.
    """

    q: Any
    kv_cache: Any
    k_rope: Any
    block_table: Any
    seq_lens: Any
    out: Any


@dataclass(frozen=True)
class MLADecodeProblem:
    """Sizes of one call: B sequences, S new tokens each, H heads, rows of latent and rope columns. ``listed``: rows
    have lists of the slots that they see, of ``max_keys`` places, not pages of keys. ``scaled``: rows of the cache have
    scales of their latents.
    """

    batch: int
    tokens: int
    heads: int
    latent: int
    rope: int
    itemsize: int
    """Bytes of an element of q."""
    page_size: int
    max_keys: int
    fp8: bool = False
    """Whether the latent columns are e4m3."""
    kv_heads: int = 1
    listed: bool = False
    scaled: bool = False

    @classmethod
    def of(
        cls, q: Any, kv_cache: Any, k_rope: Any, block_table: Any, seq_lens: Any, row_scales: Any = None
    ) -> MLADecodeProblem:
        """The sizes of a call on q ``[B, S, H, D]`` and the windows of a cache; arrays of either library."""
        (batch, tokens, heads), (_, page_size, latent) = map(int, q.shape[:3]), map(int, kv_cache.shape)
        kind, listed = dtype_of(kv_cache, "kv_cache").itemsize, seq_lens is None
        max_keys = most_keys(int(block_table.shape[1]), 1 if listed else page_size)
        itemsize, rope = dtype_of(q, "q").itemsize, int(k_rope.shape[2])
        return cls(
            batch, tokens, heads, latent, rope, itemsize, page_size, max_keys, kind == 1, listed=listed,
            scaled=row_scales is not None,
        )

    @property
    def group(self) -> int:
        """Query heads of the one KV head."""
        return self.heads

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
    one_page: bool = False
    """The keys of a tile are in one page, whose number the kernel reads once."""

    def grid(self, problem: MLADecodeProblem) -> tuple[int, int]:
        """Programs (sequence and row tile, split). The row tiles of a sequence are neighbours: they read the same
        keys. The lengths have no part in it: a CUDA graph may be replayed.
        """
        return problem.batch * self.row_tiles, self.num_splits


def choose_config(
    problem: MLADecodeProblem, *, processors: int = 132, num_splits: int | None = None, arch: str = "sm_90",
    emulated: bool = False, heavy: bool = False, batch_invariant: bool = False, wgmma: bool = False,
) -> MLADecodeConfig:
    """The configuration of a call on ``arch``, which has ``processors`` SMs (132 on an H100). ``heavy``: what is done
    to the scores takes registers.

    16 or 32 rows with mma.sync or MFMA; on Hopper 64 keys, where pages hold whole tiles: one CTA an SM, the next tile
    in flight. ``wgmma``: more than 32 rows on sm_90 take 64, which compiles to wgmma, where the compiler at hand spills
    nothing in it. Latents with scales go through registers, which is a third of the instructions for 64 rows of wgmma
    as for 16 of mma.sync, where some registers are put aside; elsewhere 16 rows, or all spill. float32 has no tensor
    cores on NVIDIA: 16 rows x 32 keys with eight warps (16 keys before sm_90, or registers spill). e4m3 takes eight
    warps from sm_100 on, for the same reason. ``emulated``: MAX's 16 rows x 128 keys on gfx950, where the compiled
    kernel would spill them. ``batch_invariant``: a split for every 2048 keys that a row of the table holds, whatever
    the batch and the device.

    >>> problem = MLADecodeProblem(batch=1, tokens=1, heads=128, latent=512, rope=64, itemsize=2, page_size=64,
    ...                            max_keys=32768)
    >>> choose_config(problem)
    MLADecodeConfig(BM=32, BN=64, BV=512, BR=64, row_tiles=4, num_splits=32, num_warps=8, num_stages=2, \
one_page=True)
    >>> choose_config(problem, num_splits=1).grid(problem), choose_config(problem, batch_invariant=True).num_splits
    ((4, 1), 16)
    """
    BV, BR = (max(32, 1 << (n - 1).bit_length()) for n in (problem.latent, problem.rope))
    amd, products, of_max = traits(arch)
    places, whole_pages = 2 * processors, problem.page_size % 64 == 0 and not problem.listed
    if emulated and of_max:
        BM, BN, num_warps, num_stages = 16, 128, 4, 1
    elif problem.itemsize == 4:
        BM, BN, num_warps, num_stages = (16, 16, 4, 1) if amd else (16, 32, 8, 1)
        if products == "mma.sync":
            BN = 16
    elif problem.scaled and wgmma and products == "wgmma" and _bytes(64, 64, BV, BR, 2, 2, arch) <= shared_limit(arch):
        BM, BN, num_warps, num_stages, places = 64, 64, 8, 2, processors
    elif problem.scaled:
        BM, BN, num_warps, num_stages = (16, 16, 4, 1) if amd else (16, 32, 8, 2)
    elif amd:
        BM, BN, num_warps, num_stages = min(32, 16 * -(-problem.rows // 16)), 32, 4, 1
    elif wgmma and products == "wgmma" and problem.rows > 32 and not heavy:
        fits = whole_pages and _bytes(64, 64, BV, BR, 2, 2, arch) <= shared_limit(arch)
        BM, BN, num_warps, num_stages, places = 64, *((64, 8, 2) if fits else (32, 8, 3)), processors
    elif whole_pages and not heavy and products != "mma.sync":
        BM, BN, num_warps, num_stages, places = *((16, 64, 8, 5) if problem.rows <= 16 else (32, 64, 8, 2)), processors
    elif problem.rows <= 16:
        BM, BN, num_warps, num_stages = 16, 32, 8 if problem.fp8 and products == "tcgen05" else 4, 2
    else:
        BM, BN, num_warps, num_stages = 32, 32, 8, 2
    row_tiles = -(-problem.rows // BM)
    programs = problem.batch * row_tiles
    num_splits = decode_splits(num_splits, programs, problem.max_keys, places, batch_invariant=batch_invariant)
    one_page = problem.page_size % BN == 0 and not problem.listed and (BM, BN) != (64, 32)  # that tile would spill
    return MLADecodeConfig(BM, BN, BV, BR, row_tiles, num_splits, num_warps, num_stages, one_page)


def shared_bytes(config: MLADecodeConfig, problem: MLADecodeProblem, arch: str, *, biased: bool = False) -> int:
    """Bytes of shared memory that the kernel takes on ``arch`` at most; ``biased``: an array is added to the scores."""
    item = max(problem.itemsize, 2)
    return _bytes(config.BM, config.BN, config.BV, config.BR, item, config.num_stages, arch, biased)


def _bytes(
    BM: int, BN: int, BV: int, BR: int, itemsize: int, num_stages: int, arch: str, biased: bool = False
) -> int:
    """As of ``shared_bytes``. A tile of K holds V, too; e4m3 is converted in place."""
    return tile_bytes(
        BM, BN, (BV + BR, 0), itemsize, num_stages, arch=arch, q_columns=(BV + BR, BV), hops=2,
        wgmma=traits(arch).products == "wgmma" and BM == 64, biased=biased,
    )
