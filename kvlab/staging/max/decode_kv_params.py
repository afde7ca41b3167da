"""The compile-time parameters of MAX's register-staged decode buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import require, shown
from kvlab.hardware import RegTileLoader, RegTileWriterLDS
from kvlab.layout import Layout, Swizzle, TensorLayout

from .buffer_config import KBufferConfig, KVBufferConfig, VBufferConfig
from .mma_geometry import MmaGeometry
from .params import KVBufferParams, ceildiv
from .tiled_mma_op import TiledTensorCore
from .typed_fields import set_typed


@dataclass(frozen=True)
class DecodeKVBufferParams(MmaGeometry):
    """Compile-time parameters of MAX's ``DecodeKVBuffer``, ``KBuffer`` and ``VBuffer``; names as in
    :class:`KVBufferParams`, and:

    kv_tile_layout   of the window in DRAM: ``BN x depth``, its rows as far apart as the cache has them
    tensor_core_mma  the matrix instruction, how many of them share a fragment of 16 bytes, and the role:
                     ``transpose_b`` True is K, False V
    num_stages       stages of the register ring that DRAM tiles wait in
    token_gen        whether the thread grid is as wide as a row of the block tile; else it is 4 vectors wide
    config           what the role decides: :class:`KBufferConfig` or :class:`VBufferConfig`, unless given
    head_dim_offset  first column of the window

    >>> core = TiledTensorCore("fp32", "bf16", (16, 16, 32), group_size=1, transpose_b=False)
    >>> params = DecodeKVBufferParams("bf16", Layout((128, 128), (256, 1)), core, None, BN=128, WN=32, BK=32, depth=128,
    ...                               num_threads=256, token_gen=True)
    >>> params.thread_grid, params.num_mmas, params.num_k_tiles, params.load_rows, params.smem_layout
    ((16, 16), 2, 1, 2, Layout("(32,128):(128,1)"))
    """

    dtype: np.dtype[Any]
    kv_tile_layout: TensorLayout
    tensor_core_mma: TiledTensorCore
    swizzle: Swizzle | None
    BN: int
    WN: int
    BK: int
    depth: int
    num_threads: int
    num_stages: int = 1
    token_gen: bool = False
    config: KVBufferConfig | None = None
    head_dim_offset: int = 0

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("kv_tile_layout", self.kv_tile_layout, TensorLayout),
            ("tensor_core_mma", self.tensor_core_mma, TiledTensorCore),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {shown(value)}: must be a {kind.__name__}")
        set_typed(self, head_dim_offset=0)
        if not isinstance(self.role_config, KVBufferConfig):
            raise TypeError(f"config is {shown(self.config)}: must be a KVBufferConfig or None")
        same = KVBufferParams(
            self.dtype, self.mma_shape, self.swizzle, self.BN, self.WN, self.BK, self.num_threads, self.depth,
            1, self.transpose, head_dim_offset=self.head_dim_offset,
        )
        in_type, layout = self.tensor_core_mma.in_type, self.kv_tile_layout
        require(same.dtype == in_type, f"dtype is {same.dtype}", f"in_type {in_type} of tensor_core_mma")
        whole = layout.shape == (self.BN, self.depth) and layout.stride[1] == 1
        require(whole, f"kv_tile_layout is {layout}", f"BN {self.BN} x depth {self.depth} with columns side by side")
        same.require_whole_warp_rows()
        object.__setattr__(self, "swizzle", same.swizzle)
        b0, b1 = self.btile
        require(b1 % self.simd_width == 0, f"a row of {b1} columns", f"a multiple of {self.simd_width}")
        grid_cols = self.thread_grid[1]
        require(
            self.thread_grid[0] > 0, f"num_threads is {self.num_threads}", f"at least {grid_cols}: a row of vectors"
        )
        frag = self.input_frag_size
        require(frag <= self.simd_width, f"mma_shape is {self.mma_shape}", "one with fragments of 16 bytes at most")
        require(
            self.vectors_per_stage <= self.rows_per_stage,
            f"num_threads {self.num_threads}",
            f"enough to move the {b0} x {b1} tile with {self.rows_per_stage} vectors each, "
            f"not {self.vectors_per_stage}",
        )

    @property
    def mma_shape(self) -> tuple[int, int, int]:
        """(M, N, K) of the matrix instruction."""
        return self.tensor_core_mma.shape

    @property
    def transpose(self) -> bool:
        """Tells whether the operand is K."""
        return self.tensor_core_mma.transpose_b

    @property
    def group_size(self) -> int:
        """Matrix instructions that share a fragment of 16 bytes."""
        return self.tensor_core_mma.group_size

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
