"""The paged KV cache: which byte holds element ``(sequence, token, head, dim)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.cache.page_table import PageTable, check_tables
from kvlab.cache.pointer import UnsafePointer, null
from kvlab.cache.row_indices import PagedRowIndices, populate
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.cache.stored_scales import ScaleStorage
from kvlab.cache.tma_descriptors import TmaTiles
from kvlab.cache.view import KVCacheView
from kvlab.common.arrays import as_array, same_place, to_numpy
from kvlab.common.checks import Int64, count, index, integers, plain
from kvlab.common.drawn import Drawn
from kvlab.memory import as_dtype, float32, invalid


class _MaxTileSize:
    """Most rows of a tile that is one strided window: a page. Static, where the class knows its page size."""

    def __get__(self, cache: PagedKVCache | None, kind: type[PagedKVCache]) -> Callable[[], int]:
        page_size = kind.page_size_ if cache is None else cache.page_size_

        def max_tile_size() -> int:
            """Most rows of a tile that is one strided window: a page."""
            if not isinstance(page_size, int):
                raise ValueError(f"{kind.__name__} has no page size: ask a cache, or {kind.__name__}[page_size]")
            return page_size

        return max_tile_size


class PagedKVCache(TmaTiles, KVCacheView, Drawn):
    """K or V of one layer in pages, a view: it owns no memory.

    Parameters
    ----------
    blocks : ``[pages, page_size, heads, head_size]``, a NumPy array or torch tensor, usually a strided view (K and V as
        halves of one buffer; HND storage transposed). Only strides are used for addressing; the last axis must be
        contiguous.
    cache_lengths : integers ``[batch]``, tokens of each sequence that were in the cache *before* this step.
    lookup_table : integers ``[batch, columns]``, see :class:`PageTable`. Columns past a sequence's end may hold
        anything: they are never followed.
    max_seq_length : most new tokens of any sequence in this step.
    max_cache_length : longest sequence of the batch, new tokens included.
    strict : whether a store through a table entry that is no page raises (True) or is dropped (False). A load raises.
    total_num_pages : table entries at or past it are sentinels. All pages of ``blocks`` unless given; a pool whose last
        page is the null page of its sentinel has one less.
    kv_params : must fit ``blocks``; made from them if None.
    scales : ``[pages, page_size, heads, ceil(head_size / quantization_granularity)]`` for a quantised cache: one scale
        for so many dims of each head and token. Its dtype is the scale dtype. Without them, what is about scales is a
        ValueError: MAX does not compile it (a continuous cache gives zeros, as MAX's does).
    quantization_granularity : dims that share a scale.

    Indices are ints or integer arrays that broadcast against each other; ``tok_idx`` counts from the start of the
    sequence. All arithmetic is 64-bit. An index out of range raises IndexError, a table entry that is no page
    ValueError. The index methods need arrays in CPU memory.

    >>> blocks = np.arange(3 * 4 * 2 * 8, dtype=np.float32).reshape(3, 4, 2, 8)
    >>> cache = PagedKVCache(blocks, [6], [[2, 0, -1]], max_seq_length=1, max_cache_length=7)
    >>> cache.load(0, 1, np.array([3, 4]), 0, width=4)  # head 1 of the last token in page 2 and the first in page 0
    array([[184., 185., 186., 187.],
           [  8.,   9.,  10.,  11.]], dtype=float32)
    >>> cache.row_idx(0, 3), cache.block_paged_ptr(0, 3, 1).offset
    (11, 184)
    >>> cache.load(0, 0, 8, 0)
    Traceback (most recent call last):
        ...
    ValueError: lookup_table[0, 2] is -1, which is none of the pages [0, 3): token 8 of sequence 0 has no page
    """

    _arrays = (*KVCacheView._arrays, "scales")
    _settings = (*KVCacheView._settings, "total_num_pages", "quantization_granularity")

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int, *,
        strict: bool = True, total_num_pages: int | None = None, kv_params: KVCacheStaticParams | None = None,
        scales: Any = None, quantization_granularity: int = 1,
    ) -> None:
        super().__init__(
            blocks, cache_lengths, lookup_table, max_seq_length, max_cache_length,
            strict=strict, num_blocks=total_num_pages, kv_params=kv_params,
        )
        if self.page_size_ != self.storage.shape[1]:
            raise ValueError(f"blocks has pages of {self.storage.shape[1]} tokens, not those of {type(self).__name__}")
        check_tables(self.cache_lengths, self.lookup_table, self.page_size_)
        self.quantization_granularity = count("quantization_granularity", quantization_granularity, least=1)
        self.scales = None if scales is None else as_array(scales)
        self.scale_storage: ScaleStorage | None = None
        if self.scales is not None:
            same_place(blocks=self.blocks, scales=self.scales)
            self.scale_storage = ScaleStorage(self.scales, self.storage.shape, self.quantization_granularity)

    @property
    def page_size_(self) -> int:
        """Tokens of a page."""
        return self.storage.shape[1]

    def __class_getitem__(cls, page_size: int) -> type[PagedKVCache]:
        """The class of caches with pages of so many tokens, as MAX's has the page size for a parameter.

        >>> PagedKVCache[16].max_tile_size()
        16
        """
        return _with_page_size(count("page_size", page_size, least=1))

    @staticmethod
    def get_type_name() -> str:
        """The type's name, for messages and traces."""
        return "PagedKVCache"

    max_tile_size = _MaxTileSize()

    def get_tma_row(self, encoded_index: Any) -> Any:
        """The row of the token that a sparse index list names by ``page * page_size + slot``: int or int64."""
        encoded = index("encoded_index", encoded_index, self.storage.shape[0] * self.page_size_)
        return plain(self.storage.row(*np.divmod(encoded, self.page_size_)))

    def populate(
        self, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int, pair_cta: bool = False,
        is_leader: bool = True, valid: Any = None,
    ) -> PagedRowIndices:
        """The rows of keys ``[base_kv_row, base_kv_row + BN)``, one tile for each program.

        base_alignment : what ``base_kv_row`` is promised to be a multiple of (else ValueError), at least the page size
            where a tile spans pages. A tile within a page is only known by its first row, not to end in that page.
        pair_cta, is_leader : whether two CTAs load the tile together, and which of them this is; the rows are those of
            the whole tile, see :meth:`PagedRowIndices.k_copies`.
        valid : leading keys in use, an int or one for each program. Sub-tiles without one are not looked up and get
            row 2**30, which TMA reads as zeros. Without ``valid`` a null page is a page like any other."""
        table = PageTable(self.page_table.entries, self.page_size_, self.storage.shape[0])
        return populate(
            table, self.storage, batch_idx, base_kv_row, BN=BN, base_alignment=base_alignment, valid=valid,
            pair_cta=pair_cta, is_leader=is_leader,
        )

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to an element, from which on ``tile_size`` tokens lie ``token_stride`` elements apart.

        tile_size : rows of the window. ValueError unless it divides the page size and the window ends in the page it
            starts in; smaller pages are addressed row by row, see :meth:`row_offsets`.
        valid : rows of the window in use, an int or one for each program. Where it is 0 or less nothing is looked up
            and the pointer is the one to the first element of ``blocks``, not to be followed."""
        start, rows = self._window(start_tok_idx, tile_size, valid)
        return self._pointer(batch_idx, start, head_idx, head_dim_idx, rows)

    def _window(self, start_tok_idx: Any, tile_size: int, valid: Any) -> tuple[Int64, Int64]:
        """First token and rows in use of windows that keep the rules of :meth:`block_paged_ptr`."""
        if count("tile_size", tile_size) < 1 or self.page_size_ % tile_size:
            raise ValueError(
                f"tile_size is {tile_size}: must divide the page size {self.page_size_}; tiles over smaller pages go "
                "by row_offsets"
            )
        rows = np.minimum(tile_size, integers("valid", tile_size if valid is None else valid))
        start = integers("start_tok_idx", start_tok_idx)
        crossing = (rows > 0) & (start % self.page_size_ + rows > self.page_size_)
        if crossing.any():
            raise ValueError(
                f"start_tok_idx {np.broadcast_to(start, crossing.shape)[crossing][0]}: a tile of {tile_size} rows from "
                f"there crosses the end of its page of {self.page_size_} tokens; start tiles on multiples of "
                f"{tile_size}"
            )
        return start, rows

    # Quantisation.

    @property
    def quantization_enabled(self) -> bool:
        """Tells whether the cache has scales."""
        return self.scale_storage is not None

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """The dtype of the scales; ``kvlab.memory.invalid``, which has no bytes, where there are none."""
        return invalid if self.scale_storage is None else self.scale_storage.dtype

    @property
    def head_dim_granularity(self) -> int:
        """Scales of a head of one token: ``ceil(head_size / quantization_granularity)``."""
        return -(-self.kv_params.head_size // self.quantization_granularity)

    def load(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1, output_dtype: Any = None
    ) -> np.ndarray[Any, Any]:
        """``width`` contiguous elements ``[..., width]``, cast to ``output_dtype`` if given.

        Quantised: the stored values, cast to the scale dtype, times the ONE scale of the first, cast to
        ``output_dtype``, which must be named and differ from the storage dtype; ValueError too where the elements do
        not all belong to that scale, and for uint8, which holds two elements of 4 bits. The stored values as they are:
        :meth:`load_quantized`."""
        if not self.quantization_enabled:
            return super().load(bs, head_idx, tok_idx, head_dim_idx, width=width, output_dtype=output_dtype)
        out = None if output_dtype is None else as_dtype(output_dtype)
        if out is None or out == self.dtype:
            raise ValueError(
                f"output_dtype {output_dtype} of a cache quantised to {self.dtype}: name another one; load_quantized "
                "gives the stored values"
            )
        if self.dtype == np.uint8:
            raise ValueError("a quantised cache of uint8 holds two elements a byte: load_quantized gives the bytes")
        self._scales().check_one_scale(head_dim_idx, width)
        value = self._stored(bs, head_idx, tok_idx, head_dim_idx, width).astype(self.scale_dtype)
        return (value * self.load_scale(bs, head_idx, tok_idx, head_dim_idx)).astype(out)

    def load_quantized(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` contiguous stored elements ``[..., width]`` without their scale. ValueError unless quantised."""
        self._scales()
        return self._stored(bs, head_idx, tok_idx, head_dim_idx, width)

    def load_scale(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` scales ``[..., width]`` from slot ``head_dim_idx // quantization_granularity`` on."""
        scales = self._scales()
        slot = scales.slot(head_dim_idx)
        scales.check_width(slot, width)
        offset = scales.offset(*self.page_table.find(bs, tok_idx), head_idx, slot)
        return scales.memory.load(offset * scales.dtype.itemsize, scales.dtype, width)

    def store_scale(self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, scales: Any) -> None:
        """Write ``scales[..., width]``, of the scale dtype, from that slot on; else as :meth:`store`."""
        storage = self._scales()
        self._write(storage, bs, head_idx, tok_idx, storage.slot(head_dim_idx), scales)

    def scales_block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """Pointer to the scale of an element, from which on ``tile_size`` tokens' scales lie equally far apart.

        ``tile_size`` and ``valid`` as in :meth:`block_paged_ptr`. ValueError unless quantised."""
        scales = self._scales()
        start, rows = self._window(start_tok_idx, tile_size, valid)
        place = self.page_table.find(batch_idx, start, rows > 0)
        offset = scales.offset(*place, head_idx, scales.slot(head_dim_idx))
        return UnsafePointer(scales.memory, np.where(rows > 0, offset, 0), scales.dtype)

    def scales_raw_ptr(self) -> UnsafePointer:
        """Pointer to the first scale; the null pointer, which is false, where there are none."""
        if self.scale_storage is None:
            return null(float32)
        return UnsafePointer(self.scale_storage.memory, 0, self.scale_dtype)

    def _scales(self) -> ScaleStorage:
        if self.scale_storage is None:
            raise ValueError(f"{self!r} has no scales: pass scales= and quantization_granularity=")
        return self.scale_storage

    def _entries(self) -> np.ndarray[Any, Any]:
        return to_numpy(self.lookup_table, "lookup_table")


@functools.cache
def _with_page_size(page_size: int) -> type[PagedKVCache]:
    members = {"page_size_": page_size, "__module__": __name__}
    return type(f"PagedKVCache[{page_size}]", (PagedKVCache,), members)
