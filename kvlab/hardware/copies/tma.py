"""TMA copies, executed: a box between a tensor in DRAM and its image in shared memory.

Loads: elements outside the tensor arrive as zeros, negative coordinates included, and the mbarrier counts the full box
in any case (measured on an H100, tests/data/h100_tma.json.gz). Stores write whole chunks of 16 bytes: the innermost
extent is rounded up to a multiple of them, so that up to 15 bytes behind the end of a row are overwritten; of the other
dimensions nothing past the end is written (measured on an H100, tests/data/h100_tma_store.json). No store may start at
a negative coordinate: CUDA's programming guide (tensor copies, "negative indices and out of bounds") lets loads alone
have negative ones, and an H100 met a store with one by an illegal instruction (benchmarks/NOTES.md)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.common.checks import integers
from kvlab.hardware._arrays import Array, IntArray, frozen
from kvlab.memory import Memory

from .mbarrier import SharedMemBarrier
from .tensor_map import TmaDescriptor


def load(
    descriptor: TmaDescriptor, coords: Sequence[Any], memory: Memory, address: Any,
    barrier: SharedMemBarrier | None = None,
) -> None:
    """``cp.async.bulk.tensor`` to shared memory: the box that starts at ``coords`` goes to ``address`` of ``memory``.

    coords    one for each dimension, slowest first (PTX counts from the innermost), in elements; may be negative. The
              innermost times the element size must be a multiple of 16 bytes.
    address   bytes, a multiple of 128
    barrier   is told of ``descriptor.transaction_bytes`` for every box

    Coordinates and address are ints or int arrays that broadcast to ``[...]``: one box each. Where ``memory`` has
    programs the leading axis is theirs.

    >>> tensor = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    >>> smem, d = Memory(256), TmaDescriptor.of(tensor, (8, 8))
    >>> load(d, (5, 8), smem, 0)
    >>> smem.image(np.int32).reshape(8, 8)[:4, 0].tolist()
    [88, 104, 120, 0]
    >>> load(d, (0, 3), smem, 0)
    Traceback (most recent call last):
        ...
    ValueError: TMA: innermost coordinate 3 of 4 bytes an element is not a multiple of 16 bytes (illegal instruction)
    """
    at, where = _place(descriptor, coords, memory, address)
    rows = _coordinates(descriptor, at[:-1])
    _to_shared(descriptor, rows, at[-1], memory, where, math.prod(descriptor.smem_box[:-1]))
    if barrier is not None:
        barrier.complete_tx(descriptor.transaction_bytes * _boxes(memory, where))


def store(descriptor: TmaDescriptor, coords: Sequence[Any], memory: Memory, address: Any) -> None:
    """``cp.async.bulk.tensor`` from shared memory: the image at ``address`` goes to the box that starts at ``coords``.

    Arguments as for :func:`load`, but no coordinate may be negative. What lies past the tensor's end is neither read
    nor written, except that rows end with whole chunks of 16 bytes (``descriptor.stored_extent`` elements): what lies
    behind a shorter row is overwritten. :class:`~kvlab.memory.OutOfBounds` where that is no byte of ``source``.

    >>> tensor = np.zeros((8, 8), np.int32)
    >>> smem, d = Memory(128), TmaDescriptor.of(tensor, (8, 4))
    >>> smem.store(0, np.arange(32, dtype=np.int32))
    >>> store(d, (6, 4), smem, 0)
    >>> tensor[5:, 2:].tolist()
    [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 2, 3], [0, 0, 4, 5, 6, 7]]
    >>> view = tensor[:, :5]                                                      # its row ends 12 bytes early
    >>> store(TmaDescriptor.of(view, (8, 4)), (0, 4), smem, 0)
    >>> tensor[6:].tolist()
    [[0, 0, 0, 0, 24, 25, 26, 27], [0, 0, 0, 0, 28, 29, 30, 31]]
    >>> store(d, (-1, 4), smem, 0)
    Traceback (most recent call last):
        ...
    ValueError: TMA: a store at coordinates (-1, 4) is an illegal instruction: only loads may have negative ones
    """
    at, where = _place(descriptor, coords, memory, address)
    negative = np.any([start < 0 for start in at], axis=0)
    if negative.any():
        bad = tuple(int(start[negative].flat[0]) for start in at)
        raise ValueError(
            f"TMA: a store at coordinates {bad} is an illegal instruction: only loads may have negative ones"
        )
    rows = _coordinates(descriptor, at[:-1])
    source, valid, width = _elements(descriptor, rows, at[-1], descriptor.stored_extent)
    image = _chunks(descriptor, where, math.prod(descriptor.smem_box[:-1]), width)
    value = memory.load(image, descriptor.dtype, width, mask=valid)
    every = value.shape[:-1]  # programs that share their coordinates write one after the other
    descriptor.source.store(np.broadcast_to(source, every), value, mask=np.broadcast_to(valid, every))


def gather4(
    descriptor: TmaDescriptor, rows: Any, column: Any, memory: Memory, address: Any,
    barrier: SharedMemBarrier | None = None,
) -> None:
    """``cp.async.bulk.tensor...tile::gather4`` (sm_100): four ``rows`` ``[..., 4]`` of a matrix, from ``column`` on.

    The descriptor has rank 2 and a box of one row; the four rows lie one under the other as those of one box. A row
    outside the tensor arrives as zeros (not measured).

    >>> tensor = np.arange(8 * 8, dtype=np.int32).reshape(8, 8)
    >>> smem = Memory(64)
    >>> gather4(TmaDescriptor.of(tensor, (1, 4)), [6, 1, 9, 1], 4, smem, 0)
    >>> smem.image(np.int32).reshape(4, 4).tolist()
    [[52, 53, 54, 55], [12, 13, 14, 15], [0, 0, 0, 0], [12, 13, 14, 15]]
    """
    if descriptor.rank != 2 or descriptor.box[0] != 1:
        raise ValueError(f"gather4: {descriptor} must have rank 2 and a box of one row")
    four = integers("gather4: rows", rows)
    if four.ndim < 1 or four.shape[-1] != 4:
        raise ValueError(f"gather4: rows has shape {four.shape}: must be [..., 4]")
    (_, at), where = _place(descriptor, (four[..., 0], column), memory, address)
    _to_shared(descriptor, [np.broadcast_to(four, (*where.shape, 4))], at, memory, where, 4)
    if barrier is not None:
        barrier.complete_tx(4 * descriptor.transaction_bytes * _boxes(memory, where))


def _boxes(memory: Memory, where: IntArray) -> int:
    """Boxes of one CTA, whose barrier is told."""
    return where.size if memory.programs is None else math.prod(where.shape[1:])


def _place(d: TmaDescriptor, coords: Sequence[Any], memory: Memory, address: Any) -> tuple[list[IntArray], IntArray]:
    """Coordinates and addresses broadcast to ``[...]`` (with a program axis if the memory has one), or ValueError."""
    if len(coords) != d.rank:
        raise ValueError(f"TMA: {len(coords)} coordinates {tuple(coords)!r} for a tensor of rank {d.rank}")
    arrays = [np.asarray(x) for x in (*coords, address)]
    if any(array.dtype.kind not in "iu" for array in arrays):
        raise ValueError(f"TMA: coordinates {tuple(coords)!r} and address {address!r} must be integers")
    if memory.programs is not None and not any(array.ndim for array in arrays):
        arrays[-1] = arrays[-1][None]
    *at, where = np.broadcast_arrays(*(array.astype(np.int64) for array in arrays))
    inner = at[-1] * d.dtype.itemsize % 16 != 0
    if inner.any():
        raise ValueError(
            f"TMA: innermost coordinate {int(at[-1][inner].flat[0])} of {d.dtype.itemsize} bytes an element is not a "
            f"multiple of 16 bytes (illegal instruction)"
        )
    if (where % 128).any():
        bad = int(where[where % 128 != 0].flat[0])
        raise ValueError(f"TMA: shared-memory address {bad} is not a multiple of 128 bytes (misaligned address)")
    return at, where


def _coordinates(d: TmaDescriptor, at: Sequence[IntArray]) -> list[IntArray]:
    """The coordinate of every row of the box in each outer dimension: ``[..., rows]`` each."""
    steps = _steps(d.smem_box[:-1], d.element_strides[:-1])
    return [start[..., None] + step for start, step in zip(at, steps, strict=True)]


@functools.lru_cache(maxsize=256)
def _steps(extents: tuple[int, ...], strides: tuple[int, ...]) -> tuple[IntArray, ...]:
    index = np.indices(extents).reshape(len(extents), math.prod(extents))
    return tuple(frozen(i * step) for i, step in zip(index, strides, strict=True))


def _elements(d: TmaDescriptor, rows: Sequence[IntArray], column: IntArray, extent: int) -> tuple[IntArray, Array, int]:
    """Byte addresses in DRAM ``[..., rows, pieces]``, which of them lie inside the tensor with rows of ``extent``
    elements, and elements of a piece: 16 bytes, or one element where the rows do not end with a whole 16 bytes."""
    size = d.dtype.itemsize
    width = 16 // size if extent * size % 16 == 0 else 1
    inner = column[..., None, None] + width * np.arange(d.box[-1] // width)
    inside = (inner >= 0) & (inner < extent)
    offset = inner
    for coordinate, extent, stride in zip(rows, d.shape, d.strides, strict=False):
        inside = inside & ((coordinate >= 0) & (coordinate < extent))[..., None]
        offset = offset + (coordinate * stride)[..., None]
    return d.base + offset * size, inside, width


def _chunks(d: TmaDescriptor, address: IntArray, rows: int, width: int) -> IntArray:
    """Byte addresses in shared memory of the pieces: ``[..., rows, pieces]``."""
    linear = d.pitch * np.arange(rows)[:, None] + np.arange(d.box[-1] // width) * width * d.dtype.itemsize
    return d.swizzle.swizzle()(address[..., None, None] + linear)


def _to_shared(
    d: TmaDescriptor, rows: Sequence[IntArray], column: IntArray, memory: Memory, address: IntArray, count: int
) -> None:
    source, inside, width = _elements(d, rows, column, d.shape[-1])
    value = d.source.load(source, d.dtype, width, mask=inside)
    image = _chunks(d, address, count, 16 // d.dtype.itemsize)
    memory.store(image, value.reshape(*value.shape[:-2], -1, 16 // d.dtype.itemsize))
