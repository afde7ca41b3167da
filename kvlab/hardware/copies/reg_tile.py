"""MAX's loaders through registers, executed: RegTileLoader, and its way into LDS."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware._arrays import Array, IntArray, frozen, integers, whole
from kvlab.layout import Layout, Swizzle
from kvlab.layout.int_tuple import at_once, flatten
from kvlab.memory import Memory, as_dtype

from .copy import buffer_load

__all__ = ["RegTileLoader", "RegTileWriterLDS"]


@dataclass(frozen=True)
class RegTileLoader:
    """DRAM to registers: workers share out the vectors of a tile, cyclically along each mode (``distribute``).

    thread_layout   ``(rows, cols)`` of workers with their strides: ``Layout.col_major(32, 2)`` for Q of 32x32x16
    width           elements of a vector, 16 bytes by default

    >>> loader = RegTileLoader("bf16", Layout.col_major(32, 2))
    >>> loader.vectors((32, 32))[40].tolist()  # of lane 40: (row, first column) of each vector, in register order
    [[8, 8], [8, 24]]
    """

    dtype: np.dtype[Any]
    thread_layout: Layout
    width: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "width", self.width or 16 // self.dtype.itemsize)
        _check_threads(self.thread_layout)

    def vectors(self, shape: tuple[int, int]) -> IntArray:
        """``[workers, vectors, 2]``: row and first column of each vector, in the row-major order of the registers."""
        return _vectors(self.thread_layout, *_sizes(shape), self.width)

    def load(
        self, memory: Memory, base: Any, shape: tuple[int, int], row_stride: int, num_records: Any, *,
        threads: int | None = None,
    ) -> Array:  # fmt: skip
        """Registers ``[..., workers, vectors * width]`` of the tile of ``shape`` that starts at byte ``base``.

        Zeros where a vector ends past ``num_records`` (bytes from ``base``). ``base`` and ``num_records`` broadcast to
        ``[...]``. With ``threads`` the result has that many rows; those past the layout's size do nothing (zeros).

        >>> tile = np.arange(4 * 16, dtype=np.int32).reshape(4, 16)
        >>> loader = RegTileLoader(np.int32, Layout.row_major(2, 2))
        >>> loader.load(Memory.over(tile), 0, (4, 16), 16, num_records=3 * 64)[1].tolist()
        [4, 5, 6, 7, 12, 13, 14, 15, 36, 37, 38, 39, 44, 45, 46, 47]
        """
        where, row_stride = self.vectors(shape), whole(row_stride, "row_stride")
        size = self.dtype.itemsize
        offset = (where[..., 0] * row_stride + where[..., 1]) * size
        one = (Ellipsis, None, None)
        base, num_records = (integers(x, "base, num_records")[one] for x in (base, num_records))
        values = buffer_load(memory, base, offset, self.width * size, num_records, dtype=self.dtype)
        registers = values.reshape(*values.shape[:-2], -1)
        if threads is None:
            return registers
        if at_once(whole(threads, "threads"), "threads") < registers.shape[-2]:
            raise ValueError(f"threads {threads} are fewer than the {registers.shape[-2]} workers of the thread layout")
        out = np.zeros((*registers.shape[:-2], threads, registers.shape[-1]), self.dtype)
        out[..., : registers.shape[-2], :] = registers
        return out


@dataclass(frozen=True)
class RegTileWriterLDS:
    """Registers to an LDS tile: vector (i, j) of a worker from registers ``(i * R1 + j) * width`` on.

    The swizzle acts on a worker's first vector, counted in vectors from the tile's first; the others are added to it.
    ValueError where that is not where it puts them: their distances must be multiples of its period. ``original=True``
    puts them there all the same, as MAX does.

    >>> writer = RegTileWriterLDS(np.int32, Layout.row_major(4, 2), Swizzle(1, 0, 1, "vector"))
    >>> lds = Memory(4 * 32)
    >>> writer.store(lds, 0, np.arange(32, dtype=np.int32).reshape(8, 4), (4, 8))
    >>> lds.image(np.int32).reshape(4, 8)[:, [0, 4]].tolist()
    [[0, 4], [12, 8], [16, 20], [28, 24]]
    """

    dtype: np.dtype[Any]
    thread_layout: Layout
    swizzle: Swizzle | None = None
    width: int = 0
    original: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "width", self.width or 16 // self.dtype.itemsize)
        _check_threads(self.thread_layout)

    def offsets(self, shape: tuple[int, int], row_stride: int | None = None) -> IntArray:
        """Where the vectors of a worker go, in elements from the tile's first ``[workers, vectors]``.

        ``row_stride``: elements between rows, as many as the tile is wide unless given; at least that, whole vectors.
        """
        shape = _sizes(shape)
        where = _vectors(self.thread_layout, *shape, self.width)
        pitch = shape[1] if row_stride is None else whole(row_stride, "row_stride")
        if pitch < shape[1] or pitch % self.width:
            raise ValueError(f"row_stride {pitch} must be a multiple of {self.width} elements, at least {shape[1]}")
        vector = where[..., 0] * (pitch // self.width) + where[..., 1] // self.width
        if self.swizzle is not None:
            first, alone = vector[:, :1], self.swizzle.apply(vector, self.width * self.dtype.itemsize)
            vector = vector - first + alone[:, :1]
            if not self.original and (vector != alone).any():
                raise ValueError(
                    f"{self.swizzle} of the first vectors of workers {self.thread_layout} in rows of {pitch} elements: "
                    "it puts the others elsewhere than behind these; distances of whole periods are accepted"
                )
        return vector * self.width

    def store(
        self, lds: Memory, lds_base: Any, registers: Any, shape: tuple[int, int], row_stride: int | None = None
    ) -> None:
        """Write ``registers`` ``[..., workers, vectors * width]`` as a row-major tile at byte ``lds_base``."""
        offset, registers = self.offsets(shape, row_stride), np.asarray(registers)
        expected = (offset.shape[0], offset.shape[1] * self.width)
        if registers.dtype != self.dtype or registers.shape[-2:] != expected:
            raise ValueError(f"registers {registers.shape} of {registers.dtype} are not [..., {expected[0]}, "
                             f"{expected[1]}] of {self.dtype}")  # fmt: skip
        address = integers(lds_base, "lds_base")[..., None, None] + offset * self.dtype.itemsize
        lds.store(address, registers.reshape(*registers.shape[:-1], -1, self.width))


def _check_threads(layout: Layout) -> None:
    if not isinstance(layout, Layout) or layout.rank != 2 or not layout.is_flat:
        raise ValueError(f"thread_layout {layout!r} is not a flat layout of two modes, such as Layout.col_major(32, 2)")
    if not layout.is_dense:
        raise ValueError(
            f"thread_layout {layout} does not give each of the workers 0 to {layout.size - 1} a place of its own"
        )


def _sizes(shape: tuple[int, int]) -> tuple[int, int]:
    rows, cols = (whole(extent, "shape") for extent in shape)
    at_once(rows * cols, "elements")
    return rows, cols


@functools.cache
def _vectors(threads: Layout, rows: int, cols: int, width: int) -> IntArray:
    grid_rows, grid_cols = flatten(threads.shape)
    if rows % grid_rows or cols % (grid_cols * width):
        raise ValueError(
            f"a {rows} x {cols} tile is not a multiple of {grid_rows} x {grid_cols} workers of {width} elements each"
        )
    stride_rows, stride_cols = flatten(threads.stride)
    worker, i, j = np.ogrid[: threads.size, : rows // grid_rows, : cols // (grid_cols * width)]
    row = worker // max(stride_rows, 1) % grid_rows + grid_rows * i + 0 * j
    col = width * (worker // max(stride_cols, 1) % grid_cols + grid_cols * j) + 0 * i
    return frozen(np.stack([row.reshape(threads.size, -1), col.reshape(threads.size, -1)], axis=-1))
