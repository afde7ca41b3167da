"""One CTA of the decode kernel on NVIDIA, float32 storage: cp.async, plain shared rows, fused multiply-add.

No tensor cores (tf32 would round the inputs). Each lane owns a patch of the accumulator and reads the operands that
it needs from unswizzled rows in shared memory, as Triton's blocked FMA dot does: K and Q along the depth, V along its
columns. Eight lanes of a K read start in the same bank, which is what this path costs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import count_wavefronts, cp_async
from kvlab.memory import AddressSpace, Memory, float32

from .fragments import FragmentMap, Fragments
from .iterator import KVTile
from .traffic import Traffic

__all__ = ["FmaCTA", "FmaShape"]

WARPS = 4
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class FmaShape:
    """Sizes of the tile: BM query rows, BN keys, D columns in DRAM, padded to BD in shared memory."""

    BM: int
    BN: int
    D: int
    BD: int
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        if self.BM % 16 or self.BN % 32 or self.BD % 32 or self.D > self.BD or self.D % 4:
            raise ValueError(f"{self}: BM must be a multiple of 16, BN and BD of 32, D of 4 and at most BD")

    def place(self, role: str) -> tuple[int, int, int]:
        """(first byte, rows, columns) of a role's tile in shared memory."""
        sizes = {"k": (self.BN, self.BD), "v": (self.BN, self.BD), "q": (self.BM, self.BD), "p": (self.BM, self.BN)}
        names = list(sizes)
        base = sum(4 * rows * cols for rows, cols in (sizes[n] for n in names[: names.index(role)]))
        return base, *sizes[role]

    @property
    def shared_bytes(self) -> int:
        base, rows, cols = self.place("p")
        return base + 4 * rows * cols


class FmaCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers."""

    def __init__(self, shape: FmaShape, programs: int, traffic: Traffic) -> None:
        self.shape, self.programs, self.traffic = shape, programs, traffic
        self.smem = Memory(shape.shared_bytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)

    def load_q(self, dram: Memory, offset: IntArray, valid: IntArray) -> Fragments:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, into shared memory and registers; invalid
        rows are 0.
        """
        base, rows, cols = self.shape.place("q")
        row, col = np.divmod(np.arange(0, rows * cols, 4), cols)
        ok = valid[:, row] & (col < self.shape.D)
        values = dram.load(4 * np.where(ok, offset[:, row] + col, 0), float32, 4)
        self.smem.store((base + 4 * (row * cols + col))[None], np.where(ok[..., None], values, np.float32(0)))
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * self.shape.D * 4)
        return self._read("q", _row_plan(self.shape, "q"), np.asarray(valid.any(axis=1)))

    def load_k(self, tile: KVTile, active: np.ndarray[Any, Any]) -> Fragments:
        """K tile of these pages into shared memory, then each lane's keys along the depth."""
        self._copy_async("k", tile)
        return self._read("k", _key_plan(self.shape), active)

    def load_v(self, tile: KVTile, active: np.ndarray[Any, Any]) -> Fragments:
        """V tile into shared memory, then each lane's columns for all keys."""
        self._copy_async("v", tile)
        return self._read("v", _column_plan(self.shape), active)

    def scores(self, q: Fragments, k: Fragments, active: np.ndarray[Any, Any]) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``."""
        layout = _accumulator(self.shape, self.shape.BN)
        return Fragments(layout.spread(np.matmul(q.tile(), k.tile().swapaxes(1, 2))), layout)

    def accumulate(self, p: Fragments, v: Fragments, o: Fragments, active: np.ndarray[Any, Any]) -> Fragments:
        """O += P V, P through shared memory since a lane needs whole rows of it."""
        base, _, cols = self.shape.place("p")
        address = base + 4 * (p.map.row[..., 0] * cols + p.map.col[..., 0])  # [threads, registers], vectors of a row
        self.smem.store(address[None], p.values)
        name = f"st.shared.b{32 * p.values.shape[-1]}"
        self._count("p write", name, address.reshape(WARPS, 32, -1).transpose(2, 0, 1), active)
        a = self._read("p", _row_plan(self.shape, "p"), active)
        return o.with_values(o.values + o.map.spread(np.matmul(a.tile(), v.tile())))

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BD]``."""
        layout = _accumulator(self.shape, self.shape.BD)
        return Fragments(np.zeros((self.programs, *layout.row.shape), np.float32), layout)

    def row_max(self, s: Fragments) -> np.ndarray[Any, Any]:
        """Largest score of each row ``[programs, BM]``."""
        return s.tile().max(axis=2)

    def row_sum(self, p: Fragments) -> np.ndarray[Any, Any]:
        """Row sums ``[programs, BM]``: the columns of a lane, then over the 32 lanes of the warp that owns the row."""
        tile = p.tile()
        lanes = tile.reshape(self.programs, self.shape.BM, 32, -1) if self.shape.BN <= 128 else tile[:, :, None]
        total: np.ndarray[Any, Any] = lanes.sum(axis=3).sum(axis=2)
        return total

    def _copy_async(self, role: str, tile: KVTile) -> None:
        base, rows, cols = self.shape.place(role)
        row, col = np.divmod(np.arange(0, rows * cols, 4), cols)
        offsets = tile.row_offsets()
        valid = (offsets[:, row] >= 0) & (col < self.shape.D)
        source = 4 * np.where(valid, offsets[:, row] + col, 0)
        cp_async(self.smem, (base + 4 * (row * cols + col))[None], tile.memory, source, 16, valid)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * 16)

    def _read(self, role: str, plan: FragmentMap, active: np.ndarray[Any, Any]) -> Fragments:
        base, _, cols = self.shape.place(role)
        address = base + 4 * (plan.row[..., 0] * cols + plan.col[..., 0])  # [threads, registers]
        width = plan.row.shape[-1]
        values = self.smem.load(address[None], float32, width)
        self._count(
            f"{role} read", f"ld.shared.b{32 * width}", address.reshape(WARPS, 32, -1).transpose(2, 0, 1), active
        )
        self.traffic.move("SMEM->registers", int(active.sum()) * address.size * 4 * width)
        return Fragments(values, plan)

    def _count(self, role: str, name: str, address: IntArray, active: np.ndarray[Any, Any]) -> None:
        got, ideal = _passes(name, address.tobytes(), self.shape.arch)
        programs = int(active.sum())
        self.traffic.access(role, wavefronts=got * programs, ideal=ideal * programs, unswizzled=got * programs)


@functools.lru_cache(maxsize=256)
def _passes(name: str, address: bytes, arch: str) -> tuple[int, int]:
    wavefronts, ideal, _ = count_wavefronts(name, np.frombuffer(address, np.int64).reshape(-1, 32), arch=arch)
    return int(wavefronts.sum()), int(ideal.sum())


def _patch(cols: int) -> int:
    """Side of a lane's square patch of an accumulator with ``cols`` columns."""
    return min(cols // 32, 4)


@functools.cache
def _accumulator(shape: FmaShape, cols: int) -> FragmentMap:
    """Each lane owns ``side x side`` patches: side rows of its warp, side consecutive columns."""
    side = _patch(cols)
    warp, lane, row_rep, i, col_rep, j = np.ogrid[
        :WARPS, :32, : max(shape.BM // (4 * side), 1), :side, : cols // (32 * side), :side
    ]
    row = (row_rep * 4 * side + warp * side + i) % shape.BM + 0 * (lane + col_rep + j)
    col = col_rep * 32 * side + lane * side + j + 0 * (warp + row_rep + i)
    return FragmentMap((shape.BM, cols), row.reshape(WARPS * 32, -1, side), col.reshape(WARPS * 32, -1, side))


@functools.cache
def _row_plan(shape: FmaShape, role: str) -> FragmentMap:
    """Whole rows (of Q or P) for the rows of a lane's patches, four columns a read, the same for all lanes of
    a warp.
    """
    _, rows, cols = shape.place(role)
    side = _patch(shape.BN if role == "q" else shape.BD)
    warp, lane, rep, i, col, e = np.ogrid[:WARPS, :32, : max(rows // (4 * side), 1), :side, : cols // 4, :4]
    row = (rep * 4 * side + warp * side + i) % rows + 0 * (lane + col + e)
    return FragmentMap((rows, cols), row.reshape(WARPS * 32, -1, 4), (4 * col + e + 0 * row).reshape(WARPS * 32, -1, 4))


@functools.cache
def _key_plan(shape: FmaShape) -> FragmentMap:
    """A lane's keys (its columns of S), four columns of the depth a read."""
    side = _patch(shape.BN)
    warp, lane, rep, j, col, e = np.ogrid[:WARPS, :32, : shape.BN // (32 * side), :side, : shape.BD // 4, :4]
    row = rep * 32 * side + lane * side + j + 0 * (warp + col + e)
    return FragmentMap(
        (shape.BN, shape.BD), row.reshape(WARPS * 32, -1, 4), (4 * col + e + 0 * row).reshape(WARPS * 32, -1, 4)
    )


@functools.cache
def _column_plan(shape: FmaShape) -> FragmentMap:
    """A lane's columns of V for every key, ``side`` columns a read."""
    side = _patch(shape.BD)
    warp, lane, key, rep, e = np.ogrid[:WARPS, :32, : shape.BN, : shape.BD // (32 * side), :side]
    col = rep * 32 * side + lane * side + e + 0 * (warp + key)
    return FragmentMap(
        (shape.BN, shape.BD), (key + 0 * col).reshape(WARPS * 32, -1, side), col.reshape(WARPS * 32, -1, side)
    )
