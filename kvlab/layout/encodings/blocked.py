"""Blocked, slice and explicit linear encodings of registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.layout.encodings.base import (
    NEWEST,
    Encoding,
    Ints,
    Matrix,
    broadcast_nd,
    cover,
    dims,
    drop_broadcast_registers,
    identity_nd,
    is_at_least,
    need,
)
from kvlab.layout.linear.linear_layout import LinearLayout


@dataclass(frozen=True)
class BlockedLayout(Encoding):
    """A box of ``size_per_thread`` elements for each thread, the threads of a warp side by side, then the warps.

    order : the dimensions, fastest first.

    Where a thread's box is larger than the tensor, registers repeat others; Triton 3.9.0 drops them, 3.6.0 and 3.7
    keep them as zero bases.

    >>> b = BlockedLayout(size_per_thread=[1, 8], threads_per_warp=[8, 4], warps_per_cta=[4, 1], order=[1, 0])
    >>> print(b.to_linear_layout((32, 64)))
    register=1 -> (0, 1)
    register=2 -> (0, 2)
    register=4 -> (0, 4)
    register=8 -> (0, 32)
    lane=1 -> (0, 8)
    lane=2 -> (0, 16)
    lane=4 -> (1, 0)
    lane=8 -> (2, 0)
    lane=16 -> (4, 0)
    warp=1 -> (8, 0)
    warp=2 -> (16, 0)
    block is a size 1 dimension
    where out dims are: [dim0 (size 32), dim1 (size 64)]
    """

    size_per_thread: Ints
    threads_per_warp: Ints
    warps_per_cta: Ints
    order: Ints
    cga_layout: Matrix = ()

    def verify(self) -> None:
        rank = len(self.order)
        need(sorted(self.order) == list(range(rank)), self, "order must be a permutation of the dimensions")
        per_dim = (self.size_per_thread, self.threads_per_warp, self.warps_per_cta)
        need(all(len(item) == rank for item in per_dim), self, "every field must have one entry for each dimension")

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        return len(self.order)

    def pattern_shape(self) -> Ints:
        boxes = zip(self.size_per_thread, self.threads_per_warp, self.warps_per_cta, strict=True)
        return tuple(math.prod(sizes) for sizes in boxes)

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        tile = (
            identity_nd("register", self.size_per_thread, self.order)
            * identity_nd("lane", self.threads_per_warp, self.order)
            * identity_nd("warp", self.warps_per_cta, self.order)
        )
        layout = cover(tile, self.cga_layout, shape)
        return drop_broadcast_registers(layout) if is_at_least(triton_version, 3, 9) else layout

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], *, triton_version: str = NEWEST
    ) -> LinearLayout:
        """An operand of a product without tensor cores: every thread holds all of K."""
        k = self.rank - 1 if operand_index == 0 else self.rank - 2
        sizes = [shape[axis] if axis == k else n for axis, n in enumerate(self.size_per_thread)]
        tile = (
            identity_nd("register", sizes, self.order)
            * broadcast_nd("lane", self.threads_per_warp, self.order, k)
            * broadcast_nd("warp", self.warps_per_cta, self.order, k)
        )
        return cover(tile, operand_cga(self.cga_layout, k), shape)


@dataclass(frozen=True)
class SliceLayout(Encoding):
    """Rest of ``parent`` on a tensor without the dimension ``dim``: a reduction leaves its result there.

    >>> b = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    >>> SliceLayout(1, b).to_linear_layout((32,)).bases
    {'register': [], 'lane': [[0], [0], [1], [2], [4]], 'warp': [[8], [16]], 'block': []}
    """

    dim: int
    parent: Encoding

    def verify(self) -> None:
        need(isinstance(self.parent, Encoding), self, "parent must be an encoding of registers")
        need(0 <= self.dim < getattr(self.parent, "rank", self.dim + 1), self, "dim must be one of the parent's")

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        rank: int = getattr(self.parent, "rank", 2)
        return rank - 1

    def pattern_shape(self) -> Ints:
        shape = self.parent.pattern_shape()
        return (*shape[: self.dim], *shape[self.dim + 1 :])

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        whole = self.parent.to_linear_layout((*shape[: self.dim], 1, *shape[self.dim :]))
        bases = {
            name: [vector[: self.dim] + vector[self.dim + 1 :] for vector in vectors]
            for name, vectors in whole.bases.items()
        }
        return drop_broadcast_registers(LinearLayout(bases, shape))


@dataclass(frozen=True)
class DistributedLinearLayout(Encoding):
    """Bases given outright, for one shape.

    A larger shape is covered by more registers, along the dimensions in the order in which the registers first move;
    for a smaller one the registers past its end go.

    >>> d = DistributedLinearLayout([[1]], [[2], [4]], [[8]], [], [16])
    >>> d.to_linear_layout((16,)).bases
    {'register': [[1]], 'lane': [[2], [4]], 'warp': [[8]], 'block': []}
    """

    reg_bases: Matrix
    lane_bases: Matrix
    warp_bases: Matrix
    block_bases: Matrix = ()
    shape: Ints = ()

    def verify(self) -> None:
        self._linear()

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        return len(self.shape)

    def _linear(self) -> LinearLayout:
        bases = {"register": self.reg_bases, "lane": self.lane_bases, "warp": self.warp_bases}
        return LinearLayout({**bases, "block": self.block_bases}, self.shape)

    def pattern_shape(self) -> Ints:
        return self.shape

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        sizes = dict(zip(dims(self.rank), shape, strict=True))
        kept = [v for v in self.reg_bases if not any(v) or any(x % n for x, n in zip(v, shape, strict=True))]
        first = [next(axis for axis, x in enumerate(vector) if x) for vector in self.reg_bases if any(vector)]
        order = dict.fromkeys([*first, *reversed(range(self.rank))])
        layout = LinearLayout(self._linear().bases | {"register": kept}, self.shape)
        return layout.transpose(*(f"dim{axis}" for axis in order)).fit(sizes).transpose(*sizes)


def operand_cga(cga_layout: Matrix, k: int) -> Matrix:
    """The CTAs of an operand: those that differ along the free dimension of the other operand hold the same."""
    return tuple(tuple(0 if axis == k else x for axis, x in enumerate(vector)) for vector in cga_layout)
