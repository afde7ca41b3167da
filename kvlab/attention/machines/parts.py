"""CTA models of the same threads side by side, each with columns of K, of V or of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.staging.tile.fragments import Fragments

Array = np.ndarray[Any, Any]


class Parts:
    """``ctas`` of one class; what rows have in common is the first one's. ``of_v``: those with columns of V."""

    def __init__(self, ctas: Sequence[Any], of_v: Sequence[Any]) -> None:
        self.ctas, self.of_v = list(ctas), list(of_v)

    @property
    def fetches(self) -> bool:
        """Tells whether the models may fetch ahead."""
        return len(self.ctas) == 1 or self.ctas[0].follows_beside

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        rows: Array = self.ctas[0].row_max(s)
        return rows

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware."""
        rows: Array = self.ctas[0].row_sum(p)
        return rows

    def add_values(self, p: Fragments, values: list[tuple[Any, Any, Fragments]], active: Array) -> list[Fragments]:
        """O + P V of (model, V, O), each of columns of its own, and the end of the tile."""
        found: list[Fragments] = type(self.ctas[0]).accumulate_parts(self.ctas, p, values, active)
        return found
