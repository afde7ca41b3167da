"""The CTA models of a prefill tile: one for the first columns of Q, K and V, one for the rest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.features.scales import P_SCALE
from kvlab.layout import TileTensor
from kvlab.memory import Memory, float8_e4m3fn
from kvlab.staging import Fragments, Traffic, row_offsets
from kvlab.staging.tile.tile_spec import KVRows, TileCTA, TileSpec

from .parts import Parts
from .rows import RowsAt, tile_walk
from .table import choose

if TYPE_CHECKING:
    from kvlab.attention.mha_prefill.config import PrefillConfig, PrefillProblem

Array = np.ndarray[Any, Any]
Pieces = tuple[Fragments, ...]


class PrefillCTA(Parts):
    """The CTAs of one launch, side by side: one model for the first columns of Q, K and V, one for the rest, if any.

    Loads and accumulators are tuples of these pieces. ``widths``: (first column, columns) of each piece of K and of V.
    """

    def __init__(self, ctas: list[TileCTA], widths: dict[str, list[tuple[int, int]]], BN: int) -> None:
        super().__init__(ctas, ctas[: len(widths["v"])])
        self.widths, self.BN = widths, BN

    def follow(self, k: RowsAt, v: RowsAt, lo: Array, full: Array, hi: Array) -> None:
        """Fetch ahead along K's and V's tiles from ``lo`` to ``full`` and on to ``hi``."""
        for i, cta in enumerate(self.ctas if self.fetches else ()):
            walks = [
                tile_walk(at, self.BN, start, end, *self.widths[role][i]) if i < len(self.widths[role]) else None
                for start, end in pairwise((lo, full, hi))
                for role, at in (("k", k), ("v", v))
            ]
            cta.follow(*walks)

    def load_q(self, array: Array, index: tuple[Array, ...], valid: Array) -> tuple[Any, ...]:
        """The query rows of ``array`` at ``index``, each ``[programs, BM]``."""
        dram, offset = Memory.over(array, name="q"), row_offsets(array, index, valid)
        both = zip(self.ctas, self.widths["k"], strict=False)
        return tuple(cta.load_q(dram, offset + column, valid) for cta, (column, _) in both)

    def load_k(self, at: RowsAt, key: Array, end: Array, active: Array) -> tuple[Any, ...]:
        """The K tile of the keys ``[programs, BN]`` below ``end``."""
        both = zip(self.ctas, self._tiles("k", at, key, end), strict=False)
        return tuple(cta.load_k(tile, active) for cta, tile in both)

    def load_v(self, at: RowsAt, key: Array, end: Array, active: Array) -> tuple[Any, ...]:
        """The V tile of the keys ``[programs, BN]`` below ``end``."""
        both = zip(self.ctas, self._tiles("v", at, key, end), strict=False)
        return tuple(cta.load_v(tile, active) for cta, tile in both)

    def _tiles(self, role: str, at: RowsAt, key: Array, end: Array) -> list[TileTensor]:
        return [tile_walk(at, self.BN, key[:, 0], end, *columns).next_tile() for columns in self.widths[role]]

    def scores(self, q: tuple[Any, ...], k: tuple[Any, ...], active: Array) -> Fragments:
        """Q K^T, float32: the products of the pieces added up."""
        s: Fragments | None = None
        for cta, rows, keys in zip(self.ctas, q, k, strict=False):
            s = cta.scores(rows, keys, active, s)
        assert s is not None
        return s

    def accumulate(self, p: Fragments, v: tuple[Any, ...], o: Pieces, dtype: np.dtype[Any], active: Array) -> Pieces:
        """O + P V in ``dtype``: P times 2^8 where it is e4m3."""
        if dtype == float8_e4m3fn:
            p = p.with_values(p.values * np.float32(P_SCALE))
        return tuple(self.add_values(p, list(zip(self.of_v, v, o, strict=True)), active))

    def zeros(self) -> Pieces:
        """The output accumulators."""
        return tuple(cta.zeros() for cta in self.of_v)


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
    k = [(min(config.D0, problem.head_dim), config.D0), (problem.head_dim - config.D0, config.D1)]
    v = [(min(config.V0, problem.value_dim), config.V0), (problem.value_dim - config.V0, config.V1)]
    ctas: list[TileCTA] = []
    for of_k, of_v in zip(k, v, strict=True):
        if of_k[1] or of_v[1]:
            tile = TileSpec(
                arch=arch, BM=config.BM, BN=config.BN, k=of_k if of_k[1] else (0, 0), v=of_v if of_v[1] else (0, 0),
                dtype=q_dtype, stored=stored, weights=weights, warps=config.num_warps, ahead=config.num_stages - 1,
                along_rows=(config.V1 or config.V0) <= config.BM,
                key_bytes=(config.D0 + config.D1 + config.V0 + config.V1) * stored.itemsize,
            )
            ctas.append(model.of(tile, rows, traffic, beside=bool(ctas)))
    widths = {
        role: [(first, columns) for first, (columns, padded) in zip((0, sides[0][1]), sides, strict=True) if padded]
        for role, sides in (("k", k), ("v", v))
    }
    return PrefillCTA(ctas, widths, config.BN)
