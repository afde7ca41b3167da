"""One CTA of the prefill kernel on sm_90, 16-bit storage: cp.async, swizzled panels, wgmma.

What Triton compiles our prefill tile to (read from its TTGIR): Q, K and V stand in shared memory as panels of at most
128 bytes a row, swizzled as TMA would (``NVMMASharedLayout``). Both products are wgmma of 64 rows a warpgroup: Q K^T
takes both operands from shared memory, through descriptors; P V takes P from the registers where the scores stood, and
V along its contiguous dimension (MN-major). Warp w owns the rows ``16 w ...`` of every ``16 * warps``.

K and V have two stages. Every access, wait and barrier is stated to ``hazards``, in the order of the PTX::

    copy K, commit, copy V, commit                                              before each of the two loops
    loop: wait_group(0), barrier, fence.proxy.async, wgmma S = Q K^T, wgmma.wait_group(0), softmax, wgmma O += P V,
          barrier, copy the next K, commit, copy the next V, commit             (P V is still in flight)
    wgmma.wait_group(0), wait_group(0), barrier                                 after each
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
from .hazards import Hazards
from .iterator import KVCacheIterator, KVTile
from .shared_tile import SharedTile
from .tile_walk import TileWalk, expect_fetched, is_same
from .traffic import Traffic

__all__ = ["PanelTile", "WgmmaCTA", "WgmmaShape"]

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
STAGES = 2  # of K and of V
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
        """Where Q stands (``"q"``) and the stages of K and V (``"k0"``, ``"k1"``, ``"v0"``, ``"v1"``)."""
        return _places(self)


class WgmmaCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers. Until :meth:`follow` is
    called there is nothing to look ahead to: each load meets at a barrier, copies, waits and meets again.

    hazards : what is in flight, and who waited; checks every access.
    """

    def __init__(self, shape: WgmmaShape, programs: int, traffic: Traffic) -> None:
        self.shape, self.programs, self.traffic = shape, programs, traffic
        nbytes = sum(place.nbytes for place in shape.places.values())
        self.smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)
        self.hazards = Hazards(self.smem, shape.warps, arch="sm_90", timeline=traffic.timeline)
        everyone = range(shape.warps)
        self._used = {at: self.hazards.region(p.base, p.nbytes, tuple(everyone)) for at, p in shape.places.items()}
        self._filled = {at: self.hazards.footprint(*self._copied_to(at)) for at in shape.places}
        self._copied, self._read = ({"k": 0, "v": 0} for _ in range(2))  # tiles so far
        self._walk: TileWalk | None = None
        self._flying: dict[str, list[KVTile]] = {"k": [], "v": []}

    def follow(self, *tiles: KVCacheIterator) -> None:
        """Fetch ahead along these iterators, of K and V for one loop after the other; the loads take their tiles in
        turn.
        """
        self._walk = TileWalk(*tiles)
        self._fetch(self._walk.next_pair())

    def load_q(self, dram: Memory, offset: IntArray, valid: Array) -> SharedTile:
        """Q rows, elements ``offset[programs, BM]`` of ``dram``, through registers into shared memory; invalid rows
        are 0.
        """
        place, plan = self.shape.places["q"], self._copy_plan("q")
        source, exists = plan.source(np.where(valid, offset, -1), 2)
        values = dram.load(source, np.uint8, 16, mask=exists)
        self.hazards.write(self._filled["q"], "q write")
        self.smem.store(place.address(plan.row, plan.byte // 16)[None], values)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * self.shape.D * 2)
        return SharedTile(self.smem, place, self.shape.dtype)

    def load_k(self, tile: KVTile, active: Array) -> SharedTile:
        """The K tile in its panels, and V's tile as well if they are fetched ahead."""
        if self._walk is not None:
            self._begin_loop(tile)
            expect_fetched(self._flying["k"], tile, "k")
        else:
            self._copy_now(tile, "k")
        self._land()
        return self._tile("k")

    def load_v(self, tile: KVTile, active: Array) -> SharedTile:
        """The V tile in its panels."""
        if self._walk is not None:
            expect_fetched(self._flying["v"], tile, "v")
        else:
            self._copy_now(tile, "v")
            self._land()
        return self._tile("v")

    def scores(self, q: SharedTile, k: SharedTile, active: Array, s: Fragments | None = None) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``: both operands from shared memory; added to ``s`` if given."""
        shape, atom, stage = self.shape, self.shape.atom(self.shape.BN), self._stage("k")
        self.hazards.read_async(self._used["q"], "q wgmma")
        self.hazards.read_async(self._used[f"k{stage}"], "k wgmma", stage)
        a, b = _q_addresses(shape), _k_addresses(shape, stage)
        c = self._blocks((self._zeros(shape.BN) if s is None else s).values)
        for step in range(shape.BD // K_STEP):
            q_step = self.smem.load(a[step][None], shape.dtype)[..., 0]  # [programs, row blocks, 64, 16]
            k_step = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, BN, 16]
            c = atom.mma(atom.fragment_a(q_step), k_step.swapaxes(1, 2)[:, None], c)
        self.hazards.wait_mma(0)
        self._count(active, (shape.BM // 64 * 64 + shape.BM // 64 * shape.BN) * shape.BD * 2)
        return self._fragments(c, shape.BN)

    def accumulate(self, p: Fragments, v: SharedTile, o: Fragments, active: Array) -> Fragments:
        """O += P V: P rounded to the storage dtype where it stands; V from shared memory, transposed by the unit."""
        shape, atom, stage = self.shape, self.shape.atom(self.shape.BD), self._stage("v")
        self.hazards.read_async(self._used[f"v{stage}"], "v wgmma", stage)
        b, a = _v_addresses(shape, stage), self._blocks(p.values.astype(shape.dtype))
        c = self._blocks(o.values)
        for step in range(shape.BN // K_STEP):
            v_step = self.smem.load(b[step][None], shape.dtype)[..., 0]  # [programs, BD, 16]
            c = atom.mma(a[..., 8 * step : 8 * step + 8], v_step.swapaxes(1, 2)[:, None], c)
        if self._walk is None:
            self.hazards.wait_mma(0)
        else:
            self.hazards.barrier()
            self._fetch(self._walk.next_of_loop())
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

    def _begin_loop(self, tile: KVTile) -> None:
        """Where a loop is over and the next one begins with ``tile``: drain, and fetch its first tiles."""
        assert self._walk is not None
        if self._flying["k"] and is_same(self._flying["k"][0], tile):
            return
        self.hazards.wait_mma(0)
        self.hazards.wait_group(0)
        self.hazards.barrier()
        for role in "kv":
            self._flying[role].clear()
            self._copied[role] = self._read[role] = 0
        self._fetch(self._walk.next_pair())

    def _fetch(self, pair: tuple[KVTile, KVTile] | None) -> None:
        """K and V into the stages that no product reads."""
        for role, tile in zip("kv", pair or (), strict=False):
            self._copy_async(tile, role)
            self._flying[role].append(tile)

    def _copy_now(self, tile: KVTile, role: str) -> None:
        self.hazards.barrier()
        self._copy_async(tile, role)

    def _land(self) -> None:
        """All copies have landed for all warps, and wgmma may see them."""
        self.hazards.wait_group(0)
        self.hazards.barrier()
        self.hazards.fence_async()

    def _copy_plan(self, at: str) -> CopyPlan:
        place = self.shape.places[at]
        return copy_plan(place.rows, 2 * place.cols, 2 * self.shape.D, self.shape.warps)

    def _copied_to(self, at: str) -> tuple[IntArray, int, IntArray]:
        """Byte address and size of every vector of a place, and the warp that brings it."""
        plan = self._copy_plan(at)
        return self.shape.places[at].address(plan.row, plan.byte // 16), 16, plan.warp

    def _copy_async(self, tile: KVTile, role: str) -> None:
        stage = self._copied[role] % STAGES
        self._copied[role] += 1
        at = f"{role}{stage}"
        plan, (address, nbytes, _) = self._copy_plan(at), self._copied_to(at)
        source, valid = plan.source_of(tile)
        self.hazards.copy_async(self._filled[at], f"{role} copy", stage)
        self.hazards.commit_group()
        cp_async(self.smem, address[None], tile.memory, source, nbytes, valid)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * 16)

    def _tile(self, role: str) -> SharedTile:
        """The next tile of a role, in its stage."""
        self._read[role] += 1
        return SharedTile(self.smem, self.shape.places[f"{role}{self._stage(role)}"], self.shape.dtype)

    def _stage(self, role: str) -> int:
        """Where the tile stands that was taken last."""
        return (self._read[role] - 1) % STAGES

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
    for at in ("q", *(f"{role}{stage}" for role in "kv" for stage in range(STAGES))):
        places[at] = PanelTile(shape.BM if at == "q" else shape.BN, shape.BD, base)
        base += places[at].nbytes
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
def _k_addresses(shape: WgmmaShape, stage: int) -> IntArray:
    """Elements that each step's descriptor of K finds: ``[steps, BN, 16]``."""
    k = shape.places[f"k{stage}"]
    steps = range(0, shape.BD, K_STEP)
    return np.array([k.descriptor(0, c, along_rows=False).addresses(shape.BN, K_STEP, shape.dtype) for c in steps])


@functools.cache
def _v_addresses(shape: WgmmaShape, stage: int) -> IntArray:
    """Elements that each step's descriptor of V finds, MN-major: ``[steps, BD, 16]``."""
    v = shape.places[f"v{stage}"]
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
