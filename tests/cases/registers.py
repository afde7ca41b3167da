"""Register tiles as the tests see them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.layout import TileTensor
from kvlab.memory import AddressSpace


def held(tile: TileTensor) -> np.ndarray[Any, Any]:
    """All registers of a tile that :meth:`TileTensor.stack_allocation` made, ``[programs, threads, *shape]``; those
    that were never loaded as poison."""
    return tile.memory.image(tile.dtype).reshape(len(tile.memory.bytes), *np.shape(tile.offset)[1:], *tile.shape).copy()


def in_registers(values: np.ndarray[Any, Any]) -> TileTensor:
    """``values`` ``[programs, threads, registers, elements]`` as a tile of each thread, which shows what is stored."""
    return TileTensor.from_numpy(values, space=AddressSpace.LOCAL, batch=2)
