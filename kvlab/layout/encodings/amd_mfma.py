"""Accumulators and operands of the matrix cores of AMD's CDNA: MFMA, 64 lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.layout.encodings.base import (
    NEWEST,
    Encoding,
    Ints,
    Matrix,
    cover,
    identity_nd,
    matrix_order,
    need,
    operand_order,
)
from kvlab.layout.linear.linear_layout import LinearLayout

MFMA_TILES = ((32, 32), (16, 16), (64, 4), (4, 64))


@dataclass(frozen=True)
class AMDMFMALayout(Encoding):
    """The accumulator of MFMA instructions.

    version : 1 gfx908, 2 gfx90a, 3 gfx942, 4 gfx950.
    instr_shape : (M, N, K).
    transposed : lanes count rows and registers columns, so that a lane holds neighbours of one row.
    element_bitwidth : 32, or 64 for float64 accumulators.
    tiles_per_warp : neighbouring instruction tiles that one warp computes.

    >>> mfma = AMDMFMALayout(4, [32, 32, 16], True, [4, 1])
    >>> mfma.to_linear_layout((128, 32)).bases["register"]
    [[0, 1], [0, 2], [0, 8], [0, 16]]
    """

    version: int
    instr_shape: Ints
    transposed: bool
    warps_per_cta: Ints
    element_bitwidth: int | None = 32
    tiles_per_warp: Ints | None = None
    cga_layout: Matrix = ()

    def verify(self) -> None:
        need(self.version in (1, 2, 3, 4), self, "version must be 1 (gfx908) to 4 (gfx950)")
        need(len(self.instr_shape) == 3, self, "instr_shape is (M, N, K)")
        need(self.instr_shape[:2] in MFMA_TILES, self, f"(M, N) must be one of {MFMA_TILES}")
        need(self.element_bitwidth in (None, 32, 64), self, "element_bitwidth must be 32 or 64")
        need(self.rank in (2, 3), self, "must be of rank 2 or 3")
        need(self.instr_shape[:2] != (64, 4) or self.transposed, self, "64 x 4 tiles must be transposed")

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        return len(self.warps_per_cta)

    def pattern_shape(self) -> Ints:
        return tile_of_warps(self.instr_shape, self._tiles_per_warp(), self.warps_per_cta)

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        step, rank = LinearLayout.identity1d, self.rank
        m, n = self.instr_shape[:2]
        dim_m, dim_n = f"dim{rank - 2}", f"dim{rank - 1}"
        height = 1 if self.element_bitwidth == 64 else 4
        across, down, lanes = (dim_m, dim_n, m) if self.transposed else (dim_n, dim_m, n)
        tile = identity_nd("register", (1,) * rank, matrix_order(rank)) * step(height, "register", down)
        tile *= step(lanes, "lane", across) * step(64 // lanes, "lane", down)
        tile *= step(max(1, m * n // (64 * height)), "register", down)
        tile = spread_tiles(tile, self._tiles_per_warp(), self.warps_per_cta, shape)
        return cover(tile, self.cga_layout, shape)

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], *, triton_version: str = NEWEST
    ) -> LinearLayout:
        """An operand: ``k_width`` consecutive elements of K in a lane, the lanes along M or N first, then along K."""
        step, rank = LinearLayout.identity1d, self.rank
        order = operand_order(operand_index, rank)
        dim_k, dim_mn = f"dim{order[0]}", f"dim{order[1]}"
        m, n = self.instr_shape[:2]
        lanes = m if operand_index == 0 else n
        tile = identity_nd("register", (1,) * rank, order) * step(k_width, "register", dim_k)
        tile *= step(lanes, "lane", dim_mn) * step(64 // lanes, "lane", dim_k)
        depth = 64 // lanes * k_width
        if (m, n, operand_index) in ((64, 4, 0), (4, 64, 1)):
            tile, depth = tile * step(16, "register", dim_k), depth * 16
        tile *= step(max(1, shape[order[0]] // depth), "register", dim_k)
        tile *= step(self._tiles_per_warp()[order[1]], "register", dim_mn)
        tile *= identity_nd("warp", self.warps_per_cta, matrix_order(rank))
        return cover(tile, self.cga_layout, shape)

    def _tiles_per_warp(self) -> Ints:
        return self.tiles_per_warp or (1,) * self.rank


def tile_of_warps(instr_shape: Ints, tiles: Ints, warps: Ints) -> Ints:
    """The shape that all warps cover with their tiles once.

    >>> tile_of_warps((32, 16, 16), (1, 2), (4, 1))
    (128, 32)
    """
    rows, cols = (n * t * w for n, t, w in zip(instr_shape[:2], tiles[-2:], warps[-2:], strict=True))
    return (*warps[:-2], rows, cols)


def spread_tiles(tile: LinearLayout, tiles: Ints, warps: Ints, shape: Sequence[int]) -> LinearLayout:
    """Tiles of a warp and warps along N, more tiles to the end of N, then tiles of a warp and warps along M (and B)."""
    step, rank = LinearLayout.identity1d, len(shape)
    dim_m, dim_n = f"dim{rank - 2}", f"dim{rank - 1}"
    cols = tile.out_dims[dim_n] * warps[-1] * tiles[-1]
    tile *= step(tiles[-1], "register", dim_n) * step(warps[-1], "warp", dim_n)
    tile *= step(max(1, shape[-1] // cols), "register", dim_n)
    tile *= step(tiles[-2], "register", dim_m) * step(warps[-2], "warp", dim_m)
    return tile * step(warps[0], "warp", "dim0") if rank == 3 else tile
