"""The tile, the matrix instruction and the warps that the parameters of every AMD buffer name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvlab.hardware import get_arch

WARP_SIZE = get_arch("gfx950").warp_size


class MmaShape:
    """Consequences of ``mma_shape``."""

    if TYPE_CHECKING:  # the parameters' own

        @property
        def mma_shape(self) -> tuple[int, int, int]: ...

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
        """Elements of a fragment of one matrix instruction in a lane."""
        return self.MMA_K * self.MMA_N // WARP_SIZE


class MmaGeometry(MmaShape):
    """Consequences of the first parameters of :class:`KVBufferParams` and :class:`DecodeKVBufferParams`."""

    if TYPE_CHECKING:  # the parameters' own

        @property
        def dtype(self) -> np.dtype[Any]: ...
        @property
        def transpose(self) -> bool: ...
        @property
        def BN(self) -> int: ...
        @property
        def WN(self) -> int: ...
        @property
        def num_threads(self) -> int: ...

    @property
    def role(self) -> str:
        """``"k"`` or ``"v"``."""
        return "k" if self.transpose else "v"

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
        return replace(self, swizzle=None)  # type: ignore[type-var]  # a dataclass
