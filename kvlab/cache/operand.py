"""Protocol of keys or values for attention kernels: MAX's trait ``MHAOperand``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvlab.cache.pointer import UnsafePointer
from kvlab.cache.row_indices import PagedRowIndices
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.hardware import RaggedTMA3DTile, TMAGather4Tile, TMATensorTile
from kvlab.layout import Layout, TileTensor


@runtime_checkable
class MHAOperand(Protocol):
    """K or V of one layer, or their scales, wherever they lie: what the KV buffers and their iterator walk over.

    ``kv_params`` and ``token_stride`` are kvlab's: in MAX the kernels know both at compile time.

    >>> from kvlab.cache import TileTensorMHAOperand
    >>> isinstance(TileTensorMHAOperand(np.zeros((2, 5, 1, 8), np.float32)), MHAOperand)
    True
    """

    # Members that MAX knows at compile time.

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Of the scales; ``kvlab.memory.invalid`` without."""

    @property
    def page_size(self) -> int:
        """Tokens of a page, 0 without pages."""

    @property
    def quantization_enabled(self) -> bool:
        """Tells whether there are scales."""

    @property
    def quantization_granularity(self) -> int:
        """Elements that share a scale."""

    @property
    def kv_params(self) -> KVCacheStaticParams:
        """Heads and head dimension."""

    @property
    def token_stride(self) -> int:
        """Elements from a token to the next, in a page."""

    # Windows and scales. Token before head.

    def block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0, tile_size: int = 1,
        valid: Any = None,
    ) -> UnsafePointer:
        """To an element at the start of ``tile_size`` rows, of which ``valid`` are in use."""

    def block_paged_tile(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, layout_val: Layout, head_dim_idx: Any = 0,
        tile_size: int = 1,
    ) -> TileTensor:
        """The memory from there on as a tile of that layout."""

    def scales_block_paged_ptr(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any = 0
    ) -> UnsafePointer:
        """To the scale of an element; null without."""

    def scales_raw_ptr(self) -> UnsafePointer:
        """To the first scale; null without."""

    def load_scale(
        self, batch_idx: Any, start_tok_idx: Any, head_idx: Any, head_dim_idx: Any, *, width: int = 1
    ) -> np.ndarray[Any, Any]:
        """``width`` scales; zeros without."""

    # Lengths and rows.

    def cache_length(self, batch_idx: Any) -> Any:
        """Tokens of a sequence."""

    def max_context_length(self) -> int:
        """Longest sequence."""

    def num_kv_rows(self) -> int:
        """Of all tokens."""

    def row_idx(self, batch_idx: Any, start_tok_idx: Any) -> Any:
        """Of a token."""

    def populate(self, batch_idx: Any, base_kv_row: Any, *, BN: int, base_alignment: int) -> PagedRowIndices:
        """Of the sub-tiles of a tile."""

    def get_tma_row(self, encoded_index: Any) -> Any:
        """Of an entry of a sparse index list."""

    # TMA; ValueError where an operand has no such tile.

    def create_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> TMATensorTile:
        """A tile of one head."""

    def create_scale_tma_tile(self, BMN: int) -> TMATensorTile:
        """One of scales."""

    def create_ragged_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int | None = None) -> RaggedTMA3DTile:
        """One whose rows end where the copy says."""

    def create_rope_tma_tile(self, swizzle_mode: Any, *, BN: int, BK: int, padded_depth: int) -> TMATensorTile:
        """One of the rope part."""

    def create_gather4_tma_tile(self, *, tile_width: int) -> TMAGather4Tile:
        """One of rows by number."""

    def create_rope_gather4_tma_tile(self, *, tile_width: int, padded_depth: int) -> TMAGather4Tile:
        """One of the rope part of rows by number."""
