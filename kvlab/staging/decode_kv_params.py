"""The compile-time parameters of MAX's register-staged decode buffer."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.hardware import RegTileLoader, RegTileWriterLDS
from kvlab.layout import Layout
from kvlab.memory import as_dtype

from .buffer_config import KBufferConfig, KVBufferConfig, VBufferConfig
from .mma_geometry import MmaGeometry
from .params import KVBufferParams, ceildiv

__all__ = ["DecodeKVBufferParams"]


@dataclass(frozen=True)
class DecodeKVBufferParams(MmaGeometry):
    """What MAX gives ``DecodeKVBuffer`` at compile time; names as in :class:`KVBufferParams`, and:

    group_size   matrix instructions that share a fragment of 16 bytes
    num_stages   stages of the register ring that DRAM tiles wait in
    token_gen    whether the thread grid is as wide as a row of the block tile; else it is 4 vectors wide
    config       what the role decides: :class:`KBufferConfig` or :class:`VBufferConfig`, unless given

    >>> params = DecodeKVBufferParams("bf16", (16, 16, 32), None, BN=128, WN=32, BK=32, num_threads=256, depth=128,
    ...                               kv_num_heads=2, transpose=False, token_gen=True)
    >>> params.thread_grid, params.num_mmas, params.num_k_tiles, params.load_rows, params.smem_layout
    ((16, 16), 2, 1, 2, Layout("(32,128):(128,1)"))
    """

    group_size: int = 1
    num_stages: int = 1
    token_gen: bool = False
    cache_depth: int = 0
    head_dim_offset: int = 0
    config: KVBufferConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_depth", self.cache_depth or self.depth)
        same = KVBufferParams(
            as_dtype(self.dtype), self.mma_shape, self.swizzle, self.BN, self.WN, self.BK, self.num_threads, self.depth,
            self.kv_num_heads, self.transpose, cache_depth=self.cache_depth, head_dim_offset=self.head_dim_offset,
        )  # fmt: skip
        same.require_whole_warp_rows()
        for name in ("dtype", "mma_shape", "swizzle"):
            object.__setattr__(self, name, getattr(same, name))
        for name in ("group_size", "num_stages"):
            same.require(getattr(self, name) >= 1, f"{name} {getattr(self, name)}", "at least 1")
        b0, b1 = self.btile
        same.require(b1 % self.simd_width == 0, f"a row of {b1} columns", f"a multiple of {self.simd_width}")
        grid_cols = self.thread_grid[1]
        same.require(
            self.thread_grid[0] > 0, f"num_threads {self.num_threads}", f"at least {grid_cols}: a row of vectors"
        )
        frag = self.input_frag_size
        same.require(frag <= self.simd_width, f"mma_shape {self.mma_shape}", "one with fragments of 16 bytes at most")
        same.require(
            self.vectors_per_stage <= self.rows_per_stage,
            f"num_threads {self.num_threads}",
            f"enough to move the {b0} x {b1} tile with {self.rows_per_stage} vectors each, "
            f"not {self.vectors_per_stage}",
        )

    @property
    def role_config(self) -> KVBufferConfig:
        """``config``, or that of the role."""
        if self.config is not None:
            return self.config
        if self.transpose:
            return KBufferConfig(self.BN, self.BK, self.WN)
        return VBufferConfig(self.BN, self.BK, self.WN, self.depth)

    @property
    def num_mmas(self) -> int:
        """Fragments of a k group."""
        return ceildiv(self.role_config.wsize, self.MMA_N)

    @property
    def num_k_tiles(self) -> int:
        """k groups of a strip."""
        return ceildiv(self.BK, self.MMA_K * self.group_size)

    @property
    def btile(self) -> tuple[int, int]:
        """Rows and columns of a block tile, what moves at a time."""
        return self.role_config.btile_dim0, self.role_config.btile_dim1

    @property
    def thread_grid(self) -> tuple[int, int]:
        """Rows and columns of the threads that copy, a vector of 16 bytes each. The others do nothing."""
        (b0, b1), sw = self.btile, self.simd_width
        if not self.token_gen:
            return self.num_threads // 4, 4
        return min(self.num_threads, b0 * b1 // sw) * sw // b1, b1 // sw

    @property
    def copied(self) -> tuple[int, int]:
        """Rows and columns of a block tile that the grid reaches, in whole passes; the rest never moves."""
        (rows, cols), (b0, b1) = self.thread_grid, self.btile
        return b0 // rows * rows, b1 // self.simd_width // cols * cols * self.simd_width

    @property
    def vectors_per_stage(self) -> int:
        """Vectors that a thread of the grid moves of a block tile."""
        (rows, cols), (r, c) = self.thread_grid, self.copied
        return r * c // (rows * cols * self.simd_width)

    @property
    def rows_per_stage(self) -> int:
        """Registers of a stage of ``load_tile``, 16 bytes each."""
        return self.num_mmas * self.num_k_tiles

    @property
    def load_rows(self) -> int:
        """Registers of ``load_tile``."""
        return self.num_stages * self.rows_per_stage

    @property
    def load_layout(self) -> Layout:
        """``load_tile``: row-major ``[load_rows, simd_width]``."""
        return Layout.row_major(self.load_rows, self.simd_width)

    @property
    def mma_layout(self) -> Layout:
        """``mma_tile``: row-major ``[num_mmas, simd_width]``."""
        return Layout.row_major(self.num_mmas, self.simd_width)

    @property
    def smem_layout(self) -> Layout:
        """The block tile in shared memory, row-major."""
        return Layout.row_major(*self.btile)

    @property
    def elements(self) -> int:
        """Elements of a register of ``mma_tile`` that a read writes: a fragment of K, 16 bytes of V."""
        return self.input_frag_size if self.transpose else self.simd_width

    @property
    def loader(self) -> RegTileLoader:
        """From DRAM to registers: which vectors of a block tile a thread takes."""
        return RegTileLoader(self.dtype, Layout.row_major(*self.thread_grid), self.simd_width)

    @property
    def writer(self) -> RegTileWriterLDS:
        """From registers to shared memory; the swizzle acts on a thread's first vector (``matrix_order`` of a buffer
        tells whether that is right)."""
        threads = Layout.row_major(*self.thread_grid)
        return RegTileWriterLDS(self.dtype, threads, self.swizzle, self.simd_width, original=True)
