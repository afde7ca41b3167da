"""Which machine a prefill tile is worked on: CTA models for an architecture and dtypes, one a piece of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvlab.attention.inputs import require
from kvlab.attention.scales import P_SCALE
from kvlab.hardware import get_arch
from kvlab.memory import Memory, bfloat16, float8_e4m3fn
from kvlab.staging import Fragments, KVCacheIterator, KVTile, TileCTA, Traffic
from kvlab.staging.fma_cta import FmaCTA, FmaShape
from kvlab.staging.kv_buffer_cta import KVBufferCTA, KVBufferShape
from kvlab.staging.mfma_cta import MfmaCTA, MfmaShape
from kvlab.staging.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.staging.nvidia_decode_cta import NvidiaDecodeCTA, operand_p_of
from kvlab.staging.wgmma_cta import WgmmaCTA, WgmmaShape, end_tiles

from .config import PrefillConfig, PrefillProblem

__all__ = ["PREFILL_ARCHS", "PrefillCTA", "check_arch", "check_machine", "piece_cta", "prefill_cta"]

PREFILL_ARCHS = ("sm_80", "sm_90", "gfx950")
Array = np.ndarray[Any, Any]
Tiles = tuple[KVTile, ...]


class PrefillCTA:
    """The CTAs of one launch, side by side: one model for the first columns of Q, K and V, one for the rest, if any.

    Loads and accumulators come in pairs, first and rest; the second is the first again where there is no rest.
    """

    def __init__(self, pieces: list[TileCTA], widths: dict[str, list[tuple[int, int]]], p_fp8: bool) -> None:
        self.pieces, self.widths, self.p_fp8 = pieces, widths, p_fp8

    def follow(self, *walks: list[KVCacheIterator]) -> None:
        """Fetch ahead along these iterators, of K's and V's pieces for one loop after the other, where there is one
        piece.
        """
        if len(self.pieces) == 1:
            self.pieces[0].follow(*(walk[0] for walk in walks))

    def columns(self, k_rows: Any, v_rows: Any) -> list[tuple[Any, list[tuple[int, int]]]]:
        """K's and V's rows, each with the (first column, columns) of its pieces."""
        return [(k_rows, self.widths["k"]), (v_rows, self.widths["v"])]

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Any, Any]:
        """The query rows, elements ``offset[programs, BM]`` of ``dram``."""
        columns = self.widths["k"]
        return _pair(p.load_q(dram, offset + at, valid) for p, (at, _) in zip(self.pieces, columns, strict=False))

    def load_k(self, tiles: Tiles, active: Array) -> tuple[Any, Any]:
        """The K tile, its columns in pieces."""
        return _pair(p.load_k(tile, active) for p, tile in zip(self.pieces, tiles, strict=False))

    def load_v(self, tiles: Tiles, active: Array) -> tuple[Any, Any]:
        """The V tile, its columns in pieces."""
        return _pair(p.load_v(tile, active) for p, tile in zip(self.pieces, tiles, strict=False))

    def scores(self, q: Any, q_rest: Any, k: Any, k_rest: Any, active: Array) -> Fragments:
        """S = Q K^T, float32: the products of the pieces, added up."""
        s = self.pieces[0].scores(q, k, active)
        return self.pieces[1].scores(q_rest, k_rest, active, s) if len(self.widths["k"]) > 1 else s

    def accumulate(
        self, p: Fragments, v: Any, v_rest: Any, o: Fragments, o_rest: Fragments, active: Array
    ) -> tuple[Fragments, Fragments]:
        """O += P V, piece by piece; P times 2^8 where it is e4m3."""
        if self.p_fp8:
            p = p.with_values(p.values * np.float32(P_SCALE))
        both = list(zip((v, v_rest), (o, o_rest), strict=True))
        return _pair(iter(self._add_values(p, both[: len(self.widths["v"])], active)))

    def _add_values(self, p: Fragments, pairs: list[tuple[Any, Fragments]], active: Array) -> list[Fragments]:
        """O + P V of each piece's (V, O)."""
        return [x.accumulate(p, v, o, active) for x, (v, o) in zip(self.pieces, pairs, strict=False)]

    def zeros(self) -> tuple[Fragments, Fragments]:
        """The output accumulators."""
        return _pair(piece.zeros() for piece, _ in zip(self.pieces, self.widths["v"], strict=False))

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``."""
        return self.pieces[0].row_max(s)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]``."""
        return self.pieces[0].row_sum(p)


class PiecesAhead(PrefillCTA):
    """Pieces that all fetch ahead."""

    pieces: list[Any]

    def follow(self, *walks: list[KVCacheIterator]) -> None:
        """Fetch ahead along these iterators, of K's and V's pieces for one loop after the other."""
        for i, piece in enumerate(self.pieces):
            piece.follow(*(walk[i] if i < len(walk) else None for walk in walks))


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

    def follow(self, *walks: list[KVCacheIterator]) -> None:
        """Nothing: a tile comes when it is asked for."""


def _pair(values: Iterator[Any]) -> tuple[Any, Any]:
    found = list(values)
    return found[0], found[-1]


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
    arch: str, problem: PrefillProblem, config: PrefillConfig, q_dtype: np.dtype[Any], k_rows: Any, v_rows: Any,
    batch_idx: Any, head_idx: Any, traffic: Traffic,
) -> PrefillCTA:  # fmt: skip
    """The CTA models of ``arch`` for the tiles of ``config``. ``k_rows`` and ``v_rows`` are the cache, or what stands
    for one; ``batch_idx`` and ``head_idx`` ``[programs]`` each program's sequence and KV head.
    """
    stored = np.dtype(k_rows.dtype)
    weights = float8_e4m3fn if problem.p_fp8 else bfloat16 if q_dtype == float8_e4m3fn else q_dtype
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
    return made(pieces, widths, problem.p_fp8)


def piece_cta(
    arch: str, sizes: tuple[int, int, int], k: tuple[int, int], v: tuple[int, int], dtype: np.dtype[Any],
    stored: np.dtype[Any], weights: np.dtype[Any], k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any,
    traffic: Traffic, *, last: int, stages: int, ahead: int = 1, beside: bool = False,
) -> TileCTA:  # fmt: skip
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
