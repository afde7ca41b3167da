"""The walk over the keys of a sequence in DRAM, one tile of BN rows after the other."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import numpy as np

from kvlab.cache import KVCacheMHAOperand, KVCacheT, MHAOperand, PagedKVCache, as_operand
from kvlab.common.checks import count
from kvlab.hardware.copies.tile_resource import DRAM, check_tile
from kvlab.layout import Layout, TileTensor
from kvlab.layout.algebra.int_tuple import flatten

IntArray = np.ndarray[Any, np.dtype[np.int64]]


def key_offsets(tile: TileTensor) -> IntArray:
    """Element offset of column 0 of every key of the tile ``[programs, BN]``; -1 past the valid rows. The tile is what
    :meth:`KVCacheIterator.next_tile` gives.

    >>> from kvlab.memory import Memory
    >>> dram = Memory.over(np.arange(12, dtype=np.float32))
    >>> key_offsets(TileTensor(dram, np.float32, Layout.row_major(2, 2), np.array([[8, 0]]), valid_rows=[[2, 1]]))
    array([[ 8, 10,  0, -1]])
    """
    first = _by_run(tile.offset)
    offset = first[..., None] + np.arange(tile.shape[0]) * flatten(tile.layout.stride)[0]
    if tile.end is not None:
        offset = np.where(offset < _by_run(tile.end)[..., None], offset, -1)
    return offset.reshape(len(first), -1)


def keys_and_columns(tile: TileTensor) -> tuple[int, int]:
    """(BN, depth) of a tile, all runs together."""
    rows, columns = tile.shape
    return rows * _by_run(tile.offset).shape[1], columns


def valid_keys(tile: TileTensor) -> IntArray:
    """Number of the tile's keys that exist ``[programs]``."""
    first, rows, pitch = _by_run(tile.offset), tile.shape[0], flatten(tile.layout.stride)[0]
    if tile.end is None:
        return np.full(len(first), rows * first.shape[1])
    return np.minimum(np.maximum(-((first - _by_run(tile.end)) // max(pitch, 1)), 0), rows).sum(axis=1)


def sub_tiles(
    tile: TileTensor, shape: tuple[int, int], row: Any, col: Any, part: tuple[int, int] | None = None
) -> TileTensor:
    """Number ``(row, col)``, ints or int arrays ``[tiles]``, of the tiles of ``shape``: ``[programs, tiles]``. Of a
    tile of several runs ``[programs, tiles, pieces]``: each as pieces of rows that no run ends in. Past the valid rows
    there are none. ``part``: the first rows and columns of each, all unless given.

    >>> from kvlab.memory import Memory
    >>> dram = Memory.over(np.arange(32, dtype=np.float32))
    >>> tile = TileTensor(dram, np.float32, Layout.row_major(2, 4), np.array([[16, 0]]), valid_rows=[[2, 1]])
    >>> strips = sub_tiles(tile, (4, 2), 0, np.arange(2))
    >>> strips.shape, strips.offset.tolist()
    ((2, 2), [[[16, 0], [18, 2]]])
    """
    part, (row, col) = part or shape, np.broadcast_arrays(row, col)
    if np.ndim(tile.offset) < 2:
        whole = tile.tile(shape, (row[None], col[None]) if row.ndim else (row, col))
        return whole if part == shape else whole.tile(part, (0, 0))
    height, runs = tile.shape[0], np.shape(tile.offset)[1]
    rows = math.gcd(height, shape[0], part[0])
    piece = row[..., None] * (shape[0] // rows) + np.arange(part[0] // rows)
    run = np.minimum(piece // (height // rows), runs - 1)
    inside = piece - run * (height // rows)
    pieces = tile.select(slice(None), run).tile((rows, shape[1]), (inside[None], (col[..., None] + 0 * piece)[None]))
    return pieces.tile((rows, part[1]), (0, 0))


def fitting_tile(name: str, tile: TileTensor, params: Any, programs: int, bounded: bool = False) -> TileTensor:
    """``tile`` with ``valid_rows``. TypeError or ValueError, which begins with ``name``, unless it is in DRAM and fits
    a buffer with these parameters and ``programs``; a ``bounded`` one takes tiles of fewer columns."""
    check_tile(name, tile, DRAM, params.dtype)
    if tile.dtype != params.dtype:
        raise ValueError(f"{name} is of {tile.dtype}: must be of {params.dtype}")
    BN, depth = keys_and_columns(tile)
    if BN != params.BN or depth > params.depth or (depth < params.depth and not bounded):
        raise ValueError(f"{name} is {BN} x {depth}: must be {params.BN} x {params.depth}")
    if len(_by_run(tile.offset)) != programs:
        raise ValueError(f"{name} is of {len(_by_run(tile.offset))} programs: must be of {programs}")
    return tile if tile.end is not None else tile.with_valid_rows(tile.shape[0])


@functools.cache
def _rows_of(rows: int, depth: int, pitch: int) -> Layout:
    return Layout((rows, depth), (pitch, 1))


def _by_run(each: Any) -> IntArray:
    """``[programs, runs]``"""
    array = np.asarray(each, np.int64)
    return array.reshape(*array.shape, *(1,) * (2 - array.ndim))


class KVCacheIterator:
    """Walks over the first ``end`` keys of one KV head, ``tile_size`` rows at a time, for all programs of a launch.

    Parameters
    ----------
    cache : the K or V cache of a layer, or another :class:`~kvlab.cache.MHAOperand`.
    tile_size : BN.
    batch_idx, kv_head_idx, end : ``[programs]`` or scalars: sequence, KV head, and the exclusive bound of its keys.
    depth : columns of the tile, the head dimension unless given.
    cache_depth : columns of a head in DRAM, where rows are to be ``num_heads * cache_depth`` apart; the cache's own row
        pitch unless given.
    head_dim_offset : first column.

    A tile is a tile tensor in DRAM ``[programs]`` of ``tile_size x depth``, whose ``valid_rows`` exist; loads bring the
    others as zeros. Its bound is that of a buffer resource, LINEAR: a column at or past ``depth`` of any row but the
    last valid one reads the neighbour. Where a page does not hold whole tiles (a kvlab extension) a tile is
    ``[programs, runs]`` of ``gcd(page_size, tile_size, starts)`` rows, none of which crosses a page; a continuous cache
    has no pages. Rows at or past ``end`` are never looked up in the page table. ``tile_start_row`` ``[programs]``
    starts at 0 and may be set.

    >>> from kvlab.cache import PagedKVCache
    >>> blocks = np.arange(3 * 4 * 1 * 8, dtype=np.float32).reshape(3, 4, 1, 8)
    >>> cache = PagedKVCache(blocks, [5], [[2, 0]], max_seq_length=1, max_cache_length=6)
    >>> iterator = KVCacheIterator(cache, 4, batch_idx=0, kv_head_idx=0, end=6)
    >>> for _ in range(3):
    ...     tile = iterator.next_tile()
    ...     print(tile.valid_rows, tile.offset, tile.load()[0, 1:3, 0, 0])
    [4] [64] [72. 80.]
    [2] [0] [8. 0.]
    [0] [0] [0. 0.]
    >>> KVCacheIterator(cache, 8, batch_idx=0, kv_head_idx=0, end=6).next_tile()  # a tile over two pages
    TileTensor(float32, (4,8):(8,1), offset [1, 2], global, bounded)
    """

    def __init__(
        self, cache: KVCacheT | MHAOperand, tile_size: int, batch_idx: Any, kv_head_idx: Any, end: Any, *,
        depth: int | None = None, cache_depth: int | None = None, head_dim_offset: int = 0,
    ) -> None:
        tile_size = count("tile_size", tile_size, least=1)
        given = {"batch_idx": batch_idx, "kv_head_idx": kv_head_idx, "end": end}
        arrays = {name: integers(name, value) for name, value in given.items()}
        try:
            batch, head, stop = np.broadcast_arrays(*arrays.values())
        except ValueError:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ValueError(f"{shapes} do not broadcast: must be [programs] or scalars") from None
        if batch.ndim != 1:
            raise ValueError(f"{', '.join(given)} broadcast to {batch.shape}: must be [programs] or scalars")
        self.cache, self.tile_size = as_operand(cache), tile_size
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
        start = integers("tile_start_row", row)
        if (start < 0).any():
            raise ValueError(f"tile_start_row is {row!r}: must not be negative")
        self._tile_start_row = np.broadcast_to(start, self.batch_idx.shape)

    def next_tile(self) -> TileTensor:
        """The tile at ``tile_start_row``, which then moves on by ``tile_size``."""
        start = self.tile_start_row
        valid = np.clip(self.end - start, 0, self.tile_size)
        page_size = self.cache.page_size
        run_rows = self.tile_size
        if page_size:
            run_rows = int(np.gcd.reduce(start[valid > 0], initial=math.gcd(run_rows, page_size)))
        first = np.arange(0, self.tile_size, run_rows)  # [runs]
        rows = np.clip(valid[:, None] - first, 0, run_rows)
        pointer = self.cache.block_paged_ptr(
            self.batch_idx[:, None], start[:, None] + first, self.kv_head_idx[:, None], self.head_dim_offset,
            tile_size=run_rows, valid=rows,
        )
        self.increment()
        layout = _rows_of(run_rows, self.depth, self.row_stride)
        offset, rows = (each[:, 0] if len(first) == 1 else each for each in (pointer.offset, rows))
        tile = TileTensor(pointer.memory, self.cache.dtype, layout, offset)
        tile.end = offset + np.where(rows > 0, (rows - 1) * self.row_stride + self.depth, 0)  # as by valid_rows=rows
        return tile

    def increment(self) -> None:
        """Pass over a tile."""
        self.tile_start_row = self.tile_start_row + self.tile_size


class SlotIterator(KVCacheIterator):
    """Walks over the places of lists of slots, the rows of ``cache.lookup_table``, as a KVCacheIterator over keys: a
    tile is ``[programs, tile_size]`` runs of one row. A place without a slot, -1 or past the pool, has no row.

    >>> from kvlab.cache import PagedKVCache
    >>> blocks = np.arange(3 * 4 * 1 * 8, dtype=np.float32).reshape(3, 4, 1, 8)
    >>> lists = PagedKVCache(blocks, [0], [[9, -1, 9, 2]], max_seq_length=1, max_cache_length=4)
    >>> tile = SlotIterator(lists, 4, batch_idx=0, kv_head_idx=0, end=4).next_tile()
    >>> key_offsets(tile)
    array([[72, -1, 72, 16]])
    """

    def next_tile(self) -> TileTensor:
        """The tile at ``tile_start_row``, which then moves on by ``tile_size``."""
        cache = cast(PagedKVCache, cast(KVCacheMHAOperand, self.cache).cache)
        table, page_size = np.asarray(cache.lookup_table), cache.page_size_
        place = self.tile_start_row[:, None] + np.arange(self.tile_size)
        listed = place < self.end[:, None]
        slot = np.where(listed, table[self.batch_idx[:, None], np.where(listed, place, 0)].astype(np.int64), -1)
        exists = (slot >= 0) & (slot < cache.storage.shape[0] * page_size)
        page, row = np.divmod(np.where(exists, slot, 0), page_size)
        offset = cache.storage.offset(page, row, self.kv_head_idx[:, None], self.head_dim_offset)
        self.increment()
        tile = TileTensor(cache.storage.memory, self.cache.dtype, _rows_of(1, self.depth, self.row_stride), offset)
        tile.end = offset + np.where(exists, self.depth, 0)
        return tile


def fitting_operand(params: Any, cache: KVCacheT | MHAOperand) -> MHAOperand:
    """``cache`` as an operand. ValueError unless it has the parameters' heads, and elements of their size."""
    operand = as_operand(cache)
    heads = operand.kv_params.num_heads
    if heads != params.kv_num_heads:
        raise ValueError(f"kv_num_heads {params.kv_num_heads} differs from the cache's {heads}")
    if operand.dtype.itemsize != params.dtype.itemsize:
        raise ValueError(f"dtype {params.dtype} has another size than the cache's {operand.dtype}")
    return operand


def buffer_walk(
    params: Any, cache: KVCacheT | MHAOperand, batch_idx: Any, head_idx: Any, end: Any, bounded: bool = False
) -> KVCacheIterator:
    """The walk of a buffer with these parameters. Rows are as far apart as the cache has them; a ``cache_depth`` other
    than ``depth`` and the cache's head dimension sets their pitch, as in MAX. ``bounded``: the tiles end with the head.

    ValueError as of :func:`fitting_operand`."""
    p, operand = params, fitting_operand(params, cache)
    head_size = operand.kv_params.head_size
    depth = min(p.depth, head_size - p.head_dim_offset) if bounded else p.depth
    own = p.depth, head_size
    return KVCacheIterator(
        operand, p.BN, batch_idx, head_idx, end, depth=depth, head_dim_offset=p.head_dim_offset,
        cache_depth=None if p.cache_depth in own else p.cache_depth,
    )


class GivenTile:
    """A walk of one tile, which the caller's iterator has already taken; its keys are counted from the tile's first."""

    def __init__(self, tile: TileTensor) -> None:
        self.tile, self.tile_start_row = tile, np.zeros(len(_by_run(tile.offset)), np.int64)

    def next_tile(self) -> TileTensor:
        """Returns that tile."""
        return self.tile


def integers(name: str, value: Any) -> IntArray:
    """``value`` as int64 with at least one axis."""
    array = np.atleast_1d(value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} is {value!r}: must be an integer or integers [programs]")
    return array.astype(np.int64)
