"""Elements of shared memory that the loads of KVMmaOp read: index arrays, made once.

Offsets are in elements from the base that a load is given. The rules are those of :class:`TiledMmaLoader`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout import Swizzle
from kvlab.memory import float32

from .mma_geometry import MmaShape
from .params import KVBufferParams
from .smem_subtile import smem_mma_subtile_offset
from .tiled_mma_loader import TiledMmaLoader, counted
from .tiled_mma_op import TiledMmaOp, get_accum_type
from .typed_fields import set_typed

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class KVMmaOpParams(MmaShape):
    """Compile-time parameters of MAX's ``KVMmaOp``.

    in_type      of the operand's elements
    mma_shape, BN, BK : as in :class:`KVBufferParams`
    swizzle      of the shared memory, or None: on 16-byte vectors (*vector-space*, for prefill), or on elements if it
                 moves less than that (*element-space*, for decode); see :class:`TiledMmaLoader`
    num_mmas     fragments of a k group
    num_k_mmas   k groups of a strip
    num_k_tiles  strips that the register tile holds
    transpose_b  True: the operand is K, False: V
    out_type     of the accumulators, that of :func:`get_accum_type` unless given
    bk_smem      columns of a block of shared memory, BK unless given"""

    in_type: np.dtype[Any]
    mma_shape: tuple[int, int, int]
    num_mmas: int
    num_k_mmas: int
    num_k_tiles: int
    BN: int
    BK: int
    transpose_b: bool = True
    swizzle: Swizzle | None = None
    out_type: np.dtype[Any] = None  # type: ignore[assignment]  # filled in by __post_init__
    bk_smem: int = 0

    def __post_init__(self) -> None:
        given: Any = self.out_type
        object.__setattr__(self, "out_type", float32 if given is None else given)
        object.__setattr__(self, "bk_smem", self.bk_smem or self.BK)
        set_typed(self)
        if given is None:
            object.__setattr__(self, "out_type", get_accum_type(self.in_type))
        TiledMmaOp(self.out_type, self.in_type, self.mma_shape)  # refuses what no instruction adds up in
        object.__setattr__(self, "swizzle", counted(self.swizzle, self.in_type))

    @classmethod
    def of(
        cls, params: KVBufferParams, *, num_mmas: int | None = None, num_k_tiles: int | None = None
    ) -> KVMmaOpParams:
        """Parameters of a buffer; by default with the register tile of MAX's ``KVBuffer``.

        >>> params = KVBufferParams("bf16", (32, 32, 16), None, BN=64, WN=64, BK=32, num_threads=256, depth=128,
        ...                         kv_num_heads=8, transpose=False)
        >>> op = KVMmaOpParams.of(params)
        >>> op.num_k_tiles, op.num_k_mmas, op.num_mmas, op.input_frag_size
        (2, 2, 4, 8)
        """
        return cls(
            params.dtype, params.mma_shape, params.num_mmas if num_mmas is None else num_mmas, params.num_k_mmas2,
            params.reg_num_k_tiles if num_k_tiles is None else num_k_tiles, params.BN, params.BK, params.transpose,
            params.swizzle, bk_smem=params.bk_smem,
        )

    @property
    def simd_width(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.in_type.itemsize

    @property
    def rows_per_strip(self) -> int:
        """Registers (fragments) of a strip."""
        return self.num_k_mmas * self.num_mmas

    @functools.cached_property
    def tiled_mma_op(self) -> TiledMmaOp:
        """The instruction that multiplies them."""
        return _tiled_mma_op(self)

    @functools.cached_property
    def loader(self) -> TiledMmaLoader:
        """The loader of its fragments."""
        return TiledMmaLoader(self.in_type, self.mma_shape, self.swizzle)

    @functools.cached_property
    def half_loader(self) -> TiledMmaLoader:
        """The loader of half fragments, from one of the two blocks that a split strip lies in."""
        M, N, K = self.mma_shape
        return TiledMmaLoader(self.in_type, (M, N, K // 2), self.swizzle)


@functools.cache
def _tiled_mma_op(p: KVMmaOpParams) -> TiledMmaOp:
    return TiledMmaOp(p.out_type, p.in_type, p.mma_shape, p.transpose_b)


@functools.cache
def prefill_offsets(p: KVMmaOpParams) -> IntArray:
    """``load_prefill``: the first elements of the reads of the warp's WN x BK tile ``[lanes, registers, reads]``."""
    if not p.transpose_b:
        raise ValueError(f"load_prefill is for K, not for {p}")
    return p.loader.b_offsets(p.num_mmas, p.BK)


@functools.cache
def split_offsets(p: KVMmaOpParams) -> IntArray:
    """``load_prefill_split``: the first elements of the reads of a WN x bk_smem half ``[lanes, registers, reads]``."""
    if not p.transpose_b or p.in_type.itemsize != 1 or p.mma_shape != (16, 16, 128) or p.BK != 128 or p.bk_smem != 64:
        raise ValueError(f"load_prefill_split is for 1-byte K, mma_shape (16, 16, 128), BK 128 and bk_smem 64, not {p}")
    return p.half_loader.b_offsets(p.num_mmas, p.bk_smem)


@functools.cache
def v_bf16_tiles(p: KVMmaOpParams, strip: int) -> IntArray:
    """``load_v_bf16``: first elements of the MMA tiles of a strip ``[registers]``."""
    M, _, K = p.mma_shape
    if p.transpose_b or p.in_type.itemsize != 2 or (M, K) not in ((32, 16), (16, 32)) or p.bk_smem != p.BK:
        raise ValueError(
            f"load_v_bf16 is for 2-byte V with mma_shape (32, 32, 16) or (16, 16, 32) and bk_smem == BK, not for {p}"
        )
    kg, i = np.ogrid[: p.num_k_mmas, : p.num_mmas]
    return smem_mma_subtile_offset(K, M, p.BN, p.BK, strip, kg, i).reshape(-1)


@functools.cache
def v_bf16_offsets(p: KVMmaOpParams, strip: int) -> IntArray:
    """``load_v_bf16``: what lanes address in two ``ds_read_tr16_b64`` a fragment ``[registers, halves, lanes]``, in
    elements of the stage. ValueError for parameters that ``load_v_bf16`` does not take.

    >>> v = KVMmaOpParams("bf16", (32, 32, 16), 2, 2, 1, BN=64, BK=32, transpose_b=False)
    >>> v_bf16_offsets(v, 0).shape
    (4, 2, 64)
    """
    return p.loader.transposed(v_bf16_tiles(p, strip)[:, None, None] + p.loader.b_tr_offsets(p.BK))


@functools.cache
def v_fp8_offsets(p: KVMmaOpParams, strip: int) -> IntArray:
    """``load_v_fp8_strip``: what each lane addresses in four ``ds_read_tr8_b64`` a fragment ``[registers, 4, lanes]``.

    In elements of the stage; the swizzle counts from the block. 32x32x64 is ``load_v_fp8_strip``, 16x16x128
    ``load_v_fp8_strip_16``; ValueError for other parameters.

    >>> v = KVMmaOpParams("fp8", (32, 32, 64), 2, 1, 1, BN=64, BK=64, transpose_b=False)
    >>> v_fp8_offsets(v, 0).shape
    (2, 4, 64)
    """
    M, _, K = p.mma_shape
    if p.transpose_b or p.in_type.itemsize != 1 or p.num_k_mmas != 1 or (M, K) not in ((32, 64), (16, 128)):
        raise ValueError(
            f"load_v_fp8_strip is for 1-byte V with mma_shape (32, 32, 64) or (16, 16, 128) and one k group, not {p}"
        )
    if p.bk_smem % M:
        raise ValueError(f"bk_smem is {p.bk_smem}: must be a multiple of MMA_M {M}")
    block, column = np.divmod(np.arange(p.num_mmas)[:, None, None], p.bk_smem // M)
    offset = p.loader.transposed(column * M + p.loader.fp8_strip_offsets(p.bk_smem, strip))
    return offset + block * p.BN * p.bk_smem
