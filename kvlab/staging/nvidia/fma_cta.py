"""One CTA of the decode kernel on NVIDIA, float32 storage: cp.async, plain shared rows, fused multiply-add.

No tensor cores (tf32 would round the inputs). Each lane owns a patch of the accumulator and reads the operands that
it needs from unswizzled rows in shared memory, as Triton's blocked FMA dot does: K and Q along the depth, V along its
columns. Eight lanes of a K read start in the same bank, which is what this path costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import current_arithmetic
from kvlab.layout import TileTensor
from kvlab.memory import Memory, float32
from kvlab.staging.tile.copy_plan import TileCopyPlan, copy_plan
from kvlab.staging.tile.fragments import FragmentMap, Fragments
from kvlab.staging.tile.rows_over_warps import butterfly, in_turn
from kvlab.staging.tile.shared_access import SharedAccess
from kvlab.staging.tile.tile_spec import TileSpec

from .decode_cta import NvidiaDecodeCTA

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class FmaShape:
    """Sizes of the tile: BM query rows, BN keys, D columns in DRAM, padded to BD in shared memory.

    ``v_in_k``: V has no place of its own, it is read from K's (MLA). ``v_columns``: (D, BD) of V where they differ from
    K's. Either may be (0, 0): a CTA for a piece of K's or of V's columns."""

    BM: int
    BN: int
    D: int
    BD: int
    arch: str = "sm_90"
    warps: int = 4
    v_in_k: bool = False
    v_columns: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for D, BD in (self.columns("k"), self.columns("v")):
            if self.BM % 16 or self.BN % 16 or (BD % 32 and BD != 16) or D > BD or D % 4:
                raise ValueError(f"{self}: BM and BN must be multiples of 16, BD of 32 (or 16), D of 4 and at most BD")

    def columns(self, role: str) -> tuple[int, int]:
        """(in DRAM, in shared memory) of V, or of K and Q."""
        return self.v_columns if role == "v" and self.v_columns is not None else (self.D, self.BD)

    def place(self, role: str) -> tuple[int, int, int]:
        """(first byte, rows, columns) of a role's tile in shared memory."""
        v = self.columns("v")[1]
        sizes = {"k": (self.BN, self.BD), "v": (self.BN, v), "q": (self.BM, self.BD), "p": (self.BM, self.BN)}
        if self.v_in_k:
            del sizes["v"]
            role = "k" if role == "v" else role
        names = list(sizes)
        base = sum(4 * rows * cols for rows, cols in (sizes[n] for n in names[: names.index(role)]))
        return base, *sizes[role]

    def stored(self, role: str) -> np.dtype[Any]:
        """The dtype of the elements that ``role`` brings to registers."""
        return float32

    def fragment_map(self, role: str) -> FragmentMap:
        """Contents of the registers once ``role`` was read: elements of its tile ``[rows, columns]``."""
        if role in ("q", "p"):
            return _row_plan(self, role)
        return _key_plan(self) if role == "k" else _column_plan(self)

    def access(self, role: str) -> SharedAccess:
        """Accesses of the CTA to read ``"q"``, ``"k"``, ``"v"``, ``"p"``, or for ``"p write"``, all of it."""
        return _access(self, role)

    @property
    def shared_bytes(self) -> int:
        base, rows, cols = self.place("p")
        return base + 4 * rows * cols


class FmaCTA(NvidiaDecodeCTA[FmaShape]):
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers.

    hazards : what is in flight, and who waited; checks every access."""

    buffer = "cp.async into plain rows"
    p_path = "shared memory"

    @classmethod
    def shape_of(cls, tile: TileSpec) -> FmaShape:
        """The sizes of the model for a tile."""
        return FmaShape(tile.BM, tile.BN, *tile.k, tile.arch, tile.warps, tile.v_in_k, tile.v)

    def load_q(self, dram: Memory, offset: IntArray, valid: BoolArray) -> Fragments:
        """Q rows (elements ``offset[programs, BM]`` of ``dram``) into shared memory and registers, or zeros."""
        self.copies.by_registers("q", dram, np.where(valid, offset, -1), 4)
        self.hazards.barrier()
        self._state_read("q")
        return self._read("q", np.asarray(valid.any(axis=1)))

    def load_k(self, tile: TileTensor, active: BoolArray) -> Fragments:
        """K tile of these pages into shared memory, then each lane's keys along the depth."""
        self.pipeline.load("k", tile)
        self._state_read("k")
        return self._read("k", active)

    def load_v(self, tile: TileTensor | None, active: BoolArray) -> Fragments:
        """V tile into shared memory (None: it lies there, with ``v_in_k``), then each lane's columns for all keys.

        In a pipeline the warps issue these reads after those of P: :meth:`accumulate` states them."""
        if tile is not None:
            self.pipeline.load("v", tile)
        if not self.pipeline.following:
            self._state_read("v")
        return self._read("v", active)

    def scores(self, q: Fragments, k: Fragments, active: BoolArray, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``; added to ``s`` if given."""
        layout = _accumulator(self.shape, self.shape.BN)
        s = Fragments.zeros(self.programs, layout) if s is None else s
        return s.with_values(layout.spread(current_arithmetic().products(q.tile(), k.tile().swapaxes(1, 2), s.tile())))

    def p_barriers(self) -> None:
        """The barrier of :meth:`operand_p` where P goes through another CTA's model of the same threads."""
        self.hazards.barrier()

    def add_values(self, p: Fragments, v: Fragments, o: Fragments) -> Fragments:
        """O += P V of what the lanes hold."""
        return o.with_values(o.map.spread(current_arithmetic().products(p.tile(), v.tile(), o.tile())))

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BD]``."""
        return Fragments.zeros(self.programs, _accumulator(self.shape, self.shape.columns("v")[1]))

    def row_max(self, s: Fragments) -> np.ndarray[Any, Any]:
        """Largest score of each row ``[programs, BM]``."""
        self._row_barriers()
        return s.tile().max(axis=2)

    def row_sum(self, p: Fragments) -> np.ndarray[Any, Any]:
        """Row sums ``[programs, BM]`` in the order of the hardware: in the lane, over the lanes, over the warps."""
        self._row_barriers()
        patch = _patch(self.shape, self.shape.BN)
        parts = p.tile().reshape(self.programs, self.shape.BM, -1, patch.warps[1], patch.lanes[1], patch.side)
        lanes = in_turn(np.add, parts.transpose(0, 1, 3, 4, 2, 5).reshape(*parts.shape[:2], *parts.shape[3:5], -1))
        return butterfly(np.add, butterfly(np.add, lanes))

    def _row_barriers(self) -> None:
        """Warps that share rows exchange them through scratch memory: written, combined, read; two barriers."""
        if _patch(self.shape, self.shape.BN).warps[1] > 1:
            super()._row_barriers()

    def _copied_to(self, role: str) -> tuple[TileCopyPlan, IntArray]:
        """The plan of a role's tile, and where each of its vectors lands."""
        base, rows, cols = self.shape.place(role)
        plan = copy_plan(rows, 4 * cols, 4 * self.shape.columns(role)[0], self.shape.warps)
        return plan, base + plan.row * 4 * cols + plan.byte


@dataclass(frozen=True)
class _Patch:
    """How an accumulator ``BM x cols`` is dealt: patches of ``side x side``, lanes and warps along (rows, columns).

    The rule is Triton's: the larger the share of a thread, the larger its patches; lanes, then warps fill the columns
    first. ``rows`` and ``cols`` ``[warps, 32, repeats, side]`` are what a lane owns."""

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
    return FragmentMap(tile, row.reshape(registers), col.reshape(registers), warp_size=32)


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
    patch = _patch(shape, shape.BN if role == "q" else shape.columns("v")[1])
    return _map(shape, (rows, cols), patch.rows[..., None, None], np.arange(cols).reshape(-1, 4))


@functools.cache
def _access(shape: FmaShape, role: str) -> SharedAccess:
    base, _, cols = shape.place("p" if role == "p write" else role)
    layout = _accumulator(shape, shape.BN) if role == "p write" else shape.fragment_map(role)
    name = "st.shared.b" if role == "p write" else "ld.shared.b"
    return SharedAccess.of_elements(name, base + 4 * (layout.row * cols + layout.col), 4, shape.arch)


@functools.cache
def _key_plan(shape: FmaShape) -> FragmentMap:
    """A lane's keys (its columns of S), four columns of the depth a read."""
    patch = _patch(shape, shape.BN)
    return _map(shape, (shape.BN, shape.BD), patch.cols[..., None, None], np.arange(shape.BD).reshape(-1, 4))


@functools.cache
def _column_plan(shape: FmaShape) -> FragmentMap:
    """A lane's columns of V for every key, the columns of a patch a read."""
    key, columns = np.arange(shape.BN)[:, None, None], shape.columns("v")[1]
    return _map(shape, (shape.BN, columns), key, _patch(shape, columns).cols[:, :, None])
