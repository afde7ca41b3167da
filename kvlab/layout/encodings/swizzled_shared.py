"""Shared memory with XOR swizzles of the vectors of a row: Triton's general encoding and AMD's rotating one."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.layout.encodings.base import Ints, Matrix, cover, need, shape_per_cta
from kvlab.layout.encodings.shared import SharedEncoding
from kvlab.layout.linear.linear_layout import LinearLayout


@dataclass(frozen=True)
class SwizzledSharedLayout(SharedEncoding):
    """Rows along ``order[0]``; the vectors of ``vec`` elements of row r are XORed with ``r // per_phase % max_phase``.

    ``offset = r * NC + (c ^ ((r // per_phase) % max_phase * vec % NC))`` with NC columns: a swizzle wider than a row
    wraps. Further dimensions follow in ``order``; a tensor of rank 1 is not swizzled.

    >>> s = SwizzledSharedLayout(vec=2, per_phase=1, max_phase=4, order=[1, 0])
    >>> s.offsets((4, 8)).tolist()[1]
    [10, 11, 8, 9, 14, 15, 12, 13]
    """

    vec: int
    per_phase: int
    max_phase: int
    order: Ints
    cga_layout: Matrix = ()

    def verify(self) -> None:
        sizes = (self.vec, self.per_phase, self.max_phase)
        need(all(n > 0 and n & (n - 1) == 0 for n in sizes), self, "vec, per_phase, max_phase must be powers of two")
        need(sorted(self.order) == list(range(len(self.order))), self, "order must be a permutation of the dimensions")

    def phase(self, row: int) -> int:
        """By how many vectors the columns of a row move."""
        return row // self.per_phase % self.max_phase

    def pattern_shape(self) -> Ints:
        """At least 64 columns (128 bytes of 2-byte elements) and the rows of one period."""
        sizes = [max(64, self.vec * self.max_phase), self.period(), *(1,) * len(self.order)]
        return tuple(sizes[self.order.index(axis)] for axis in range(len(self.order)))

    def period(self) -> int:
        """Rows after which the pattern starts again, 8 at least."""
        return max(8, self.per_phase * self.max_phase)

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == len(self.order), self, f"shape is {tuple(shape)}: must be of rank {len(self.order)}")
        sizes = shape_per_cta(self.cga_layout, shape)
        if len(shape) == 1:
            tile = LinearLayout.identity1d(sizes[0], "offset", "dim0")
            return cover(tile, self.cga_layout, shape)
        cols, rows = sizes[self.order[0]], sizes[self.order[1]]
        bases = [(0, 1 << bit) for bit in range(cols.bit_length() - 1)]
        bases += [(1 << bit, self.vec * self.phase(1 << bit) % cols) for bit in range(rows.bit_length() - 1)]
        tile = LinearLayout({"offset": bases}, {f"dim{self.order[1]}": rows, f"dim{self.order[0]}": cols})
        for axis in self.order[2:]:
            tile *= LinearLayout.identity1d(sizes[axis], "offset", f"dim{axis}")
        return cover(tile, self.cga_layout, shape)


@dataclass(frozen=True)
class AMDRotatingSharedLayout(SwizzledSharedLayout):
    """Swizzled layout whose phase is XORed with the number of its period: rows ``max_phase * per_phase`` apart start
    elsewhere, so that reads down a column spread too (gfx942, the V operand). Gluon has no class for it.

    >>> AMDRotatingSharedLayout(vec=1, per_phase=1, max_phase=2, order=[1, 0]).offsets((4, 2)).tolist()
    [[0, 1], [3, 2], [5, 4], [6, 7]]
    """

    def phase(self, row: int) -> int:
        return row // self.per_phase % self.max_phase ^ row // (self.per_phase * self.max_phase) % self.max_phase

    def period(self) -> int:
        return max(8, self.per_phase * self.max_phase**2)
