"""Accumulators and register operands of NVIDIA's tensor cores: mma.sync (version 2) and wgmma (version 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.layout.encodings.base import (
    NEWEST,
    Encoding,
    Ints,
    Matrix,
    broadcast_nd,
    cover,
    identity_nd,
    matrix_order,
    need,
    operand_order,
)
from kvlab.layout.encodings.blocked import operand_cga
from kvlab.layout.linear.linear_layout import LinearLayout


@dataclass(frozen=True)
class NVMMADistributedLayout(Encoding):
    """The accumulator of tensor-core instructions.

    version : (2, 0) mma.sync, (3, 0) wgmma.
    warps_per_cta : warps along each dimension; version 2 counts them along N first, version 3 along M.
    instr_shape : (..., 16, 8) for version 2; (16, N, K) of one warp for version 3.

    >>> mma = NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    >>> mma.to_linear_layout((64, 16)).bases["register"]
    [[0, 1], [8, 0], [0, 8]]
    """

    version: Ints
    warps_per_cta: Ints
    instr_shape: Ints
    cga_layout: Matrix = ()

    def verify(self) -> None:
        need(len(self.version) == 2 and self.version[0] in (2, 3), self, "version must be (2, 0) or (3, 0)")
        need(self.rank in (2, 3), self, "must be of rank 2 or 3")
        rows, cols = self._tile()
        need(rows == 16 and cols >= 8 and cols & (cols - 1) == 0, self, "tiles of 16 rows and 8, 16, 32, ... columns")

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        return len(self.warps_per_cta)

    @property
    def is_hopper(self) -> bool:
        """Is it wgmma?"""
        return self.version[0] == 3

    def _tile(self) -> tuple[int, int]:
        need(len(self.instr_shape) >= 2, self, "instr_shape must have two or more entries")
        rows, cols = self.instr_shape[:2] if self.is_hopper else self.instr_shape[-2:]
        return rows, cols

    def pattern_shape(self) -> Ints:
        rows, cols = self._tile()
        return (*self.warps_per_cta[:-2], rows * self.warps_per_cta[-2], cols * self.warps_per_cta[-1])

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        rows, cols = self._tile()
        order = matrix_order(self.rank)
        tile = _warp_tile(rows, cols, 2, order)
        tile *= identity_nd("warp", self.warps_per_cta, self._warp_order())
        return cover(tile, self.cga_layout, shape)

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], *, triton_version: str = NEWEST
    ) -> LinearLayout:
        """A (16 x 8 k_width) or B (8 k_width x 8) of mma.sync, or A of wgmma, in registers.

        ``k_width`` consecutive elements of K lie in one lane: 32 bits of them for the instruction, more where the
        data was loaded in wider pieces (K is then permuted alike in A and B)."""
        need(operand_index == 0 or not self.is_hopper, self, "operand 1 of wgmma is read from shared memory")
        need(k_width > 0 and k_width & (k_width - 1) == 0, self, f"k_width is {k_width}: must be a power of two")
        order = operand_order(operand_index, self.rank)
        tile = _warp_tile(16 if operand_index == 0 else 8, 8 * k_width, k_width, order)
        tile *= broadcast_nd("warp", self.warps_per_cta, self._warp_order(), order[0])
        return cover(tile, operand_cga(self.cga_layout, order[0]), shape)

    def _warp_order(self) -> Ints:
        return matrix_order(self.rank, row_major=not self.is_hopper)


def _warp_tile(outer: int, inner: int, k_width: int, order: Ints) -> LinearLayout:
    """Lanes 4 x 8, ``k_width`` elements of each along the inner dimension, repeated outwards, then inwards."""
    step = LinearLayout.identity1d
    inner_dim, outer_dim = f"dim{order[0]}", f"dim{order[1]}"
    return (
        identity_nd("register", (1,) * len(order), order)
        * step(k_width, "register", inner_dim)
        * step(4, "lane", inner_dim)
        * step(8, "lane", outer_dim)
        * step(outer // 8, "register", outer_dim)
        * step(inner // (4 * k_width), "register", inner_dim)
    )
