"""What the emulators of Hopper's kernels share: the twins of ``kernel``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.staging import Fragments
from kvlab.staging.tile.rows_over_warps import in_turn

Array = np.ndarray[Any, Any]
NOTHING = np.float32(-(2.0**100))


def quad_sum(e: Fragments) -> Array:
    """Row sums ``[BM, 4]``, one for each lane of the quad that holds a row."""
    tile = e.tile()[0]
    pairs = tile.reshape(len(tile), -1, 4, 2).sum(3)
    return in_turn(np.add, pairs.swapaxes(1, 2))
