"""Common part of caches and collections: made over arrays of one library, made again over those of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from kvlab.common.arrays import to_numpy, to_torch


class OverArrays:
    """A cache or a collection, which its constructor's arguments, kept as attributes of the same names, make again.

    ``_arrays`` names those that are arrays of NumPy or torch (or None), ``_settings`` the others."""

    _arrays: ClassVar[tuple[str, ...]] = ("blocks", "cache_lengths", "lookup_table")
    _settings: ClassVar[tuple[str, ...]] = ("max_seq_length", "max_cache_length", "kv_params", "strict")

    def numpy(self) -> Self:
        """Over NumPy arrays, the same bytes (bf16 by its bits). ValueError unless all of it is in CPU memory."""
        return self._map(to_numpy)

    def torch(self) -> Self:
        """Over torch tensors, the same bytes (bf16 by its bits)."""
        return self._map(to_torch)

    def _map(self, convert: Callable[[Any, str], Any]) -> Self:
        """The same over ``convert(array, name)`` of each array."""
        arrays = {name: getattr(self, name) for name in self._arrays}
        return self._replace(**{name: convert(array, name) for name, array in arrays.items() if array is not None})

    def _replace(self, **changes: Any) -> Self:
        """The same with other values of some arguments."""
        fields = {name: getattr(self, name) for name in (*self._arrays, *self._settings)}
        return type(self)(**(fields | changes))
