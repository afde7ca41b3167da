"""One CTA of the decode kernel on sm_80 and sm_90, 16-bit storage: cp.async, ldmatrix, mma.sync.

What Triton compiles our decode tile to (16 or 32 query rows, read from its TTGIR and SASS): four warps along the keys
for Q K^T and along the depth for P V; K and V by cp.async into swizzled rows; K by ldmatrix, V by ldmatrix.trans; Q
and P through shared memory and ldmatrix, since every warp needs all of them. The mask, the online softmax and the scale
work on the accumulator registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom, count_wavefronts, cp_async, get_arch, get_atom, ldmatrix, stmatrix
from kvlab.memory import AddressSpace, Memory

from .fragments import FragmentMap, Fragments
from .iterator import KVTile
from .swizzled_tile import SwizzledTile
from .traffic import Traffic

__all__ = ["MmaSyncCTA", "MmaSyncShape", "SharedTile"]

WARPS = 4
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class MmaSyncShape:
    """Sizes of the tile: BM query rows, BN keys, D columns in DRAM, padded to BD in shared memory."""

    BM: int
    BN: int
    D: int
    BD: int
    dtype: np.dtype[Any]
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        if self.BM % 16 or self.BN % (8 * WARPS) or self.BD % 16 or self.D > self.BD:
            raise ValueError(f"{self}: BM and BD must be multiples of 16, BN of {8 * WARPS}, D at most BD")
        if self.D * self.dtype.itemsize % 16:
            raise ValueError(f"D {self.D}: a row of {self.dtype} must be a multiple of 16 bytes")

    @property
    def atom(self) -> MmaAtom:
        return get_atom({"bfloat16": "mma.sync.m16n8k16.bf16", "float16": "mma.sync.m16n8k16.f16"}[self.dtype.name])

    def place(self, role: str) -> SwizzledTile:
        """Where the tile of ``"q"``, ``"k"``, ``"v"`` or ``"p"`` stands in shared memory."""
        places, _ = _places(self)
        if role not in places:
            raise ValueError(f"role {role!r} is not one of {', '.join(places)}")
        return places[role]

    def fragment_map(self, role: str) -> FragmentMap:
        """What the registers hold once ``role`` was read: elements of its tile ``[rows, columns]``."""
        return self._plan(role).map

    def read_addresses(self, role: str, *, swizzled: bool = True) -> tuple[str, IntArray]:
        """The instruction that reads ``role`` and its byte addresses ``[instructions, warps, 32]``.

        >>> from kvlab.memory import bfloat16
        >>> shape = MmaSyncShape(BM=16, BN=64, D=64, BD=64, dtype=bfloat16)
        >>> name, address = shape.read_addresses("k")
        >>> name, address.shape, address[0, 0, :10].tolist()
        ('ldmatrix.x4', (4, 4, 32), [0, 144, 288, 432, 576, 720, 864, 1008, 16, 128])
        """
        place, plan = self.place(role), self._plan(role)
        place = place if swizzled else place.plain()
        return ("ldmatrix.x4.trans" if role == "v" else "ldmatrix.x4"), place.address(plan.row, plan.vector)

    def _plan(self, role: str) -> _Plan:
        self.place(role)
        if role in ("k", "v"):
            return _k_plan(self) if role == "k" else _v_plan(self)
        return _a_plan(self, self.BD if role == "q" else self.BN)


@dataclass(frozen=True, eq=False)
class SharedTile:
    """A tile that stands in shared memory (Q): its image is its value."""

    memory: Memory
    place: SwizzledTile
    dtype: np.dtype[Any]

    def tile(self) -> np.ndarray[Any, Any]:
        """``[programs, rows, cols]``."""
        address = self.place.address(np.arange(self.place.rows)[:, None], np.arange(self.place.vectors))
        values = self.memory.load(address[None], self.dtype, 16 // self.dtype.itemsize)
        return values.reshape(len(values), self.place.rows, -1)


class MmaSyncCTA:
    """The CTAs of one launch, side by side: ``programs`` copies of shared memory and registers."""

    def __init__(self, shape: MmaSyncShape, programs: int, traffic: Traffic) -> None:
        self.shape, self.programs, self.traffic = shape, programs, traffic
        places, nbytes = _places(shape)
        self.places = places
        self.smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)

    def load_q(self, dram: Memory, offset: IntArray, valid: IntArray) -> SharedTile:
        """Q rows (elements ``offset[programs, BM]`` of ``dram``) through registers into shared memory, or zeros."""
        place, size = self.places["q"], self.shape.dtype.itemsize
        row, vector, inside = _vectors(place, self.shape.D * size)
        ok = valid[:, row] & inside
        source = offset[:, row] * size + 16 * vector
        values = dram.load(np.where(ok, source, 0), np.uint8, 16)
        self.smem.store(place.address(row, vector)[None], np.where(ok[..., None], values, 0).astype(np.uint8))
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * self.shape.D * size)
        return SharedTile(self.smem, place, self.shape.dtype)

    def load_k(self, tile: KVTile, active: np.ndarray[Any, Any]) -> Fragments:
        """K tile of these pages into shared memory, then to the B fragments of S = Q K^T."""
        self._copy_async(tile, self.places["k"])
        return self._read("k", active)

    def load_v(self, tile: KVTile, active: np.ndarray[Any, Any]) -> Fragments:
        """V tile into shared memory, then transposed to the B fragments of O += P V."""
        self._copy_async(tile, self.places["v"])
        return self._read("v", active)

    def scores(self, q: SharedTile, k: Fragments, active: np.ndarray[Any, Any]) -> Fragments:
        """S = Q K^T, float32, ``[BM, BN]``."""
        a = self._read("q", active)
        s = np.zeros((self.programs, *_accumulator(self.shape, self.shape.BN).row.shape), np.float32)
        return self._multiply(a, k, Fragments(s, _accumulator(self.shape, self.shape.BN)))

    def accumulate(self, p: Fragments, v: Fragments, o: Fragments, active: np.ndarray[Any, Any]) -> Fragments:
        """O += P V: P rounded to the storage dtype, through shared memory and ldmatrix to the A fragments."""
        self._store_p(p.values.astype(self.shape.dtype), active)
        a = self._read("p", active)
        return self._multiply(a, v, o)

    def zeros(self) -> Fragments:
        """The output accumulator ``[BM, BD]``."""
        layout = _accumulator(self.shape, self.shape.BD)
        return Fragments(np.zeros((self.programs, *layout.row.shape), np.float32), layout)

    def row_max(self, s: Fragments) -> np.ndarray[Any, Any]:
        """Largest score of each row ``[programs, BM]``: in the lane, over its quad, over the warps."""
        return self._by_row(s, np.max)

    def row_sum(self, p: Fragments) -> np.ndarray[Any, Any]:
        """Row sums ``[programs, BM]`` in the order of the hardware: in the lane, over its quad, over the warps."""
        return self._by_row(p, np.sum)

    def _by_row(self, x: Fragments, reduce: Any) -> np.ndarray[Any, Any]:
        parts = x.values.reshape(self.programs, WARPS, 8, 4, self.shape.BM // 16, -1, 2, 2)
        lane = reduce(parts, axis=(5, 7))  # [programs, warps, 8 rows, quad, BM/16, halves]
        rows = reduce(reduce(lane, axis=3), axis=1)  # [programs, 8, BM/16, halves]
        return rows.transpose(0, 2, 3, 1).reshape(self.programs, self.shape.BM)

    def _copy_async(self, tile: KVTile, place: SwizzledTile) -> None:
        size = self.shape.dtype.itemsize
        row, vector, inside = _vectors(place, self.shape.D * size)
        offsets = tile.row_offsets()  # [programs, BN] elements, -1 past the valid rows
        valid = (offsets[:, row] >= 0) & inside
        source = np.where(valid, offsets[:, row] * size + 16 * vector, 0)
        cp_async(self.smem, place.address(row, vector)[None], tile.memory, source, 16, valid)
        self.traffic.move("DRAM->SMEM", int(valid.sum()) * 16)

    def _store_p(self, p: np.ndarray[Any, Any], active: np.ndarray[Any, Any]) -> None:
        """P ``[programs, threads, (BM/16) * n-tiles, 4]`` by stmatrix; before sm_90 two elements a store."""
        place = self.places["p"]
        if "stmatrix" in get_arch(self.shape.arch).features:
            name, address, plain = "stmatrix.x4", *(_p_matrix_addresses(self.shape, x) for x in (place, place.plain()))
            pairs = p.reshape(self.programs, WARPS, 32, len(address), 8)
            stmatrix(self.smem, address[None].swapaxes(1, 2), np.moveaxis(pairs, 3, 2), 4)
        else:
            name, address, plain = "st.shared.b32", *(_p_pair_addresses(self.shape, x) for x in (place, place.plain()))
            pairs = p.reshape(self.programs, WARPS, 32, len(address), 2)
            self.smem.store(address[None], np.moveaxis(pairs, 3, 1))
        self._count("p write", name, address, plain, active)

    def _read(self, role: str, active: np.ndarray[Any, Any]) -> Fragments:
        """ldmatrix.x4 of every warp."""
        name, address = self.shape.read_addresses(role)
        layout = self.shape.fragment_map(role)
        words = ldmatrix(self.smem, address[None], 4, trans=name.endswith("trans"), dtype=self.shape.dtype)
        registers = np.moveaxis(words, 1, 3)  # [programs, warps, 32, instructions, 8]
        _, plain = self.shape.read_addresses(role, swizzled=False)
        self._count(f"{role} read", name, address, plain, active)
        self.traffic.move("SMEM->registers", int(active.sum()) * address.size * 16)
        return Fragments(registers.reshape(self.programs, *layout.row.shape), layout)

    def _count(self, role: str, name: str, address: IntArray, plain: IntArray, active: np.ndarray[Any, Any]) -> None:
        programs = int(active.sum())
        got, ideal = _passes(name, address.tobytes(), self.shape.arch)
        without, _ = _passes(name, plain.tobytes(), self.shape.arch)
        self.traffic.access(role, wavefronts=got * programs, ideal=ideal * programs, unswizzled=without * programs)

    def _multiply(self, a: Fragments, b: Fragments, c: Fragments) -> Fragments:
        """C += A B over the warps' tiles, one step of 16 at a time, accumulated in float32."""
        atom, tiles_m = self.shape.atom, self.shape.BM // 16
        a_regs = _by_tile(a.values, tiles_m, 8)  # [programs, warps, tiles_m, tiles_k, 32, 8]
        b_regs = _by_tile(
            b.values, b.values.shape[2] // a_regs.shape[3], 4
        )  # [programs, warps, tiles_n, tiles_k, 32, 4]
        c_regs = _by_tile(c.values, tiles_m, 4)  # [programs, warps, tiles_m, tiles_n, 32, 4]
        for step in range(a_regs.shape[3]):
            c_regs = atom.mma(a_regs[:, :, :, None, step], b_regs[:, :, None, :, step], c_regs)
        values = np.moveaxis(c_regs, 4, 2).reshape(c.values.shape)
        return c.with_values(values)


def _by_tile(values: np.ndarray[Any, Any], outer: int, regs: int) -> np.ndarray[Any, Any]:
    """``[P, threads, outer * inner, regs]`` -> ``[P, warps, outer, inner, 32, regs]``."""
    return np.moveaxis(values.reshape(len(values), WARPS, 32, outer, -1, regs), 2, 4)


@functools.cache
def _places(shape: MmaSyncShape) -> tuple[dict[str, SwizzledTile], int]:
    """Where Q, K, V and P stand in shared memory (P in its own place; the compiler may overlay it), and the
    bytes in all.
    """
    size, base, places = shape.dtype.itemsize, 0, {}
    for role, rows, cols in (
        ("k", shape.BN, shape.BD),
        ("v", shape.BN, shape.BD),
        ("q", shape.BM, shape.BD),
        ("p", shape.BM, shape.BN),
    ):
        places[role] = SwizzledTile(rows, cols * size, base)
        base += places[role].nbytes
    return places, base


@functools.cache
def _vectors(place: SwizzledTile, valid_bytes: int) -> tuple[IntArray, IntArray, np.ndarray[Any, np.dtype[np.bool_]]]:
    """All 16-byte vectors of a tile, row-major: row, vector, and whether the vector lies in the row's data."""
    row, vector = np.divmod(np.arange(place.rows * place.vectors), place.vectors)
    return row, vector, 16 * vector < valid_bytes


@functools.lru_cache(maxsize=256)
def _passes(name: str, address: bytes, arch: str) -> tuple[int, int]:
    """(wavefronts, ideal) of all the instructions of a CTA."""
    lanes = np.frombuffer(address, np.int64).reshape(-1, 32)
    wavefronts, ideal, _ = count_wavefronts(name, lanes, arch=arch)
    return int(wavefronts.sum()), int(ideal.sum())


@dataclass(frozen=True, eq=False)
class _Plan:
    """Row and 16-byte vector that each lane addresses, ``[instructions, warps, 32]``, and what the registers
    then hold.
    """

    row: IntArray
    vector: IntArray
    map: FragmentMap


def _map(
    shape: MmaSyncShape, operand: str, row0: IntArray, col0: IntArray, tile: tuple[int, int], swap: bool
) -> FragmentMap:
    """FragmentMap of an operand whose atom tile ``i`` of warp ``w`` starts at ``(row0, col0)[w, i]``."""
    atom = shape.atom
    regs = {"a": atom.regs_a, "b": atom.regs_b, "c": atom.regs_c}[operand]
    row, col = np.broadcast_arrays(*getattr(atom, operand)(np.arange(32)[:, None], np.arange(regs)))  # [32, regs]
    if swap:
        row, col = col, row
    rows = row0[:, None, :, None] + row[:, None, :]  # [warps, 32, tiles, regs]
    cols = (col0[:, None, :, None] + col[:, None, :]) % tile[1]
    threads = WARPS * 32
    return FragmentMap(tile, rows.reshape(threads, -1, regs) % tile[0], cols.reshape(threads, -1, regs))


@functools.cache
def _k_plan(shape: MmaSyncShape) -> _Plan:
    """Warp w holds keys ``32 n + 8 w + 0..7``; one ldmatrix.x4 brings 8 keys x 32 columns: two k steps."""
    tiles_n, tiles_k = shape.BN // 32, shape.BD // 16
    pairs = max(tiles_k // 2, 1)
    n, pair, warp, lane = np.ogrid[:tiles_n, :pairs, :WARPS, :32]
    if tiles_k == 1:
        raise ValueError(f"BD {shape.BD} must be at least 32 to feed ldmatrix.x4")
    row = np.broadcast_to(32 * n + 8 * warp + lane % 8, (tiles_n, pairs, WARPS, 32)).reshape(-1, WARPS, 32)
    vector = np.broadcast_to(4 * pair + lane // 8, (tiles_n, pairs, WARPS, 32)).reshape(-1, WARPS, 32)
    w, n, k = np.ogrid[:WARPS, :tiles_n, :tiles_k]
    row0 = np.broadcast_to(32 * n + 8 * w, (WARPS, tiles_n, tiles_k)).reshape(WARPS, -1)
    col0 = np.broadcast_to(16 * k, (WARPS, tiles_n, tiles_k)).reshape(WARPS, -1)
    return _Plan(row, vector, _map(shape, "b", row0, col0, (shape.BN, shape.BD), swap=True))


@functools.cache
def _v_plan(shape: MmaSyncShape) -> _Plan:
    """Warp w holds columns ``32 n + 8 w + 0..7``; one ldmatrix.x4.trans brings 32 keys x 8 columns: two k steps."""
    tiles_n, tiles_k = max(shape.BD // 32, 1), shape.BN // 16
    n, pair, warp, lane = np.ogrid[:tiles_n, : tiles_k // 2, :WARPS, :32]
    row = np.broadcast_to(32 * pair + lane, (tiles_n, tiles_k // 2, WARPS, 32)).reshape(-1, WARPS, 32)
    vector = np.broadcast_to(4 * n + warp, (tiles_n, tiles_k // 2, WARPS, 32)).reshape(-1, WARPS, 32)
    w, n, k = np.ogrid[:WARPS, :tiles_n, :tiles_k]
    row0 = np.broadcast_to(16 * k, (WARPS, tiles_n, tiles_k)).reshape(WARPS, -1)
    col0 = np.broadcast_to(32 * n + 8 * w, (WARPS, tiles_n, tiles_k)).reshape(WARPS, -1)
    return _Plan(row, vector, _map(shape, "b", row0, col0, (shape.BN, shape.BD), swap=False))


@functools.cache
def _a_plan(shape: MmaSyncShape, cols: int) -> _Plan:
    """Every warp holds all of Q or P; one ldmatrix.x4 brings a 16 x 16 tile."""
    tiles_m, tiles_k = shape.BM // 16, cols // 16
    m, k, warp, lane = np.ogrid[:tiles_m, :tiles_k, :WARPS, :32]
    row = np.broadcast_to(16 * m + lane % 16, (tiles_m, tiles_k, WARPS, 32)).reshape(-1, WARPS, 32)
    vector = np.broadcast_to(2 * k + lane // 16 + 0 * warp, (tiles_m, tiles_k, WARPS, 32)).reshape(-1, WARPS, 32)
    w, m, k = np.ogrid[:WARPS, :tiles_m, :tiles_k]
    row0 = np.broadcast_to(16 * m + 0 * w, (WARPS, tiles_m, tiles_k)).reshape(WARPS, -1)
    col0 = np.broadcast_to(16 * k, (WARPS, tiles_m, tiles_k)).reshape(WARPS, -1)
    return _Plan(row, vector, _map(shape, "a", row0, col0, (shape.BM, cols), swap=False))


@functools.cache
def _accumulator(shape: MmaSyncShape, cols: int) -> FragmentMap:
    """Warp w holds columns ``32 n + 8 w + 0..7`` of all rows."""
    tiles_m, tiles_n = shape.BM // 16, max(cols // 32, 1)
    w, m, n = np.ogrid[:WARPS, :tiles_m, :tiles_n]
    row0 = np.broadcast_to(16 * m + 0 * w, (WARPS, tiles_m, tiles_n)).reshape(WARPS, -1)
    col0 = np.broadcast_to(32 * n + 8 * w, (WARPS, tiles_m, tiles_n)).reshape(WARPS, -1)
    return _map(shape, "c", row0, col0, (shape.BM, cols), swap=False)


@functools.cache
def _p_matrix_addresses(shape: MmaSyncShape, place: SwizzledTile) -> IntArray:
    """stmatrix.x4 of P: two n-tiles of 16 rows an instruction; ``[instructions, warps, 32]``."""
    tiles_m, pairs = shape.BM // 16, shape.BN // 64
    m, pair, warp, lane = np.ogrid[:tiles_m, :pairs, :WARPS, :32]
    row = 16 * m + lane % 16 + 0 * pair + 0 * warp
    vector = 8 * pair + warp + 4 * (lane // 16) + 0 * m
    address: IntArray = place.address(row, vector)
    return address.reshape(-1, WARPS, 32)


@functools.cache
def _p_pair_addresses(shape: MmaSyncShape, place: SwizzledTile) -> IntArray:
    """Plain stores of P: the two neighbouring columns of an accumulator row; ``[instructions, warps, 32]``."""
    layout, size = _accumulator(shape, shape.BN), shape.dtype.itemsize
    row, column = layout.row[..., ::2], layout.col[..., ::2]
    address: IntArray = place.address(row, column * size // 16) + column * size % 16  # [threads, tiles, 2]
    return np.moveaxis(address.reshape(WARPS, 32, -1), 2, 0)
