"""Pages in memory: page, slot, head and dim to an element, by strides."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kvlab.common.arrays import INFERENCE, as_array, dtype_of, element_strides, to_numpy, wants_grad
from kvlab.common.checks import Int64, count, index, integers
from kvlab.memory import Memory


class BlockStorage:
    """``blocks[page, slot, head, dim]``, a NumPy array or torch tensor of any strides whose last axis is contiguous.

    >>> kv = np.zeros((5, 2, 16, 2, 64), np.float32)
    >>> half = BlockStorage(kv[:, 1], "blocks")  # V of a buffer that holds K and V page by page
    >>> half.strides, half.page_stride, half.num_rows
    ((4096, 128, 64, 1), 32, 144)
    >>> int(half.offset(page=1, slot=2, head=1, dim=3))
    4419
    """

    def __init__(self, blocks: Any, name: str) -> None:
        blocks = as_array(blocks)
        shape = tuple(int(extent) for extent in blocks.shape)
        if len(shape) != 4 or min(shape) < 1:
            raise ValueError(
                f"{name} has shape {shape}: must be 4 axes [pages, page_size, heads, head_size], none of them empty"
            )
        if wants_grad(blocks):
            raise ValueError(f"{name} requires grad: must be {INFERENCE}")
        self.blocks, self.name, self.shape = blocks, name, shape
        self.dtype: np.dtype[Any] = dtype_of(blocks, name)
        self.strides = element_strides(blocks, name)
        if min(self.strides) < 0 or self.strides[3] != 1:
            raise ValueError(
                f"{name} has strides {self.strides} (elements): the last axis must be contiguous (1), none negative"
            )

    @cached_property
    def memory(self) -> Memory:
        """The bytes from the first to the last element, shared; element ``[0, 0, 0, 0]`` has address 0."""
        return Memory.over(to_numpy(self.blocks, self.name), name=self.name)

    def offset(self, page: Any, slot: Any, head: Any, dim: Any) -> Int64:
        """Elements from the first one, int64. ``page`` and ``slot`` are trusted; IndexError for a bad head or dim."""
        head = index("head_idx", head, self.shape[2])
        dim = index("head_dim_idx", dim, self.shape[3])
        return np.asarray(page * self.strides[0] + slot * self.strides[1] + head * self.strides[2] + dim)

    def check_width(self, head_dim_idx: Any, width: int) -> None:
        """IndexError unless ``width`` elements from there on end inside the head."""
        last = int(np.max(integers("head_dim_idx", head_dim_idx), initial=0)) + count("width", width)
        if width < 1 or last > self.shape[3]:
            raise IndexError(
                f"width {width} from head_dim_idx {last - width} must end inside the head of {self.shape[3]}"
            )

    # Rows. A row is all heads of one token.

    @cached_property
    def page_stride(self) -> int:
        """Rows from the first token of a page to that of the next. ValueError where rows are not dense."""
        heads, head_size = self.shape[2:]
        row = heads * head_size
        dense = self.strides[1:3] == (row, head_size)
        if not dense or self.strides[0] % row:
            raise ValueError(
                f"{self.name} has strides {self.strides} (elements): rows need heads {head_size} apart, tokens {row} "
                f"apart and pages a multiple of {row} apart; address other layouts with block_paged_ptr or row_offsets"
            )
        return self.strides[0] // row

    @property
    def num_rows(self) -> int:
        """Rows from the first of the first page to the last of the last page."""
        return (self.shape[0] - 1) * self.page_stride + self.shape[1]

    def row(self, page: Any, slot: Any) -> Int64:
        """The row of a token, int64."""
        return np.asarray(page * self.page_stride + slot)
