"""Tiles that several TMA boxes fill: which box goes where."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import count, integers
from kvlab.common.drawn import Drawn
from kvlab.hardware._arrays import IntArray, frozen
from kvlab.layout.algebra.int_tuple import at_once
from kvlab.memory import Memory

from . import tma
from .mbarrier import SharedMemBarrier
from .tensor_map import TensorMapSwizzle, TmaDescriptor, descriptor_strides


@dataclass(frozen=True, eq=False)
class TMATensorTile(Drawn):
    """Destination of one ``async_copy``: a tile of shared memory, box after box.

    descriptor   of one hardware copy; its box is MAX's ``desc_shape``
    tile_shape   slowest first
    is_k_major   the order of the boxes: first dimension fastest (3-D and more), else last fastest

    >>> tile = create_tensor_tile(np.zeros((64, 128), np.float16), (32, 128), "128B")
    >>> tile.descriptor.box, tile.offsets.tolist(), tile.corners.tolist()  # elements; (row, column) of each box
    ((32, 64), [0, 2048], [[0, 0], [0, 64]])
    """

    descriptor: TmaDescriptor
    tile_shape: tuple[int, ...]
    is_k_major: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile_shape", tuple(int(n) for n in self.tile_shape))
        rank = self.descriptor.rank
        if len(self.tile_shape) != rank or not 2 <= rank <= 5 or min(self.tile_shape) < 1:
            raise ValueError(f"tile_shape {self.tile_shape} of {self.descriptor} must have its rank, 2 to 5")
        box = self.descriptor.box
        if rank == 2 and (self.tile_shape[0] % box[0] or self.tile_shape[1] % box[1]):
            raise ValueError(f"tile_shape is {self.tile_shape}: must be whole boxes of {box}; no rest is copied")
        box_bytes = self.descriptor.image_bytes
        if len(self.offsets) > 1 and box_bytes % 128:
            raise ValueError(
                f"tile_shape {self.tile_shape}: boxes of {box} take {box_bytes} bytes, not a multiple "
                f"of 128: the second one could not be copied"
            )

    @property
    def offsets(self) -> IntArray:
        """``[boxes]``: where each box starts in shared memory, in elements from the tile's first."""
        return _boxes(self.tile_shape, self.descriptor.box, self.is_k_major)[0]

    @property
    def corners(self) -> IntArray:
        """``[boxes, rank]``: where each box starts in the tensor, relative to the tile, slowest dimension first."""
        return _boxes(self.tile_shape, self.descriptor.box, self.is_k_major)[1]

    @property
    def transaction_bytes(self) -> int:
        """Summand of ``async_copy`` in the barrier's count: all boxes in full."""
        return len(self.offsets) * self.descriptor.transaction_bytes

    def async_copy(
        self, memory: Memory, address: Any, coords: Sequence[Any], barrier: SharedMemBarrier | None = None
    ) -> None:
        """DRAM -> shared memory: the tile that starts at ``coords``, INNERMOST FIRST as in PTX and MAX: (column, row).

        ``address`` (bytes) and coordinates are ints or int arrays that broadcast to ``[...]``, ``[P]`` or ``[1]``
        where ``memory`` has programs.

        >>> tile = create_tensor_tile(np.arange(32 * 16, dtype=np.int32).reshape(32, 16), (8, 8), "none")
        >>> smem = Memory(256)
        >>> tile.async_copy(smem, 0, (8, 4))  # columns 8.., rows 4..; two boxes of 4 columns
        >>> smem.image(np.int32)[[0, 4, 32]].tolist()
        [72, 88, 76]
        """
        tma.load(self.descriptor, *self._all(memory, address, coords), barrier)

    def async_store(self, memory: Memory, address: Any, coords: Sequence[Any]) -> None:
        """Shared memory -> DRAM, arguments as for :meth:`async_copy`."""
        tma.store(self.descriptor, *self._all(memory, address, coords))

    def _all(self, memory: Memory, address: Any, coords: Sequence[Any]) -> tuple[list[IntArray], Memory, IntArray]:
        """All boxes as one copy with an axis of boxes."""
        if len(coords) != self.descriptor.rank:
            raise ValueError(f"{len(coords)} coordinates {tuple(coords)!r} for a tensor of rank {self.descriptor.rank}")
        start = [integers("TMA: coordinate", x)[..., None] for x in reversed(coords)]
        at = [x + corner for x, corner in zip(start, self.corners.T, strict=True)]
        where = integers("TMA: address", address)[..., None] + self.offsets * self.descriptor.dtype.itemsize
        if memory.programs is not None and where.ndim == 1:
            where = where[None]
        return at, memory, where


@functools.lru_cache(maxsize=256)
def _boxes(tile: tuple[int, ...], box: tuple[int, ...], is_k_major: bool) -> tuple[IntArray, IntArray]:
    """2-D: row blocks, then column blocks; else every block, rounded up."""
    if len(tile) == 2:
        rows, cols = (tile[0], tile[1]) if is_k_major else (tile[1], tile[0])
        counts: tuple[int, ...] = (rows // box[0], cols // box[1])
        at_once(math.prod(counts), "boxes")
        index = np.indices(counts).reshape(2, -1)
    else:
        counts = tuple(-(-n // b) for n, b in zip(tile, box, strict=True))
        at_once(math.prod(counts), "boxes")
        index = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts, order="F" if is_k_major else "C"))
    offsets = np.arange(index.shape[1]) * math.prod(box)
    return frozen(offsets), frozen((index * np.array(box)[:, None]).T)


def _sizes(shape: Any, what: str) -> tuple[int, ...]:
    """A tuple of positive ints, or ValueError."""
    if not isinstance(shape, tuple | list) or not shape:
        raise ValueError(f"{what} is {shape!r}: must be a tuple of sizes, slowest first")
    return tuple(count(what, size, 1) for size in shape)


def create_tensor_tile(
    array: Any, tile_shape: tuple[int, ...], swizzle: Any = "none", k_major_tma: bool = True
) -> TMATensorTile:
    """A tile cut into boxes as wide as the swizzle (16 bytes without one), as MAX cuts it: the canonical K-major image.

    ValueError where a swizzled tile's rows are not whole boxes, or several boxes are not multiples of 128 bytes.

    >>> create_tensor_tile(np.zeros((64, 128), np.float16), (32, 128), "64B").descriptor
    TmaDescriptor(box 32 x 32 of 64 x 128 float16, swizzle 64B)
    """
    array, tile_shape = np.asarray(array), _sizes(tile_shape, "tile_shape")
    mode = TensorMapSwizzle.of(swizzle)
    whole_boxes(f"tile_shape {tile_shape}", tile_shape[-1], array.itemsize, mode)
    box = _ragged_shape(len(tile_shape), array.dtype, tile_shape, mode)
    return TMATensorTile(TmaDescriptor.of(array, box, mode), tuple(tile_shape), k_major_tma)


def create_tma_tile(array: Any, tile_sizes: tuple[int, ...], swizzle: Any = "none") -> TMATensorTile:
    """The simple 2-D form: the tile is one box. A swizzled box must not be wider than the swizzle.

    >>> create_tma_tile(np.zeros((64, 64), np.float16), (16, 32), "64B").transaction_bytes
    1024
    """
    tile_sizes = _sizes(tile_sizes, "tile_sizes")
    return TMATensorTile(TmaDescriptor.of(array, tile_sizes, swizzle), tile_sizes)


def create_split_tma(array: Any, smem_shape: tuple[int, ...], swizzle: Any = "128B") -> TMATensorTile:
    """The padded form: the last dimension of the tile is rounded up to whole boxes; columns past the tensor are zeros.

    >>> create_split_tma(np.zeros((256, 80), np.float16), (32, 80), "128B").tile_shape
    (32, 128)
    """
    array, smem_shape = np.asarray(array), _sizes(smem_shape, "smem_shape")
    what = len(smem_shape), array.dtype, smem_shape, swizzle
    return TMATensorTile(TmaDescriptor.of(array, _ragged_shape(*what), swizzle), _padded_shape(*what))


def _padded_shape(rank: int, dtype: Any, smem_shape: tuple[int, ...], swizzle_mode: Any) -> tuple[int, ...]:
    """The shape of a tile in shared memory: the last dimension rounded up to whole boxes.

    >>> _padded_shape(3, "bf16", (32, 1, 80), "128B")
    (32, 1, 128)
    """
    *outer, wide = _ragged_shape(rank, dtype, smem_shape, swizzle_mode)
    return (*outer, -(-smem_shape[-1] // wide) * wide)


def _ragged_shape(rank: int, dtype: Any, smem_shape: tuple[int, ...], swizzle_mode: Any) -> tuple[int, ...]:
    """The shape of one of its boxes: as wide as the swizzle, 16 bytes without one.

    >>> _ragged_shape(3, "bf16", (32, 1, 80), "128B")
    (32, 1, 64)
    """
    shape = _sizes(smem_shape, "smem_shape")
    if len(shape) != rank:
        raise ValueError(f"smem_shape {shape} has {len(shape)} dimensions: must have rank {rank}")
    return (*shape[:-1], TensorMapSwizzle.of(swizzle_mode).granularity(dtype))


def whole_boxes(name: str, row: int, itemsize: int, mode: TensorMapSwizzle) -> None:
    """ValueError unless a row of a swizzled tile, ``row`` elements, is whole boxes."""
    if mode and row * itemsize % mode.bytes:
        raise ValueError(
            f"{name}: rows of {row}*{itemsize} = {row * itemsize} B are not a multiple of {mode.bytes} B, the span of "
            f"swizzle {mode.label}"
        )


def create_kv_tile(array: Any, BN: int, BK: int, swizzle: Any = "128B") -> TMATensorTile:
    """K or V of one head: tile ``[BN, 1, BK]`` of ``array`` ``[rows, heads, head_size]``; coordinates depth, head, row.

    >>> kv = np.arange(64 * 2 * 128).reshape(64, 2, 128).astype(np.float32)
    >>> tile, smem = create_kv_tile(kv, 16, 64), Memory(16 * 64 * 4)
    >>> tile.async_copy(smem, 0, (64, 1, 32))
    >>> smem.image(np.float32)[0] == kv[32, 1, 64], tile.offsets.tolist()
    (np.True_, [0, 512])
    """
    array = np.asarray(array)
    if array.ndim != 3:
        raise ValueError(f"array has shape {array.shape}: must be [rows, heads, head_size]")
    return create_split_tma(array, (BN, 1, BK), swizzle)


def fold_kv_descriptor(array: Any, BN: int, BK: int, swizzle: Any = "128B", row_major: bool = False) -> TmaDescriptor:
    """The same tile in ONE copy (MAX's ``fold_chunks``, sm_100), S being the swizzle's width: a box of rank 4,
    ``(1, chunks, BN, S)``, over the dimensions heads, head_size / S, rows, S. It starts at (head, depth / S, row, 0).

    ``row_major``: rank 5, ``(1, BN / 8, chunks, 8, S)``: the chunks of 8 rows lie together (a page-dense image);
    it starts at (head, row / 8, depth / S, 0, 0).

    >>> fold_kv_descriptor(np.zeros((64, 2, 128), np.float16), 32, 128)
    TmaDescriptor(box 1 x 2 x 32 x 64 of 2 x 2 x 64 x 64 float16, swizzle 128B)
    """
    array = np.asarray(array)
    mode = TensorMapSwizzle.of(swizzle)
    rows, heads, depth = array.shape
    BN, BK = count("BN", BN, 1), count("BK", BK, 1)
    S = mode.bytes // array.itemsize
    chunks = BK // S
    if BK % S or chunks < 2 or depth % BK or (row_major and (BN % 8 or rows % 8)):
        raise ValueError(
            f"BK is {BK}: must be at least 2 times and a multiple of {S} (swizzle {mode.label}) and divide head_size "
            f"{depth}; row_major: BN {BN} and rows {rows} multiples of 8"
        )
    row, head, one = descriptor_strides(array)
    dims: list[tuple[int, int, int]]  # extent, stride, box of each dimension
    if row_major:
        dims = [(heads, head, 1), (rows // 8, 8 * row, BN // 8), (depth // S, S, chunks), (8, row, 8), (S, one, S)]
    else:
        dims = [(heads, head, 1), (depth // S, S, chunks), (rows, row, BN), (S, one, S)]
    shape, strides, box = zip(*dims, strict=True)
    return TmaDescriptor(Memory.over(array), array.dtype, shape, strides, box, mode)
