"""Extents and strides of a TileTensor that a kernel's compiler knows, and the type of its linear indices."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from kvlab.layout.algebra.int_tuple import flatten
from kvlab.layout.tensor.tile_base import TileBase
from kvlab.memory import AddressSpace

INT32_LIMIT = 1 << 31


class TileStatic(TileBase):
    """Static part of a layout (see ``TileTensor``): everything, until :meth:`make_dynamic` says otherwise."""

    __slots__ = ()

    def make_dynamic(self, *modes: int) -> Self:
        """The same view, of which a compiler knows no extent and no stride; or, with ``modes``, everything but the
        extents of these modes (MAX's MixedLayout: rows at run time, columns static).

        Accesses and views stay as they are; :meth:`copy_from`, arithmetic in place, :meth:`coalesce` and
        :meth:`split` without an index need static extents and raise ValueError, as a kernel would not compile.

        >>> from kvlab.layout import Layout, TileTensor
        >>> t = TileTensor.stack_allocation(Layout.row_major(4, 8), "bf16").make_dynamic(0)
        >>> t.static_shape, t.static_stride, t.all_dims_known
        ((-1, 8), (8, 1), False)
        >>> t.tile((2, 8), (1, 0)).all_dims_known
        True
        >>> t += 1
        Traceback (most recent call last):
            ...
        ValueError: arithmetic in place of (4,8):(8,1) with runtime extents: must be a static shape
        """
        if any(not isinstance(mode, int) or not 0 <= mode < self.rank for mode in modes):
            raise ValueError(f"make_dynamic{modes} of {self.layout}: must be modes 0 to {self.rank - 1}")
        shape, stride = self._leaves_known()
        if modes:
            leaf_modes = [m for m, mode in enumerate(self.layout.modes) for _ in flatten(mode.shape)]
            known = tuple(was and mode not in modes for was, mode in zip(shape, leaf_modes, strict=True)), stride
        else:
            known = (False,) * len(shape), (False,) * len(stride)
        return self._view(self.layout, self.offset, self.element_size, known)

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The extent of each leaf, -1 where it is a runtime value."""
        extents = zip(flatten(self.layout.shape), self._leaves_known()[0], strict=True)
        return tuple(extent if known else -1 for extent, known in extents)

    @property
    def static_stride(self) -> tuple[int, ...]:
        """The stride of each leaf, -1 where it is a runtime value."""
        strides = zip(flatten(self.layout.stride), self._leaves_known()[1], strict=True)
        return tuple(stride if known else -1 for stride, known in strides)

    @property
    def shape_known(self) -> bool:
        """Is every extent static?"""
        return all(self._leaves_known()[0])

    @property
    def stride_known(self) -> bool:
        """Is every stride static?"""
        return all(self._leaves_known()[1])

    @property
    def all_dims_known(self) -> bool:
        """Is every extent and every stride static?"""
        return self.shape_known and self.stride_known

    @property
    def linear_idx_type(self) -> np.dtype[Any]:
        """The type in which MAX adds up offsets: int32 for shared and constant memory and for static layouts that it
        can count, else int64. kvlab computes in int64; :meth:`check_linear_idx` finds what would wrap.

        >>> from kvlab.layout import Layout, TileTensor
        >>> t = TileTensor.from_numpy(np.zeros((4, 8), np.float32))
        >>> t.linear_idx_type, t.make_dynamic().linear_idx_type
        (dtype('int32'), dtype('int64'))
        """
        if self.memory.space in (AddressSpace.SHARED, AddressSpace.CONSTANT):
            return np.dtype(np.int32)
        fits = self.all_dims_known and self.layout.cosize < INT32_LIMIT
        return np.dtype(np.int32 if fits else np.int64)

    def check_linear_idx(self) -> Self:
        """Returns the tensor; ValueError where an offset from its first scalar does not fit :attr:`linear_idx_type`."""
        farthest = self.layout.cosize + self.element_size - 2
        if farthest > np.iinfo(self.linear_idx_type).max:
            raise ValueError(
                f"{self!r}: offset {farthest} wraps around in {self.linear_idx_type}, the index type of "
                f"{self.memory.space.value} memory"
            )
        return self
