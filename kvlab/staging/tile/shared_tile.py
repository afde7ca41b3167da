"""A tile that lies in shared memory, and a value that a kernel has in another form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvlab.memory import Memory


class Place(Protocol):
    """Place of a tile: its rows, the 16-byte vectors of a row, and the byte address of each."""

    @property
    def rows(self) -> int: ...
    @property
    def vectors(self) -> int: ...
    def address(self, row: Any, vector: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class SharedTile:
    """A tile that lies in shared memory: its image is its value."""

    memory: Memory
    place: Place
    dtype: np.dtype[Any]

    def tile(self) -> np.ndarray[Any, Any]:
        """``[programs, rows, cols]``."""
        values = self.memory.load(self._address()[None], self.dtype, 16 // self.dtype.itemsize)
        return values.reshape(len(values), self.place.rows, -1)

    def store(self, values: np.ndarray[Any, Any]) -> None:
        """Put ``[programs, rows, cols]`` there, of the tile's dtype."""
        vectors = np.ascontiguousarray(values).reshape(len(values), self.place.rows, self.place.vectors, -1)
        self.memory.store(self._address()[None], vectors)

    def _address(self) -> Any:
        return self.place.address(np.arange(self.place.rows)[:, None], np.arange(self.place.vectors))


@dataclass(frozen=True, eq=False)
class TileView:
    """A value of a CTA, and what the kernel has in its place: ``view`` of its tile."""

    value: Any
    view: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

    def tile(self) -> np.ndarray[Any, Any]:
        """``[programs, rows, columns]`` as the kernel has it."""
        return self.view(self.value.tile())
