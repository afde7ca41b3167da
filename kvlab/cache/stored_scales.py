"""The scales of a quantised cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache.pointer import UnsafePointer, null
from kvlab.cache.storage import BlockStorage
from kvlab.common.checks import Int64, count, integers
from kvlab.memory import float32, invalid


class ScaleStorage(BlockStorage):
    """``scales[page, slot, head, ceil(head_size / granularity)]`` of blocks of the given shape, of any strides.

    >>> scales = ScaleStorage(np.ones((3, 16, 2, 2), np.float32), (3, 16, 2, 128), granularity=64)
    >>> scales.slot([0, 63, 64, 127])
    array([0, 0, 1, 1])
    >>> scales.check_one_scale(60, 8)
    Traceback (most recent call last):
        ...
    ValueError: width 8 from head_dim_idx 60 crosses a multiple of the granularity 64: one load has one scale
    """

    def __init__(self, scales: Any, blocks: tuple[int, ...], granularity: int) -> None:
        super().__init__(scales, "scales")
        self.granularity, self.head_size = granularity, blocks[3]
        expected = (*blocks[:3], -(-blocks[3] // granularity))
        if self.shape != expected:
            raise ValueError(
                f"scales has shape {self.shape}: must be {expected}, one for {granularity} of the {blocks[3]} dims of "
                f"each head of blocks {blocks}"
            )
        if self.dtype.kind in "iu":
            raise ValueError(f"scales has dtype {self.dtype}: must be a floating-point one")

    def slot(self, head_dim_idx: Any) -> Int64:
        """The scale of an element: ``head_dim_idx // granularity``. IndexError outside the head."""
        dim = integers("head_dim_idx", head_dim_idx)
        if dim.size and not 0 <= dim.min() <= dim.max() < self.head_size:
            bad = int(dim.min() if dim.min() < 0 else dim.max())
            raise IndexError(f"head_dim_idx is {bad}: must be in [0, {self.head_size})")
        return dim // self.granularity

    def check_one_scale(self, head_dim_idx: Any, width: int) -> None:
        """ValueError unless the ``width`` elements from there on share their scale."""
        dim = integers("head_dim_idx", head_dim_idx)
        bad: np.ndarray[Any, Any] = np.asarray(dim % self.granularity + count("width", width) > self.granularity)
        if bad.any():
            raise ValueError(
                f"width {width} from head_dim_idx {int(dim[bad].flat[0])} crosses a multiple of the granularity "
                f"{self.granularity}: one load has one scale"
            )


class Unquantized:
    """Of a cache or an operand that has no scales."""

    quantization_enabled = False
    quantization_granularity = 1
    scale_dtype = invalid

    def scales_block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0
    ) -> UnsafePointer:
        """The null pointer."""
        return null(float32)

    def scales_raw_ptr(self) -> UnsafePointer:
        """The null pointer."""
        return null(float32)


def zeros_at(dtype: Any, width: int, *indices: Any) -> np.ndarray[Any, Any]:
    """``width`` zeros for each place, of operands that have no scales."""
    return np.zeros((*np.broadcast(*indices).shape, count("width", width, least=1)), dtype)
