"""Common part of the collections: all layers of a model in one array, and the views of each."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import numpy as np

from kvlab.cache.over_arrays import OverArrays
from kvlab.cache.static_params import KVCacheStaticParams
from kvlab.cache.view import KVCacheView
from kvlab.common.arrays import as_array, to_numpy, to_torch
from kvlab.common.checks import flag, index, plain
from kvlab.common.opaque import opaque_methods
from kvlab.common.torch_here import is_torch

View = TypeVar("View", bound=KVCacheView)


@opaque_methods
class KVCacheCollection(OverArrays, Generic[View]):
    """K and V of all layers: the part that paged and continuous collections have in common.

    A subclass makes the ``View`` of one layer in ``_view``, and names the axes of its ``blocks`` and their extents."""

    dtype: np.dtype[Any]

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int,
        kv_params: KVCacheStaticParams | None, *, strict: bool, axes: str,
    ) -> None:
        self.blocks, self.cache_lengths, self.lookup_table = map(as_array, (blocks, cache_lengths, lookup_table))
        shape = tuple(self.blocks.shape)
        if len(shape) != 6 or min(shape) < 1 or shape[1] > 2:
            raise ValueError(f"blocks has shape {shape}: must be 6 axes [{axes}], KV 1 or 2, none of them empty")
        self.kv_params = KVCacheStaticParams(*shape[4:], is_mla=shape[1] == 1) if kv_params is None else kv_params
        if (self.kv_params.kv_extent, self.kv_params.num_heads, self.kv_params.head_size) != (shape[1], *shape[4:]):
            raise ValueError(f"kv_params {self.kv_params} does not fit blocks of shape {shape}")
        self.max_seq_length, self.max_cache_length = max_seq_length, max_cache_length
        self.strict = flag("strict", strict)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.blocks.shape[2])

    @property
    def batch_size(self) -> int:
        """Sequences: rows of the page table."""
        return int(self.lookup_table.shape[0])

    def get_key_cache(self, layer_idx: int) -> View:
        """K of one layer, a view."""
        return self._view(0, self._layer(layer_idx))

    def get_value_cache(self, layer_idx: int) -> View:
        """V of one layer, a view. ValueError for MLA, which stores no V."""
        if self.kv_params.is_mla:
            raise ValueError("an MLA cache stores no V: read it out of get_key_cache")
        return self._view(1, self._layer(layer_idx))

    def cache_length(self, bs_idx: Any) -> Any:
        """Tokens in the cache before this step: an int, or int64 of the shape of ``bs_idx``."""
        lengths = to_numpy(self.cache_lengths, "cache_lengths")
        return plain(lengths[index("bs_idx", bs_idx, self.batch_size)].astype(np.int64))

    def with_lengths(self, cache_lengths: Any, max_seq_length: int) -> Self:
        """The same storage and table at another step: ``cache_lengths`` before it, up to ``max_seq_length`` new tokens.

        The longest length is read, which waits for a GPU that holds ``cache_lengths``."""
        lengths = as_array(cache_lengths)
        longest = max_seq_length + (int(lengths.max()) if len(lengths) else 0)
        return self._replace(cache_lengths=lengths, max_seq_length=max_seq_length, max_cache_length=longest)

    def to(self, device: Any) -> Self:
        """Over torch tensors on that device, copied if they are not there yet."""
        return self._map(lambda array, name: to_torch(array, name).to(device))

    def __repr__(self) -> str:
        _, kv, layers, _, heads, head_size = self.blocks.shape
        return (
            f"{type(self).__name__}({self._extents()}, {layers} layers, {'K and V' if kv == 2 else 'K'}, "
            f"{heads} heads x {head_size} {self.dtype}, batch {self.batch_size}, "
            f"{'torch' if is_torch(self.blocks) else 'numpy'})"
        )

    # For the subclasses.

    def _extents(self) -> str:
        """How many blocks of how many tokens, for the repr."""
        raise NotImplementedError

    def _layer(self, layer_idx: Any) -> int:
        """IndexError unless it is one of the layers, ValueError unless it is one number."""
        if np.ndim(layer_idx):
            raise ValueError(f"layer_idx has shape {np.shape(layer_idx)}: must be one integer")
        return int(index("layer_idx", layer_idx, self.num_layers))

    def _view(self, kv: int, layer: int) -> View:
        """K (0) or V (1) of one layer."""
        raise NotImplementedError
