"""MAX's operands: the keys or values of a cache, of a dense or of a ragged tensor, or a cache's scales."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from kvlab.cache.operand import MHAOperand
from kvlab.cache.paged import PagedKVCache
from kvlab.cache.pointer import UnsafePointer, null
from kvlab.cache.protocol import KVCacheT
from kvlab.cache.row_indices import PagedRowIndices, populate_rows
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.cache.storage import BlockStorage
from kvlab.cache.stored_scales import ScaleStorage, Unquantized, zeros_at
from kvlab.cache.tma_descriptors import depth_strip
from kvlab.common.arrays import as_array, to_numpy
from kvlab.common.checks import Int64, count, index, integers, plain
from kvlab.hardware import RaggedTMA3DTile, TmaDescriptor, TMAGather4Tile, TMATensorTile, create_kv_tile
from kvlab.layout import Layout, TileTensor
from kvlab.memory import Memory, float32


class _Windows:
    """What all operands do with a pointer."""

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to an element, at the start of ``tile_size`` rows, of which ``valid`` are in use."""
        raise NotImplementedError

    def block_paged_tile(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, layout_val: Layout, head_dim_idx: Any = 0,
        tile_size: int = 1,
    ) -> TileTensor:
        """The memory from there on as a tile of that layout (strides in elements)."""
        return self.block_paged_ptr(batch_idx, start_tok_idx, head_idx, head_dim_idx, tile_size).tile_tensor(layout_val)


class KVCacheMHAOperand(_Windows):
    """A cache as an operand: everything is the cache's. Note the order of :meth:`load_scale`: token before head.

    >>> from kvlab.cache import PagedKVCache
    >>> blocks = np.arange(3 * 4 * 2 * 8, dtype=np.float32).reshape(3, 4, 2, 8)
    >>> keys = KVCacheMHAOperand(PagedKVCache(blocks, [6], [[2, 0]], max_seq_length=1, max_cache_length=7))
    >>> keys.page_size, keys.cache_length(0), keys.row_idx(0, 5), keys.block_paged_ptr(0, 5, 1).offset
    (4, 6, 1, 24)
    """

    def __init__(self, cache: KVCacheT) -> None:
        self.cache = cache
        self.dtype, self.scale_dtype, self.page_size = cache.dtype, cache.scale_dtype, cache.page_size_
        self.quantization_enabled = cache.quantization_enabled
        self.quantization_granularity = cache.quantization_granularity

    def __getattr__(self, name: str) -> Any:
        """``cache_length`` (without the new tokens), ``row_idx``, ``populate``, the tile creators, ...: the cache's."""
        if name == "cache" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.cache, name)

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to an element, at the start of ``tile_size`` rows, of which ``valid`` are in use."""
        return self.cache.block_paged_ptr(batch_idx, start_tok_idx, head_idx, head_dim_idx, tile_size, valid)

    def load_scale(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` scales; token before head."""
        return self.cache.load_scale(batch_idx, head_idx, start_tok_idx, head_dim_idx, width=width)

    def create_scale_tma_tile(self, BMN: int) -> TMATensorTile:
        """Refused: ValueError. Its scales lie in pages."""
        raise ValueError(f"KVCacheMHAOperand has no scale_tma_tile of BMN {BMN}: the scales of a cache lie in pages")


class _Unquantized(Unquantized):
    """Of an operand that has no scales beside its elements."""

    def load_scale(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """Zeros of float32, ``width`` for each place."""
        return zeros_at(float32, width, batch_idx, start_tok_idx, head_idx, head_dim_idx)


class _Untiled:
    """Of an operand for which MAX has no TMA tiles beyond those that its class defines."""

    def _refuse(self, name: str) -> ValueError:
        return ValueError(f"{type(self).__name__} has no {name}: as in MAX, only a cache's operand has one")

    def create_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> TMATensorTile:
        """Refused: ValueError."""
        raise self._refuse("tma_tile")

    def create_scale_tma_tile(self, BMN: int) -> TMATensorTile:
        """Refused: ValueError."""
        raise self._refuse("scale_tma_tile")

    def create_ragged_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> RaggedTMA3DTile:
        """Refused: ValueError."""
        raise self._refuse("ragged_tma_tile")

    def create_rope_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int, padded_depth: int) -> TMATensorTile:
        """Refused: ValueError."""
        raise self._refuse("rope_tma_tile")

    def create_gather4_tma_tile(self, **parameters: Any) -> TMAGather4Tile:
        """Refused: ValueError."""
        raise self._refuse("gather4_tma_tile")

    def create_rope_gather4_tma_tile(self, **parameters: Any) -> TMAGather4Tile:
        """Refused: ValueError."""
        raise self._refuse("rope_gather4_tma_tile")


class KVCacheScalesMHAOperand(_Untiled, _Unquantized, _Windows):
    """The scales of a cache as an operand of their own: heads of ``head_dim_granularity`` scales. No TMA.

    ``head_dim_idx`` counts the cache's elements, of which a scale serves ``quantization_granularity``.

    >>> from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
    >>> pool = PagedKVCacheCollection.allocate(
    ...     KVCacheStaticParams(2, 128), num_pages=1, page_size=16, num_layers=1, batch_size=1, max_length=16,
    ...     dtype="float8_e4m3fn", scale_dtype="float32", quantization_granularity=64,
    ... )
    >>> pool.lookup_table[0, 0] = 0
    >>> scales = KVCacheScalesMHAOperand(pool.get_key_cache(0))
    >>> [int(scales.block_paged_ptr(0, 0, 1, d).offset) for d in (0, 63, 64)]  # two scales a head
    [2, 2, 3]
    """

    def __init__(self, cache: PagedKVCache) -> None:
        if not isinstance(cache, PagedKVCache) or cache.scale_storage is None:
            raise ValueError(f"cache {cache!r} has no scales: must be a PagedKVCache with scales")
        self.cache = cache
        self.dtype, self.page_size = cache.scale_dtype, cache.page_size_
        self.kv_params = KVCacheStaticParams(*cache.scale_storage.shape[2:])
        self.token_stride = cache.scale_storage.strides[1]

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to the scale of an element of the cache; the rules of a window are those of the cache."""
        return self.cache.scales_block_paged_ptr(batch_idx, start_tok_idx, head_idx, head_dim_idx, tile_size, valid)

    def cache_length(self, batch_idx: Any) -> Any:
        """Tokens before this step."""
        return self.cache.cache_length(batch_idx)

    def max_context_length(self) -> int:
        """Longest sequence."""
        return self.cache.max_context_length()

    def row_idx(self, batch_idx: Any, start_tok_idx: Any) -> Any:
        """The cache's."""
        return self.cache.row_idx(batch_idx, start_tok_idx)

    def num_kv_rows(self) -> int:
        """The cache's."""
        return self.cache.num_kv_rows()

    def populate(self, batch_idx: Any, base_kv_row: Any, **parameters: Any) -> PagedRowIndices:
        """The cache's."""
        return self.cache.populate(batch_idx, base_kv_row, **parameters)

    def get_tma_row(self, encoded_index: Any) -> Any:
        """The cache's."""
        return self.cache.get_tma_row(encoded_index)


class _Dense(_Untiled, _Unquantized, _Windows):
    """An operand over ``[rows, heads, D]``, its rows in one piece."""

    page_size = 0
    rows: BlockStorage

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        return self.rows.dtype

    @property
    def kv_params(self) -> KVCacheStaticParams:
        """Heads and head dimension."""
        return KVCacheStaticParams(*self.rows.shape[2:])

    @property
    def token_stride(self) -> int:
        """Elements from a token to the next."""
        return self.rows.strides[1]

    def num_kv_rows(self) -> int:
        """All tokens."""
        return self.rows.shape[1]

    def get_tma_row(self, encoded_index: Any) -> Any:
        """``encoded_index`` itself."""
        return encoded_index

    def _row(self, batch_idx: Any, token: Any) -> Int64:
        raise NotImplementedError

    def row_idx(self, batch_idx: Any, start_tok_idx: Any) -> Any:
        """The row of a token."""
        return plain(self._row(batch_idx, start_tok_idx))

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to an element. Of ``tile_size`` rows ``valid``, or one, must be there: else IndexError. Where
        ``valid`` is 0 nothing is looked up and the pointer is the one to the first element, not to be followed."""
        count("tile_size", tile_size, least=1)
        rows = np.minimum(tile_size, integers("valid", 1 if valid is None else valid))
        places = {"batch_idx": batch_idx, "start_tok_idx": start_tok_idx, "head_idx": head_idx, "d": head_dim_idx}
        batch, start, head, dim, rows = np.broadcast_arrays(*(integers(*item) for item in places.items()), rows)
        some, offset = rows > 0, np.zeros(rows.shape, np.int64)
        self._row(batch[some], start[some] + rows[some] - 1)  # the last row is there
        offset[some] = self.rows.offset(0, self._row(batch[some], start[some]), head[some], dim[some])
        return UnsafePointer(self.rows.memory, offset, self.dtype)

    def populate(
        self, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int = 1, pair_cta: bool = False,
        is_leader: bool = True,
    ) -> PagedRowIndices:
        """One sub-tile: the row of key ``base_kv_row``."""
        base = integers("base_kv_row", base_kv_row)
        return populate_rows(
            lambda batch, first, _: self._row(batch, first), batch_idx, base, BN=BN, page_size=0, pair_cta=pair_cta,
            is_leader=is_leader,
        )

    def create_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> TMATensorTile:
        """``[BN, 1, BK]`` out of ``[rows, heads, depth]``; BK is the padded depth if None."""
        BK = depth_strip(self.dtype, swizzle_mode, self.rows.shape[3], BK)
        return create_kv_tile(to_numpy(self.rows.blocks[0]), count("BN", BN, least=1), BK, swizzle_mode)


class TileTensorMHAOperand(_Dense):
    """A dense tensor ``[B, S, H, D]`` whose S tokens are all there.

    scales : ``[B, S, H, n]``, one for ``ceil(D / n)`` dims, or None.

    >>> keys = TileTensorMHAOperand(np.zeros((2, 5, 1, 8), np.float32))
    >>> keys.cache_length(1), keys.row_idx(1, 3), keys.num_kv_rows(), keys.max_context_length()
    (5, 8, 10, 5)
    """

    def __init__(self, buffer: Any, scales: Any = None) -> None:
        buffer = as_array(buffer)
        if buffer.ndim != 4:
            raise ValueError(f"buffer has shape {tuple(buffer.shape)}: must be [B, S, H, D]")
        self.batch_size, self.tokens, _, depth = map(int, buffer.shape)
        self.rows = BlockStorage(_merged(to_numpy(buffer, "buffer"))[None], "buffer")
        self.scales: ScaleStorage | None = None
        if scales is not None and as_array(scales).ndim > 0:
            scales = to_numpy(as_array(scales), "scales")
            if scales.ndim != 4:
                raise ValueError(f"scales has shape {scales.shape}: must be [B, S, H, n] for buffer {buffer.shape}")
            self.quantization_enabled, self.quantization_granularity = True, -(-depth // scales.shape[3])
            self.scales = ScaleStorage(_merged(scales)[None], self.rows.shape, self.quantization_granularity)
            self.scale_dtype = self.scales.dtype

    def cache_length(self, batch_idx: Any) -> Any:
        """S: all tokens are there."""
        return plain(np.full_like(index("batch_idx", batch_idx, self.batch_size), self.tokens))

    def max_context_length(self) -> int:
        """S."""
        return self.tokens

    def load_scale(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` scales; zeros where there are none."""
        if self.scales is None:
            return super().load_scale(batch_idx, start_tok_idx, head_idx, head_dim_idx, width=width)
        self.scales.check_width(self.scales.slot(head_dim_idx), width)
        return self.scales_block_paged_ptr(batch_idx, start_tok_idx, head_idx, head_dim_idx).load(width)

    def scales_block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0
    ) -> UnsafePointer:
        """Pointer to the scale of an element; the null pointer without scales."""
        if self.scales is None:
            return null(float32)
        row, slot = self._row(batch_idx, start_tok_idx), self.scales.slot(head_dim_idx)
        return UnsafePointer(self.scales.memory, self.scales.offset(0, row, head_idx, slot), self.scale_dtype)

    def scales_raw_ptr(self) -> UnsafePointer:
        """Pointer to the first scale; the null pointer without scales."""
        return null(float32) if self.scales is None else UnsafePointer(self.scales.memory, 0, self.scale_dtype)

    def _row(self, batch_idx: Any, token: Any) -> Int64:
        batch = index("batch_idx", batch_idx, self.batch_size)
        return np.asarray(batch * self.tokens + index("start_tok_idx", token, self.tokens))


class RaggedMHAOperand(_Dense):
    """Sequences one after the other: ``[total tokens, H, D]``, with the first row of each in ``cache_row_offsets``.

    scales : ``[total, 1]`` (per token) or ``[H, total, 1]`` (per token and head), for :meth:`create_scale_tma_tile`.

    >>> keys = RaggedMHAOperand(np.zeros((7, 1, 8), np.float32), [0, 3, 7])
    >>> keys.cache_length(1), keys.row_idx(1, 2), keys.num_kv_rows()
    (4, 5, 7)
    """

    def __init__(self, buffer: Any, cache_row_offsets: Any, scales: Any = None) -> None:
        buffer = as_array(buffer)
        if buffer.ndim != 3:
            raise ValueError(f"buffer has shape {tuple(buffer.shape)}: must be [total tokens, H, D]")
        self.rows = BlockStorage(to_numpy(buffer, "buffer")[None], "buffer")
        self.offsets = integers("cache_row_offsets", to_numpy(as_array(cache_row_offsets)))
        o = self.offsets
        if o.ndim != 1 or not o.size or o[0] < 0 or (np.diff(o) < 0).any() or o[-1] > buffer.shape[0]:
            raise ValueError(
                f"cache_row_offsets is {o.tolist()}: must be [batch + 1] numbers from 0 to {buffer.shape[0]}, none "
                "less than the one before"
            )
        self.scales = None if scales is None else to_numpy(as_array(scales), "scales")

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return int(self.offsets.size) - 1

    def cache_length(self, batch_idx: Any) -> Any:
        """Tokens of a sequence."""
        batch = index("batch_idx", batch_idx, self.batch_size)
        return plain(self.offsets[batch + 1] - self.offsets[batch])

    def max_context_length(self) -> int:
        """Not known: ValueError, as MAX refuses to compile it."""
        raise ValueError("a ragged operand does not know its longest sequence: use cache_length")

    def scales_raw_ptr(self) -> UnsafePointer:
        """Pointer to the first scale; the null pointer without scales."""
        if self.scales is None:
            return null(float32)
        return UnsafePointer(Memory.over(self.scales, name="scales"), 0, self.scales.dtype)

    def create_scale_tma_tile(self, BMN: int) -> TMATensorTile:
        """``[1, BMN]`` of the scales as ``[1, total]`` or ``[H, total]``; the number of scales is a multiple of 4."""
        if self.scales is None or self.scales.ndim not in (2, 3):
            shape = None if self.scales is None else self.scales.shape
            raise ValueError(f"scales is {shape}: must be [total, 1] or [H, total, 1]")
        if self.scales.size % 4:
            raise ValueError(f"{self.scales.size} scales: must be a multiple of 4, TMA moves 16 bytes")
        count("BMN", BMN, least=1)
        rows = 1 if self.scales.ndim == 2 else self.rows.shape[2]
        matrix = self.scales.reshape(rows, -1)
        return TMATensorTile(TmaDescriptor.of(matrix, (1, BMN)), (1, BMN))

    def _row(self, batch_idx: Any, token: Any) -> Int64:
        batch, token = index("batch_idx", batch_idx, self.batch_size), integers("start_tok_idx", token)
        length = self.offsets[batch + 1] - self.offsets[batch]
        bad = (token < 0) | (token >= length)
        if bad.any():
            token, length = np.broadcast_arrays(token, length)
            raise IndexError(f"start_tok_idx is {token[bad].flat[0]}: must be in [0, {length[bad].flat[0]})")
        return np.asarray(self.offsets[batch] + token)


_WALKED = ("block_paged_ptr", "dtype", "kv_params", "page_size", "token_stride")


def as_operand(operand: Any) -> MHAOperand:
    """``operand``, or a cache as the operand it is. TypeError that names what an object lacks to be walked over.

    >>> as_operand(3)
    Traceback (most recent call last):
        ...
    TypeError: int is no KV cache and no MHAOperand: it has no block_paged_ptr, dtype, kv_params, page_size, \
token_stride
    """
    if hasattr(operand, "page_size_") and not isinstance(operand, KVCacheMHAOperand):
        return KVCacheMHAOperand(operand)
    lacks = [name for name in _WALKED if not hasattr(operand, name)]
    if lacks:
        raise TypeError(f"{type(operand).__name__} is no KV cache and no MHAOperand: it has no {', '.join(lacks)}")
    return cast(MHAOperand, operand)


def _merged(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``[B, S, ...]`` as ``[B * S, ...]``, the same bytes. ValueError where sequences do not follow one another."""
    merged = array.reshape(-1, *array.shape[2:])
    if array.size and not np.shares_memory(merged, array):
        raise ValueError(
            f"strides of {array.strides} bytes: sequences must follow one another, B * S rows in one piece"
        )
    return merged
