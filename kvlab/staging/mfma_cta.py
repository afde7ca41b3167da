"""One CTA of MAX's streaming decode on gfx950: strips through one shared-memory buffer, MFMA, P through LDS.

K strip by strip and V strip by strip through :class:`DecodeStreamingKVBuffer`; Q stays in registers. All products are
issued swapped (K Q^T and V^T P^T), so that a lane owns one query row. P is staged through LDS in blocks of BM x BK, not
swizzled, and read in canonical key order (spec/kv_cache.md 6.1). On the hardware each strip's product follows its
load; here a tile's strips are loaded first, which moves the same bytes through the same places.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.cache import PagedKVCache
from kvlab.hardware import MmaAtom, count_wavefronts
from kvlab.layout import Swizzle
from kvlab.memory import AddressSpace, Memory

from .decode_streaming import DecodeStreamingKVBuffer
from .fragments import FragmentMap, Fragments
from .iterator import KVTile
from .kv_mma_op import mfma_atom, mma_tiles
from .params import WARP_SIZE, KVBufferParams
from .traffic import Traffic

__all__ = ["MfmaCTA", "MfmaShape", "Strips"]

WARPS = 4
Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class MfmaShape:
    """Sizes of the tile: BM query rows, BN keys, D columns; strips of BK."""

    BM: int
    BN: int
    D: int
    dtype: np.dtype[Any]
    BK: int = 32

    def __post_init__(self) -> None:
        if self.BM % 16 or self.BN % (16 * WARPS) or self.D % (16 * WARPS):
            raise ValueError(f"{self}: BM must be a multiple of 16, BN and D of {16 * WARPS}")

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

    def params(self, kv_num_heads: int, *, transpose: bool) -> KVBufferParams:
        """The parameters of the K (``transpose``) or V buffer.

        K of 16 bits takes ``Swizzle(3, 0, 3)``; float32 has fragments of 4 bytes, which only read back without one.
        """
        swizzle = Swizzle(3, 0, 3, unit="vector") if transpose and self.dtype.itemsize == 2 else None
        return KVBufferParams(
            self.dtype, self.mma_shape, swizzle, BN=self.BN, WN=self.BN // WARPS, BK=self.BK,
            num_threads=WARPS * WARP_SIZE, depth=self.D, kv_num_heads=kv_num_heads, transpose=transpose,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Strips:
    """The registers of a tile's strips, one after the other; ``axis`` is the one along which they make up the tile."""

    registers: list[Array]
    map: FragmentMap
    axis: int

    def tile(self) -> Array:
        """``[programs, BN, depth]``."""
        return np.concatenate([self.map.gather(strip) for strip in self.registers], axis=self.axis)


class MfmaCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of LDS and registers."""

    def __init__(
        self,
        shape: MfmaShape,
        k_cache: PagedKVCache,
        v_cache: PagedKVCache,
        batch_idx: Any,
        head_idx: Any,
        traffic: Traffic,
    ) -> None:
        self.shape, self.traffic, self.programs = shape, traffic, len(batch_idx)
        heads = k_cache.kv_params.num_heads
        strip = shape.BK * max(shape.BN, shape.D) * shape.dtype.itemsize
        nbytes = 2 * strip + shape.BM * shape.BN * shape.dtype.itemsize
        self.smem = Memory(nbytes, space=AddressSpace.SHARED, name="LDS", programs=self.programs)
        self.p_base = 2 * strip
        self.k = DecodeStreamingKVBuffer(
            shape.params(heads, transpose=True),
            k_cache,
            batch_idx,
            head_idx,
            self.smem,
            smem_address=0,
            traffic=traffic,
        )
        self.v = DecodeStreamingKVBuffer(
            shape.params(heads, transpose=False),
            v_cache,
            batch_idx,
            head_idx,
            self.smem,
            smem_address=strip,
            traffic=traffic,
        )

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> Fragments:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, straight into every warp's registers; invalid
        rows are 0.
        """
        layout, size = _q_map(self.shape), self.shape.dtype.itemsize
        row, col = layout.row[..., 0], layout.col[..., 0]  # [threads, registers], the first element of a fragment
        ok = valid[:, row]
        values = dram.load(np.where(ok, offset[:, row] + col, 0) * size, self.shape.dtype, layout.row.shape[-1])
        self.traffic.move("DRAM->registers", int(valid.sum()) * self.shape.D * size)
        return Fragments(np.where(ok[..., None], values, np.zeros((), self.shape.dtype)), layout)

    def load_k(self, tile: KVTile, active: Array) -> Strips:
        """The K tile, strip after strip: columns ``[strip * BK, + BK)`` of all keys."""
        return self._load(self.k, tile, active, axis=2)

    def load_v(self, tile: KVTile, active: Array) -> Strips:
        """The V tile, strip after strip: keys ``[strip * BK, + BK)`` of all columns."""
        return self._load(self.v, tile, active, axis=1)

    def scores(self, q: Fragments, k: Strips, active: Array) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``."""
        s = Fragments(self._zero(_accumulator(self.shape, self.shape.BN)), _accumulator(self.shape, self.shape.BN))
        return self._multiply(q.values, k, s)

    def accumulate(self, p: Fragments, v: Strips, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the storage dtype, through LDS to the operand that meets V."""
        size = self.shape.dtype.itemsize
        write = self.p_base + size * _p_offsets(self.shape, p.map)
        self.smem.store(write[None], p.values.astype(self.shape.dtype))
        self._count("p write", f"ds_write_b{32 * size}", write, active)
        layout = _p_map(self.shape)
        read = self.p_base + size * _p_offsets(self.shape, layout)
        width = layout.row.shape[-1]
        operand = self.smem.load(read[None], self.shape.dtype, width)
        self._count("p read", f"ds_read_b{8 * width * size}", read, active)
        self.traffic.move("SMEM->registers", int(active.sum()) * read.size * width * size)
        return self._multiply(operand, v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, D]``."""
        layout = _accumulator(self.shape, self.shape.D)
        return Fragments(self._zero(layout), layout)

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``: in the lane, over the row's four lanes, over the warps."""
        return self._by_row(s, np.max)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]`` in the order of the hardware: in the lane, over four lanes, over the warps."""
        return self._by_row(p, np.sum)

    def _by_row(self, x: Fragments, reduce: Any) -> Array:
        parts = x.values.reshape(self.programs, WARPS, 4, 16, -1, self.shape.BM // 16, 4)
        lane = reduce(parts, axis=(4, 6))  # [programs, warps, 4, 16 rows, BM/16]
        rows = reduce(reduce(lane, axis=2), axis=1)  # [programs, 16, BM/16]
        return rows.transpose(0, 2, 1).reshape(self.programs, self.shape.BM)

    def _load(self, buffer: DecodeStreamingKVBuffer, tile: KVTile, active: Array, axis: int) -> Strips:
        registers = []
        for strip in range(buffer.num_strips):
            buffer.load_from_dram(strip, tile, active)
            registers.append(buffer.load_from_shared(active))
        return Strips(registers, buffer.fragment_map(), axis)

    def _multiply(self, operand: Array, strips: Strips, c: Fragments) -> Fragments:
        """C += operand x strips, k group after k group; ``operand`` is ``[P, threads, (strip, k group, m), frag]``."""
        tiles_m, values = self.shape.BM // 16, c.values
        groups = operand.reshape(*operand.shape[:2], -1, tiles_m, operand.shape[-1])
        for strip, registers in enumerate(strips.registers):
            tiles_n = registers.shape[2] // self.shape.k_groups
            for kg in range(self.shape.k_groups):
                b = registers[:, :, kg * tiles_n : (kg + 1) * tiles_n]
                values = mma_tiles(self.shape.atom, groups[:, :, strip * self.shape.k_groups + kg], b, values)
        return c.with_values(values)

    def _zero(self, layout: FragmentMap) -> Array:
        return np.zeros((self.programs, *layout.row.shape), np.float32)

    def _count(self, role: str, name: str, address: IntArray, active: Array) -> None:
        got, ideal = _passes(name, address.tobytes(), address.shape[1])
        n = int(active.sum())
        self.traffic.access(role, wavefronts=got * n, ideal=ideal * n, unswizzled=got * n)


@functools.lru_cache(maxsize=256)
def _passes(name: str, address: bytes, registers: int) -> tuple[int, int]:
    """(wavefronts, ideal) of the access of ``[threads, registers]``; provisional, as all AMD wavefronts."""
    lanes = np.frombuffer(address, np.int64).reshape(-1, WARP_SIZE, registers).transpose(2, 0, 1)
    wavefronts, ideal, _ = count_wavefronts(name, lanes, arch="gfx950")
    return int(wavefronts.sum()), int(ideal.sum())


def _p_offsets(shape: MfmaShape, layout: FragmentMap) -> IntArray:
    """Where fragments of P (their first elements) stand: blocks of BM x BK, row-major, one after the other."""
    row, key = layout.row[..., 0], layout.col[..., 0]
    return key // shape.BK * shape.BM * shape.BK + row * shape.BK + key % shape.BK


@functools.cache
def _operand_map(shape: MfmaShape, cols: int) -> FragmentMap:
    """``[BM, cols]`` as the second operand of every warp: registers (k group, m), row ``16 m + lane % 16``."""
    _, _, K = shape.mma_shape
    frag = 16 * K // WARP_SIZE
    warp, lane, group, m, e = np.ogrid[:WARPS, :WARP_SIZE, : cols // K, : shape.BM // 16, :frag]
    row = 16 * m + lane % 16 + 0 * (warp + group + e)
    col = group * K + lane // 16 * frag + e + 0 * row
    return FragmentMap((shape.BM, cols), *(x.reshape(WARPS * WARP_SIZE, -1, frag) for x in (row, col)))


def _q_map(shape: MfmaShape) -> FragmentMap:
    return _operand_map(shape, shape.D)


def _p_map(shape: MfmaShape) -> FragmentMap:
    return _operand_map(shape, shape.BN)


@functools.cache
def _accumulator(shape: MfmaShape, cols: int) -> FragmentMap:
    """``[BM, cols]``, each warp a quarter of the columns: registers (n, m), row ``16 m + lane % 16``, four
    columns a lane.
    """
    width = cols // WARPS
    warp, lane, n, m, e = np.ogrid[:WARPS, :WARP_SIZE, : width // 16, : shape.BM // 16, :4]
    row = 16 * m + lane % 16 + 0 * (warp + n + e)
    col = warp * width + 16 * n + lane // 16 * 4 + e + 0 * row
    return FragmentMap((shape.BM, cols), *(x.reshape(WARPS * WARP_SIZE, -1, 4) for x in (row, col)))
