"""Which machine a prefill tile is worked on: CTA models for an architecture and dtypes, one a piece of columns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvlab.attention.call.checks import require
from kvlab.attention.features.scales import P_SCALE
from kvlab.hardware import get_arch
from kvlab.layout import TileTensor
from kvlab.memory import Memory, float8_e4m3fn
from kvlab.staging import Fragments, TileCTA, Traffic, row_offsets
from kvlab.staging.gfx950.kv_buffer_cta import KVBufferCTA, KVBufferShape
from kvlab.staging.gfx950.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.nvidia.decode_cta import NvidiaDecodeCTA, operand_p_of
from kvlab.staging.nvidia.fma_cta import FmaCTA, FmaShape
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.staging.nvidia.wgmma_cta import WgmmaCTA, end_tiles
from kvlab.staging.nvidia.wgmma_plan import WgmmaShape

from .config import PrefillConfig, PrefillProblem
from .rows import RowsAt, tile_walk

PREFILL_ARCHS = ("sm_80", "sm_90", "gfx950")
Array = np.ndarray[Any, Any]
Pieces = tuple[Fragments, ...]


class PrefillCTA:
    """The CTAs of one launch, side by side: one model for the first columns of Q, K and V, one for the rest, if any.

    Loads and accumulators are tuples of these pieces. ``widths``: (first column, columns) of each piece of K and of V.
    """

    def __init__(self, pieces: list[TileCTA], widths: dict[str, list[tuple[int, int]]], BN: int) -> None:
        self.pieces, self.widths, self.BN = pieces, widths, BN

    def follow(self, k: RowsAt, v: RowsAt, lo: Array, full: Array, hi: Array) -> None:
        """Fetch ahead along K's and V's tiles from ``lo`` to ``full`` and on to ``hi``, where there is one piece."""
        if len(self.pieces) == 1:
            self._follow(self.pieces[0], 0, k, v, lo, full, hi)

    def _follow(self, piece: Any, i: int, k: RowsAt, v: RowsAt, *bounds: Array) -> None:
        """Let the ``i``-th piece fetch ahead, in one loop after the other."""
        walks = [
            tile_walk(at, self.BN, start, end, *self.widths[role][i]) if i < len(self.widths[role]) else None
            for start, end in pairwise(bounds)
            for role, at in (("k", k), ("v", v))
        ]
        piece.follow(*walks)

    def load_q(self, array: Array, index: tuple[Array, ...], valid: Array) -> tuple[Any, ...]:
        """The query rows of ``array`` at ``index``, each ``[programs, BM]``."""
        dram, offset = Memory.over(array, name="q"), row_offsets(array, index, valid)
        both = zip(self.pieces, self.widths["k"], strict=False)
        return tuple(piece.load_q(dram, offset + column, valid) for piece, (column, _) in both)

    def load_k(self, at: RowsAt, key: Array, end: Array, active: Array) -> tuple[Any, ...]:
        """The K tile of the keys ``[programs, BN]`` below ``end``."""
        both = zip(self.pieces, self._tiles("k", at, key, end), strict=False)
        return tuple(piece.load_k(tile, active) for piece, tile in both)

    def load_v(self, at: RowsAt, key: Array, end: Array, active: Array) -> tuple[Any, ...]:
        """The V tile of the keys ``[programs, BN]`` below ``end``."""
        both = zip(self.pieces, self._tiles("v", at, key, end), strict=False)
        return tuple(piece.load_v(tile, active) for piece, tile in both)

    def _tiles(self, role: str, at: RowsAt, key: Array, end: Array) -> list[TileTensor]:
        return [tile_walk(at, self.BN, key[:, 0], end, *columns).next_tile() for columns in self.widths[role]]

    def scores(self, q: tuple[Any, ...], k: tuple[Any, ...], active: Array) -> Fragments:
        """Q K^T, float32: the products of the pieces added up."""
        s = self.pieces[0].scores(q[0], k[0], active)
        if len(q) > 1:
            s = self.pieces[1].scores(q[1], k[1], active, s)
        return s

    def accumulate(self, p: Fragments, v: tuple[Any, ...], o: Pieces, dtype: np.dtype[Any], active: Array) -> Pieces:
        """O + P V in ``dtype``: P times 2^8 where it is e4m3."""
        if dtype == float8_e4m3fn:
            p = p.with_values(p.values * np.float32(P_SCALE))
        return tuple(self._add_values(p, list(zip(v, o, strict=True)), active))

    def _add_values(self, p: Fragments, pairs: list[tuple[Any, Fragments]], active: Array) -> list[Fragments]:
        """O + P V of each piece's (V, O)."""
        return [x.accumulate(p, v, o, active) for x, (v, o) in zip(self.pieces, pairs, strict=False)]

    def zeros(self) -> Pieces:
        """The output accumulators."""
        return tuple(piece.zeros() for piece, _ in zip(self.pieces, self.widths["v"], strict=False))

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.pieces[0].row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]``."""
        return self.pieces[0].row_sum(p)


class PiecesAhead(PrefillCTA):
    """Pieces that all fetch ahead."""

    pieces: list[Any]

    def follow(self, k: RowsAt, v: RowsAt, lo: Array, full: Array, hi: Array) -> None:
        """Fetch ahead along K's and V's tiles from ``lo`` to ``full`` and on to ``hi``."""
        for i, piece in enumerate(self.pieces):
            self._follow(piece, i, k, v, lo, full, hi)


class WgmmaPieces(PiecesAhead):
    """Pieces of wgmma, whose next tiles come behind the products of all of them."""

    pieces: list[WgmmaCTA]

    def _add_values(self, p: Fragments, pairs: list[tuple[Any, Fragments]], active: Array) -> list[Fragments]:
        found = [x.add_values(p, v, o, active) for x, (v, o) in zip(self.pieces, pairs, strict=False)]
        end_tiles(self.pieces)
        return found


class NvidiaPieces(PiecesAhead):
    """Pieces without wgmma: P passes through the first for all of them."""

    pieces: list[NvidiaDecodeCTA[Any]]

    def _add_values(self, p: Fragments, pairs: list[tuple[Any, Fragments]], active: Array) -> list[Fragments]:
        a = operand_p_of(self.pieces, self.pieces[0], p, active)
        return [x.add_values(a, v, o) for x, (v, o) in zip(self.pieces, pairs, strict=False)]


class PiecesAtOnce(NvidiaPieces):
    """Pieces without wgmma whose tiles are converted on their way, or have one stage: none is fetched ahead."""

    def follow(self, k: RowsAt, v: RowsAt, lo: Array, full: Array, hi: Array) -> None:
        """Nothing: a tile comes when it is asked for."""


def check_arch(arch: str) -> None:
    """ValueError for a machine on which prefill is not emulated."""
    require(arch in PREFILL_ARCHS, f"arch {arch!r}", f"one of {', '.join(PREFILL_ARCHS)}")


def check_machine(arch: str, problem: PrefillProblem) -> None:
    """ValueError for dtypes that the emulated machine does not have."""
    fp8 = min(problem.itemsize, problem.kv_itemsize) == 1
    require(not (fp8 and arch == "sm_80"), f"float8_e4m3fn on {arch}", "on sm_90 or gfx950: sm_80 has no e4m3")


def stages_on_gfx950(row_bytes: int, BN: int) -> int:
    """Stages of tiles of BN keys, ``row_bytes`` of K and V together for each, that the LDS holds: MAX's two, or one.

    >>> stages_on_gfx950(1024, 64), stages_on_gfx950(2176, 64)
    (2, 1)
    """
    return 2 if 2 * row_bytes * BN <= get_arch("gfx950").shared_bytes else 1


def prefill_cta(
    arch: str, problem: PrefillProblem, config: PrefillConfig, q_dtype: np.dtype[Any], weights: np.dtype[Any],
    k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any, traffic: Traffic,
) -> PrefillCTA:
    """The CTA models of ``arch`` for the tiles of ``config``. ``weights``: the dtype of P and V where they are
    multiplied. ``k_rows`` and ``v_rows`` are the cache, or what stands for one; ``batch_idx`` and ``head_idx``
    ``[programs]`` each program's sequence and KV head.
    """
    stored = np.dtype(k_rows.dtype)
    k_widths = [(config.D0, min(config.D0, problem.head_dim)), (config.D1, problem.head_dim - config.D0)]
    v_widths = [(config.V0, min(config.V0, problem.value_dim)), (config.V1, problem.value_dim - config.V0)]
    columns = config.D0 + config.D1 + config.V0 + config.V1
    stages = stages_on_gfx950(columns * stored.itemsize, config.BN)
    pieces: list[TileCTA] = []
    for (BD, D), (BDV, DV) in zip(k_widths, v_widths, strict=True):
        if not (BD or BDV):
            continue
        sizes = config.BM, config.BN, config.num_warps
        k, v = (D if BD else 0, BD), (DV if BDV else 0, BDV)
        where = k_rows, v_rows, batch_idx, head_idx, traffic
        dtypes, last = (q_dtype, stored, weights), config.V1 or config.V0
        pieces.append(piece_cta(arch, sizes, k, v, *dtypes, *where, last=last, stages=stages, beside=bool(pieces)))
    widths = {
        role: [(0, sides[0][1])] + ([(sides[0][0], sides[1][1])] if sides[1][0] else [])
        for role, sides in (("k", k_widths), ("v", v_widths))
    }
    made: type[PrefillCTA] = PrefillCTA
    if isinstance(pieces[0], NvidiaDecodeCTA):
        at_once = stored.itemsize < q_dtype.itemsize or config.num_stages == 1
        made = PiecesAtOnce if at_once else NvidiaPieces
    elif isinstance(pieces[0], WgmmaCTA):
        made = WgmmaPieces
    return made(pieces, widths, config.BN)


def piece_cta(
    arch: str, sizes: tuple[int, int, int], k: tuple[int, int], v: tuple[int, int], dtype: np.dtype[Any],
    stored: np.dtype[Any], weights: np.dtype[Any], k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any,
    traffic: Traffic, *, last: int, stages: int, ahead: int = 1, beside: bool = False,
) -> TileCTA:
    """The CTA model of ``arch`` for a piece of the columns: ``sizes`` are query rows, keys and warps, ``k`` and ``v``
    columns in DRAM and padded. Dtypes of Q, of K and V in DRAM, of P and V where they are multiplied. ``last``: columns
    of the last product. ``stages``: of K and V on gfx950. ``ahead``: tiles in flight on sm_90. ``beside``: another
    piece's model of the same threads states the waits and barriers.

    sm_80 (mma.sync, its warps along the rows if ``last`` is not more than the rows) and sm_90 (wgmma, of 64 rows and
    more): what our Triton kernel compiles to, float32 without tensor cores. Converted e4m3 beside mma.sync stands in
    shared memory as 16 bits, where the compiled kernel converts what it has read. gfx950: MAX's prefill through
    KVBuffer; float32, which that buffer does not take, strip by strip with the fp32 MFMA.
    """
    (BM, BN, num_warps), (D, BD), (DV, BDV) = sizes, k, v
    if arch == "gfx950" and dtype.itemsize == 4:
        return MfmaCTA(MfmaShape(BM, BN, BD, dtype, DV=BDV, columns=D), k_rows, v_rows, batch_idx, head_idx, traffic)
    if arch == "gfx950":
        shape = KVBufferShape(BM, BN, BD, dtype, BDV, stored, weights, D, stages)
        return KVBufferCTA(shape, k_rows, v_rows, batch_idx, head_idx, traffic)
    if arch not in PREFILL_ARCHS:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(PREFILL_ARCHS)}")
    if dtype.itemsize == 4:
        fma = FmaShape(BM, BN, D, BD, arch, num_warps, False, False, (DV, BDV))
        return FmaCTA(fma, len(batch_idx), traffic, beside=beside)
    if arch == "sm_80" or BM < 64:
        mma = MmaSyncShape(BM, BN, D, BD, dtype, arch, False, (DV, BDV), False, num_warps, along_rows=BM >= last)
        return MmaSyncCTA(mma, len(batch_idx), traffic, beside=beside)
    wgmma = WgmmaShape(BM, BN, D, BD, dtype, num_warps, DV, BDV, stored, weights, ahead)
    return WgmmaCTA(wgmma, len(batch_idx), traffic, beside=beside)
