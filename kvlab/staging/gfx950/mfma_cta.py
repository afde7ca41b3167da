"""One CTA of MAX's streaming decode on gfx950: strips through one shared-memory buffer, MFMA, P through LDS.

K strip by strip and V strip by strip through :class:`DecodeStreamingKVBuffer`; Q stays in registers. All products are
issued swapped (K Q^T and V^T P^T), so that a lane owns one query row. P is staged through LDS in blocks of BM x BK, not
swizzled, and read in canonical key order. On the hardware each strip's product follows its
load; here a tile's strips are loaded first, which moves the same bytes through the same places. Every access, wait and
barrier is stated to ``hazards``: load, wait, barrier, registers, barrier for each strip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvlab.cache import PagedKVCache, UnsafePointer
from kvlab.hardware import MmaAtom
from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import Memory
from kvlab.staging.max.decode_streaming import DecodeStreamingKVBuffer
from kvlab.staging.max.operand_maps import operand_map, output_map, score_map
from kvlab.staging.max.p_buffer import PRegisterBuffer
from kvlab.staging.max.params import WARP_SIZE, KVBufferParams
from kvlab.staging.max.tiled_mma_op import mfma_atom
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import KVCacheIterator
from kvlab.staging.tile.rows_over_warps import RowsOverWarps
from kvlab.staging.tile.tile_spec import KVRows, TileSpec

from .mfma_product import mma_step_by_step
from .strips import Strips, StripShape, query_fragments

WARPS = 4
Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class MfmaShape(StripShape):
    """Sizes of the tile, in strips of BK; e4m3 is converted in registers."""

    BK: int = 32

    def __post_init__(self) -> None:
        if self.BM % 16 or any(n % (16 * WARPS) for n in (self.BN, self.D, self.v_depth)):
            raise ValueError(f"{self}: BM must be a multiple of 16, BN and D of {16 * WARPS}, and so DV")

    @property
    def atom(self) -> MmaAtom:
        return mfma_atom(self.mma_shape, self.dtype)

    @property
    def mma_shape(self) -> tuple[int, int, int]:
        """float32 has its own instruction, with one element a lane."""
        return (16, 16, 4) if self.dtype.itemsize == 4 else (16, 16, 32)

    @property
    def k_groups(self) -> int:
        """Matrix instructions along the contraction of a strip."""
        return self.BK // self.mma_shape[2]

    def params(self, kv_num_heads: int, *, transpose: bool, dtype: np.dtype[Any] | None = None) -> KVBufferParams:
        """The parameters of the K (``transpose``) or V buffer, of elements as they are stored or of another ``dtype``.

        K of 16 bits takes ``Swizzle(3, 0, 3)``; float32 has fragments of 4 bytes, which only read back without one, and
        e4m3 such of 8 bytes."""
        dtype = self.kv_dtype if dtype is None else dtype
        swizzle = Swizzle(3, 0, 3, unit="vector") if transpose and dtype.itemsize == 2 else None
        return KVBufferParams(
            dtype, self.mma_shape, swizzle, BN=self.BN, WN=self.BN // WARPS, BK=self.BK,
            num_threads=WARPS * WARP_SIZE, depth=self.D if transpose else self.v_depth, kv_num_heads=kv_num_heads,
            transpose=transpose,
        )


class MfmaCTA(RowsOverWarps):
    """The CTAs of one launch, side by side: ``programs`` copies of LDS and registers."""

    buffer = "DecodeStreamingKVBuffer, a strip at a time"
    p_path = "shared memory"

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self:
        """The model for a tile, or for a part of one."""
        (D, BD), (_, BDV) = tile.k, tile.v
        shape = MfmaShape(tile.BM, tile.BN, BD, tile.dtype, DV=BDV, columns=D, stored=tile.stored)
        return cls(shape, *rows, traffic)

    def __init__(
        self, shape: MfmaShape, k_cache: PagedKVCache, v_cache: PagedKVCache, batch_idx: Any, head_idx: Any,
        traffic: Traffic,
    ) -> None:
        self.shape = shape
        heads = k_cache.kv_params.num_heads
        strip = shape.BK * max(shape.BN, shape.v_depth) * shape.kv_dtype.itemsize
        nbytes = 2 * strip + shape.BM * shape.BN * shape.dtype.itemsize
        super().__init__(nbytes, WARPS, "gfx950", len(batch_idx), traffic, unit=shape.kv_dtype.itemsize)
        where: dict[str, Any] = {"traffic": traffic, "hazards": self.hazards}
        buffer: dict[str, Any] = {"bounded": True, **where}
        first = UnsafePointer(self.smem, 0, shape.kv_dtype)
        if shape.D:
            k_params = shape.params(heads, transpose=True)
            self.k = DecodeStreamingKVBuffer(k_params, k_cache, batch_idx, head_idx, first, **buffer)
        if shape.v_depth:
            v_params = shape.params(heads, transpose=False)
            self.v = DecodeStreamingKVBuffer(
                v_params, v_cache, batch_idx, head_idx, first + strip // shape.kv_dtype.itemsize, **buffer
            )
            p_params = shape.params(heads, transpose=False, dtype=shape.dtype)
            self.p = PRegisterBuffer(p_params, shape.BM, self.programs, smem=self.smem, smem_address=2 * strip, **where)

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetches nothing: strips share one buffer, so none is fetched ahead."""

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> Fragments:
        """Q rows (elements ``offset[programs, BM]`` of ``dram``) straight into every warp's registers, or zeros."""
        layout, dtype = operand_map(self.k.params, self.shape.BM), self.shape.dtype
        columns = self.shape.q_columns
        self.traffic.move("DRAM->registers", int(valid.sum()) * columns * dtype.itemsize)
        return query_fragments(dram, offset, valid, layout, dtype, columns=columns)

    def load_k(self, tile: TileTensor, active: Array) -> Strips:
        """The K tile, strip after strip: columns ``[strip * BK, + BK)`` of all keys."""
        return self._load(self.k, tile, active, axis=2)

    def load_k_strip(self, tile: TileTensor, first: int, active: Array) -> Strips:
        """The strip of the K tile whose columns begin at ``first``."""
        registers = np.array(self._load_strip(self.k, first // self.shape.BK, tile, active))
        return Strips(registers[:, :, None], self.k.fragment_map(), axis=2)

    def load_q_strip(self, rows: Fragments, first: int) -> Array:
        """The registers of Q rows that meet the strip whose columns begin at ``first``."""
        registers = rows.values.shape[2] // self.k.num_strips
        strip = first // self.shape.BK
        return rows.values[:, :, strip * registers : (strip + 1) * registers]

    def add_scores(self, q: Array, k: Strips, s: Fragments) -> Fragments:
        """S + Q K^T over the columns of one strip."""
        return self._multiply(q, k, s)

    def zero_scores(self) -> Fragments:
        """The accumulator of S, ``[BM, BN]``."""
        return Fragments.zeros(self.programs, score_map(self.k.params, self.shape.BM))

    def load_v(self, tile: TileTensor, active: Array) -> Strips:
        """The V tile, strip after strip: keys ``[strip * BK, + BK)`` of all columns."""
        return self._load(self.v, tile, active, axis=1)

    def scores(self, q: Fragments, k: Strips, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``; added to ``s`` if given."""
        return self._multiply(q.values, k, self.zero_scores() if s is None else s)

    def accumulate(self, p: Fragments, v: Strips, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the storage dtype, through LDS to the operand that multiplies V."""
        self.p.copy_to_shared(p.values, active)
        self.hazards.barrier()
        return self._multiply(np.asarray(self.p.load_from_shared(active)), v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, DV]``."""
        return Fragments.zeros(self.programs, output_map(self.v.params, self.shape.BM))

    def _by_row(self, x: Fragments, combine: np.ufunc) -> Array:
        parts = x.values.reshape(self.programs, WARPS, 4, 16, -1, self.shape.BM // 16, 4)
        fours = combine(combine(parts[..., 0], parts[..., 1]), combine(parts[..., 2], parts[..., 3]))
        lane = combine.reduce(fours, axis=4)  # [programs, warps, 4, 16 rows, BM/16]
        rows = combine.reduce(combine.reduce(lane, axis=2), axis=1)  # [programs, 16, BM/16]
        return rows.transpose(0, 2, 1).reshape(self.programs, self.shape.BM)

    def _load(self, buffer: DecodeStreamingKVBuffer, tile: TileTensor, active: Array, axis: int) -> Strips:
        layout, dtype = buffer.mma_layout, buffer.params.dtype
        registers = np.empty((self.programs, 64 * WARPS, buffer.num_strips, *layout.shape), dtype)  # type: ignore[misc]
        for strip in range(buffer.num_strips):
            registers[:, :, strip] = self._load_strip(buffer, strip, tile, active)
        return Strips(registers, buffer.fragment_map(), axis)

    def _load_strip(self, buffer: DecodeStreamingKVBuffer, strip: int, tile: TileTensor, active: Array) -> TileTensor:
        buffer.load_from_dram(strip, tile, active)
        self.hazards.wait_group(0)
        self.hazards.barrier()
        registers = buffer.load_from_shared(active)
        self.hazards.barrier()
        return registers

    def _multiply(self, operand: Array, strips: Strips, c: Fragments) -> Fragments:
        """C += operand x strips, k group after k group; the strips' elements converted to the dtype of the product."""
        a, b = strips.steps(operand, self.shape.k_groups)
        b = b.astype(self.shape.dtype, copy=False)
        return c.with_values(mma_step_by_step(self.shape.atom, a, b, c.values))
