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

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class FmaShape:
    """Sizes of the tile: BM query rows, BN keys, D columns in DRAM, padded to BD in shared memory."""

    BM: int
    BN: int
    D: int
    BD: int
    arch: str = "sm_90"
    warps: int = 4

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
        """Q rows (elements ``offset[programs, BM]`` of ``dram``) into shared memory and registers, or zeros."""
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
        self._count("p write", name, address.reshape(self.shape.warps, 32, -1).transpose(2, 0, 1), active)
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
        """Row sums ``[programs, BM]`` in the order of the hardware: in the lane, over the lanes, over the warps."""
        patch = _patch(self.shape, self.shape.BN)
        parts = p.tile().reshape(self.programs, self.shape.BM, -1, patch.warps[1], patch.lanes[1], patch.side)
        total: np.ndarray[Any, Any] = parts.sum(axis=(2, 5)).sum(axis=3).sum(axis=2)
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
            f"{role} read",
            f"ld.shared.b{32 * width}",
            address.reshape(self.shape.warps, 32, -1).transpose(2, 0, 1),
            active,
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


@dataclass(frozen=True)
class _Patch:
    """How an accumulator ``BM x cols`` is dealt: patches of ``side x side``, lanes and warps along (rows, columns).

    The rule is Triton's: the larger the share of a thread, the larger its patches; lanes, then warps fill the columns
    first. ``rows`` and ``cols`` ``[warps, 32, repeats, side]`` are what a lane owns.
    """

    side: int
    lanes: tuple[int, int]
    warps: tuple[int, int]
    rows: IntArray
    cols: IntArray


@functools.cache
def _patch(shape: FmaShape, cols: int) -> _Patch:
    share = shape.BM * cols // (32 * shape.warps)
    side = 4 if share >= 16 else 2 if share >= 4 else 1
    across = min(cols // side, 32 * shape.warps)
    lanes = 32 // min(across, 32), min(across, 32)
    warps_n = max(across // lanes[1], 1)
    warps = shape.warps // warps_n, warps_n
    warp, lane, _, step = np.ogrid[: shape.warps, :32, :1, :side]
    owned = []
    for axis, (warp_at, lane_at, extent) in enumerate(
        [(warp // warps_n, lane // lanes[1], shape.BM), (warp % warps_n, lane % lanes[1], cols)]
    ):
        block = warps[axis] * lanes[axis] * side
        repeat = np.arange(max(extent // block, 1))[:, None]
        owned.append((repeat * block + (warp_at * lanes[axis] + lane_at) * side + step) % extent)
    return _Patch(side, lanes, warps, *owned)


def _map(shape: FmaShape, tile: tuple[int, int], row: IntArray, col: IntArray) -> FragmentMap:
    """From ``[warps, 32, ..., elements]``."""
    row, col = np.broadcast_arrays(row, col)
    registers = (32 * shape.warps, -1, row.shape[-1])
    return FragmentMap(tile, row.reshape(registers), col.reshape(registers))


@functools.cache
def _accumulator(shape: FmaShape, cols: int) -> FragmentMap:
    """Registers (row repeat, column repeat, row of the patch), each the columns of a patch."""
    patch = _patch(shape, cols)
    row = patch.rows[:, :, :, None, :, None]
    return _map(shape, (shape.BM, cols), row, patch.cols[:, :, None, :, None, :])


@functools.cache
def _row_plan(shape: FmaShape, role: str) -> FragmentMap:
    """Whole rows (of Q or P) for the rows of a lane's patches, four columns a read, the same for lanes in a row."""
    _, rows, cols = shape.place(role)
    patch = _patch(shape, shape.BN if role == "q" else shape.BD)
    return _map(shape, (rows, cols), patch.rows[..., None, None], np.arange(cols).reshape(-1, 4))


@functools.cache
def _key_plan(shape: FmaShape) -> FragmentMap:
    """A lane's keys (its columns of S), four columns of the depth a read."""
    patch = _patch(shape, shape.BN)
    return _map(shape, (shape.BN, shape.BD), patch.cols[..., None, None], np.arange(shape.BD).reshape(-1, 4))


@functools.cache
def _column_plan(shape: FmaShape) -> FragmentMap:
    """A lane's columns of V for every key, the columns of a patch a read."""
    key = np.arange(shape.BN)[:, None, None]
    return _map(shape, (shape.BN, shape.BD), key, _patch(shape, shape.BD).cols[:, :, None])
