"""One CTA of MAX's prefill on gfx950, 16- or 8-bit storage: whole tiles through two stages of KVBuffer, MFMA 32x32x16
or, for e4m3, 32x32x64.

Four warps of 32 query rows and all keys of a tile each, so P never leaves the registers: V's fragments come in the
order of the keys in which the scores lie. All products are issued swapped, a lane owns one query row. The order of
MAX's prefill, every access, wait and barrier of which is stated to ``hazards``::

    copy K and V into stage 0                                                   before the loop
    loop: wait for K, barrier, K to registers, S = Q K^T, copy the next K and V into the other stage,
          softmax, wait for V, barrier, V to registers, O += P V

e4m3 K and V beside a 16-bit operand (a kvlab extension) are read as MAX reads e4m3 and converted in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvlab.hardware import get_arch
from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import Memory
from kvlab.staging.max.kv_buffer import KVBuffer
from kvlab.staging.max.operand_maps import kv_buffer_operand_map, output_map, score_map
from kvlab.staging.max.params import WARP_SIZE, KVBufferParams
from kvlab.staging.max.tiled_mma_op import mfma_atom
from kvlab.staging.record.traffic import Traffic
from kvlab.staging.tile.fragments import Fragments
from kvlab.staging.tile.iterator import GivenTile, KVCacheIterator
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.tile_spec import KVRows, TileSpec
from kvlab.staging.tile.tile_walk import TileWalk, expect_fetched

from .mfma_product import mma_step_by_step
from .strips import Strips, StripShape, eights, query_fragments

WARPS, STAGES = 4, 2
Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class KVBufferShape(StripShape):
    """Sizes of the tile. stages : of K and V; with one nothing is fetched ahead."""

    stages: int = STAGES

    def __post_init__(self) -> None:
        known, BK = (0, *(n for n in (32, 64, 128, 256, 512) if n >= self.BK)), self.BK
        if self.BM % (32 * WARPS) or self.BN % BK or self.D not in known or self.v_depth not in known:
            depths = f"powers of two from {BK} to 512"
            raise ValueError(f"{self}: BM must be a multiple of {32 * WARPS}, BN of {BK}, D and DV {depths}")

    @property
    def mma_shape(self) -> tuple[int, int, int]:
        """Of the instruction for K and V as they are stored, whose fragments a lane reads."""
        return (32, 32, 64) if self.kv_dtype.itemsize == 1 else (32, 32, 16)

    @property
    def BK(self) -> int:
        """Columns or keys of a strip."""
        return 64 if self.kv_dtype.itemsize == 1 else 32

    def params(self, kv_num_heads: int, *, transpose: bool) -> KVBufferParams:
        """The parameters of the K (``transpose``) or V buffer; K is swizzled."""
        return KVBufferParams(
            self.kv_dtype, self.mma_shape, Swizzle(3, 0, 4, "vector") if transpose else None, BN=self.BN, WN=self.BN,
            BK=self.BK, num_threads=WARPS * WARP_SIZE, depth=self.D if transpose else self.v_depth,
            kv_num_heads=kv_num_heads, transpose=transpose, num_smem_stages=self.stages,
        )


class KVBufferCTA(LaunchedCTA):
    """The CTAs of one launch, side by side: ``programs`` copies of LDS and registers.

    Keys and values come with the tiles; ``k_rows`` and ``v_rows`` are what the iterators walk over. Until
    :meth:`follow` is called there is nothing to look ahead to: each load copies, waits and ends with a barrier."""

    buffer = "KVBuffer, two stages or one"
    p_path = "registers"

    @classmethod
    def of(cls, tile: TileSpec, rows: KVRows, traffic: Traffic, *, beside: bool = False) -> Self:
        """The model for a tile, or for a part of one; MAX's two stages where LDS holds two tiles of all parts."""
        stages = 2 if 2 * tile.key_bytes * tile.BN <= get_arch(tile.arch).shared_bytes else 1
        (D, BD), (_, BDV) = tile.k, tile.v
        shape = KVBufferShape(tile.BM, tile.BN, BD, tile.dtype, BDV, tile.stored, tile.weights, D, stages)
        return cls(shape, *rows, traffic)

    def __init__(
        self, shape: KVBufferShape, k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any, traffic: Traffic
    ) -> None:
        self.shape = shape
        heads, size = k_rows.kv_params.num_heads, shape.kv_dtype.itemsize
        parts = [shape.params(heads, transpose=t) for t, n in ((True, shape.D), (False, shape.v_depth)) if n]
        sizes = [shape.stages * part.smem_stage_size * size for part in parts]
        super().__init__(sum(sizes), WARPS, "gfx950", len(batch_idx), traffic)
        where: dict[str, Any] = {"end": 0, "bounded": True}
        where |= {"traffic": traffic, "hazards": self.hazards}
        if shape.D:
            self.k = KVBuffer(parts[0], k_rows, batch_idx, head_idx, parts[0].smem_tile(self.smem, 0), **where)
        if shape.v_depth:
            self.v = KVBuffer(
                parts[-1], v_rows, batch_idx, head_idx, parts[-1].smem_tile(self.smem, sum(sizes[:-1])), **where
            )
        self._copied, self._read = ({"k": 0, "v": 0} for _ in range(2))  # tiles so far
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[TileTensor]] = {"k": [], "v": []}

    def follow(self, *tiles: KVCacheIterator | None) -> None:
        """Fetch ahead along these iterators, of K and V for one loop after the other; the loads take their tiles in
        turn. Nothing where there is one stage."""
        if self.shape.stages > 1:
            self._walk = TileWalk(*tiles)
            self._fetch()

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> Fragments:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, straight into registers; invalid rows are 0."""
        layout, dtype = kv_buffer_operand_map(self.k.params, self.shape.BM), self.shape.dtype
        columns = self.shape.q_columns
        self.traffic.move("DRAM->registers", int(valid.sum()) * columns * dtype.itemsize)
        return query_fragments(dram, offset, valid, layout, dtype, self.k.params.simd_width, columns)

    def load_k(self, tile: TileTensor, active: Array) -> Strips:
        """The K tile in its stage, then all strips into registers."""
        ahead = self._walk is not None and self._walk.more
        return self._load(self.k, tile, active, self.v.vm_instrs_per_load if ahead else 0, axis=2)

    def load_v(self, tile: TileTensor, active: Array) -> Strips:
        """The V tile in its stage, then all strips by transposing reads."""
        newer = [0]
        if self._flying["k"]:  # of the next tile; 0 makes the wait one for all
            newer = [self.k.vm_instrs_per_load, self.v.vm_instrs_per_load]
        return self._load(self.v, tile, active, sum(newer) if all(newer) else 0, axis=1)

    def scores(self, q: Fragments, k: Strips, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``; added to ``s`` if given."""
        zeros = Fragments.zeros(self.programs, score_map(self.k.params, self.shape.BM))
        s = self._multiply(q.values, k, zeros if s is None else s, self.shape.dtype)
        self._fetch()
        return s

    def accumulate(self, p: Fragments, v: Strips, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to its dtype where it lies."""
        P, threads, _, regs = p.values.shape
        tiles = p.values.astype(self.shape.p_dtype).reshape(P, threads, self.shape.BN // 32, -1, regs)
        if self.shape.kv_dtype.itemsize == 1:  # a fragment has the keys of two score tiles
            pairs = tiles.reshape(P, threads, self.shape.BN // 64, 2, -1, regs).swapaxes(3, 4)
            operand = pairs.reshape(P, threads, -1, 2 * regs)  # strip, query tile
        else:
            halves = tiles.reshape(P, threads, self.shape.BN // 32, -1, 2, regs // 2).swapaxes(3, 4)
            operand = halves.reshape(P, threads, -1, regs // 2)  # strip, k group, query tile
        return self._multiply(operand, v, o, self.shape.p_dtype)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, DV]``."""
        return Fragments.zeros(self.programs, output_map(self.v.params, self.shape.BM))

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``: in the lane, then over the row's two lanes."""
        return self._by_row(s, np.max)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]``: in the lane, then over the row's two lanes."""
        return self._by_row(p, np.sum)

    def _by_row(self, x: Fragments, reduce: Any) -> Array:
        parts = x.values.reshape(self.programs, WARPS, 2, 32, self.shape.BN // 32, -1, 16)
        rows = reduce(reduce(parts, axis=(4, 6)), axis=2)  # [programs, warps, 32 rows, query tiles]
        return rows.swapaxes(2, 3).reshape(self.programs, self.shape.BM)

    def _fetch(self) -> None:
        """The next tiles, if any, into the stages that are not being read."""
        pair = None if self._walk is None else self._walk.next_pair()
        if pair is None:
            return
        for buffer, tile in zip((self.k, self.v), pair.values(), strict=True):
            self._copy(buffer, tile)
            self._flying[buffer.params.role].append(tile)

    def _stage(self, tiles: int) -> int:
        """Of the tile that so many came before."""
        return tiles % self.shape.stages

    def _copy(self, buffer: KVBuffer, tile: TileTensor, active: Array | None = None) -> None:
        role = buffer.params.role
        buffer.kv_cache_iter = GivenTile(tile)
        buffer.load_from_dram(self._stage(self._copied[role]), active)
        self._copied[role] += 1

    def _load(self, buffer: KVBuffer, tile: TileTensor, active: Array, newer: int, axis: int) -> Strips:
        """``newer``: DMA instructions of a wave that were issued after those of the tile and may go on."""
        role = buffer.params.role
        if self._walk is None:
            self.hazards.barrier()
            self._copy(buffer, tile, active)
        else:
            expect_fetched(self._flying[role], tile, role)
        self.hazards.wait_group(0 if self._walk is None else newer)
        self.hazards.barrier()
        buffer.load_from_shared(self._stage(self._read[role]), active=active)
        self._read[role] += 1
        return Strips.of(buffer, axis)

    def _multiply(self, operand: Array, strips: Strips, c: Fragments, dtype: np.dtype[Any]) -> Fragments:
        """C += operand x strips in ``dtype``, k group after k group."""
        a, b = strips.steps(operand, self.shape.BK // self.shape.mma_shape[2])
        if dtype != self.shape.kv_dtype:  # fragments of e4m3, converted: those of several 16-bit instructions
            a, b = (eights(x.astype(dtype)) for x in (a, b))
        atom = mfma_atom((32, 32, 64) if dtype.itemsize == 1 else (32, 32, 16), dtype)
        return c.with_values(mma_step_by_step(atom, a, b, c.values))
