"""The plan of a prefill tile on sm_90: where its operands lie in shared memory, and what the descriptors find."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom, SmemDescriptor, TensorMapSwizzle, get_atom
from kvlab.staging.tile.fragments import FragmentMap

IntArray = np.ndarray[Any, np.dtype[np.int64]]
K_BYTES = 32  # of a row that one wgmma contracts
SUFFIX = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True)
class PlainRows:
    """``rows x cols`` elements of ``itemsize`` bytes at byte ``base``, row after row: e4m3 before it is converted."""

    rows: int
    cols: int
    base: int
    itemsize: int = 2

    @property
    def vectors(self) -> int:
        """16-byte vectors of a row."""
        return self.itemsize * self.cols // 16

    @property
    def nbytes(self) -> int:
        return self.itemsize * self.rows * self.cols

    def address(self, row: IntArray, vector: IntArray) -> IntArray:
        """Byte address of 16-byte ``vector`` of ``row``."""
        return self.base + row * self.cols * self.itemsize + 16 * vector


@dataclass(frozen=True)
class PanelTile(PlainRows):
    """The same elements cut into panels of ``width`` bytes a row, one after the other, swizzled as TMA would.

    >>> tile = PanelTile(rows=64, cols=128, base=0)
    >>> tile.address(np.array([1, 1, 0]), np.array([0, 1, 8])).tolist()  # 16-byte vectors; 8: the second panel
    [144, 128, 8192]
    """

    @property
    def width(self) -> int:
        """Bytes of a panel's row: the swizzle width."""
        return min(self.itemsize * self.cols, 128)

    def descriptor(self, row: int, col: int, *, along_rows: bool) -> SmemDescriptor:
        """The operand that starts at ``(row, col)``; ``along_rows``: the rows are contracted (V), else the columns."""
        panel, byte = divmod(self.itemsize * col, self.width)
        start = self.base + panel * self.rows * self.width + row * self.width + byte
        more = self.itemsize * self.cols > self.width  # panels: what leads from one to the next
        leading = (self.rows * self.width if more else 0) if along_rows else 16
        return SmemDescriptor(start, leading, 8 * self.width, TensorMapSwizzle.of(f"{self.width}B"))

    def address(self, row: IntArray, vector: IntArray) -> IntArray:
        """Byte address of 16-byte ``vector`` of ``row``."""
        panel, within = np.divmod(16 * vector, self.width)
        linear = self.base + panel * self.rows * self.width + row * self.width + within
        swizzled: IntArray = self.descriptor(0, 0, along_rows=False).swizzle.swizzle()(linear)
        return swizzled


@dataclass(frozen=True)
class WgmmaShape:
    """Sizes of the tile: BM query rows, BN keys; D columns of Q and K in DRAM, padded to BD in shared memory, DV of V
    padded to BDV (as those of K if None; 0: no such part); ``warps`` 4 or 8.

    dtype : of Q, and of K where it is multiplied. stored : of K and V in DRAM. weights : of P, and of V where it is
    multiplied. Each as ``dtype`` if None. ahead : tiles of K and V in flight while one is worked on. v_in_k : V has no
    place of its own, it is read from K's (MLA)."""

    BM: int
    BN: int
    D: int
    BD: int
    dtype: np.dtype[Any]
    warps: int = 8
    DV: int | None = None
    BDV: int | None = None
    stored: np.dtype[Any] | None = None
    weights: np.dtype[Any] | None = None
    ahead: int = 1
    v_in_k: bool = False

    def __post_init__(self) -> None:
        for name, value in (("DV", self.D), ("BDV", self.BD), ("stored", self.dtype), ("weights", self.dtype)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.warps % 4 or self.BM % (16 * min(self.warps, 4 * (self.BM // 64) or 4)) or self.BN % 16:
            raise ValueError(f"{self}: warps must be a multiple of 4, BM of 64 (128 for two warpgroups), BN of 16")
        for D, BD in ((self.D, self.BD), (self.v_depth, self.v_width)):
            if D % 8 or BD % 16 or D > BD or BD > 256 * self.groups_n:
                raise ValueError(
                    f"{self}: D and DV must be multiples of 8 elements, BD and BDV of 16 that hold them, at most "
                    f"{256 * self.groups_n}"
                )
        if self.BN > 256:
            raise ValueError(f"{self}: BN must be at most 256")

    @property
    def v_depth(self) -> int:
        """DV."""
        return self.DV or 0

    @property
    def v_width(self) -> int:
        """BDV."""
        return self.BDV or 0

    @property
    def groups_n(self) -> int:
        """Warpgroups that share out the columns of O. Of S each has all, in so many instructions."""
        return max(1, 16 * self.warps // self.BM)

    @property
    def p_dtype(self) -> np.dtype[Any]:
        """Of P and of V where they are multiplied."""
        return self.dtype if self.weights is None else self.weights

    @property
    def dram_dtype(self) -> np.dtype[Any]:
        """Of K and V in DRAM."""
        return self.dtype if self.stored is None else self.stored

    @property
    def v_transposed(self) -> bool:
        """Tells whether V lies in shared memory with its keys along the rows of the panels."""
        return self.p_dtype.itemsize == 1

    def atom(self, columns: int, dtype: np.dtype[Any] | None = None) -> MmaAtom:
        """``wgmma.m64n<columns>`` of operands of ``dtype``, of Q's if None; a warpgroup's share of the columns."""
        dtype = self.dtype if dtype is None else dtype
        n = columns // self.groups_n
        return get_atom(f"wgmma.m64n{n}k{K_BYTES // dtype.itemsize}.{SUFFIX[dtype.name]}")

    @property
    def converted(self) -> dict[str, bool]:
        """Tells whether K (``"k"``) and V pass from plain rows through registers, to be converted."""
        return {"k": self.dtype != self.dram_dtype, "v": self.p_dtype != self.dram_dtype}

    def stages(self, role: str) -> int:
        """Stages of K (``"k"``) or V where it comes from DRAM: panels, or the plain rows before it is converted."""
        if role == "v" and self.v_transposed:
            return 1
        return self.ahead if self.converted[role] else self.ahead + 1

    @property
    def places(self) -> dict[str, PlainRows]:
        """Places of Q (``"q"``) and of the stages of K and V (``"k0"``, ``"k1"``, ``"v0"``, ``"v1"``) when they are
        multiplied; K and V before they are converted (``"k plain0"``, ``"v plain0"``)."""
        return _places(self)

    def panel(self, at: str) -> PanelTile:
        """The place ``at``, of an operand."""
        place = self.places[at]
        assert isinstance(place, PanelTile), at
        return place


@functools.cache
def _places(shape: WgmmaShape) -> dict[str, PlainRows]:
    size, p_size = shape.dtype.itemsize, shape.p_dtype.itemsize
    v = (shape.v_width, shape.BN) if shape.v_transposed else (shape.BN, shape.v_width)
    tiles = [("q", (shape.BM, shape.BD), size)]
    panels = {role: 1 if shape.converted[role] else shape.stages(role) for role in "kv"}
    tiles += [(f"k{stage}", (shape.BN, shape.BD), size) for stage in range(panels["k"])]
    tiles += [(f"v{stage}", v, p_size) for stage in range(0 if shape.v_in_k else panels["v"])]
    base, places = 0, dict[str, PlainRows]()
    for at, (rows, cols), itemsize in tiles:
        if rows * cols:
            places[at] = PanelTile(rows, cols, base, itemsize)
            base += places[at].nbytes
    for role, cols in (("k", shape.BD), ("v", 0 if shape.v_in_k else shape.v_width)):
        for stage in range(shape.stages(role) if cols and shape.converted[role] else 0):
            at = f"{role} plain{stage}"
            places[at] = PlainRows(shape.BN, cols, base, shape.dram_dtype.itemsize)
            base += places[at].nbytes
    return places


def q_addresses(shape: WgmmaShape) -> IntArray:
    """Elements that each step's descriptors of Q find: ``[steps, blocks of 64 rows, 64, k]``."""
    return along_columns(shape.panel("q"), 64, shape.dtype)


def k_addresses(shape: WgmmaShape, stage: int) -> IntArray:
    """Elements that each step's descriptors of K find: ``[steps, instructions, keys of each, k]``."""
    return along_columns(shape.panel(f"k{stage}"), shape.BN // shape.groups_n, shape.dtype)


def v_addresses(shape: WgmmaShape, stage: int) -> IntArray:
    """Elements that each step's descriptors of V find: ``[steps, groups, BDV / groups, k]``; MN-major if of 16 bits."""
    find = along_columns if shape.v_transposed else along_rows
    return find(shape.panel(f"{'k' if shape.v_in_k else 'v'}{stage}"), shape.v_width // shape.groups_n, shape.p_dtype)


@functools.cache
def along_columns(place: PanelTile, rows: int, dtype: np.dtype[Any]) -> IntArray:
    """Elements that the descriptors of an operand find whose columns are contracted, ``rows`` of them an instruction:
    ``[steps, instructions, rows, k]``."""
    k = K_BYTES // dtype.itemsize
    return np.array(
        [
            [place.descriptor(row, column, along_rows=False).addresses(rows, k, dtype)
             for row in range(0, place.rows, rows)]
            for column in range(0, place.cols, k)
        ]
    )


@functools.cache
def along_rows(place: PanelTile, columns: int, dtype: np.dtype[Any]) -> IntArray:
    """Elements that the descriptors of an operand find whose rows are contracted, ``columns`` of them an instruction:
    ``[steps, instructions, columns, k]``."""
    k = K_BYTES // dtype.itemsize
    return np.array(
        [
            [place.descriptor(row, column, along_rows=True).addresses(columns, k, dtype, "MN")
             for column in range(0, place.cols, columns)]
            for row in range(0, place.rows, k)
        ]
    )


@functools.cache
def accumulator_map(shape: WgmmaShape, columns: int) -> FragmentMap:
    """Warp w has rows ``16 w ...`` of every ``16 * warps``, all columns, or a warpgroup its share of them: ``[threads,
    repeats, registers]``."""
    n = shape.groups_n
    warps = shape.warps // n  # along the rows
    thread, repeat, r = np.ogrid[: 32 * shape.warps, : shape.BM // (16 * warps), : columns // n // 2]
    row, col = shape.atom(columns).c(thread % 128, r)
    row = row + thread % (32 * warps) // 128 * 64 + repeat * 16 * warps
    col = col + thread // (32 * warps) * (columns // n) + 0 * row
    return FragmentMap((shape.BM, columns), row, col, warp_size=32)


@functools.cache
def scores_map(shape: WgmmaShape) -> FragmentMap:
    """S ``[BM, BN]``: as O, but for warpgroups of the same rows, each of which has all of the keys."""
    n = shape.groups_n
    if n == 1:
        return accumulator_map(shape, shape.BN)
    thread, regs = np.arange(32 * shape.warps)[:, None, None], shape.BN // n // 2
    r = np.arange(n * regs)
    row, col = shape.atom(shape.BN).c(thread % 128, r % regs)
    return FragmentMap((shape.BM, shape.BN), row + 0 * r, col + r // regs * (shape.BN // n), warp_size=32)
