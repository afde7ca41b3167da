"""Elements that each lane of an mma.sync tile addresses and holds: index arrays, made once a shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom, get_arch, get_atom
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.shared_access import SharedAccess

from .swizzled_tile import SwizzledTile

WARPS = 4
Q_ROLES = ("q", "q_odd", "q_third", "q_fourth")
"""Tiles of the columns of Q, by their number in an element of K."""
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class MmaSyncShape:
    """Sizes of the tile: BM query rows, BN keys, D columns in DRAM, padded to BD in shared memory.

    ``v_in_k``: V has no place of its own, it is read from K's (MLA). ``v_columns``: (D, BD) of V where they differ from
    K's. Either may be (0, 0): a CTA for a piece of K's or of V's columns. ``each``: an element of K and V is two
    columns of fp8 or four of 4 bits, and Q lies in shared memory in as many tiles (``Q_ROLES``), of two its even and
    its odd columns.

    ``stages`` of K: its second tile lies at ``"k1"``.

    The warps lie along the keys (Q K^T) and the columns (P V), or with ``along_rows`` along the query rows: each
    reads all of K and V, and P stays in its registers. Where there are more warps than there is to share, the last
    ones do again what the first do.

    ``turned``: BM is 8, and one warp takes S^T = K Q^T and O^T = V^T P^T, in which rows of queries are the columns of
    mma."""

    BM: int
    BN: int
    D: int
    BD: int
    dtype: np.dtype[Any]
    arch: str = "sm_90"
    v_in_k: bool = False
    v_columns: tuple[int, int] | None = None
    each: int = 1
    warps: int = WARPS
    along_rows: bool = False
    stages: int = 1

    def __post_init__(self) -> None:
        unit = 8 if self.turned else 16
        rows, keys = unit * self.warps_m, 8 * self.warps_n
        shared_out = (self.BM % rows == 0 or rows % self.BM == 0) and (self.BN % keys == 0 or keys % self.BN == 0)
        for D, BD in (self.columns("k"), self.columns("v")):
            if self.BM % unit or self.BN % 32 or not shared_out or BD % 16 or D > BD:
                raise ValueError(
                    f"{self}: BM and BD must be multiples of 16, BN of 32, D at most BD; BM a multiple or a part of "
                    f"{rows}, BN of {keys}; or BM 8 of one warp"
                )
            if D * self.dtype.itemsize % 16:
                raise ValueError(f"D {D}: a row of {self.dtype} must be a multiple of 16 bytes")

    @property
    def turned(self) -> bool:
        """Tells whether rows of queries are the columns of mma."""
        return (self.BM, self.warps) == (8, 1)

    @property
    def p_in_registers(self) -> bool:
        """Tells whether P comes to its operand without shared memory: where it stands, or ``turned`` by shuffles."""
        return self.along_rows or self.turned

    @property
    def warps_m(self) -> int:
        """Warps along the query rows."""
        return self.warps if self.along_rows else 1

    @property
    def warps_n(self) -> int:
        """Warps along the keys and the columns."""
        return 1 if self.along_rows else self.warps

    def place_of(self, warp: Any) -> tuple[Any, Any]:
        """A warp's number along the rows and along the columns."""
        return (warp, 0 * warp) if self.along_rows else (0 * warp, warp)

    def columns(self, role: str) -> tuple[int, int]:
        """(in DRAM, in shared memory) of V, or of K and Q."""
        return self.v_columns if role == "v" and self.v_columns is not None else (self.D, self.BD)

    def stored(self, role: str) -> np.dtype[Any]:
        """The dtype of the elements that ``role`` brings to registers."""
        return np.dtype(np.int16) if self.each > 1 and role in ("k", "v") else self.dtype

    @property
    def atom(self) -> MmaAtom:
        return get_atom({"bfloat16": "mma.sync.m16n8k16.bf16", "float16": "mma.sync.m16n8k16.f16"}[self.dtype.name])

    def place(self, role: str) -> SwizzledTile:
        """Place of the tile of ``"q"``, ``"k"``, ``"v"`` or ``"p"`` in shared memory."""
        places, _ = _places(self)
        if role not in places:
            raise ValueError(f"role is {role!r}: must be one of {', '.join(places)}")
        return places[role]

    def fragment_map(self, role: str) -> FragmentMap:
        """Contents of the registers once ``role`` was read: elements of its tile ``[rows, columns]``."""
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
        name = f"ldmatrix.x{plan.matrices}" + (".trans" if role == "v" else "")
        return name, place.address(plan.row, plan.vector)

    def output_map(self, cols: int) -> FragmentMap:
        """The accumulator ``[BM, cols]`` of S (BN columns) or O: a warp holds columns ``8 (warps_n n + w) + 0..7``, w
        its number along them, of rows ``16 (warps_m m + w) + 0..15``; ``turned``, of S^T and O^T."""
        return _accumulator(self, cols)

    def access(self, role: str) -> SharedAccess:
        """Accesses of the CTA to read ``"q"``, ``"k"``, ``"v"``, ``"p"``, or for ``"p write"``, all of it."""
        return _access(self, role)

    @property
    def shared_bytes(self) -> int:
        """Of Q, K, V and P."""
        return _places(self)[1]

    def _plan(self, role: str) -> _LanePlan:
        if role != "p":  # in registers alone, maybe
            self.place(role)
        if self.turned:
            return _turned_plan(self, role)
        if role in ("k", "v"):
            return _k_plan(self) if role == "k" else _v_plan(self)
        return _a_plan(self, self.BN if role == "p" else self.BD)


@functools.cache
def _access(shape: MmaSyncShape, role: str) -> SharedAccess:
    if role == "p write":
        place = shape.place("p")
        stmatrix = "stmatrix" in get_arch(shape.arch).features
        matrices = 4 if shape.BN >= 16 * shape.warps_n or shape.BM >= 32 else 2
        name, nbytes = (f"stmatrix.x{matrices}", 4 * matrices) if stmatrix else ("st.shared.b32", 4)
        address, plain = (
            (_p_matrix_addresses if stmatrix else _p_pair_addresses)(shape, x) for x in (place, place.plain())
        )
    else:
        nbytes = 4 * shape._plan(role).matrices
        (name, address), (_, plain) = (shape.read_addresses(role, swizzled=x) for x in (True, False))
    return SharedAccess.of(name, address, nbytes, shape.arch, plain)


@functools.cache
def _places(shape: MmaSyncShape) -> tuple[dict[str, SwizzledTile], int]:
    """Places of Q, K, V and P in shared memory (P in its own place; the compiler may overlay it), and the bytes in all.
    """
    size, base = shape.dtype.itemsize, 0
    places: dict[str, SwizzledTile] = {}
    for role, rows, cols in (
        *((f"k{stage}" if stage else "k", shape.BN, shape.BD) for stage in range(shape.stages)),
        ("v", shape.BN, shape.columns("v")[1]),
        *((role, shape.BM, shape.BD) for role in Q_ROLES[: shape.each]),
        ("p", shape.BM, 0 if shape.p_in_registers else shape.BN),
    ):
        if role == "v" and shape.v_in_k:
            places[role] = places["k"]
            continue
        if not cols:
            continue
        places[role] = SwizzledTile(rows, cols * size, base)
        base += places[role].nbytes
    return places, base


@dataclass(frozen=True, eq=False)
class _LanePlan:
    """Row and 16-byte vector that each lane addresses, ``[instructions, warps, 32]``, and what the registers
    then hold. ``matrices`` of 8 rows of 16 bytes an instruction."""

    row: IntArray
    vector: IntArray
    map: FragmentMap
    matrices: int = 4


def _map(
    shape: MmaSyncShape, operand: str, row0: IntArray, col0: IntArray, tile: tuple[int, int], swap: bool
) -> FragmentMap:
    """FragmentMap of an operand whose atom tile ``i, j`` of warp ``w`` starts at ``(row0, col0)[w, i, j]``."""
    atom = shape.atom
    regs = {"a": atom.regs_a, "b": atom.regs_b, "c": atom.regs_c}[operand]
    row, col = np.broadcast_arrays(*getattr(atom, operand)(np.arange(32)[:, None], np.arange(regs)))  # [32, regs]
    if swap:
        row, col = col, row
    row0, col0 = (x.reshape(shape.warps, 1, -1, 1) for x in np.broadcast_arrays(row0, col0))
    rows = row0 + row[:, None, :]  # [warps, 32, tiles, regs]
    cols = (col0 + col[:, None, :]) % tile[1]
    threads = shape.warps * 32
    return FragmentMap(tile, rows.reshape(threads, -1, regs) % tile[0], cols.reshape(threads, -1, regs), warp_size=32)


def _plan(shape: MmaSyncShape, row: IntArray, vector: IntArray, layout: FragmentMap, matrices: int = 4) -> _LanePlan:
    """From row and vector ``[.., .., warps, 32]``, to broadcast."""
    row, vector = (x.reshape(-1, shape.warps, 32) for x in np.broadcast_arrays(row, vector))
    return _LanePlan(row, vector, layout, matrices)


@functools.cache
def _k_plan(shape: MmaSyncShape) -> _LanePlan:
    """A warp holds keys ``8 (warps_n n + w) + 0..7``; an ldmatrix.x4 brings 8 keys x 32 columns: two k steps. Where
    there are 16 columns it brings two such n, or is an ldmatrix.x2."""
    tiles_n, tiles_k = _share(shape.BN, 8 * shape.warps_n), shape.BD // 16
    across = 2 if tiles_k == 1 else 4  # 16-byte vectors of an instruction
    two = 2 if tiles_k == 1 and tiles_n % 2 == 0 else 1  # its n
    n, pair, warp, lane = np.ogrid[: tiles_n // two, : max(tiles_k // 2, 1), : shape.warps, :32]
    row = 8 * (shape.warps_n * (two * n + lane // 8 // across % two) + shape.place_of(warp)[1]) + lane % 8
    vector = 4 * pair + lane // 8 % across
    w, n, k = np.ogrid[: shape.warps, :tiles_n, :tiles_k]
    layout = _map(shape, "b", 8 * (shape.warps_n * n + shape.place_of(w)[1]), 16 * k, (shape.BN, shape.BD), swap=True)
    return _plan(shape, row % shape.BN, vector, layout, matrices=two * across)


@functools.cache
def _v_plan(shape: MmaSyncShape) -> _LanePlan:
    """A warp holds columns ``8 (warps_n n + w) + 0..7``; an ldmatrix.x4.trans brings 32 keys x 8 columns: two k
    steps."""
    columns = shape.columns("v")[1]
    tiles_n, tiles_k = _share(columns, 8 * shape.warps_n), shape.BN // 16
    n, pair, warp, lane = np.ogrid[:tiles_n, : tiles_k // 2, : shape.warps, :32]
    row, vector = 32 * pair + lane, (shape.warps_n * n + shape.place_of(warp)[1]) % (columns // 8)
    w, n, k = np.ogrid[: shape.warps, :tiles_n, :tiles_k]
    layout = _map(shape, "b", 16 * k, 8 * (shape.warps_n * n + shape.place_of(w)[1]), (shape.BN, columns), swap=False)
    return _plan(shape, row, vector, layout)


@functools.cache
def _a_plan(shape: MmaSyncShape, cols: int) -> _LanePlan:
    """Every warp holds its rows of Q or P, all of them unless the warps lie along the rows; one ldmatrix.x4 brings a
    16 x 16 tile."""
    tiles_m, tiles_k = _share(shape.BM, 16 * shape.warps_m), cols // 16
    m, k, warp, lane = np.ogrid[:tiles_m, :tiles_k, : shape.warps, :32]
    row, vector = 16 * (shape.warps_m * m + shape.place_of(warp)[0]) + lane % 16, 2 * k + lane // 16 + 0 * warp
    w, m, k = np.ogrid[: shape.warps, :tiles_m, :tiles_k]
    layout = _map(shape, "a", 16 * (shape.warps_m * m + shape.place_of(w)[0]), 16 * k, (shape.BM, cols), swap=False)
    return _plan(shape, row % shape.BM, vector, layout)


@functools.cache
def _accumulator(shape: MmaSyncShape, cols: int) -> FragmentMap:
    """See ``output_map``."""
    if shape.turned:
        _, row, tile = np.ogrid[:1, :1, : cols // 16]
        return _map(shape, "c", row, 16 * tile, (shape.BM, cols), swap=True)
    tiles_m, tiles_n = _share(shape.BM, 16 * shape.warps_m), _share(cols, 8 * shape.warps_n)
    w, m, n = np.ogrid[: shape.warps, :tiles_m, :tiles_n]
    at_row, at_column = shape.place_of(w)
    row, column = 16 * (shape.warps_m * m + at_row), 8 * (shape.warps_n * n + at_column)
    return _map(shape, "c", row, column, (shape.BM, cols), swap=False)


@functools.cache
def _turned_plan(shape: MmaSyncShape, role: str) -> _LanePlan:
    """K and V^T as A, an ldmatrix.x4 (V: transposed) a tile of 16 keys x 16 columns; Q^T and P^T as B: an ldmatrix.x4
    brings 8 rows x 32 columns of Q, an x2 16."""
    columns = {"v": shape.columns("v")[1], "p": shape.BN}.get(role, shape.BD)
    lane = np.arange(32)
    if role in ("k", "v"):
        _, key, column = np.ogrid[:1, : shape.BN // 16, : columns // 16]
        layout = _map(shape, "a", 16 * key, 16 * column, (shape.BN, columns), swap=role == "v")
        lower, upper = (lane // 8 % 2, lane // 16) if role == "k" else (lane // 16, lane // 8 % 2)
        return _plan(shape, 16 * key[..., None] + 8 * lower + lane % 8, 2 * column[..., None] + upper, layout)
    _, row, tile = np.ogrid[:1, :1, : columns // 16]
    layout, matrices = _map(shape, "b", row, 16 * tile, (shape.BM, columns), swap=True), 2 if columns == 16 else 4
    first = matrices * np.arange(columns // (8 * matrices))[:, None]
    return _plan(shape, lane % 8, first + lane // 8 % matrices, layout, matrices)


def _share(extent: int, together: int) -> int:
    """Tiles of each warp where all warps together cover ``together`` of ``extent`` with one each."""
    return max(extent // together, 1)


@functools.cache
def _p_matrix_addresses(shape: MmaSyncShape, place: SwizzledTile) -> IntArray:
    """stmatrix.x4 of P: two n-tiles of 16 rows an instruction; where a warp has one, 32 rows of it, or x2 of 16;
    ``[instructions, warps, 32]``."""
    pairs, warps, two = max(shape.BN // (16 * shape.warps), 1), shape.warps, shape.BN >= 16 * shape.warps
    rows = 16 if two else min(shape.BM, 32)  # of an instruction
    m, pair, warp, lane = np.ogrid[: shape.BM // rows, :pairs, : shape.warps, :32]
    row = rows * m + lane % rows + 0 * pair + 0 * warp
    vector = 2 * warps * pair + warp + (warps if two else 0) * (lane // 16) + 0 * m
    address: IntArray = place.address(row, vector % place.vectors)
    return address.reshape(-1, shape.warps, 32)


@functools.cache
def _p_pair_addresses(shape: MmaSyncShape, place: SwizzledTile) -> IntArray:
    """Plain stores of P: the two neighbouring columns of an accumulator row; ``[instructions, warps, 32]``."""
    layout, size = _accumulator(shape, shape.BN), shape.dtype.itemsize
    row, column = layout.row[..., ::2], layout.col[..., ::2]
    address: IntArray = place.address(row, column * size // 16) + column * size % 16  # [threads, tiles, 2]
    return np.moveaxis(address.reshape(shape.warps, 32, -1), 2, 0)
