"""CTA models of the same threads side by side, each with columns of K, of V or of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.tile_spec import TileCTA

Array = np.ndarray[Any, Any]


class Parts:
    """``ctas`` of one class; what rows have in common is the first one's. ``of_v``: those with columns of V."""

    def __init__(self, ctas: Sequence[TileCTA], of_v: Sequence[TileCTA]) -> None:
        self.ctas, self.of_v = list(ctas), list(of_v)

    @property
    def fetches(self) -> bool:
        """Tells whether the models may fetch ahead."""
        return len(self.ctas) == 1 or self.ctas[0].follows_beside

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.ctas[0].row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        return self.ctas[0].row_sum(p)

    def add_values(self, p: Fragments, values: list[tuple[Any, Any, Fragments]], active: Array) -> list[Fragments]:
        """O + P V of (model, V, O), each of columns of its own, and the end of the tile."""
        return type(self.ctas[0]).accumulate_parts(self.ctas, p, values, active)
