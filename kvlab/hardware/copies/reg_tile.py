"""MAX's loaders through registers, executed: RegTileLoader, and its way into LDS."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import count
from kvlab.hardware._arrays import BoolArray, IntArray, frozen
from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.layout.algebra.int_tuple import at_once, flatten
from kvlab.layout.tensor.access import leading
from kvlab.memory import as_dtype

from .copy import buffer_load
from .tile_resource import DRAM, LDS, REGISTERS, check_tile, resource_of


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

    def load(self, dst: TileTensor, src: TileTensor, *, columns: Any = None) -> None:
        """Execute it: the tile ``src`` goes to the workers' registers ``dst``, or many at once, whose axes lead the
        offsets of both; that of the workers is the last one of ``dst``.

        dst : in registers, ``vectors x width`` row-major without gaps, or as many in one mode. With more threads than
            workers those past them do nothing: their registers keep what they hold.
        src : in DRAM, as for :meth:`SubTileLoaderLDS.load`: zeros where a vector ends past the bound.
        columns : of ``src`` that exist, as there.

        >>> from kvlab.memory import AddressSpace
        >>> src = TileTensor.from_numpy(np.arange(4 * 16, dtype=np.int32).reshape(4, 16)).with_valid_rows(3)
        >>> dst = TileTensor.stack_allocation(Layout.row_major(4, 4), np.int32, AddressSpace.LOCAL, threads=4)
        >>> RegTileLoader(np.int32, Layout.row_major(2, 2)).load(dst, src)
        >>> dst.to_numpy()[1].tolist()
        [[4, 5, 6, 7], [12, 13, 14, 15], [36, 37, 38, 39], [44, 45, 46, 47]]
        """
        where, base, voffset, records = self._reach(dst, src, columns)
        values = buffer_load(src.memory, base, voffset, self.width * self.dtype.itemsize, records, dtype=src.dtype)
        registers = values.reshape(*values.shape[:-2], *dst.shape, 1).view(dst.dtype)
        dst.select(..., slice(len(where))).store(registers)

    def arrives(self, dst: TileTensor, src: TileTensor, *, columns: Any = None) -> BoolArray:
        """Vectors that :meth:`load` brings from DRAM, and not as zeros: ``[leading axes, workers, vectors]``."""
        _, _, voffset, records = self._reach(dst, src, columns)
        return np.asarray(voffset + self.width * self.dtype.itemsize <= records)

    def _reach(
        self, dst: TileTensor, src: TileTensor, columns: Any
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The vectors of each worker, and the resource that reaches them; refuses what is not to be loaded."""
        check_tile("dst", dst, REGISTERS, self.dtype)
        check_tile("src", src, DRAM, self.dtype)
        lead = max(np.ndim(dst.offset) - 1, 0)
        where = self.vectors((src.shape[0] * math.prod(np.shape(src.offset)[lead:]), src.shape[1]))
        threads, size = np.shape(dst.offset)[-1:], where.shape[1] * self.width
        if not dst.is_row_major or dst.num_elements() != size:
            raise ValueError(f"dst is {dst.layout}: must be {size} elements without gaps, {where.shape[1]} vectors")
        if threads < (len(where),):
            raise ValueError(f"dst is of {threads} threads: must be of the {len(where)} workers of the thread layout")
        return where, *resource_of(src, where[..., 0], where[..., 1], lead, columns)


@dataclass(frozen=True)
class RegTileWriterLDS:
    """Registers to an LDS tile: vector (i, j) of a worker from registers ``(i * R1 + j) * width`` on.

    The swizzle acts on a worker's first vector, counted in vectors from the tile's first; the others are added to it.
    ValueError where that is not where it puts them: their distances must be multiples of its period. ``original=True``
    puts them there all the same, as MAX does.

    >>> from kvlab.memory import AddressSpace
    >>> writer = RegTileWriterLDS(np.int32, Layout.row_major(4, 2), Swizzle(1, 0, 1, "vector"))
    >>> lds = TileTensor.stack_allocation(Layout.row_major(4, 8), np.int32)
    >>> registers = np.arange(32, dtype=np.int32).reshape(8, 4)
    >>> writer.store(lds, TileTensor.from_numpy(registers, space=AddressSpace.LOCAL, batch=1))
    >>> lds.to_numpy()[:, [0, 4]].tolist()
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
        """Places of a worker's vectors, in elements from the tile's first ``[workers, vectors]``.

        ``row_stride``: elements between rows, as many as the tile is wide unless given; at least that, whole vectors.
        """
        shape = _sizes(shape)
        where = _vectors(self.thread_layout, *shape, self.width)
        pitch = shape[1] if row_stride is None else count("row_stride", row_stride)
        if pitch < shape[1] or pitch % self.width:
            raise ValueError(f"row_stride is {pitch}: must be a multiple of {self.width} elements, at least {shape[1]}")
        vector = where[..., 0] * (pitch // self.width) + where[..., 1] // self.width
        if self.swizzle is not None:
            first, alone = vector[:, :1], self.swizzle.apply(vector, self.width * self.dtype.itemsize)
            vector = vector - first + alone[:, :1]
            if not self.original and (vector != alone).any():
                raise ValueError(
                    f"{self.swizzle} of the first vectors of workers {self.thread_layout} in rows of {pitch} elements: "
                    "it puts the others elsewhere than behind these: must be distances of whole periods"
                )
        return vector * self.width

    def store(self, dst: TileTensor, src: TileTensor) -> None:
        """Write the workers' registers ``src`` to the tile ``dst``, or many at once, as :meth:`RegTileLoader.load`.

        dst : in shared memory, rows x columns, the columns contiguous.
        src : in registers, ``vectors x width`` or as many elements in one mode, row-major without gaps, of ``dtype``.
        """
        check_tile("dst", dst, LDS, self.dtype)
        check_tile("src", src, REGISTERS, self.dtype)
        if dst.rank != 2 or not dst.layout.is_flat or flatten(dst.layout.stride)[1] != 1:
            raise ValueError(f"dst is {dst.layout}: must be rows x columns, the columns contiguous")
        offset = self.offsets((dst.shape[0], dst.shape[1]), flatten(dst.layout.stride)[0])
        workers, vectors = offset.shape
        size, threads = vectors * self.width, np.shape(src.offset)[-1:]
        if src.dtype != self.dtype or src.num_elements() != size or not src.is_row_major or threads != (workers,):
            raise ValueError(
                f"src is {src.layout} of {src.dtype} and {threads} threads: must be {size} elements without gaps of "
                f"{self.dtype} and {workers}"
            )
        registers = np.asarray(src)
        address = (leading(np.asarray(dst.offset), np.ndim(dst.offset) + 2) + offset) * self.dtype.itemsize
        registers = registers.reshape(*registers.shape[: np.ndim(src.offset)], vectors, self.width)
        dst.memory.store(address + dst.memory.base, registers)


def _check_threads(layout: Layout) -> None:
    if not isinstance(layout, Layout) or layout.rank != 2 or not layout.is_flat:
        raise ValueError(f"thread_layout is {layout!r}: must be flat, of two modes, as Layout.col_major(32, 2)")
    if not layout.is_dense:
        raise ValueError(
            f"thread_layout is {layout}: must give each of the workers 0 to {layout.size - 1} a place of its own"
        )


def _sizes(shape: tuple[int, int]) -> tuple[int, int]:
    rows, cols = (count("shape", extent) for extent in shape)
    at_once(rows * cols, "elements")
    return rows, cols


@functools.cache
def _vectors(threads: Layout, rows: int, cols: int, width: int) -> IntArray:
    grid_rows, grid_cols = flatten(threads.shape)
    if rows % grid_rows or cols % (grid_cols * width):
        raise ValueError(
            f"shape is {rows} x {cols}: must be a multiple of {grid_rows} x {grid_cols} workers of {width} elements"
        )
    stride_rows, stride_cols = flatten(threads.stride)
    worker, i, j = np.ogrid[: threads.size, : rows // grid_rows, : cols // (grid_cols * width)]
    row = worker // max(stride_rows, 1) % grid_rows + grid_rows * i + 0 * j
    col = width * (worker // max(stride_cols, 1) % grid_cols + grid_cols * j) + 0 * i
    return frozen(np.stack([row.reshape(threads.size, -1), col.reshape(threads.size, -1)], axis=-1))
