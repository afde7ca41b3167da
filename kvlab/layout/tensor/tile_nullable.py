"""A TileTensor whose memory may be absent: an optional argument of a kernel (a mask, a sink, a scale)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.of_layout import OfLayout
from kvlab.layout.tensor.tile_tensor import TileTensor
from kvlab.memory import AddressSpace, as_dtype


class NullableTileTensor(OfLayout):
    """The layout and dtype of a tensor, and the tensor itself where it is given. Only questions about the layout are
    answered without it.

    >>> absent = NullableTileTensor("bf16", Layout.row_major(4, 8))
    >>> bool(absent), absent.shape, absent.num_elements()
    (False, (4, 8), 32)
    >>> absent.value()
    Traceback (most recent call last):
        ...
    ValueError: NullableTileTensor(bfloat16, (4,8):(8,1), generic, absent) has no memory; ask bool(...) first
    >>> given = NullableTileTensor.of(TileTensor.from_numpy(np.arange(6.0).reshape(2, 3)))
    >>> bool(given), given.value()[1, 2].item()
    (True, 5.0)
    """

    __slots__ = ("_tensor", "dtype", "layout", "space")

    def __init__(self, dtype: Any, layout: Layout, space: AddressSpace = AddressSpace.GENERIC) -> None:
        self.dtype: np.dtype[Any] = as_dtype(dtype)
        if not isinstance(layout, Layout):
            raise ValueError(f"layout {layout!r} of a NullableTileTensor: must be a Layout")
        self.layout, self.space = layout, space
        self._tensor: TileTensor | None = None

    @classmethod
    def of(cls, tensor: TileTensor) -> NullableTileTensor:
        """One that is not absent."""
        self = cls(tensor.dtype, tensor.layout, tensor.memory.space)
        self._tensor = tensor
        return self

    def __bool__(self) -> bool:
        return self._tensor is not None

    def __repr__(self) -> str:
        state = "given" if self else "absent"
        return f"NullableTileTensor({self.dtype}, {self.layout}, {self.space.value}, {state})"

    def value(self) -> TileTensor:
        """The tensor. ValueError where it is absent."""
        if self._tensor is None:
            raise ValueError(f"{self!r} has no memory; ask bool(...) first")
        return self._tensor
