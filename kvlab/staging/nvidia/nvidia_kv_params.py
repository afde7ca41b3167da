"""Compile-time parameters of the K and V buffers on NVIDIA, with MAX's names for the derived members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import get_arch
from kvlab.memory import as_dtype

WARPS, WARP_SIZE = 4, 32


@dataclass(frozen=True)
class NvidiaKVParams:
    """A buffer of ``num_smem_stages`` tiles of ``BN`` keys, 16-bit storage, read by four warps.

    transpose   True: the buffer of K (S = Q K^T), False: of V (O += P V)
    depth       columns in DRAM; in shared memory a row has ``padded_depth``
    arch        ``"sm_80"``: cp.async and ldmatrix; ``"sm_90"`` also TMA and wgmma

    >>> k = NvidiaKVParams("bf16", BN=64, depth=80, kv_num_heads=8, transpose=True)
    >>> k.padded_depth, k.smem_stage_size, k.num_k_mmas2, k.MMA_K, k.role
    (128, 8192, 8, 16, 'k')
    """

    dtype: np.dtype[Any]
    BN: int
    depth: int
    kv_num_heads: int
    transpose: bool
    num_smem_stages: int = 2
    arch: str = "sm_80"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        if self.dtype.name not in ("bfloat16", "float16"):
            raise ValueError(
                f"dtype is {self.dtype}: must be bfloat16 or float16, what ldmatrix.trans and wgmma transpose"
            )
        if self.BN % 32 or not 32 <= self.BN <= 256:
            raise ValueError(f"BN is {self.BN}: must be a multiple of 32 from 32 to 256")
        if self.depth % 8 or not 16 <= self.depth <= 256:
            raise ValueError(f"depth is {self.depth}: must be a multiple of 8 from 16 to 256")
        if self.num_smem_stages < 1:
            raise ValueError(f"num_smem_stages is {self.num_smem_stages}: must be at least 1")
        if get_arch(self.arch).vendor != "nvidia":
            raise ValueError(f"arch {self.arch!r} is not NVIDIA's; KVBuffer is for AMD's")

    @property
    def role(self) -> str:
        """``"k"`` or ``"v"``."""
        return "k" if self.transpose else "v"

    @property
    def padded_depth(self) -> int:
        """Columns of a row in shared memory: a power of two of at least 64."""
        return max(64, 1 << (self.depth - 1).bit_length())

    @property
    def smem_cols(self) -> int:
        """Elements of a row in shared memory."""
        return self.padded_depth

    @property
    def smem_stage_size(self) -> int:
        """Elements of a stage."""
        return self.BN * self.padded_depth

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.smem_stage_size * self.dtype.itemsize

    @property
    def num_threads(self) -> int:
        """Number of threads that hold the fragments."""
        return WARPS * WARP_SIZE

    @property
    def simd_width(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def MMA_K(self) -> int:
        """Contraction of an instruction."""
        return 16

    @property
    def num_k_mmas2(self) -> int:
        """Instructions along the contraction: of the depth for K, of the keys for V."""
        return (self.padded_depth if self.transpose else self.BN) // self.MMA_K
