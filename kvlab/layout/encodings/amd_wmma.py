"""Accumulators and operands of the matrix cores of AMD's RDNA: WMMA, 32 lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.layout.encodings.amd_mfma import spread_tiles, tile_of_warps
from kvlab.layout.encodings.base import (
    NEWEST,
    Encoding,
    Ints,
    Matrix,
    broadcast_nd,
    cover,
    drop_broadcast_registers,
    identity_nd,
    is_at_least,
    matrix_order,
    need,
    operand_order,
)
from kvlab.layout.encodings.blocked import operand_cga
from kvlab.layout.linear.linear_layout import LinearLayout


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
        need(self.version in (1, 2, 3), self, "version must be 1 (gfx11), 2 (gfx12) or 3 (gfx1250)")
        given = (self.warps_per_cta, self.warp_bases)
        need(given.count(None) == 1, self, "either warps_per_cta or warp_bases must be given")
        object.__setattr__(self, "instr_shape", self.instr_shape or (16, 16, 16))
        object.__setattr__(self, "rank", self.rank or len(self.warps_per_cta or (self.warp_bases or ((0, 0),))[0]))
        need(self.rank in (2, 3), self, "must be of rank 2 or 3")
        tiles = ((16, 16), (32, 16)) if self.version > 1 else ((16, 16),)
        need((self.instr_shape or ())[:2] in tiles, self, f"instr_shape must be (M, N, K) with (M, N) in {tiles}")

    def pattern_shape(self) -> Ints:
        assert self.instr_shape is not None
        if self.warp_bases is None:
            return tile_of_warps(self.instr_shape, self._tiles(), self._warps_per_cta())
        tiles = self._warps().out_dims
        *batch, rows, cols = (tiles[f"dim{axis}"] for axis in range(len(tiles)))
        return (*batch, rows * self.instr_shape[0], cols * self.instr_shape[1])

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        rank, (m, n, _) = self._rank_and_shape(shape)
        if not is_at_least(triton_version, 3, 9):
            fits = all(size in (1, max(size, tile)) for size, tile in zip(shape[-2:], (m, n), strict=True))
            need(fits, self, f"{tuple(shape)} is smaller than the instruction, which Triton before 3.9 refuses")
        step = LinearLayout.identity1d
        across, down = (rank - 2, rank - 1) if self.transposed else (rank - 1, rank - 2)
        tile = identity_nd("register", (1,) * rank, matrix_order(rank))
        if self.version == 1:
            pairs = step(2, "lane", f"dim{down}") * step(8, "register", f"dim{down}")
            tile = tile * step(16, "lane", f"dim{across}") * pairs
        else:
            tile = tile * step(8, "register", f"dim{down}") * step(16, "lane", f"dim{across}")
            tile *= step(2, "lane", f"dim{down}") * step(m // 16, "register", f"dim{down}")
        if self.warp_bases is not None:
            return cover(tile * self._warps(), self.cga_layout, shape)
        return cover(spread_tiles(tile, self._tiles(), self._warps_per_cta(), shape), self.cga_layout, shape)

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], *, triton_version: str = NEWEST
    ) -> LinearLayout:
        """An operand: ``k_width`` elements of K in a lane, 16 lanes along M or N; the other 16 lanes hold the same
        (version 1) or the next elements of K.

        Registers go to the end of K of the instruction, or before Triton 3.9 to the end of K of the tensor (in 3.6.0
        only where the warp has further tiles along M or N); then to the further tiles. Before 3.9 CTAs that split K of
        the accumulator's grid split the operand."""
        rank, (m, n, k) = self._rank_and_shape(shape)
        need(self.version > 1 or k_width in (8, 16), self, f"k_width is {k_width}: must be 8 or 16")
        step = LinearLayout.identity1d
        order = operand_order(operand_index, rank)
        dim_k, dim_mn = f"dim{order[0]}", f"dim{order[1]}"
        tile = identity_nd("register", (1,) * rank, order) * step(k_width, "register", dim_k)
        tile *= step(16, "lane", dim_mn)
        tile *= (LinearLayout.zeros1d if self.version == 1 else step)(2, "lane", dim_k)
        tile_mn, cga = m if operand_index == 0 else n, self.cga_layout
        if self.warp_bases is None:
            k = shape[order[0]] if self._tiles()[order[1]] > 1 else k
        elif not is_at_least(triton_version, 3, 9):
            k = shape[order[0]]
        else:
            cga = operand_cga(cga, order[0])
        tile *= step(max(1, k // (2 * k_width)), "register", dim_k) * step(tile_mn // 16, "register", dim_mn)
        if self.warp_bases is None:
            tile *= step(self._tiles()[order[1]], "register", dim_mn)
            tile *= broadcast_nd("warp", self._warps_per_cta(), matrix_order(rank), order[0])
        else:
            tile *= drop_broadcast_registers(_without(self._warps(), dim_k))
        return cover(tile, cga, shape)

    def _rank_and_shape(self, shape: Sequence[int]) -> tuple[int, tuple[int, int, int]]:
        assert self.rank is not None
        assert self.instr_shape is not None
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        m, n, k = self.instr_shape
        return self.rank, (m, n, k)

    def _warps(self) -> LinearLayout:
        """Tiles of each warp, and warps, counted in tiles."""
        assert self.rank is not None
        assert self.warp_bases is not None
        names = [f"dim{axis}" for axis in range(self.rank)]
        tiles = LinearLayout({"register": self.reg_bases, "warp": self.warp_bases}, names)
        return tiles.transpose(*(names[axis] for axis in matrix_order(self.rank)))

    def _tiles(self) -> Ints:
        return self.tiles_per_warp or (1,) * (self.rank or 2)

    def _warps_per_cta(self) -> Ints:
        assert self.warps_per_cta is not None
        return self.warps_per_cta


def _without(layout: LinearLayout, dim: str) -> LinearLayout:
    """The layout that does not move along a dimension."""
    axis = list(layout.out_dims).index(dim)
    bases = {name: [[*v[:axis], 0, *v[axis + 1 :]] for v in vectors] for name, vectors in layout.bases.items()}
    return LinearLayout(bases, layout.out_dims | {dim: 1})
