"""The tile, the matrix instruction and the warps that the parameters of every AMD buffer name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from kvlab.hardware import get_arch
from kvlab.layout import Swizzle

__all__ = ["WARP_SIZE", "MmaGeometry"]

WARP_SIZE = get_arch("gfx950").warp_size


@dataclass(frozen=True)
class MmaGeometry:
    """The first parameters of :class:`KVBufferParams` and :class:`DecodeKVBufferParams`, and what follows from them."""

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

    @property
    def role(self) -> str:
        """``"k"`` or ``"v"``."""
        return "k" if self.transpose else "v"

    @property
    def MMA_N(self) -> int:
        return self.mma_shape[1]

    @property
    def MMA_K(self) -> int:
        return self.mma_shape[2]

    @property
    def input_frag_size(self) -> int:
        """Elements of a fragment of one matrix instruction in a lane."""
        return self.MMA_K * self.MMA_N // WARP_SIZE

    @property
    def simd_width(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def num_warps(self) -> int:
        return self.num_threads // WARP_SIZE

    @property
    def num_warps_n(self) -> int:
        """Warps along the keys."""
        return self.BN // self.WN

    def unswizzled(self) -> Self:
        """The same without the swizzle."""
        return replace(self, swizzle=None)
