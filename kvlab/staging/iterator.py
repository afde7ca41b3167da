"""The walk over the keys of a sequence in DRAM, one tile of BN rows after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache import KVCacheT, MHAOperand, as_operand
from kvlab.cache.checks import count
from kvlab.drawn import Drawn
from kvlab.hardware import buffer_load
from kvlab.layout import Layout, TileTensor
from kvlab.layout.int_tuple import flatten
from kvlab.memory import AddressSpace, Memory

__all__ = ["GivenTile", "KVCacheIterator", "KVTile", "buffer_walk"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]
DRAM = (AddressSpace.GLOBAL, AddressSpace.GENERIC)
FAR = 1 << 32  # a byte offset past the bound of every resource


@dataclass(frozen=True, eq=False)
class KVTile(Drawn):
    """``BN`` rows of ``depth`` columns in DRAM, one such tile for each program.

    memory       the DRAM
    dtype        of an element
    run_base     ``[programs, runs]``: element offset of the first row of each run; void where a run has no valid row
    run_rows     rows of a run; row r of the tile is row ``r % run_rows`` of run ``r // run_rows``
    row_stride   elements between neighbouring rows of a run
    depth        columns
    bounded      whether columns past them read as 0
    valid_rows   ``[programs]``: leading rows that exist; the others read as 0

    A *run* lies in one page, so it is one strided window, reached through one buffer resource with its own LINEAR
    bound: what ends past element ``(valid - 1) * row_stride + depth`` of the run reads as 0. A column at or past
    ``depth`` of any earlier row is not caught, it reads the neighbour, unless the tile is ``bounded``: then its address
    is made one past the bound, and it reads as 0. A tile inside one page (MAX's only case) is one
    run; over smaller pages there are several, a kvlab extension.

    >>> dram = Memory.over(np.arange(12, dtype=np.float32))
    >>> base, valid = np.array([[8, 0]]), np.array([3])  # two runs of two rows of two columns, three rows valid
    >>> tile = KVTile(dram, np.dtype(np.float32), base, run_rows=2, row_stride=2, depth=2, valid_rows=valid)
    >>> tile.load(np.arange(4), 0 * np.arange(4), 2).tolist()
    [[[8.0, 9.0], [10.0, 11.0], [0.0, 1.0], [0.0, 0.0]]]
    """

    memory: Memory
    dtype: np.dtype[Any]
    run_base: IntArray
    run_rows: int
    row_stride: int
    depth: int
    valid_rows: IntArray
    bounded: bool = False

    @classmethod
    def of(cls, tile: KVTile | TileTensor) -> KVTile:
        """``tile``, or a tile tensor in DRAM ``[rows, columns]`` with contiguous rows as one, a run."""
        if isinstance(tile, cls):
            return tile
        if not isinstance(tile, TileTensor):
            raise TypeError(f"gmem_tile {tile!r} must be a KVTile or a TileTensor in DRAM")
        shape, stride = flatten(tile.layout.shape), flatten(tile.layout.stride)
        if len(shape) != 2 or stride[1] != 1 or tile.element_size != 1 or tile.memory.space not in DRAM:
            raise ValueError(f"gmem_tile {tile!r} must be rows x columns in DRAM, its columns contiguous")
        base = np.atleast_1d(np.asarray(tile.offset, np.int64))[:, None]
        valid = shape[0] if tile.valid_rows is None else tile.valid_rows
        valid_rows = np.broadcast_to(valid, len(base)).astype(np.int64)
        return cls(tile.memory, tile.dtype, base, shape[0], stride[0], shape[1], valid_rows)

    def tile_tensor(self) -> TileTensor:
        """The same as a tile tensor with ``valid_rows``; ValueError unless it is one run."""
        layout = Layout(self.shape, self.stride)
        return TileTensor(self.memory, self.dtype, layout, self.offset, valid_rows=self.valid_rows)

    @property
    def programs(self) -> int:
        """Programs: tiles side by side."""
        return self.run_base.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(BN, depth). Of the BN rows the leading ``valid_rows`` exist."""
        return self.run_base.shape[1] * self.run_rows, self.depth

    @property
    def stride(self) -> tuple[int, int]:
        """Elements from a row to the next of its run, and from a column to the next."""
        return self.row_stride, 1

    @property
    def offset(self) -> IntArray:
        """Element offset of the tile ``[programs]``, if it is one run."""
        if self.run_base.shape[1] != 1:
            runs = f"{self.run_base.shape[1]} runs of {self.run_rows} rows"
            raise ValueError(f"the tile is {runs}: it has no single offset; use row_offsets")
        return self.run_base[:, 0]

    def row_offsets(self) -> IntArray:
        """Element offset of column 0 of every row ``[programs, BN]``; -1 past the valid rows."""
        row = np.arange(self.shape[0])
        offset = self.run_base[:, row // self.run_rows] + row % self.run_rows * self.row_stride
        return np.where(row < self.valid_rows[:, None], offset, -1)

    def resource(self, row: Any, col: Any) -> tuple[IntArray, IntArray, IntArray]:
        """How buffer loads reach the elements ``(row, col)`` (int arrays that broadcast), in bytes.

        Returns the resource's base ``[programs, ...]``, voffset ``[...]`` and num_records ``[programs, ...]``.
        """
        row, col = np.asarray(row, np.int64), np.asarray(col, np.int64)
        size, runs = self.dtype.itemsize, self.run_base.shape[1]
        if runs == 1:  # one base and one bound for all
            records = np.where(self.valid_rows > 0, (self.valid_rows - 1) * self.row_stride + self.depth, 0)
            base, records = self.memory.base + self.run_base[:, 0] * size, records * size
            voffset = self._inside(col, (row * self.row_stride + col) * size)
            whole = (len(base), *voffset.shape)
            ones = (-1, *(1,) * voffset.ndim)
            return np.broadcast_to(base.reshape(ones), whole), voffset, np.broadcast_to(records.reshape(ones), whole)
        run = np.minimum(row // self.run_rows, runs - 1)
        voffset = self._inside(col, ((row - run * self.run_rows) * self.row_stride + col) * size)
        rows = np.clip(self.valid_rows[:, None] - np.arange(runs) * self.run_rows, 0, self.run_rows)
        records = np.where(rows > 0, (rows - 1) * self.row_stride + self.depth, 0) * size
        return self.memory.base + self.run_base[:, run] * size, voffset, records[:, run]

    def _inside(self, col: IntArray, voffset: IntArray) -> IntArray:
        """``voffset``, or one past every bound."""
        return np.where(col < self.depth, voffset, FAR) if self.bounded else voffset

    def load(self, row: Any, col: Any, width: int = 1) -> np.ndarray[Any, Any]:
        """``width`` elements from ``(row, col)`` on, up to 16 bytes, as a buffer load delivers them: zeros where the
        vector ends past the bound of its run. ``[programs, *shape of row and col, width]``.
        """
        base, voffset, records = self.resource(row, col)
        return buffer_load(self.memory, base, voffset, width * self.dtype.itemsize, records, dtype=self.dtype)


class KVCacheIterator:
    """Walks over the first ``end`` keys of one KV head, ``tile_size`` rows at a time, for all programs of a launch.

    Parameters
    ----------
    cache : the K or V cache of a layer, or another :class:`~kvlab.cache.MHAOperand`.
    tile_size : BN.
    batch_idx, kv_head_idx, end : ``[programs]`` or scalars: sequence, KV head, and the exclusive bound of its keys.
    depth : columns of the tile, the head size unless given.
    cache_depth : columns of a head in DRAM, where rows are to be ``num_heads * cache_depth`` apart; the cache's own row
        pitch unless given.
    head_dim_offset : first column.
    bounded : whether columns past ``depth`` are zeros, as in :class:`KVTile`.

    ``tile_start_row`` ``[programs]`` starts at 0 and may be set. Where a page does not hold whole tiles the tile is
    split into runs of ``gcd(page_size, tile_size, starts)`` rows, none of which crosses a page; a continuous cache
    has no pages. Rows at or past ``end`` are never looked up in the page table.

    >>> from kvlab.cache import PagedKVCache
    >>> blocks = np.arange(3 * 4 * 1 * 8, dtype=np.float32).reshape(3, 4, 1, 8)
    >>> cache = PagedKVCache(blocks, [5], [[2, 0]], max_seq_length=1, max_cache_length=6)
    >>> iterator = KVCacheIterator(cache, 4, batch_idx=0, kv_head_idx=0, end=6)
    >>> for _ in range(3):
    ...     tile = iterator.next_tile()
    ...     print(tile.valid_rows, tile.offset, tile.load(row=np.array([1, 2]), col=np.array([0, 0]))[0, :, 0])
    [4] [64] [72. 80.]
    [2] [0] [8. 0.]
    [0] [0] [0. 0.]
    >>> KVCacheIterator(cache, 8, batch_idx=0, kv_head_idx=0, end=6).next_tile().row_offsets()
    array([[64, 72, 80, 88,  0,  8, -1, -1]])
    """

    def __init__(
        self,
        cache: KVCacheT | MHAOperand,
        tile_size: int,
        batch_idx: Any,
        kv_head_idx: Any,
        end: Any,
        *,
        depth: int | None = None,
        cache_depth: int | None = None,
        head_dim_offset: int = 0,
        bounded: bool = False,
    ) -> None:
        tile_size = count("tile_size", tile_size, least=1)
        given = {"batch_idx": batch_idx, "kv_head_idx": kv_head_idx, "end": end}
        batch, head, stop = np.broadcast_arrays(*(_integers(name, value) for name, value in given.items()))
        if batch.ndim != 1:
            raise ValueError(f"{', '.join(given)} broadcast to {batch.shape}: expected [programs] or scalars")
        self.cache, self.tile_size, self.bounded = as_operand(cache), tile_size, bounded
        self.batch_idx, self.kv_head_idx, self.end = batch, head, stop
        head_size = self.cache.kv_params.head_size
        self.depth = head_size if depth is None else count("depth", depth, least=1)
        self.head_dim_offset = count("head_dim_offset", head_dim_offset)
        if self.head_dim_offset + self.depth > head_size:
            raise ValueError(
                f"depth {self.depth} from head_dim_offset {head_dim_offset} on must end inside the head of {head_size}"
            )
        pitch = None if cache_depth is None else count("cache_depth", cache_depth, least=1)
        self.row_stride = self.cache.token_stride if pitch is None else self.cache.kv_params.num_heads * pitch
        self.tile_start_row = 0

    @property
    def tile_start_row(self) -> IntArray:
        """First row of the next tile ``[programs]``; an int or ``[programs]`` may be assigned."""
        return self._tile_start_row

    @tile_start_row.setter
    def tile_start_row(self, row: Any) -> None:
        start = _integers("tile_start_row", row)
        if (start < 0).any():
            raise ValueError(f"tile_start_row {row!r} must not be negative")
        self._tile_start_row = np.broadcast_to(start, self.batch_idx.shape)

    def next_tile(self) -> KVTile:
        """The tile at ``tile_start_row``, which then moves on by ``tile_size``."""
        start = self.tile_start_row
        valid = np.clip(self.end - start, 0, self.tile_size)
        page_size = self.cache.page_size
        run_rows = self.tile_size
        if page_size:
            run_rows = int(np.gcd.reduce(start[valid > 0], initial=math.gcd(run_rows, page_size)))
        first = np.arange(0, self.tile_size, run_rows)  # [runs]
        pointer = self.cache.block_paged_ptr(
            self.batch_idx[:, None],
            start[:, None] + first,
            self.kv_head_idx[:, None],
            self.head_dim_offset,
            tile_size=run_rows,
            valid=np.clip(valid[:, None] - first, 0, run_rows),
        )
        self.increment()
        where = pointer.memory, self.cache.dtype, pointer.offset, run_rows, self.row_stride, self.depth
        return KVTile(*where, valid, self.bounded)

    def increment(self) -> None:
        """Pass over a tile."""
        self.tile_start_row = self.tile_start_row + self.tile_size


def buffer_walk(
    params: Any, cache: KVCacheT | MHAOperand, batch_idx: Any, head_idx: Any, end: Any, bounded: bool = False
) -> KVCacheIterator:
    """The walk of a buffer with these parameters. Rows are as far apart as the cache has them; a ``cache_depth`` other
    than ``depth`` and the cache's head size sets their pitch, as in MAX. ``bounded``: the tiles end with the head.
    """
    depth = params.depth
    if bounded:
        depth = min(depth, as_operand(cache).kv_params.head_size - params.head_dim_offset)
    p, own = params, (params.depth, as_operand(cache).kv_params.head_size)
    return KVCacheIterator(
        cache, p.BN, batch_idx, head_idx, end, depth=depth, head_dim_offset=p.head_dim_offset, bounded=bounded,
        cache_depth=None if p.cache_depth in own else p.cache_depth,
    )  # fmt: skip


class GivenTile:
    """A walk of one tile, which the caller's iterator has already taken; its keys are counted from the tile's first."""

    def __init__(self, tile: KVTile) -> None:
        self.tile, self.tile_start_row = tile, np.zeros(tile.programs, np.int64)

    def next_tile(self) -> KVTile:
        """That tile."""
        return self.tile


def _integers(name: str, value: Any) -> IntArray:
    """``value`` as int64 with at least one axis."""
    array = np.atleast_1d(value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} {value!r} must be an integer or integers [programs]")
    return array.astype(np.int64)
