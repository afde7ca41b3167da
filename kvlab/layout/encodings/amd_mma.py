"""Accumulators and operands of AMD's matrix cores: MFMA (CDNA, 64 lanes) and WMMA (RDNA, 32 lanes)."""

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
    drop_broadcast_registers,
    identity_nd,
    matrix_order,
    need,
    operand_order,
)
from kvlab.layout.encodings.blocked import operand_cga
from kvlab.layout.linear_layout import LinearLayout

__all__ = ["AMDMFMALayout", "AMDWMMALayout"]

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
        need(self.version in (1, 2, 3, 4), self, "version 1 (gfx908) to 4 (gfx950) is accepted")
        need(len(self.instr_shape) == 3, self, "instr_shape is (M, N, K)")
        need(self.instr_shape[:2] in MFMA_TILES, self, f"(M, N) must be one of {MFMA_TILES}")
        need(self.element_bitwidth in (None, 32, 64), self, "element_bitwidth 32 or 64 is accepted")
        need(self.rank in (2, 3), self, "tensors of rank 2 and 3 are accepted")
        need(self.instr_shape[:2] != (64, 4) or self.transposed, self, "64 x 4 tiles must be transposed")

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        return len(self.warps_per_cta)

    def to_linear_layout(self, shape: Sequence[int], *, triton_version: str = NEWEST) -> LinearLayout:
        need(len(shape) == self.rank, self, f"a tensor of rank {self.rank} is accepted, not {tuple(shape)}")
        step, rank = LinearLayout.identity1d, self.rank
        m, n = self.instr_shape[:2]
        dim_m, dim_n = f"dim{rank - 2}", f"dim{rank - 1}"
        height = 1 if self.element_bitwidth == 64 else 4
        across, down, lanes = (dim_m, dim_n, m) if self.transposed else (dim_n, dim_m, n)
        tile = identity_nd("register", (1,) * rank, matrix_order(rank)) * step(height, "register", down)
        tile *= step(lanes, "lane", across) * step(64 // lanes, "lane", down)
        tile *= step(max(1, m * n // (64 * height)), "register", down)
        tiles, warps = self._tiles_per_warp(), self.warps_per_cta
        tile *= step(tiles[-1], "register", dim_n) * step(warps[-1], "warp", dim_n)
        tile *= step(max(1, shape[-1] // (n * warps[-1] * tiles[-1])), "register", dim_n)
        tile *= step(tiles[-2], "register", dim_m) * step(warps[-2], "warp", dim_m)
        if rank == 3:
            tile *= step(warps[0], "warp", "dim0")
        return cover(tile, self.cga_layout, shape, triton_version=triton_version)

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], triton_version: str = NEWEST
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
        return cover(tile, operand_cga(self.cga_layout, order[0]), shape, triton_version=triton_version)

    def _tiles_per_warp(self) -> Ints:
        return self.tiles_per_warp or (1,) * self.rank


@dataclass(frozen=True)
class AMDWMMALayout(Encoding):
    """The accumulator of WMMA instructions.

    version : 1 gfx11 (RDNA3), 2 gfx12 (RDNA4), 3 gfx1250.
    warps_per_cta, tiles_per_warp : as Triton 3.6.0 places warps and the tiles of each; or
    warp_bases, reg_bases : the bases of both in units of tiles, as Triton 3.7 and later do.

    >>> wmma = AMDWMMALayout(2, False, warps_per_cta=[2, 2])
    >>> wmma == AMDWMMALayout(2, False, warp_bases=[[0, 1], [1, 0]])
    False
    >>> wmma.to_linear_layout((32, 32)).bases["lane"]
    [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    """

    version: int
    transposed: bool
    warps_per_cta: Ints | None = None
    instr_shape: Ints | None = None
    tiles_per_warp: Ints | None = None
    cga_layout: Matrix = ()
    warp_bases: Matrix | None = None
    reg_bases: Matrix = ()
    rank: int | None = None

    def verify(self) -> None:
        need(self.version in (1, 2, 3), self, "version 1 (gfx11), 2 (gfx12) or 3 (gfx1250) is accepted")
        given = (self.warps_per_cta, self.warp_bases)
        need(given.count(None) == 1, self, "either warps_per_cta or warp_bases must be given")
        object.__setattr__(self, "instr_shape", self.instr_shape or (16, 16, 16))
        object.__setattr__(self, "rank", self.rank or len(self.warps_per_cta or (self.warp_bases or ((0, 0),))[0]))
        need(self.rank in (2, 3), self, "tensors of rank 2 and 3 are accepted")
        tiles = ((16, 16), (32, 16)) if self.version > 1 else ((16, 16),)
        need((self.instr_shape or ())[:2] in tiles, self, f"instr_shape (M, N, K) with (M, N) in {tiles} is accepted")

    def to_linear_layout(self, shape: Sequence[int], *, triton_version: str = NEWEST) -> LinearLayout:
        rank, (m, n, _) = self._rank_and_shape(shape)
        need(all(s == 1 or s >= t for s, t in zip(shape[-2:], (m, n), strict=True)), self, f"{shape} is too small")
        step = LinearLayout.identity1d
        across, down = (rank - 2, rank - 1) if self.transposed else (rank - 1, rank - 2)
        tile = identity_nd("register", (1,) * rank, matrix_order(rank))
        if self.version == 1:
            pairs = step(2, "lane", f"dim{down}") * step(8, "register", f"dim{down}")
            tile = tile * step(16, "lane", f"dim{across}") * pairs
        else:
            tile = tile * step(8, "register", f"dim{down}") * step(16, "lane", f"dim{across}")
            tile *= step(2, "lane", f"dim{down}") * step(m // 16, "register", f"dim{down}")
        return cover(tile * self._warps(), self.cga_layout, shape, triton_version=triton_version)

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], triton_version: str = NEWEST
    ) -> LinearLayout:
        """An operand: ``k_width`` elements of K in a lane, 16 lanes along M or N; the other 16 lanes hold the same
        (version 1) or the next elements of K."""
        rank, (m, n, k) = self._rank_and_shape(shape)
        step = LinearLayout.identity1d
        order = operand_order(operand_index, rank)
        dim_k, dim_mn = f"dim{order[0]}", f"dim{order[1]}"
        tile = identity_nd("register", (1,) * rank, order) * step(k_width, "register", dim_k)
        tile *= step(16, "lane", dim_mn)
        tile *= (LinearLayout.zeros1d if self.version == 1 else step)(2, "lane", dim_k)
        tile *= step(max(1, k // (2 * k_width)), "register", dim_k)
        tile *= step((m if operand_index == 0 else n) // 16, "register", dim_mn)
        warps = self._warps()
        bases = {
            name: [[0 if out == dim_k else x for x, out in zip(v, warps.out_dims, strict=True)] for v in vectors]
            for name, vectors in warps.bases.items()
        }
        sizes = {name: 1 if name == dim_k else size for name, size in warps.out_dims.items()}
        tile *= drop_broadcast_registers(LinearLayout(bases, sizes))
        return cover(tile, operand_cga(self.cga_layout, order[0]), shape, triton_version=triton_version)

    def _rank_and_shape(self, shape: Sequence[int]) -> tuple[int, tuple[int, int, int]]:
        assert self.rank is not None
        assert self.instr_shape is not None
        need(len(shape) == self.rank, self, f"a tensor of rank {self.rank} is accepted, not {tuple(shape)}")
        m, n, k = self.instr_shape
        return self.rank, (m, n, k)

    def _warps(self) -> LinearLayout:
        """Tiles of each warp, and warps, counted in tiles."""
        assert self.rank is not None
        order = matrix_order(self.rank)
        names = [f"dim{axis}" for axis in range(self.rank)]
        if self.warp_bases is not None:
            return LinearLayout({"register": self.reg_bases, "warp": self.warp_bases}, names)
        tiles = self.tiles_per_warp or (1,) * self.rank
        assert self.warps_per_cta is not None
        return identity_nd("register", tiles, order) * broadcast_nd("warp", self.warps_per_cta, order, None)
