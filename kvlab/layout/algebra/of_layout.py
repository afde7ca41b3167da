"""Queries that a tensor's layout alone answers."""

from __future__ import annotations

from kvlab.layout.algebra.int_tuple import as_int, flatten
from kvlab.layout.algebra.layout import Layout


class OfLayout:
    """The questions about ``layout`` that a tensor answers, whether its memory is there or not."""

    __slots__ = ()

    layout: Layout

    @property
    def rank(self) -> int:
        """Number of modes."""
        return self.layout.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical elements of each mode."""
        return tuple(mode.size for mode in self.layout.modes)

    @property
    def flat_rank(self) -> int:
        """Number of leaves of the shape."""
        return len(flatten(self.layout.shape))

    def dim(self, mode: int) -> int:
        """Logical elements of one mode."""
        return self.shape[as_int(mode, "mode")]

    def num_elements(self) -> int:
        """Number of logical elements (a vector counts as one)."""
        return self.layout.size
