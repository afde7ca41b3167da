"""Protocol of a KV cache for kernels: MAX's trait ``KVCacheT``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from kvlab.cache.pointer import UnsafePointer
from kvlab.cache.row_indices import PagedRowIndices
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.hardware import RaggedTMA3DTile, TMAGather4Tile, TMATensorTile
from kvlab.layout import TileTensor


@runtime_checkable
class KVCacheT(Protocol):
    """K or V of one layer. ``bs`` is the sequence, ``tok_idx`` counts from its start; indices may be integer arrays.

    >>> from kvlab.cache import ContinuousBatchingKVCache
    >>> isinstance(ContinuousBatchingKVCache(np.zeros((2, 8, 1, 16), np.float32), [0], [1], 1, 1), KVCacheT)
    True
    """

    # Members that MAX knows at compile time.

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the stored elements."""

    kv_params: KVCacheStaticParams

    @property
    def page_size_(self) -> int:
        """Tokens of a page, 0 without pages."""

    @property
    def quantization_enabled(self) -> bool:
        """Tells whether there are scales."""

    quantization_granularity: int

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Of the scales; ``kvlab.memory.invalid`` without."""

    @property
    def device_type(self) -> type[Any]:
        """Of what a kernel on the device gets."""

    # Lengths and limits.

    def cache_lengths_nd(self) -> TileTensor:
        """Tokens of each sequence before this step, ``[batch]`` of uint32."""

    def cache_length(self, batch_idx: Any) -> Any:
        """The same of one sequence."""

    def empty_cache(self) -> bool:
        """Tells whether all cache lengths are 0."""

    def max_prompt_length(self) -> int:
        """Most new tokens."""

    def max_context_length(self) -> int:
        """Longest sequence, new tokens included."""

    @property
    def max_tile_size(self) -> Callable[[], int]:
        """Static: most rows of one window; -1 for any."""

    # Elements and scales.

    def load(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1, output_dtype: Any = None
    ) -> np.ndarray[Any, Any]:
        """``width`` elements."""

    def store(self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, val: Any) -> None:
        """Write elements."""

    def load_scale(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` scales."""

    def store_scale(self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, scales: Any) -> None:
        """Write scales."""

    def load_quantized(
        self, bs: Any, head_idx: Any, tok_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` elements as they are stored."""

    # Pointers.

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0,
        tile_size: int = 1, valid: Any = None,
    ) -> UnsafePointer:
        """To an element at the start of ``tile_size`` rows, of which ``valid`` are in use."""

    def scales_block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0
    ) -> UnsafePointer:
        """To the scale of an element."""

    def scales_raw_ptr(self) -> UnsafePointer:
        """To the first scale; null without."""

    # Rows.

    def num_kv_rows(self) -> int:
        """Of all heads, from the first to the last."""

    def row_idx(self, batch_idx: Any, start_tok_idx: Any) -> Any:
        """Of a token."""

    def get_tma_row(self, encoded_index: Any) -> Any:
        """Of an entry of a sparse index list."""

    def populate(
        self, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int,
        pair_cta: bool = False, is_leader: bool = True,
    ) -> PagedRowIndices:
        """Of the sub-tiles of a tile."""

    # TMA.

    def create_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> TMATensorTile:
        """A tile of one head."""

    def create_ragged_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> RaggedTMA3DTile:
        """One whose rows end where the copy says."""

    def create_rope_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int, padded_depth: int) -> TMATensorTile:
        """One of the rope part."""

    def create_gather4_tma_tile(
        self, *, tile_height: int = 4, tile_width: int, tile_stride: int | None = None,
        swizzle_mode: Any = "SWIZZLE_NONE", tma_dtype: Any = None, l2_promotion: Any = "NONE",
    ) -> TMAGather4Tile:
        """One of rows by number."""

    def create_rope_gather4_tma_tile(
        self, *, tile_height: int = 4, tile_width: int, padded_depth: int, swizzle_mode: Any = "SWIZZLE_NONE",
        l2_promotion: Any = "NONE",
    ) -> TMAGather4Tile:
        """One of the rope part of rows by number."""

    # Itself.

    @staticmethod
    def get_type_name() -> str:
        """The type's name."""

    def copy(self) -> Self:
        """Another view of the same memory."""
