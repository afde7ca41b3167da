"""The CTA models of a prefill tile: one for the first columns of Q, K and V, one for the rest."""

from __future__ import annotations

from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.features.scales import P_SCALE
from kvlab.memory import Memory, float8_e4m3fn
from kvlab.staging import Fragments, KVCacheIterator, Traffic, row_offsets
from kvlab.staging.tile.tile_spec import KVRows, TileCTA, TileSpec

from .parts import Accumulator, Parts, PieceColumns, piece_columns
from .rows import tile_walk
from .table import choose

if TYPE_CHECKING:
    from kvlab.attention.mha_prefill.config import PrefillConfig, PrefillProblem

Array = np.ndarray[Any, Any]


class PrefillCTA(Parts):
    """The CTAs of one launch, side by side: one model for the first columns of Q, K and V, one for the rest, if any.

    Loads and accumulators are tuples of these pieces; ``k`` and ``v`` are their columns. It walks over K's and V's
    tiles itself, in one loop after the other.
    """

    def __init__(
        self, ctas: list[TileCTA], rows: KVRows, k: list[PieceColumns], v: list[PieceColumns], BN: int
    ) -> None:
        super().__init__(ctas, ctas[: len(v)])
        self.rows, self.k, self.v, self.BN = rows, k, v, BN
        self.tiles: list[tuple[list[KVCacheIterator], list[KVCacheIterator]]] = []

    def follow(self, first: Array, *bounds: Array) -> None:
        """Loops over the keys from one of ``bounds`` to the next, and fetches ahead along them. first : the first row
        of each program's sequence.
        """
        k, v, batch, head = self.rows
        for lo, hi in pairwise(bounds):
            of_k, of_v = (
                [tile_walk((rows, batch, first, head), self.BN, lo, hi, one.first, one.inside) for one in pieces]
                for rows, pieces in ((k, self.k), (v, self.v))
            )
            self.tiles.append((of_k, of_v))
        for i, cta in enumerate(self.ctas if self.fetches else ()):
            cta.follow(*(walks[i] if i < len(walks) else None for loop in self.tiles for walks in loop))

    def load_q(self, array: Array, index: tuple[Array, ...], valid: Array) -> tuple[Any, ...]:
        """The query rows of ``array`` at ``index``, each ``[programs, BM]``."""
        dram, offset = Memory.over(array, name="q"), row_offsets(array, index, valid)
        both = zip(self.ctas, self.k, strict=False)
        return tuple(cta.load_q(dram, offset + piece.first, valid) for cta, piece in both)

    def load_k(self, loop: int, active: Array) -> tuple[Any, ...]:
        """The next K tile of a loop."""
        both = zip(self.ctas, self.tiles[loop][0], strict=False)
        return tuple(cta.load_k(tiles.next_tile(), active) for cta, tiles in both)

    def load_v(self, loop: int, active: Array) -> tuple[Any, ...]:
        """The next V tile of a loop."""
        both = zip(self.ctas, self.tiles[loop][1], strict=False)
        return tuple(cta.load_v(tiles.next_tile(), active) for cta, tiles in both)

    def scores(self, q: tuple[Any, ...], k: tuple[Any, ...], active: Array) -> Fragments:
        """Q K^T, float32: the products of the pieces added up."""
        s: Fragments | None = None
        for cta, rows, keys in zip(self.ctas, q, k, strict=False):
            s = cta.scores(rows, keys, active, s)
        assert s is not None
        return s

    def accumulate(
        self, p: Fragments, v: tuple[Any, ...], o: Accumulator, dtype: np.dtype[Any], active: Array
    ) -> Accumulator:
        """O + P V in ``dtype``: P times 2^8 where it is e4m3."""
        if dtype == float8_e4m3fn:
            p = p.with_values(p.values * np.float32(P_SCALE))
        return o.with_parts(self.add_values(p, list(zip(self.of_v, v, o.parts, strict=True)), active))

    def zeros(self) -> Accumulator:
        """The output accumulator."""
        return Accumulator(tuple(cta.zeros() for cta in self.of_v), tuple(piece.positions(0) for piece in self.v))


def prefill_cta(
    arch: str, problem: PrefillProblem, config: PrefillConfig, q_dtype: np.dtype[Any], weights: np.dtype[Any],
    k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any, traffic: Traffic,
) -> PrefillCTA:
    """The CTA models of ``arch`` for the tiles of ``config``. ``weights``: the dtype of P and V where they are
    multiplied. ``k_rows`` and ``v_rows`` are the cache, or what stands for one; ``batch_idx`` and ``head_idx``
    ``[programs]`` each program's sequence and KV head.

    On NVIDIA they are what our Triton kernel compiles to, float32 without tensor cores. e4m3 that is converted beside
    mma.sync lies in shared memory as 16 bits, where the compiled kernel converts what it has read. gfx950: MAX's
    prefill through KVBuffer; float32, which that buffer does not take, strip by strip with the fp32 MFMA.
    """
    stored = np.dtype(k_rows.dtype)
    model, rows = choose(arch, stored, "mha_prefill", rows=config.BM).cta, KVRows(k_rows, v_rows, batch_idx, head_idx)
    k = piece_columns((config.D0, config.D1), problem.head_dim, 1)
    v = piece_columns((config.V0, config.V1), problem.value_dim, 1)
    ctas: list[TileCTA] = []
    for of_k, of_v in zip_longest(k, v):
        tile = TileSpec(
            arch=arch, BM=config.BM, BN=config.BN, k=_widths(of_k), v=_widths(of_v), dtype=q_dtype, stored=stored,
            weights=weights, warps=config.num_warps, ahead=config.num_stages - 1,
            along_rows=(config.V1 or config.V0) <= config.BM,
            key_bytes=(config.D0 + config.D1 + config.V0 + config.V1) * stored.itemsize,
        )
        ctas.append(model.of(tile, rows, traffic, beside=bool(ctas)))
    return PrefillCTA(ctas, rows, k, v, config.BN)


def _widths(piece: PieceColumns | None) -> tuple[int, int]:
    """Columns in DRAM and in shared memory, 0 where there is no piece."""
    return (0, 0) if piece is None else (piece.inside, piece.width)
