"""One CTA of MAX's decode on gfx950: whole tiles of K and V through KVBuffer, MFMA 16x16, P through LDS.

Four warps lie along the keys for S^T = K Q^T and along the depth for O^T = V^T P^T, where each reads its slice of
V's tile by transposing reads. One stage of each; above a depth of 256 K and V share one memory, and V is fetched when
the scores are done. K and V of fp8 are converted in registers to 16 bits, where their fragments of 32 elements feed
four instructions. The order is that of MAX's decode, but for V's reads, which are stated before P's instead of after
them; every access, wait and barrier is stated to ``hazards``::

    copy K (and V)                                                              before the loop
    loop: wait, barrier, K to registers, S = Q K^T, softmax (rows meet over the warps: two barriers each),
          [shared: barrier, copy V, wait, barrier], V to registers, P to LDS, barrier, P from LDS,
          barrier, copy the next K (and V), O += P V

MLA decode is the same with K of the latent and the rope columns, whose latent columns are V: nothing is copied for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import Memory
from kvlab.staging.max.kv_buffer import KVBuffer
from kvlab.staging.max.operand_maps import kv_buffer_operand_map, output_map, score_map
from kvlab.staging.max.p_staging import PStagingParams, lds_accesses
from kvlab.staging.max.params import WARP_SIZE, KVBufferParams
from kvlab.staging.max.tiled_mma_op import mfma_atom
from kvlab.staging.max.warp_slices import WarpSlices
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.iterator import GivenTile, KVCacheIterator
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.p_exchange import PExchange
from kvlab.staging.tile.rows_over_warps import QuarterRows
from kvlab.staging.tile.tile_spec import KVRows, TileSpec
from kvlab.staging.tile.tile_walk import TileWalk, expect_fetched

from .mfma_product import mma_step_by_step
from .strips import Strips, eights, query_fragments

WARPS, BM, BN = 4, 16, 128
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class KVBufferDecodeShape:
    """A tile of 16 query rows and 128 keys of depth D, stored as ``dtype`` and multiplied as ``mma_dtype``. MLA: V is
    the first ``latent`` columns of K, read from K's memory."""

    D: int
    dtype: np.dtype[Any]
    mma_dtype: np.dtype[Any]
    latent: int = 0

    def __post_init__(self) -> None:
        rope = self.D - self.latent
        if self.latent and (self.latent % (32 * WARPS) or rope % 32 or rope <= 0 or self.dtype.itemsize != 2):
            raise ValueError(f"{self}: must have latent columns a multiple of 128, rope columns of 32, in 16 bits")
        if self.latent:
            return
        accepted = (64, 128, 256, 512) if self.dtype.itemsize == 2 else (128, 256, 512)
        if self.D not in accepted or self.mma_dtype.itemsize != 2 or self.dtype.itemsize > 2:
            words = ", ".join(map(str, accepted[:-1])) + f" or {accepted[-1]}"
            raise ValueError(f"{self}: D must be {words}, the products of 16 bits")

    @property
    def BK(self) -> int:
        """Columns (K) or keys (V) of a strip: those of one instruction on the storage dtype."""
        return 32 if self.dtype.itemsize == 2 else 128

    @property
    def v_depth(self) -> int:
        """Columns of V."""
        return self.latent or self.D

    @property
    def shared_kv(self) -> bool:
        """Tells whether V takes K's memory when the scores are done."""
        return self.D > 256

    def params(self, kv_num_heads: int, *, transpose: bool) -> KVBufferParams:
        """The parameters of the K (``transpose``) or V buffer; K is swizzled."""
        return KVBufferParams(
            self.dtype, (16, 16, self.BK), Swizzle(3, 0, 3, "vector") if transpose else None, BN=BN,
            WN=BN // WARPS if transpose else BN, BK=self.BK, num_threads=WARPS * WARP_SIZE, depth=self.D,
            kv_num_heads=kv_num_heads, transpose=transpose, num_smem_stages=1,
        )


class KVBufferDecodeCTA(QuarterRows):
    """The CTAs of one launch, side by side: ``programs`` copies of LDS and registers. Until :meth:`follow` is called
    there is nothing to look ahead to: each load has a barrier, copies, waits and has one more."""

    buffer = "KVBuffer, one stage; V of MLA is read from K's"
    p_path = "shared memory"
    whole_rows = True

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self:
        """The model for a tile; ValueError for another than it has."""
        sizes = tile.BM, tile.BN, tile.warps
        if sizes != (BM, BN, WARPS) or (tile.k != tile.v and not tile.v_in_k):
            raise ValueError(
                f"BM, BN, warps {sizes}, columns {tile.k} of K and {tile.v} of V: must be {(BM, BN, WARPS)}, columns "
                "the same"
            )
        shape = KVBufferDecodeShape(tile.k[0], tile.stored, tile.dtype, tile.v[0] if tile.v_in_k else 0)
        return cls(shape, *rows, traffic)

    def __init__(
        self, shape: KVBufferDecodeShape, k_cache: Any, v_cache: Any, batch_idx: Any, head_idx: Any, traffic: Traffic
    ) -> None:
        self.shape = shape
        heads = k_cache.kv_params.num_heads
        k, v = (shape.params(heads, transpose=transpose) for transpose in (True, False))
        nbytes = BN * shape.D * shape.dtype.itemsize
        p_first = nbytes if shape.shared_kv or shape.latent else 2 * nbytes
        super().__init__(p_first + BM * BN * shape.mma_dtype.itemsize, WARPS, "gfx950", len(batch_idx), traffic)
        where: dict[str, Any] = {"end": 0, "traffic": traffic, "hazards": self.hazards}
        self.k = KVBuffer(k, k_cache, batch_idx, head_idx, k.smem_tile(self.smem, 0), **where)
        self.buffers = [self.k]
        if not shape.latent:
            first = v.smem_tile(self.smem, 0 if shape.shared_kv else nbytes)
            self.buffers.append(KVBuffer(v, v_cache, batch_idx, head_idx, first, **where))
        self.slices = WarpSlices(self.buffers[-1], WARPS, shape.v_depth)
        per_warp = KVBufferParams(
            shape.dtype, k.mma_shape, None, BN=BN, WN=BN // WARPS, BK=shape.BK, num_threads=WARPS * WARP_SIZE,
            depth=shape.v_depth, kv_num_heads=heads, transpose=False,
        )
        self._output = output_map(per_warp, BM)
        self.exchange = p_through_lds(self, shape.mma_dtype, kv_buffer_operand_map(per_warp, BM), p_first)
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[TileTensor]] = {"k": [], "v": []}
        self.atom = mfma_atom((16, 16, 32), shape.mma_dtype)

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetch ahead along these iterators, of K and V for one loop after the other; the loads take their tiles in
        turn."""
        self._walk = TileWalk(*tiles)
        self._fetch()

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> Fragments:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, straight into every warp's registers, or zeros."""
        layout, dtype = _query_map(self.k.params), self.shape.mma_dtype
        self.traffic.move("DRAM->registers", int(valid.sum()) * self.shape.D * dtype.itemsize)
        return query_fragments(dram, offset, valid, layout, dtype)

    def load_k(self, tile: TileTensor, active: Array) -> Strips:
        """The K tile by DMA into LDS, then every warp its 32 keys."""
        self._land(self.k, tile, active)
        self.k.load_from_shared(0, active=active)
        return Strips.of(self.k, axis=2)

    def load_v(self, tile: TileTensor | None, active: Array) -> Strips:
        """The V tile by DMA into LDS (None: it is K's), then every warp its columns by transposing reads."""
        if tile is not None:
            self._land(self.buffers[-1], tile, active)
        self.slices.load_from_shared(0, active=active)
        return Strips.of(self.slices, axis=1)

    def split_q(self, q: Fragments) -> tuple[Fragments, Fragments]:
        """Registers of Q, those of the latent and those of the rope columns."""
        latent, layout = self.shape.latent, q.map
        at, n = latent // self.shape.BK, layout.shape[0]
        first = FragmentMap((n, latent), layout.row[:, :at], layout.col[:, :at])
        rest = FragmentMap((n, self.shape.D - latent), layout.row[:, at:], layout.col[:, at:] - latent)
        return Fragments(q.values[:, :, :at], first), Fragments(q.values[:, :, at:], rest)

    def split_k(self, k: Strips) -> tuple[Strips, Strips]:
        """The strips of the latent and those of the rope columns."""
        at = self.shape.latent // self.shape.BK
        return (
            Strips(k.registers[:, :, :at], k.map, k.axis), Strips(k.registers[:, :, at:], k.map, k.axis),
        )

    def scores(self, q: Fragments, k: Strips, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``; added to ``s`` if given."""
        operand = q.values.reshape(*q.values.shape[:2], -1, self.k.params.input_frag_size)
        zeros = Fragments.zeros(self.programs, score_map(self.k.params, BM))
        return self._multiply(operand, k, zeros if s is None else s)

    def accumulate(self, p: Fragments, v: Strips, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the dtype of the products, through LDS to the operand that multiplies V."""
        operand = self.exchange(p.values, active)
        if self._walk is not None and self._walk.more:
            self.hazards.barrier()
            self._fetch()
        return self._multiply(operand, v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, columns of V]``."""
        return Fragments.zeros(self.programs, self._output)

    def _fetch(self) -> None:
        """The next K tile, and V's unless it has to wait for K's memory."""
        pair = None if self._walk is None else self._walk.next_pair()
        for buffer, tile in zip(self.buffers, (pair or {}).values(), strict=False):
            self._flying[buffer.params.role].append(tile)
            if buffer is self.k or not self.shape.shared_kv:
                self._copy(buffer, tile)

    def _copy(self, buffer: KVBuffer, tile: TileTensor, active: Array | None = None) -> None:
        buffer.kv_cache_iter = GivenTile(tile)
        buffer.load_from_dram(0, active)

    def _land(self, buffer: KVBuffer, tile: TileTensor, active: Array) -> None:
        """Make sure that all warps may read the tile."""
        if self._walk is not None:
            expect_fetched(self._flying[buffer.params.role], tile, buffer.params.role)
        waits = self._walk is None or buffer is self.k
        if self._walk is None or (buffer is not self.k and self.shape.shared_kv):
            self.hazards.barrier()
            self._copy(buffer, tile, active)
            waits = True
        if waits:
            self.hazards.wait_group(0)
            self.hazards.barrier()

    def _multiply(self, operand: Array, strips: Strips, c: Fragments) -> Fragments:
        """C += operand x strips, strip after strip; a fragment of 32 elements in four steps of eight."""
        a, b = (eights(x.astype(self.shape.mma_dtype)) for x in strips.steps(operand, 1))
        return c.with_values(mma_step_by_step(self.atom, a, b, c.values))


def p_through_lds(cta: LaunchedCTA, dtype: np.dtype[Any], operand: FragmentMap, first: int) -> PExchange:
    """P of 16 rows and 128 keys, in blocks of 32 keys: a warp writes the block of its keys, every warp reads all blocks
    (MAX's P staging of 16x16 instructions, swizzled). The 16 bytes of a lane are four keys of each of its two score
    tiles: V's fragments of 16 bits hold the keys in that order. Those of 8 bits hold consecutive keys and take 8 bytes
    at a time."""
    params = PStagingParams(dtype, (16, 16, 32), BM, BM, BN, BN // WARPS, 32, Swizzle(3, 0, 3, "vector"))
    accesses = lds_accesses(params, operand)
    return PExchange(cta.smem, accesses, dtype, first=first, hazards=cta.hazards, traffic=cta.traffic)


@functools.cache
def _query_map(k: KVBufferParams) -> FragmentMap:
    """What the registers of Q hold, eight neighbouring columns each."""
    layout = kv_buffer_operand_map(k, BM)
    row, col = (x.reshape(len(x), -1, 8) for x in (layout.row, layout.col))
    return FragmentMap(layout.shape, row, col)
