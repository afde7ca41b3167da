"""The compile-time parameters of the KV buffers, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import require
from kvlab.layout import Layout, Swizzle, TileTensor, TileType
from kvlab.memory import AddressSpace, Memory

from .mma_geometry import WARP_SIZE, MmaGeometry
from .typed_fields import set_typed

FOLLOWS = ("MAX 26.7", "document")


def ceildiv(a: Any, b: Any) -> Any:
    """a / b, rounded up; ints or int arrays.

    >>> ceildiv(7, 4)
    2
    """
    return -(-a // b)


@dataclass(frozen=True)
class KVBufferParams(MmaGeometry):
    """Compile-time parameters of MAX's KV buffers; the names are MAX's.

    dtype            of the keys and values. Buffers move bytes: any dtype of the same size takes the same path
    mma_shape        (M, N, K) of the matrix instruction; M = N
    swizzle          of the shared memory, on 16-byte vectors, or None
    BN, WN           keys of a tile, and of a warp
    BK               depth (K) or keys (V) of a strip, what one step of the matrix product takes
    num_threads      of the CTA, a multiple of 64
    depth            columns of K or V
    kv_num_heads     KV heads in DRAM
    transpose        True: the operand is K (of Q K^T, the depth is contracted); False: V (of P V, the keys are)
    full_kv          whether a stage of shared memory holds all columns, or one block of ``bk_smem``
    cache_depth      columns of a head in DRAM, ``depth`` unless given. The cache knows how far apart its rows are; with
                     another number than its head dimension or ``depth`` they are ``kv_num_heads * cache_depth`` apart
    head_dim_offset  first column
    reg_chunk_depth  depth whose strips of K the register tile holds, ``depth`` unless given
    smem_depth       columns that go to shared memory, ``depth`` unless given
    reg_chunk_keys   keys whose strips of V the register tile holds, ``WN`` unless given
    bk_smem          columns of a block of shared memory, ``BK`` unless given (or ``BK / 2`` for 1-byte K of 16x16x128)
    num_smem_stages  stages of shared memory
    follows          ``"MAX 26.7"``: what its kernels compile to; ``"document"``: what its documentation says, which
                     differs in three things. (1) ``vm_instrs_per_load`` is 0 where the warp tiles of a load do not
                     divide evenly over the warps; in the document as if they did. (2) With ``full_kv=False`` every load
                     brings the first block of the next key tile; in the document all blocks of one, load after load.
                     (3) A strip of V in the streaming buffer is flat, ``BK x depth``; in the document ``depth / BK``
                     blocks of BK x BK

    The streaming buffer has neither stages nor register chunks: it ignores the parameters from ``reg_chunk_depth`` on.

    >>> from kvlab.layout import Swizzle
    >>> params = KVBufferParams("bf16", (16, 16, 32), Swizzle(3, 0, 3, "vector"), BN=128, WN=32, BK=32,
    ...                         num_threads=256, depth=128, kv_num_heads=8, transpose=True)
    >>> params.input_frag_size, params.simd_width, params.num_k_tiles, params.num_warps_n
    (8, 8, 4, 4)
    >>> params.smem_stage_size, params.num_repeats, params.vm_instrs_per_load, params.mma_layout
    (16384, 4, 8, Layout("(8,8):(8,1)"))
    """

    dtype: np.dtype[Any]
    mma_shape: tuple[int, int, int]
    swizzle: Swizzle | None
    BN: int
    WN: int
    BK: int
    num_threads: int
    depth: int
    kv_num_heads: int
    transpose: bool
    full_kv: bool = True
    cache_depth: int = None  # type: ignore[assignment]  # filled in by __post_init__, as those below
    head_dim_offset: int = 0
    reg_chunk_depth: int = None  # type: ignore[assignment]
    smem_depth: int = None  # type: ignore[assignment]
    reg_chunk_keys: int = None  # type: ignore[assignment]
    bk_smem: int = None  # type: ignore[assignment]
    num_smem_stages: int = 2
    follows: str = "MAX 26.7"

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        like = {"cache_depth": "depth", "reg_chunk_depth": "depth", "smem_depth": "depth"}
        for name, other in {**like, "reg_chunk_keys": "WN", "bk_smem": "BK"}.items():
            if getattr(self, name) is None:
                set_(self, name, getattr(self, other))
        set_typed(self, head_dim_offset=0)
        if self.swizzle is not None:
            try:
                set_(self, "swizzle", self.swizzle.to("vector"))
            except ValueError as error:
                raise ValueError(f"swizzle {error}") from None
        if self.mma_shape[0] != self.mma_shape[1] or self.mma_shape[0] not in (16, 32):
            raise ValueError(f"mma_shape is {self.mma_shape}: must be (16, 16, K) or (32, 32, K)")
        require(self.follows in FOLLOWS, f"follows is {self.follows!r}", " or ".join(map(repr, FOLLOWS)))
        require(16 % self.dtype.itemsize == 0, f"dtype is {self.dtype}", "an element of 1, 2, 4, 8 or 16 bytes")
        require(self.MMA_K * self.MMA_N % WARP_SIZE == 0, f"MMA_K is {self.MMA_K}", "a multiple of 64 / MMA_N")
        require(self.BK % self.MMA_K == 0, f"BK is {self.BK}", f"a multiple of MMA_K {self.MMA_K}")
        require(self.BN % self.WN == 0, f"BN is {self.BN}", f"a multiple of WN {self.WN}")
        require(self.num_threads % WARP_SIZE == 0, f"num_threads is {self.num_threads}", "a multiple of 64")

    def require_whole_warp_rows(self) -> None:
        """ValueError unless every row of warps along the keys is complete."""
        require(
            self.num_warps % self.num_warps_n == 0, f"num_threads is {self.num_threads}",
            f"a multiple of {WARP_SIZE * self.num_warps_n}: BN // WN = {self.num_warps_n} warps along the keys",
        )

    # The matrix instruction and the registers.

    @property
    def num_mmas(self) -> int:
        """Fragments of a k group: of the warp's keys (K), or of the depth (V)."""
        return ceildiv(self.WN if self.transpose else self.depth, self.MMA_N)

    @property
    def num_k_mmas2(self) -> int:
        """k groups: matrix instructions along the contraction of a strip."""
        return ceildiv(self.BK, self.MMA_K)

    @property
    def num_k_tiles(self) -> int:
        """Strips that a warp contracts."""
        return ceildiv(self.depth if self.transpose else self.WN, self.BK)

    @property
    def reg_num_k_tiles(self) -> int:
        """Strips that the register tile holds; strip s lies in slot ``s % reg_num_k_tiles``."""
        return ceildiv(self.reg_chunk_depth if self.transpose else self.reg_chunk_keys, self.BK)

    @property
    def rows_per_k_mma(self) -> int:
        """Registers (fragments) of a k group."""
        return self.num_mmas

    @property
    def rows_per_k_tile(self) -> int:
        """Registers (fragments) of a strip."""
        return self.num_k_mmas2 * self.num_mmas

    @property
    def mma_total_rows(self) -> int:
        """Registers (fragments) of a lane."""
        return self.reg_num_k_tiles * self.rows_per_k_tile

    @property
    def mma_layout(self) -> Layout:
        """Registers of a lane: row-major ``[mma_total_rows, input_frag_size]``."""
        return Layout.row_major(self.mma_total_rows, self.input_frag_size)

    # Warps.

    @property
    def wtile_dim0(self) -> int:
        """Rows of a warp's tile."""
        return self.WN

    @property
    def wtile_dim1(self) -> int:
        """Columns of a warp's tile."""
        return self.BK

    def warp_col(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of each warp along the keys: ``[warps]``."""
        return np.arange(self.num_warps) % self.num_warps_n

    # Shared memory: stages of blocks of BN x bk_smem, row-major.

    @property
    def num_repeats(self) -> int:
        """Blocks that hold all columns."""
        return self.smem_depth // self.bk_smem

    @property
    def blocks_per_stage(self) -> int:
        return self.num_repeats if self.full_kv else 1

    @property
    def smem_cols(self) -> int:
        """Columns in a stage."""
        return self.smem_depth if self.full_kv else self.bk_smem

    @property
    def smem_stage_size(self) -> int:
        """Elements of a stage."""
        return self.BN * self.smem_cols

    @property
    def smem_total_cols(self) -> int:
        """Columns of all blocks of all stages."""
        return self.num_smem_stages * self.blocks_per_stage * self.bk_smem

    @property
    def block_by_block(self) -> bool:
        """Tells whether loads bring the blocks of a key tile one after the other."""
        return not self.full_kv and self.follows == "document"

    @property
    def blocked_strip(self) -> bool:
        """Tells whether a strip of the streaming buffer is blocks of BK x BK."""
        return not self.transpose and self.follows == "document"

    @property
    def smem_parent_layout(self) -> Layout:
        """All blocks side by side. Only its tiles of whole blocks are meant; inside one the strides are
        :attr:`smem_tile_strides`."""
        return Layout((self.BN, self.smem_total_cols), (self.bk_smem, self.BN))

    def smem_tile(self, memory: Memory, address: int | None = None) -> TileTensor:
        """All blocks in ``memory``, from a byte address on (the first unless given): what ``KVBuffer`` takes."""
        first = 0 if address is None else address - memory.base
        if first % 16 or not 0 <= first < memory.nbytes:
            raise ValueError(
                f"address is {address}: must be a multiple of 16 in [{memory.base}, {memory.base + memory.nbytes}) of "
                f"{memory.name}"
            )
        return self.SmemParentType(memory, first // self.dtype.itemsize)

    @property
    def SmemParentType(self) -> TileType:
        """The type of ``smem_tile``."""
        return TileType(self.dtype, self.smem_parent_layout, AddressSpace.SHARED)

    @property
    def MMATileType(self) -> TileType:
        """The type of a lane's register tile."""
        return TileType(self.dtype, self.mma_layout, AddressSpace.LOCAL)

    @property
    def smem_tile_strides(self) -> tuple[int, int]:
        """Elements between rows and between columns of a block."""
        return self.bk_smem, 1

    # What moves from DRAM.

    @property
    def warp_tile_rows(self) -> int:
        """Rows that a warp moves at a time by DMA."""
        return 32

    @property
    def row_stride(self) -> int:
        """Elements between neighbouring keys in DRAM."""
        return self.kv_num_heads * self.cache_depth

    @property
    def dma_col_groups(self) -> int:
        """Warp tiles side by side: the blocks of a stage."""
        return self.blocks_per_stage

    @property
    def total_tiles(self) -> int:
        """Warp tiles of a load, ``warp_tile_rows`` x ``bk_smem`` each."""
        return self.BN // self.warp_tile_rows * self.dma_col_groups

    @property
    def tiles_per_warp(self) -> int:
        """Steps of a load: warp tiles of the busiest warp."""
        return ceildiv(self.total_tiles, self.num_warps)

    @property
    def vm_instrs_per_load(self) -> int:
        """DMA instructions of a warp that a wait for one load counts: 2 a warp tile, or 0, which waits for all. The
        true number is 4 a warp tile of rows of 128 bytes."""
        even = self.total_tiles % self.num_warps == 0
        return 2 * self.tiles_per_warp if even or self.follows == "document" else 0
