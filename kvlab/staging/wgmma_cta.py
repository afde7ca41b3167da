"""One CTA of the prefill kernel on sm_90, 16-bit storage: cp.async, swizzled panels, wgmma.

What Triton compiles our prefill tile to (read from its TTGIR): Q, K and V stand in shared memory as panels of at most
128 bytes a row, swizzled as TMA would (``NVMMASharedLayout``). Both products are wgmma of 64 rows a warpgroup: Q K^T
takes both operands from shared memory, through descriptors; P V takes P from the registers where the scores stood, and
V along its contiguous dimension (MN-major). Warp w owns the rows ``16 w ...`` of every ``16 * warps``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom, SmemDescriptor, TensorMapSwizzle, cp_async, get_atom
from kvlab.memory import AddressSpace, Memory

from .copy_plan import CopyPlan, copy_plan
from .fragments import FragmentMap, Fragments
from .iterator import KVTile
from .shared_tile import SharedTile
from .traffic import Traffic

__all__ = ["PanelTile", "WgmmaCTA", "WgmmaShape"]

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
K_STEP = 16  # elements of 2 bytes that one wgmma contracts


@dataclass(frozen=True)
class PanelTile:
    """``rows x cols`` 16-bit elements at byte ``base``, cut into panels of ``width`` bytes a row, one after the other.

    >>> tile = PanelTile(rows=64, cols=128, base=0)
    >>> tile.address(np.array([1, 1, 0]), np.array([0, 1, 8])).tolist()  # 16-byte vectors; 8: the second panel
    [144, 128, 8192]
    """

    rows: int
    cols: int
    base: int

    @property
    def width(self) -> int:
        """Bytes of a panel's row: the swizzle width."""
        return min(2 * self.cols, 128)

    @property
    def vectors(self) -> int:
        """16-byte vectors of a row, in all panels."""
        return self.cols // 8

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.cols

    def descriptor(self, row: int, col: int, *, along_rows: bool) -> SmemDescriptor:
        """The operand that starts at ``(row, col)``; ``along_rows``: the rows are contracted (V), else the columns."""
        panel, byte = divmod(2 * col, self.width)
        start = self.base + panel * self.rows * self.width + row * self.width + byte
        leading = self.rows * self.width if along_rows else 16
        return SmemDescriptor(start, leading, 8 * self.width, TensorMapSwizzle.of(f"{self.width}B"))

    def address(self, row: IntArray, vector: IntArray) -> IntArray:
        """Byte address of 16-byte ``vector`` of ``row``."""
        panel, within = np.divmod(16 * vector, self.width)
        linear = self.base + panel * self.rows * self.width + row * self.width + within
        swizzled: IntArray = self.descriptor(0, 0, along_rows=False).swizzle.swizzle()(linear)
        return swizzled


@dataclass(frozen=True)
class WgmmaShape:
    """Sizes of the tile: BM query rows, BN keys, D columns in DRAM, padded to BD in shared memory; ``warps`` 4 or 8."""

    BM: int
    BN: int
    D: int
    BD: int
    dtype: np.dtype[Any]
    warps: int = 8

    def __post_init__(self) -> None:
        if self.warps % 4 or self.BM % (16 * self.warps) or self.BN % 16 or self.BD % 32 or self.D > self.BD:
            raise ValueError(f"{self}: BM must be a multiple of {16 * self.warps}, BN of 16, BD of 32, D at most BD")
        if self.D % 8 or max(self.BN, self.BD) > 256:
            raise ValueError(f"{self}: D must be a multiple of 8 elements (16 bytes), BN and BD at most 256")

    def atom(self, columns: int) -> MmaAtom:
        """``wgmma.m64n<columns>k16``."""
        return get_atom(f"wgmma.m64n{columns}k16.{'bf16' if self.dtype.name == 'bfloat16' else 'f16'}")

    @property
    def places(self) -> dict[str, PanelTile]:
        """Where Q, K and V stand."""
        return _places(self)


class WgmmaCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers."""

    def __init__(self, shape: WgmmaShape, programs: int, traffic: Traffic) -> None:
        self.shape, self.programs, self.traffic = shape, programs, traffic
        nbytes = sum(place.nbytes for place in shape.places.values())
        self.smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> SharedTile:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, through registers into shared memory; invalid rows
        are 0.
        """
        place, plan = self.shape.places["q"], self._copy_plan("q")
        source, exists = plan.source(np.where(valid, offset, -1), 2)
        values = dram.load(source, np.uint8, 16, mask=exists)
        self.smem.store(place.address(plan.row, plan.byte // 16)[None], values)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * self.shape.D * 2)
        return SharedTile(self.smem, place, self.shape.dtype)

    def load_k(self, tile: KVTile, active: Array) -> SharedTile:
        """The K tile into its panels."""
        return self._copy_async(tile, "k")

    def load_v(self, tile: KVTile, active: Array) -> SharedTile:
        """The V tile into its panels."""
        return self._copy_async(tile, "v")

    def scores(self, q: SharedTile, k: SharedTile, active: Array) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: both operands from shared memory."""
        shape, atom = self.shape, self.shape.atom(self.shape.BN)
        a, b = _q_addresses(shape), _k_addresses(shape)
        c = self._blocks(self._zeros(shape.BN).values)
        for step in range(shape.BD // K_STEP):
            q_step = self.smem.load(a[step][None], shape.dtype)[..., 0]  # [programs, row blocks, 64, 16]
            k_step = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, BN, 16]
            c = atom.mma(atom.fragment_a(q_step), k_step.swapaxes(1, 2)[:, None], c)
        self._count(active, (shape.BM // 64 * 64 + shape.BM // 64 * shape.BN) * shape.BD * 2)
        return self._fragments(c, shape.BN)

    def accumulate(self, p: Fragments, v: SharedTile, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the storage dtype where it stands; V from shared memory, transposed by the unit."""
        shape, atom = self.shape, self.shape.atom(self.shape.BD)
        b, a = _v_addresses(shape), self._blocks(p.values.astype(shape.dtype))
        c = self._blocks(o.values)
        for step in range(shape.BN // K_STEP):
            v_step = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, BD, 16]
            c = atom.mma(a[..., 8 * step : 8 * step + 8], v_step.swapaxes(1, 2)[:, None], c)
        self._count(active, shape.BM // 64 * shape.BN * shape.BD * 2)
        return self._fragments(c, shape.BD)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BD]``."""
        return self._zeros(self.shape.BD)

    def row_max(self, s: Fragments) -> Array:
        """Largest score of each row ``[programs, BM]``: in the lane, then over its quad."""
        return self._by_row(s, np.max)

    def row_sum(self, p: Fragments) -> Array:
        """Row sums ``[programs, BM]``: in the lane, then over its quad."""
        return self._by_row(p, np.sum)

    def _by_row(self, x: Fragments, reduce: Any) -> Array:
        parts = x.values.reshape(self.programs, self.shape.warps, 8, 4, x.values.shape[2], -1, 2, 2)
        rows = reduce(reduce(parts, axis=(5, 7)), axis=3)  # [programs, warps, 8 rows, repeats, halves]
        return rows.transpose(0, 3, 1, 4, 2).reshape(self.programs, self.shape.BM)

    def _copy_plan(self, role: str) -> CopyPlan:
        place = self.shape.places[role]
        return copy_plan(place.rows, 2 * place.cols, 2 * self.shape.D, self.shape.warps)

    def _copy_async(self, tile: KVTile, role: str) -> SharedTile:
        place, plan = self.shape.places[role], self._copy_plan(role)
        source, valid = plan.source_of(tile)
        cp_async(self.smem, place.address(plan.row, plan.byte // 16)[None], tile.memory, source, 16, valid)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * 16)
        return SharedTile(self.smem, place, self.shape.dtype)

    def _count(self, active: Array, nbytes: int) -> None:
        self.traffic.move("SMEM->tensor cores", int(active.sum()) * nbytes)

    def _zeros(self, columns: int) -> Fragments:
        return Fragments.zeros(self.programs, _accumulator(self.shape, columns))

    def _blocks(self, values: Array) -> Array:
        """``[P, threads, repeats, regs]`` -> ``[P, blocks of 64 rows, 128, regs]``, in the order of the rows."""
        P, threads, repeats, regs = values.shape
        return np.moveaxis(values.reshape(P, threads // 128, 128, repeats, regs), 3, 1).reshape(P, -1, 128, regs)

    def _fragments(self, c: Array, columns: int) -> Fragments:
        layout = _accumulator(self.shape, columns)
        P, _, _, regs = c.shape
        values = np.moveaxis(c.reshape(P, -1, self.shape.warps // 4, 128, regs), 1, 3)
        return Fragments(values.reshape(P, *layout.row.shape), layout)


@functools.cache
def _places(shape: WgmmaShape) -> dict[str, PanelTile]:
    base, places = 0, {}
    for role, rows in (("q", shape.BM), ("k", shape.BN), ("v", shape.BN)):
        places[role] = PanelTile(rows, shape.BD, base)
        base += places[role].nbytes
    return places


@functools.cache
def _q_addresses(shape: WgmmaShape) -> IntArray:
    """Elements that each step's descriptors of Q find: ``[steps, blocks of 64 rows, 64, 16]``."""
    q, steps, blocks = shape.places["q"], range(0, shape.BD, K_STEP), range(0, shape.BM, 64)
    found = [
        [q.descriptor(row, k, along_rows=False).addresses(64, K_STEP, shape.dtype) for row in blocks] for k in steps
    ]
    return np.array(found)


@functools.cache
def _k_addresses(shape: WgmmaShape) -> IntArray:
    """Elements that each step's descriptor of K finds: ``[steps, BN, 16]``."""
    k = shape.places["k"]
    steps = range(0, shape.BD, K_STEP)
    return np.array([k.descriptor(0, c, along_rows=False).addresses(shape.BN, K_STEP, shape.dtype) for c in steps])


@functools.cache
def _v_addresses(shape: WgmmaShape) -> IntArray:
    """Elements that each step's descriptor of V finds, MN-major: ``[steps, BD, 16]``."""
    v = shape.places["v"]
    steps = range(0, shape.BN, K_STEP)
    found = [v.descriptor(key, 0, along_rows=True).addresses(shape.BD, K_STEP, shape.dtype, "MN") for key in steps]
    return np.array(found)


@functools.cache
def _accumulator(shape: WgmmaShape, columns: int) -> FragmentMap:
    """Warp w has rows ``16 w ...`` of every ``16 * warps``, all columns: ``[threads, repeats, columns / 2]``."""
    repeats = shape.BM // (16 * shape.warps)
    thread, repeat, r = np.ogrid[: 32 * shape.warps, :repeats, : columns // 2]
    row, col = shape.atom(columns).c(thread % 128, r)
    row = row + thread // 128 * 64 + repeat * 16 * shape.warps
    return FragmentMap((shape.BM, columns), row, np.broadcast_to(col, row.shape), warp_size=32)
