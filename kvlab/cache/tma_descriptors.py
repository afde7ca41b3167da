"""TMA descriptors over the rows of a cache, which :mod:`kvlab.hardware` executes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.cache.storage import BlockStorage
from kvlab.common.arrays import to_numpy
from kvlab.common.checks import count
from kvlab.hardware import (
    RaggedTMA3DTile,
    TensorMapSwizzle,
    TmaDescriptor,
    TMAGather4Tile,
    TMATensorTile,
    create_kv_tile,
    create_tma_tile_gather4,
)
from kvlab.hardware.copies.tma_gather4 import _gather4_box_width
from kvlab.memory import Memory, as_dtype, bfloat16

Array = np.ndarray[Any, Any]


def padded_depth(dtype: Any, swizzle_mode: Any, depth: int) -> int:
    """``depth`` rounded up to whole swizzle widths, in elements.

    >>> padded_depth("bf16", "128B", 80), padded_depth("bf16", "64B", 80), padded_depth("fp8", "128B", 576)
    (128, 96, 640)
    """
    width = TensorMapSwizzle.of(swizzle_mode).granularity(dtype)
    return -(-count("depth", depth) // width) * width


def depth_strip(dtype: Any, swizzle_mode: Any, depth: int, BK: int | None) -> int:
    """``BK``, or the padded depth if None. ValueError unless it is whole swizzle widths."""
    width = TensorMapSwizzle.of(swizzle_mode).granularity(dtype)
    BK = padded_depth(dtype, swizzle_mode, depth) if BK is None else BK
    if count("BK", BK) < 1 or BK % width:
        label = TensorMapSwizzle.of(swizzle_mode).label
        raise ValueError(f"BK is {BK}: must be a multiple of {width} elements of {as_dtype(dtype)}, swizzle {label}")
    return BK


def kv_rows(storage: BlockStorage) -> Array:
    """All rows from the first to the last of the storage: ``[num_rows, heads, head_size]``, the same bytes.

    Rows between two pages of the view belong to other layers, or to the other half. ValueError unless rows are dense.

    >>> kv = np.arange(3 * 2 * 4 * 1 * 8).reshape(3, 2, 4, 1, 8)
    >>> rows = kv_rows(BlockStorage(kv[:, 1], "blocks"))
    >>> rows.shape, int(rows[8, 0, 0]) == int(kv[1, 1, 0, 0, 0])
    ((20, 1, 8), True)
    """
    rows, (_, _, heads, head_size) = storage.num_rows, storage.shape
    blocks, size = to_numpy(storage.blocks, storage.name), storage.dtype.itemsize
    return np.lib.stride_tricks.as_strided(
        blocks, (rows, heads, head_size), (heads * head_size * size, head_size * size, size),
        writeable=blocks.flags.writeable,
    )


class TmaTiles:
    """The tile creators of the caches: each gives a descriptor over *all* rows, for the row that ``row_idx``,
    ``populate`` or ``get_tma_row`` names. A box of rows is right as long as it stays in one page: ValueError for one of
    more rows.

    >>> from kvlab.cache import PagedKVCache
    >>> blocks = np.arange(3 * 4 * 2 * 16, dtype=np.float32).reshape(3, 4, 2, 16)
    >>> cache = PagedKVCache(blocks, [6], [[2, 0]], max_seq_length=1, max_cache_length=7)
    >>> tile, smem = cache.create_tma_tile("64B", BN=4), Memory(4 * 16 * 4, name="smem")
    >>> tile.async_copy(smem, 0, (0, 1, cache.row_idx(0, 4)))  # depth, head, row: innermost first
    >>> smem.image("float32").reshape(4, 16)[0, :4].tolist(), blocks[0, 0, 1, :4].tolist()
    ([16.0, 17.0, 18.0, 19.0], [16.0, 17.0, 18.0, 19.0])
    """

    storage: BlockStorage

    @property
    def page_size_(self) -> int:
        """Tokens of a page; 0 without pages."""
        raise NotImplementedError

    def create_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> TMATensorTile:
        """``[BN, 1, BK]`` out of ``[num_kv_rows, num_heads, head_size]``: one box for each swizzle width of the depth.

        BK : the padded depth if None; columns past ``head_size`` are zeros."""
        BK = depth_strip(self.storage.dtype, swizzle_mode, self.storage.shape[3], BK)
        return create_kv_tile(kv_rows(self.storage), self._box_rows(BN), BK, swizzle_mode)

    def create_ragged_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> RaggedTMA3DTile:
        """``[BN, BK]`` of one head of which only as many rows exist as each copy says; the others read as zeros and
        are not written."""
        BK = depth_strip(self.storage.dtype, swizzle_mode, self.storage.shape[3], BK)
        return RaggedTMA3DTile.of(kv_rows(self.storage), BM=self._box_rows(BN), BN=BK, swizzle=swizzle_mode)

    def create_rope_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int, padded_depth: int) -> TMATensorTile:
        """``[BN, 1, BK]`` bfloat16: the rope part of rows that hold ``padded_depth`` bytes of content before it.

        BK : rope values of a row; ``head_size == padded_depth + 2 * BK``. The tensor is as wide as a row although it
        starts in its middle: only columns below BK are rope. ValueError for a continuous cache."""
        rows = self._rope_rows(padded_depth)
        self._box_rows(BN)
        width = (padded_depth + 2 * depth_strip(bfloat16, swizzle_mode, BK, BK)) // 2
        if 2 * width != rows.shape[2]:
            raise ValueError(
                f"padded_depth {padded_depth} + 2 * BK {BK} must be the row of a head, {rows.shape[2]} bytes"
            )
        shape, box = (*rows.shape[:2], width), (BN, 1, TensorMapSwizzle.of(swizzle_mode).granularity(bfloat16))
        descriptor = TmaDescriptor(
            Memory.over(rows, name=self.storage.name), bfloat16, shape, (rows.shape[1] * width, width, 1), box,
            swizzle_mode, base=padded_depth,
        )
        return TMATensorTile(descriptor, (BN, 1, BK))

    def create_gather4_tma_tile(
        self, *, tile_height: int = 4, tile_width: int, tile_stride: int | None = None,
        swizzle_mode: Any = "SWIZZLE_NONE", tma_dtype: Any = None, l2_promotion: Any = "NONE",
    ) -> TMAGather4Tile:
        """``tile_height`` rows by number (``get_tma_row``), the first ``tile_width`` columns of each.

        tma_dtype : what the columns count, the storage dtype by default.
        tile_width : of a swizzled tile whole boxes, or ValueError: the descriptor's matrix is ``[num_kv_rows,
            tile_width]``, and no box hangs over it.
        tile_stride : columns from a row to the next, ``tile_width`` by default; ValueError unless that is the cache's
            own row (all heads).
        l2_promotion : a :class:`~kvlab.hardware.TensorMapL2Promotion` or its name."""
        dtype = self.storage.dtype if tma_dtype is None else as_dtype(tma_dtype)
        stride = tile_width if tile_stride is None else tile_stride
        for name, value in (("tile_width", tile_width), ("tile_height", tile_height), ("tile_stride", stride)):
            count(name, value, least=1)
        rows = kv_rows(self.storage)
        flat = rows.reshape(rows.shape[0], -1)
        if stride * dtype.itemsize != flat.shape[1] * flat.itemsize:
            raise ValueError(
                f"tile_stride {stride} of {dtype} is {stride * dtype.itemsize} bytes: must be a row of the cache, "
                f"{flat.shape[1] * flat.itemsize} bytes"
            )
        return create_tma_tile_gather4(flat.view(dtype), tile_width, swizzle_mode, tile_height, l2_promotion)

    def create_rope_gather4_tma_tile(
        self, *, tile_height: int = 4, tile_width: int, padded_depth: int, swizzle_mode: Any = "SWIZZLE_NONE",
        l2_promotion: Any = "NONE",
    ) -> TMAGather4Tile:
        """``tile_height`` rows by number, one box of each row's rope part, in bfloat16.

        tile_width : bfloat16 values from a row to the next, 320 for the row of 640 bytes. ValueError unless that is the
            cache's own row, and for a continuous cache. The tensor begins ``padded_depth`` bytes into the first row and
            is as wide as a row: a box of ``tile_width``, that of no swizzle, runs into the content of the next row.
        l2_promotion : a :class:`~kvlab.hardware.TensorMapL2Promotion` or its name."""
        rows = self._rope_rows(padded_depth)
        for name, value in (("tile_width", tile_width), ("tile_height", tile_height)):
            count(name, value, least=1)
        if rows.shape[1] != 1 or 2 * tile_width != rows.shape[2]:
            raise ValueError(
                f"tile_width {tile_width} bfloat16 values must be a row of {rows.shape[2]} bytes of one KV head; the "
                f"cache has {rows.shape[1]}"
            )
        width = _gather4_box_width(bfloat16, tile_width, swizzle_mode)
        descriptor = TmaDescriptor(
            Memory.over(rows, name=self.storage.name), bfloat16, (rows.shape[0], tile_width), (tile_width, 1),
            (1, width), swizzle_mode, base=padded_depth, l2_promotion=l2_promotion,
        )
        return TMAGather4Tile(descriptor, (tile_height, width), tile_width=width)

    def _box_rows(self, BN: int) -> int:
        """``BN`` where a page holds as many rows."""
        if count("BN", BN, least=1) > self.page_size_ > 0:
            raise ValueError(f"BN is {BN}: must be at most {self.page_size_}, the rows of a page")
        return BN

    def _rope_rows(self, padded_depth: int) -> Array:
        if self.page_size_ <= 0:
            raise ValueError("a continuous cache has no rope part beside its content: use a paged one")
        if self.storage.dtype.itemsize != 1:
            raise ValueError(
                f"blocks has dtype {self.storage.dtype}: rows of 8-bit content and bfloat16 rope are declared in bytes "
                "(an 8-bit dtype)"
            )
        rows = kv_rows(self.storage)
        if not 0 < count("padded_depth", padded_depth) < rows.shape[2]:
            raise ValueError(f"padded_depth is {padded_depth}: must be inside the row of {rows.shape[2]} bytes")
        return rows
