"""One CTA of MAX's prefill on gfx950, 16-bit storage: whole tiles through two stages of KVBuffer, MFMA 32x32x16.

Four warps of 32 query rows and all keys of a tile each, so P never leaves the registers: V's fragments come in the
order of the keys in which the scores stand. All products are issued swapped, a lane owns one query row. The order of
MAX's prefill, every access, wait and barrier of which is stated to ``hazards``::

    copy K and V into stage 0                                                   before the loop
    loop: wait for K, barrier, K to registers, S = Q K^T, copy the next K and V into the other stage,
          softmax, wait for V, barrier, V to registers, O += P V
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom
from kvlab.layout import Swizzle
from kvlab.memory import AddressSpace, Memory

from .fragments import Fragments
from .hazards import Hazards
from .iterator import GivenTile, KVCacheIterator, KVTile
from .kv_buffer import KVBuffer
from .kv_mma_op import mfma_atom
from .mfma_product import mma_step_by_step
from .operand_maps import kv_buffer_operand_map, output_map, score_map
from .params import WARP_SIZE, KVBufferParams
from .strips import Strips, query_fragments
from .tile_walk import TileWalk, expect_fetched
from .traffic import Traffic

__all__ = ["KVBufferCTA", "KVBufferShape"]

WARPS, STAGES = 4, 2
Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class KVBufferShape:
    """Sizes of the tile: BM query rows, BN keys, D columns; strips of BK."""

    BM: int
    BN: int
    D: int
    dtype: np.dtype[Any]
    BK: int = 32

    def __post_init__(self) -> None:
        if self.BM % (32 * WARPS) or self.BN % 32 or self.D not in (64, 128, 256):
            raise ValueError(f"{self}: BM must be a multiple of {32 * WARPS}, BN of 32, D 64, 128 or 256")

    @property
    def atom(self) -> MmaAtom:
        return mfma_atom((32, 32, 16), self.dtype)

    def params(self, kv_num_heads: int, *, transpose: bool) -> KVBufferParams:
        """The parameters of the K (``transpose``) or V buffer; K is swizzled."""
        return KVBufferParams(
            self.dtype, (32, 32, 16), Swizzle(3, 0, 4, "vector") if transpose else None, BN=self.BN, WN=self.BN,
            BK=self.BK, num_threads=WARPS * WARP_SIZE, depth=self.D, kv_num_heads=kv_num_heads, transpose=transpose,
            num_smem_stages=STAGES,
        )  # fmt: skip


class KVBufferCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of LDS and registers.

    Keys and values come with the tiles; ``k_rows`` and ``v_rows`` are what the iterators walk over. Until
    :meth:`follow` is called there is nothing to look ahead to: each load copies, waits and meets at a barrier.

    hazards : what is in flight, and who waited; checks every access.
    """

    def __init__(
        self, shape: KVBufferShape, k_rows: Any, v_rows: Any, batch_idx: Any, head_idx: Any, traffic: Traffic
    ) -> None:
        self.shape, self.traffic, self.programs = shape, traffic, len(batch_idx)
        heads, size = k_rows.kv_params.num_heads, shape.dtype.itemsize
        k, v = (shape.params(heads, transpose=transpose) for transpose in (True, False))
        nbytes = STAGES * k.smem_stage_size * size
        self.smem = Memory(2 * nbytes, space=AddressSpace.SHARED, name="LDS", programs=self.programs)
        self.hazards = Hazards(self.smem, WARPS, arch="gfx950", timeline=traffic.timeline)
        where: dict[str, Any] = {"smem": self.smem, "end": 0, "traffic": traffic, "hazards": self.hazards}
        self.k = KVBuffer(k, k_rows, batch_idx, head_idx, smem_address=0, **where)
        self.v = KVBuffer(v, v_rows, batch_idx, head_idx, smem_address=nbytes, **where)
        self._copied, self._read = ({"k": 0, "v": 0} for _ in range(2))  # tiles so far
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[KVTile]] = {"k": [], "v": []}

    def follow(self, *tiles: KVCacheIterator) -> None:
        """Fetch ahead along these iterators, of K and V for one loop after the other; the loads take their tiles in
        turn.
        """
        self._walk = TileWalk(*tiles)
        self._fetch()

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> Fragments:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, straight into registers; invalid rows are 0."""
        layout, dtype = kv_buffer_operand_map(self.k.params, self.shape.BM), self.shape.dtype
        self.traffic.move("DRAM->registers", int(valid.sum()) * self.shape.D * dtype.itemsize)
        return query_fragments(dram, offset, valid, layout, dtype)

    def load_k(self, tile: KVTile, active: Array) -> Strips:
        """The K tile in its stage, then all strips into registers."""
        last = self._walk is not None and not self._walk.more
        return self._load(self.k, tile, active, 0 if last else self.v.vm_instrs_per_load, axis=2)

    def load_v(self, tile: KVTile, active: Array) -> Strips:
        """The V tile in its stage, then all strips by transposing reads."""
        newer = self.k.vm_instrs_per_load, self.v.vm_instrs_per_load  # of the next tile; 0 makes the wait one for all
        return self._load(self.v, tile, active, sum(newer) if self._flying["k"] and all(newer) else 0, axis=1)

    def scores(self, q: Fragments, k: Strips, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``; added to ``s`` if given."""
        zeros = Fragments.zeros(self.programs, score_map(self.k.params, self.shape.BM))
        s = self._multiply(q.values, k, zeros if s is None else s)
        self._fetch()
        return s

    def accumulate(self, p: Fragments, v: Strips, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the storage dtype where it stands."""
        P, threads, _, regs = p.values.shape
        tiles = p.values.astype(self.shape.dtype).reshape(P, threads, self.shape.BN // 32, -1, 2, regs // 2)
        operand = tiles.swapaxes(3, 4).reshape(P, threads, -1, regs // 2)  # strip, k group, query tile
        return self._multiply(operand, v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, D]``."""
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
        for buffer, tile in zip((self.k, self.v), pair or (), strict=False):
            self._copy(buffer, tile)
            self._flying[buffer.params.role].append(tile)

    def _copy(self, buffer: KVBuffer, tile: KVTile, active: Array | None = None) -> None:
        role = buffer.params.role
        buffer.kv_cache_iter = GivenTile(tile)
        buffer.load_from_dram(self._copied[role] % STAGES, active)
        self._copied[role] += 1

    def _load(self, buffer: KVBuffer, tile: KVTile, active: Array, newer: int, axis: int) -> Strips:
        """``newer``: DMA instructions of a wave that were issued after those of the tile and may go on."""
        role = buffer.params.role
        if self._walk is None:
            self.hazards.barrier()
            self._copy(buffer, tile, active)
        else:
            expect_fetched(self._flying[role], tile, role)
        self.hazards.wait_group(0 if self._walk is None else newer)
        self.hazards.barrier()
        buffer.load_from_shared(self._read[role] % STAGES, active=active)
        self._read[role] += 1
        return Strips.of(buffer, axis)

    def _multiply(self, operand: Array, strips: Strips, c: Fragments) -> Fragments:
        """C += operand x strips, k group after k group."""
        a, b = strips.steps(operand, self.shape.BK // 16)
        return c.with_values(mma_step_by_step(self.shape.atom, a, b, c.values))
