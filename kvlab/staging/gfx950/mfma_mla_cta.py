"""One CTA of MAX's MLA decode on gfx950: K of all columns through KVBuffer, V read from K's memory.

Four warps lie along the keys for S^T = K Q^T and along the latent columns for O^T = V^T P^T, where each reads its
slice of K's tile by transposing reads. P goes through LDS in the order of the keys that V's fragments have (5.9, 7.4).
Every access, wait and barrier is stated to ``hazards``::

    loop: wait, barrier, K to registers, S = Q K^T, softmax (rows meet over the warps: two barriers each),
          V to registers, P to LDS, barrier, P from LDS, barrier, copy the next K, O += P V
"""

from __future__ import annotations

import functools
from typing import Any, Self

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.layout import Swizzle
from kvlab.memory import Memory
from kvlab.staging.max.kv_buffer import KVBuffer
from kvlab.staging.max.operand_maps import kv_buffer_operand_map, output_map, score_map
from kvlab.staging.max.params import WARP_SIZE, KVBufferParams
from kvlab.staging.max.tiled_mma_op import mfma_atom
from kvlab.staging.max.warp_slices import WarpSlices
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.rows_over_warps import QuarterRows
from kvlab.staging.tile.tile_spec import LatentRows, TileSpec

from .kv_buffer_decode_cta import p_through_lds
from .mfma_product import mma_step_by_step
from .strips import Strips, query_fragments

WARPS, BK, MMA = 4, 32, (16, 16, 32)
Array = np.ndarray[Any, Any]


class MfmaMLACTA(QuarterRows):
    """The CTAs of one launch, side by side: ``programs`` copies of LDS and registers.

    ValueError unless 16-bit storage, BM 16, BN 128, latent columns a multiple of 128 and rope columns of 32.
    """

    buffer = "KVBuffer, one stage; V is read from K's"
    p_path = "shared memory"
    of_latents = True

    @classmethod
    def of_windows(cls, tile: TileSpec, rope: tuple[int, int], rows: LatentRows, traffic: Traffic) -> Self:
        """The model for a tile of latent columns and those of ``rope``; windows are copied side by side unless they
        lie so.
        """
        columns, cache = (tile.k[0], rope[0]), _whole_rows(rows.latent, rows.rope)
        return cls(tile.BM, tile.BN, columns, cache, rows.batch_idx, rows.end, traffic)

    def __init__(
        self, BM: int, BN: int, columns: tuple[int, int], cache: PagedKVCache, batch_idx: Any, end: Any,
        traffic: Traffic,
    ) -> None:
        latent, rope = columns
        if BM != 16 or BN != WARPS * BK or latent % (WARPS * BK) or rope % BK or cache.dtype.itemsize != 2:
            raise ValueError(
                f"BM {BM}, BN {BN}, columns {columns}, {cache.dtype} on gfx950: must be BM 16, BN 128, latent columns "
                "a multiple of 128, rope columns of 32, in 16 bits"
            )
        self.BM, self.columns = BM, columns
        common: dict[str, Any] = {"BN": BN, "WN": BN // WARPS, "BK": BK, "num_threads": WARPS * WARP_SIZE}
        swizzle = Swizzle(3, 0, 3, unit="vector")
        k = KVBufferParams(
            cache.dtype, MMA, swizzle, **common, depth=sum(columns), kv_num_heads=1, transpose=True, num_smem_stages=1,
        )
        self.v_params = KVBufferParams(
            cache.dtype, MMA, swizzle, **common, depth=latent, kv_num_heads=1, transpose=False
        )
        p_first = k.smem_stage_size * cache.dtype.itemsize
        super().__init__(p_first + BM * BN * cache.dtype.itemsize, WARPS, "gfx950", len(batch_idx), traffic)
        first = k.smem_tile(self.smem, 0)
        self.k = KVBuffer(k, cache, batch_idx, 0, first, end=end, traffic=traffic, hazards=self.hazards)
        self.v = WarpSlices(self.k, WARPS, latent)
        self.exchange = p_through_lds(self, cache.dtype, kv_buffer_operand_map(self.v_params, BM), p_first)
        self._fetched: Array | None = None  # first key of the tile in flight or in LDS
        self.atom = mfma_atom(MMA, cache.dtype)

    def load_q(self, dram: Memory, offset: Array, valid: Array) -> tuple[Fragments, Fragments]:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, straight into every warp's registers; invalid rows
        are 0.
        """
        dtype = self.k.params.dtype
        latent, rope = _query_maps(self.k.params, self.BM, *self.columns)
        self.traffic.move("DRAM->registers", int(valid.sum()) * sum(self.columns) * dtype.itemsize)
        return (
            query_fragments(dram, offset, valid, latent, dtype),
            query_fragments(dram, offset + self.columns[0], valid, rope, dtype),
        )

    def load_k(self, start: Array, active: Array) -> tuple[Strips, Strips]:
        """The tile of all columns by DMA into LDS, then its strips: those of the latent and those of the rope part."""
        if self._fetched is None or not np.array_equal(self._fetched, start):
            self._fetch(start)
        self.hazards.wait_group(0)
        self.hazards.barrier()
        self.k.load_from_shared(0, active=active)
        strips, first = Strips.of(self.k, axis=2), self.columns[0] // BK
        parts = strips.registers[:, :, :first], strips.registers[:, :, first:]
        return Strips(parts[0], strips.map, axis=2), Strips(parts[1], strips.map, axis=2)

    def scores(
        self, q: tuple[Fragments, Fragments], k: tuple[Strips, Strips], active: Array, by_key: Array | None = None
    ) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: strip after strip of the latent, times ``by_key`` ``[programs, BN]`` if
        given, then of the rope columns.
        """
        s = self._multiply(q[0].values, k[0], Fragments.zeros(self.programs, score_map(self.k.params, self.BM)))
        if by_key is not None:
            s = s.with_values(s.values * np.take(by_key, s.map.col, axis=1))
        return self._multiply(q[1].values, k[1], s)

    def load_v(self, active: Array) -> Strips:
        """Every warp its slice of the latent columns of K's tile, keys ``[strip * BK, + BK)`` a strip."""
        self.v.load_from_shared(0, active=active)
        return Strips.of(self.v, axis=1)

    def accumulate(self, p: Fragments, v: Strips, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the storage dtype, through LDS to the operand that multiplies V."""
        operand = self.exchange(p.values, active)
        after = self.k.kv_cache_iter.tile_start_row
        if (after < self.k.end).any():
            self._fetch(after)
        return self._multiply(operand, v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, latent columns]``."""
        return Fragments.zeros(self.programs, output_map(self.v_params, self.BM))

    def _fetch(self, start: Array) -> None:
        """Begin to copy the tile at ``start``; all warps have read the one before."""
        self.hazards.barrier()
        self.k.kv_cache_iter.tile_start_row = start
        self.k.load_from_dram(0)
        self._fetched = np.array(start)

    def _multiply(self, operand: Array, strips: Strips, c: Fragments) -> Fragments:
        """C += operand x strips, strip after strip; ``operand`` is ``[programs, threads, strips, 8]``."""
        a, b = strips.steps(operand, 1)
        return c.with_values(mma_step_by_step(self.atom, a, b, c.values))


@functools.cache
def _query_maps(k: KVBufferParams, BM: int, latent: int, rope: int) -> tuple[FragmentMap, FragmentMap]:
    """What the registers of Q hold, of the latent and of the rope columns."""
    whole, strips = kv_buffer_operand_map(k, BM), latent // BK
    return (
        FragmentMap((BM, latent), whole.row[:, :strips], whole.col[:, :strips]),
        FragmentMap((BM, rope), whole.row[:, strips:], whole.col[:, strips:] - latent),
    )


def _whole_rows(latent: PagedKVCache, rope: PagedKVCache) -> PagedKVCache:
    """The cache of which these are windows, side by side in memory or brought there."""
    first, second = np.asarray(latent.blocks), np.asarray(rope.blocks)
    D = first.shape[3]
    if second.ctypes.data - first.ctypes.data == D * first.itemsize and first.strides == second.strides:
        rows = np.lib.stride_tricks.as_strided(first, (*first.shape[:3], D + second.shape[3]), first.strides)
    else:
        rows = np.concatenate([first, second], -1)
    return PagedKVCache(
        rows, latent.cache_lengths, latent.lookup_table, latent.max_seq_length, latent.max_cache_length
    )
