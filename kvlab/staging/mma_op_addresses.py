"""Which elements of shared memory the loads of KVMmaOp read (spec/layout.md 7.3 to 7.5): index arrays, made once.

Offsets are in elements from the base that a load is given.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout import Swizzle
from kvlab.memory import as_dtype

from .params import WARP_SIZE, KVBufferParams, ceildiv

__all__ = ["KVMmaOpParams", "prefill_offsets", "split_offsets", "v_bf16_offsets", "v_fp8_offsets"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class KVMmaOpParams:
    """What MAX gives ``KVMmaOp`` at compile time.

    dtype, mma_shape, swizzle, BN, BK, transpose : as in :class:`KVBufferParams`.
    num_mmas     fragments of a k group
    num_k_mmas   k groups of a strip
    num_k_tiles  strips that the register tile holds
    bk_smem      columns of a block of shared memory, BK unless given
    """

    dtype: np.dtype[Any]
    mma_shape: tuple[int, int, int]
    num_mmas: int
    num_k_mmas: int
    num_k_tiles: int
    BN: int
    BK: int
    transpose: bool
    swizzle: Swizzle | None = None
    bk_smem: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "mma_shape", tuple(self.mma_shape))
        if self.bk_smem is None:
            object.__setattr__(self, "bk_smem", self.BK)
        if self.swizzle is not None:
            object.__setattr__(self, "swizzle", self.swizzle.to("vector"))
        for name in ("num_mmas", "num_k_mmas", "num_k_tiles", "BN", "BK", "bk_smem"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")

    @classmethod
    def of(
        cls,
        params: KVBufferParams,
        *,
        num_mmas: int | None = None,
        num_k_tiles: int | None = None,
        bk_smem: int | None = None,
    ) -> KVMmaOpParams:
        """Those of a buffer; by default with the register tile of MAX's ``KVBuffer``: all strips that a warp contracts.

        >>> params = KVBufferParams("bf16", (32, 32, 16), None, BN=64, WN=64, BK=32, num_threads=256, depth=128,
        ...                         kv_num_heads=8, transpose=False)
        >>> op = KVMmaOpParams.of(params)
        >>> op.num_k_tiles, op.num_k_mmas, op.num_mmas, op.input_frag_size
        (2, 2, 4, 8)
        """
        whole = ceildiv(params.WN if params.transpose else params.depth, params.MMA_N)
        return cls(
            params.dtype, params.mma_shape, whole if num_mmas is None else num_mmas, params.num_k_mmas2,
            params.num_k_tiles if num_k_tiles is None else num_k_tiles, params.BN, params.BK, params.transpose,
            params.swizzle, bk_smem,
        )  # fmt: skip

    @property
    def input_frag_size(self) -> int:
        """Elements of a fragment in a lane."""
        return self.mma_shape[1] * self.mma_shape[2] // WARP_SIZE

    @property
    def simd_width(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def rows_per_strip(self) -> int:
        """Registers (fragments) of a strip."""
        return self.num_k_mmas * self.num_mmas

    def swizzled(self, offset: IntArray) -> IntArray:
        """An element offset after the swizzle of 16-byte vectors."""
        if self.swizzle is None:
            return offset
        return self.swizzle(offset // self.simd_width) * self.simd_width + offset % self.simd_width


@functools.cache
def prefill_offsets(p: KVMmaOpParams) -> IntArray:
    """``load_prefill``: 16-byte vectors of the warp's WN x BK tile ``[lanes, registers, pieces]``."""
    M, _, K = p.mma_shape
    pieces = p.input_frag_size // p.simd_width
    if not p.transpose or p.input_frag_size % p.simd_width or pieces not in (1, 2):
        raise ValueError(f"load_prefill is for K with fragments of 16 or 32 bytes, not for {p}")
    lane, kg, i, piece = np.ogrid[:WARP_SIZE, : p.num_k_mmas, : p.num_mmas, :pieces]
    column = kg * K + piece * (K // pieces) + lane // M * p.simd_width
    offset = p.swizzled(lane % M * p.BK + column) + i * M * p.BK
    return offset.reshape(WARP_SIZE, p.rows_per_strip, pieces)


@functools.cache
def split_offsets(p: KVMmaOpParams) -> IntArray:
    """``load_prefill_split``: 16-byte vectors of a WN x bk_smem half ``[lanes, registers]``."""
    M, _, K = p.mma_shape
    if not p.transpose or p.dtype.itemsize != 1 or (M, K) != (16, 128) or p.BK != 128 or p.bk_smem != 64:
        raise ValueError(f"load_prefill_split is for 1-byte K, mma_shape (16, 16, 128), BK 128 and bk_smem 64, not {p}")
    lane, i = np.ogrid[:WARP_SIZE, : p.num_mmas]
    return p.swizzled(lane % M * p.bk_smem + lane // M * p.simd_width + 0 * i) + i * M * p.bk_smem


@functools.cache
def v_bf16_offsets(p: KVMmaOpParams, strip: int) -> IntArray:
    """``load_v_bf16``: what each lane addresses in two ``ds_read_tr16_b64`` a fragment ``[registers, halves, lanes]``.

    In a half the rows of 16 lanes take 4 x 16 pieces of K/2 keys x M columns: side by side first if M is 32.
    """
    M, _, K = p.mma_shape
    if p.transpose or p.dtype.itemsize != 2 or (M, K) not in ((32, 16), (16, 32)):
        raise ValueError(f"load_v_bf16 is for 2-byte V with mma_shape (32, 32, 16) or (16, 16, 32), not {p}")
    per_block = _per_block(p)
    kg, i, half, lane = np.ogrid[: p.num_k_mmas, : p.num_mmas, :2, :WARP_SIZE]
    base = strip * p.BK * p.BK + kg * K * p.BK + i // per_block * p.BN * p.BK + i % per_block * M
    row, across = lane // 16, M // 16
    key = half * (K // 2) + row // across * 4 + lane % 16 // 4
    offset = p.swizzled(base + key * p.BK + row % across * 16 + lane % 4 * 4)
    return offset.reshape(p.rows_per_strip, 2, WARP_SIZE)


@functools.cache
def v_fp8_offsets(p: KVMmaOpParams, strip: int) -> IntArray:
    """``load_v_fp8_strip``: what each lane addresses in four ``ds_read_tr8_b64`` a fragment ``[registers, 4, lanes]``.

    The swizzle counts from the block. 32x32x64 is ``load_v_fp8_strip``, 16x16x128 ``load_v_fp8_strip_16``.
    """
    M, _, K = p.mma_shape
    if p.transpose or p.dtype.itemsize != 1 or p.num_k_mmas != 1 or (M, K) not in ((32, 64), (16, 128)):
        raise ValueError(
            f"load_v_fp8_strip is for 1-byte V with mma_shape (32, 32, 64) or (16, 16, 128) and one k group, not {p}"
        )
    assert p.bk_smem is not None
    per_block = _per_block(p)
    i, step, lane = np.ogrid[: p.num_mmas, :4, :WARP_SIZE]
    pair, odd = lane % 16 // 2, lane % 2
    if M == 32:
        rel_key, hw_key_shift = pair % 4 + pair // 4 * 8, lane // 32 * 4
        key = 16 * step + rel_key + hw_key_shift
        column = lane // 16 % 2 * 16 + odd * 8
    else:
        key, column = 32 * (lane // 16) + 8 * step + pair, 8 * odd
    offset = p.swizzled((strip * K + key) * p.bk_smem + i % per_block * M + column)
    return offset + i // per_block * p.BN * p.bk_smem


def _per_block(p: KVMmaOpParams) -> int:
    """Fragments side by side in a block of shared memory."""
    assert p.bk_smem is not None
    if p.bk_smem % p.mma_shape[0]:
        raise ValueError(f"bk_smem {p.bk_smem} must be a multiple of MMA_M {p.mma_shape[0]}")
    return p.bk_smem // p.mma_shape[0]
