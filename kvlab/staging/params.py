"""The compile-time parameters of the KV buffers, and what follows from them (spec/kv_cache.md 5.1, 5.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.hardware import get_arch
from kvlab.layout import Swizzle
from kvlab.memory import as_dtype

__all__ = ["WARP_SIZE", "KVBufferParams", "ceildiv"]

WARP_SIZE = get_arch("gfx950").warp_size


def ceildiv(a: Any, b: Any) -> Any:
    """a / b, rounded up; ints or int arrays.

    >>> ceildiv(7, 4)
    2
    """
    return -(-a // b)


@dataclass(frozen=True)
class KVBufferParams:
    """What MAX gives its KV buffers at compile time; the names are MAX's.

    dtype            of the keys and values. Buffers move bytes: any dtype of the same size takes the same path
    mma_shape        (M, N, K) of the matrix instruction; M = N
    swizzle          of the shared memory, on 16-byte vectors, or None
    BN, WN           keys of a tile, and of a warp
    BK               depth (K) or keys (V) of a strip, what one step of the matrix product takes
    num_threads      of the CTA, a multiple of 64
    depth            columns of K or V
    kv_num_heads     KV heads in DRAM
    transpose        True: the operand is K (of Q K^T, the depth is contracted); False: V (of P V, the keys are)
    cache_depth      columns of a head in DRAM, ``depth`` unless given
    head_dim_offset  first column

    >>> params = KVBufferParams("bf16", (16, 16, 32), Swizzle(3, 0, 3, "vector"), BN=128, WN=32, BK=32,
    ...                         num_threads=256, depth=128, kv_num_heads=8, transpose=True)
    >>> params.input_frag_size, params.simd_width, params.num_k_tiles, params.num_warps_n
    (8, 8, 4, 4)
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
    cache_depth: int | None = None
    head_dim_offset: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "dtype", as_dtype(self.dtype))
        set_(self, "mma_shape", tuple(self.mma_shape))
        if self.cache_depth is None:
            set_(self, "cache_depth", self.depth)
        if self.swizzle is not None:
            set_(self, "swizzle", self.swizzle.to("vector"))
        if len(self.mma_shape) != 3 or self.mma_shape[0] != self.mma_shape[1] or self.mma_shape[0] not in (16, 32):
            raise ValueError(f"mma_shape {self.mma_shape} is not (16, 16, K) or (32, 32, K)")
        for name in ("BN", "WN", "BK", "num_threads", "depth", "kv_num_heads", "cache_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        self.require(16 % self.dtype.itemsize == 0, f"dtype {self.dtype}", "an element of 1, 2, 4, 8 or 16 bytes")
        self.require(self.MMA_K * self.MMA_N % WARP_SIZE == 0, f"MMA_K {self.MMA_K}", "a multiple of 64 / MMA_N")
        self.require(self.BK % self.MMA_K == 0, f"BK {self.BK}", f"a multiple of MMA_K {self.MMA_K}")
        self.require(self.BN % self.WN == 0, f"BN {self.BN}", f"a multiple of WN {self.WN}")
        self.require(self.num_threads % WARP_SIZE == 0, f"num_threads {self.num_threads}", "a multiple of 64")
        self.require(
            self.num_warps % self.num_warps_n == 0,
            f"num_threads {self.num_threads}",
            f"a multiple of {WARP_SIZE * self.num_warps_n}: BN // WN = {self.num_warps_n} warps along the keys",
        )

    @staticmethod
    def require(fulfilled: bool, what: str, accepted: str) -> None:
        """ValueError "what must be accepted" unless fulfilled."""
        if not fulfilled:
            raise ValueError(f"{what} must be {accepted}")

    @property
    def MMA_M(self) -> int:
        return self.mma_shape[0]

    @property
    def MMA_N(self) -> int:
        return self.mma_shape[1]

    @property
    def MMA_K(self) -> int:
        return self.mma_shape[2]

    @property
    def input_frag_size(self) -> int:
        """Elements of a fragment in a lane."""
        return self.MMA_K * self.MMA_N // WARP_SIZE

    @property
    def simd_width(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def num_k_mmas2(self) -> int:
        """k groups: matrix instructions along the contraction of a strip."""
        return ceildiv(self.BK, self.MMA_K)

    @property
    def num_k_tiles(self) -> int:
        """Strips that a warp contracts."""
        return ceildiv(self.depth if self.transpose else self.WN, self.BK)

    @property
    def num_warps(self) -> int:
        return self.num_threads // WARP_SIZE

    @property
    def num_warps_n(self) -> int:
        """Warps along the keys."""
        return self.BN // self.WN

    @property
    def warp_tile_rows(self) -> int:
        """Rows that a warp moves at a time by DMA."""
        return 32

    @property
    def row_stride(self) -> int:
        """Elements between neighbouring keys in DRAM."""
        assert self.cache_depth is not None
        return self.kv_num_heads * self.cache_depth

    @property
    def role(self) -> str:
        """``"k"`` or ``"v"``."""
        return "k" if self.transpose else "v"

    def unswizzled(self) -> KVBufferParams:
        """The same without the swizzle."""
        return replace(self, swizzle=None)

    def warp_col(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which of the warps along the keys each warp is: ``[warps]``."""
        return np.arange(self.num_warps) % self.num_warps_n
