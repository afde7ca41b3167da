"""Type of a tile tensor when a kernel is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import shown
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.tensor.tile_tensor import TileTensor
from kvlab.memory import AddressSpace, Memory, as_dtype


@dataclass(frozen=True)
class TileType:
    """A type of tile tensors, MAX's ``TileTensor[dtype, layout, address_space=...]``: :func:`isinstance` tells whether
    a tensor is of it, a call makes one over a memory.

    >>> fragments = TileType("bf16", Layout.row_major(4, 8), AddressSpace.LOCAL)
    >>> isinstance(TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16", AddressSpace.LOCAL), fragments)
    True
    >>> fragments.checked("reg_tile", TileTensor.stack_allocation(Layout.row_major(4, 8), "fp16", AddressSpace.LOCAL))
    Traceback (most recent call last):
        ...
    ValueError: reg_tile is TileTensor(float16, (4,8):(8,1), offset 0, local): must be bfloat16, (4,8):(8,1), local
    """

    dtype: np.dtype[Any]
    layout: Layout
    address_space: AddressSpace

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))

    def __instancecheck__(self, tile: object) -> bool:
        return isinstance(tile, TileTensor) and self._of(tile) == self

    def __str__(self) -> str:
        return f"{self.dtype}, {self.layout}, {self.address_space.value}"

    def __call__(self, memory: Memory, offset: Any = 0) -> TileTensor:
        """The tile at element ``offset`` of ``memory``."""
        if memory.space is not self.address_space:
            spaces = f"{memory.space.value} memory: must be in {self.address_space.value} memory"
            raise ValueError(f"memory {memory.name!r} is in {spaces}")
        return TileTensor(memory, self.dtype, self.layout, offset)

    def checked(self, name: str, tile: Any) -> TileTensor:
        """``tile``; TypeError or ValueError, about the argument ``name``, unless it is of this type."""
        if not isinstance(tile, TileTensor):
            raise TypeError(f"{name} is {shown(tile)}: must be a TileTensor: {self}")
        if self._of(tile) != self:
            raise ValueError(f"{name} is {tile!r}: must be {self}")
        return tile

    @staticmethod
    def _of(tile: TileTensor) -> TileType:
        return TileType(tile.dtype, tile.layout, tile.address_space)
