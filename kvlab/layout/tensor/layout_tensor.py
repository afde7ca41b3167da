"""MAX's older LayoutTensor: the same memory and layout as a TileTensor, with the legacy rules of its views."""

from __future__ import annotations

from typing import Any, Literal, Self

from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.tensor.tile_base import TileBase
from kvlab.layout.tensor.tile_tensor import TileTensor


class LayoutTensor(TileTensor):
    """A TileTensor whose views follow MAX's legacy rules unless ``legacy=False`` is given.

    A tile that the mode does not hold whole is clipped. A vector gathers the scalars that its shape names. Threads may
    be nested and dealt out along an ``axis``. Copies do not cast.

    ``t.to_layout_tensor()`` makes one of a :class:`TileTensor`, ``to_tile_tensor()`` goes back; both share the bytes.

    >>> import numpy as np
    >>> t = TileTensor.from_numpy(np.arange(32).reshape(8, 4)).to_layout_tensor()
    >>> t.vectorize(4, 1).load()[0, 1]
    array([ 1,  5,  9, 13])
    >>> t.tile((3, 4), (2, 0)).layout
    Layout("(2,4):(4,1)")
    >>> type(t.to_tile_tensor()).__name__
    'TileTensor'
    """

    __slots__ = ()

    def to_tile_tensor(self) -> TileTensor:
        """The same elements as a :class:`TileTensor`. ValueError for gathered vectors, which it has not."""
        if self.element_layout is not None and self.element_layout.size > 1:
            raise ValueError(f"to_tile_tensor of {self!r}: its vectors are gathered; take the scalars first")
        return self._as(TileTensor)

    def tile(self, tile_shape: Any, coord: Any, *, stride_layout: Any = None, legacy: bool = True) -> Self:
        """The tile number ``coord``, clipped where the tensor ends."""
        return super().tile(tile_shape, coord, stride_layout=stride_layout, legacy=legacy)

    def vectorize(self, *vector: int, legacy: bool = True) -> Self:
        """The same elements as vectors of the scalars that ``vector`` names."""
        return super().vectorize(*vector, legacy=legacy)

    def distribute(
        self, threads: Layout, lane: Any, swizzle: Swizzle | None = None, *, legacy: bool = True,
        axis: int | None = None, submode_axis: int | None = None,
    ) -> Self:
        """The elements that thread ``lane`` owns, the threads dealt out over the modes or along one."""
        return super().distribute(threads, lane, swizzle, legacy=legacy, axis=axis, submode_axis=submode_axis)

    def copy_from(self, source: TileBase, *, order: Literal["colex", "memory"] | None = None) -> Self:
        """Copies as a TileTensor does, for tensors of one dtype."""
        if source.dtype != self.dtype:
            raise ValueError(f"copy of {source!r} to {self!r}: a LayoutTensor does not cast: must be equal dtypes")
        return super().copy_from(source, order=order)
