"""MAX's gfx950 loaders that bring a tile from DRAM to LDS by DMA, executed.

LDS is linear in the lane, so a swizzle permutes the source: lane l of sub-block s fetches vector ``swizzle(l + 64 s)``.
Whoever reads logical vector v at slot ``swizzle(v)`` gets it. What lies past the buffer's bound arrives as zeros."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import count, integers
from kvlab.common.drawn import Drawn
from kvlab.hardware._arrays import BoolArray, IntArray, frozen
from kvlab.layout import Swizzle, TileTensor
from kvlab.layout.algebra.int_tuple import at_once
from kvlab.memory import as_dtype

from .copy import buffer_load_lds
from .tile_resource import DRAM, LDS, check_tile, resource_of

_LANES = 64


@dataclass(frozen=True, eq=False)
class DmaPlan:
    """DMA instructions: the element of the tile that each lane fetches first, ``row`` and ``col`` ``[n, 64]``, how many
    elements (``width``), and where lane 0's land, ``offset`` ``[n]`` in elements from the tile's first.

    >>> plan = SubTileLoaderLDS("bf16").plan(32, 32)
    >>> plan.row.shape, plan.offset.tolist(), plan.width
    ((2, 64), [0, 512], 8)
    """

    row: IntArray
    col: IntArray
    offset: IntArray
    width: int


@dataclass(frozen=True)
class SubTileLoaderLDS:
    """A wave's ``M x N`` tile, row-major in LDS, 32 rows at a time.

    Rows of at most 64 bytes are fetched by 16 x 4 lanes, longer ones by 8 x 8. ``swizzle``, then ``swizzle2``, act on
    the number of a 16-byte vector in its 32-row block. ValueError for one that changes bits from 6 on: a vector would
    have to come from the lanes of another instruction.

    >>> loader = SubTileLoaderLDS("bf16", Swizzle(3, 0, 4, "vector"))
    >>> plan = loader.plan(32, 32)
    >>> [(int(r), int(c) // 8) for r, c in zip(plan.row[0, 16:21], plan.col[0, 16:21])]  # (row, vector) of lanes 16..20
    [(4, 1), (4, 0), (4, 3), (4, 2), (5, 1)]
    """

    dtype: np.dtype[Any]
    swizzle: Swizzle | None = None
    swizzle2: Swizzle | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        for name in ("swizzle", "swizzle2"):
            swizzle = getattr(self, name)
            if swizzle is None:
                continue
            if swizzle.to("vector").zzz_mask >= _LANES:
                raise ValueError(
                    f"SubTileLoaderLDS: {name} {swizzle} changes bits of a vector's number from 6 on: must be bits 0 "
                    "to 5, the lane"
                )
            object.__setattr__(self, name, swizzle.to("vector"))

    def plan(self, M: int, N: int, worker_base: int = 0) -> DmaPlan:
        """The instructions for an ``M x N`` tile. ``worker_base``: sub-block number of the tile's first one, where
        several waves share a 32-row block, so that the swizzle sees the block's own vector numbers."""
        M, N, worker_base = count("M", M), count("N", N), count("worker_base", worker_base)
        at_once(M * N, "elements")
        return _sub_tile_plan(self, M, N, worker_base)

    def load(
        self, dst: TileTensor, src: TileTensor, scalar_offset: Any = 0, worker_base: int = 0, *, columns: Any = None
    ) -> None:
        """Execute it: the tile ``src`` goes to ``dst``, or many at once, whose axes lead the offsets of both.

        dst : in shared memory, ``M x N``, row-major without gaps.
        src : in DRAM, ``M x N`` with contiguous columns; or pieces of fewer rows, along one more axis of its offset.
            What lies past its ``valid_rows`` arrives as zeros, by the linear bound of a buffer resource.
        scalar_offset : elements by which the fetched ones lie behind those of ``src``.
        columns : of ``src`` that exist, an int or one for each tile; the others arrive as zeros. All unless given.

        >>> from kvlab.layout import Layout
        >>> src = TileTensor.from_numpy(np.arange(64 * 64, dtype=np.int16).reshape(64, 64)).with_valid_rows(31)
        >>> dst = TileTensor.stack_allocation(Layout.row_major(32, 32), np.int16)
        >>> SubTileLoaderLDS(np.int16).load(dst, src.tile((32, 32), (0, 1)))
        >>> dst.to_numpy()[[0, 1, 30, 31], 0].tolist()
        [32, 96, 1952, 0]
        """
        plan, base, voffset, records = self._reach(dst, src, worker_base, columns)
        size = self.dtype.itemsize
        target = np.asarray(dst.offset)[..., None] * size + dst.memory.base + plan.offset * size
        scalar = integers("scalar_offset", scalar_offset)[..., None, None] * size
        buffer_load_lds(dst.memory, target, src.memory, base, voffset, plan.width * size, records, scalar)

    def arrives(self, dst: TileTensor, src: TileTensor, worker_base: int = 0, *, columns: Any = None) -> BoolArray:
        """Lanes to which :meth:`load` brings data from DRAM, and not zeros: ``[leading axes, instructions, 64]``."""
        plan, _, voffset, records = self._reach(dst, src, worker_base, columns)
        return np.asarray(voffset + plan.width * self.dtype.itemsize <= records)

    def _reach(
        self, dst: TileTensor, src: TileTensor, worker_base: int, columns: Any
    ) -> tuple[DmaPlan, IntArray, IntArray, IntArray]:
        """The instructions, and the resource that they reach; refuses what is not to be loaded."""
        check_tile("dst", dst, LDS, self.dtype)
        check_tile("src", src, DRAM, self.dtype)
        if not dst.is_row_major or dst.rank != 2:
            raise ValueError(f"dst is {dst.layout}: must be rows x columns, row-major without gaps")
        (rows, cols), lead, pieces = dst.shape, np.ndim(dst.offset), np.shape(src.offset)[np.ndim(dst.offset) :]
        if (math.prod(pieces) * src.shape[0], src.shape[1]) != (rows, cols) or len(pieces) > 1:
            many = "".join(f"{n} pieces of " for n in pieces)
            raise ValueError(f"src is {many}{src.shape[0]} x {src.shape[1]}: must be {rows} x {cols}")
        plan = self.plan(rows, cols, worker_base)
        return plan, *resource_of(src, plan.row, plan.col, lead, columns)


@functools.cache
def _sub_tile_plan(loader: SubTileLoaderLDS, M: int, N: int, worker_base: int) -> DmaPlan:
    size = loader.dtype.itemsize
    rows, cols = (16, 4) if N * size // 4 <= 16 else (8, 8)
    width, block = N // cols, min(M, 32)
    if N % cols or width * size not in (1, 2, 4, 12, 16):
        raise ValueError(
            f"SubTileLoaderLDS: N {N} of {loader.dtype} gives each of {cols} lanes a row {N * size / cols:g} bytes, "
            f"must be 1, 2, 4, 12 or 16"
        )
    if M % rows or M % block:
        raise ValueError(f"SubTileLoaderLDS: M is {M}: must be a multiple of {rows} rows and, above 32, of 32")
    group, sub, lane = np.ogrid[: M // block, : block // rows, :_LANES]
    worker = lane + _LANES * (sub + worker_base)
    for swizzle in (loader.swizzle, loader.swizzle2):
        worker = worker if swizzle is None else swizzle(worker)
    place = worker % _LANES
    row = block * group + rows * sub + place // cols
    col = width * (place % cols) + 0 * row
    offset = (block * group + rows * sub)[..., 0] * N
    return DmaPlan(frozen(row.reshape(-1, _LANES)), frozen(col.reshape(-1, _LANES)), frozen(offset.reshape(-1)), width)


@dataclass(frozen=True)
class SubTileLoaderLDS_st_8x32(Drawn):  # noqa: N801 - MAX's public name
    """A CTA's ``BN x depth`` tile as sub-tiles of 8 rows and 64 bytes (512 bytes each), numbered row-major; no swizzle.

    >>> loader = SubTileLoaderLDS_st_8x32("bf16", BN=64, depth=128, BK=32, num_threads=256)
    >>> loader.plan.row.shape, loader.plan.row[0, [0, 4, 63]].tolist(), loader.plan.col[0, [0, 1, 32]].tolist()
    ((16, 64), [0, 1, 7], [0, 8, 32])
    """

    dtype: np.dtype[Any]
    BN: int
    depth: int
    BK: int
    num_threads: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        size = self.dtype.itemsize
        for name in ("BN", "depth", "BK", "num_threads"):
            object.__setattr__(self, name, count(name, getattr(self, name), 1))
        at_once(self.BN * self.depth, "elements")
        if self.BK * size != 64 or self.depth % self.BK or self.BN % 8:
            raise ValueError(
                f"{self}: BK {self.BK} of {self.dtype} must be 64 bytes and divide depth {self.depth}, 8 divide BN"
            )
        if self.num_threads % _LANES or self.BN * self.depth * size % (16 * self.num_threads):
            raise ValueError(
                f"{self}: {self.BN * self.depth * size} bytes must be a multiple of 16 bytes for each of num_threads "
                f"{self.num_threads} threads, whole waves of {_LANES}"
            )

    @property
    def plan(self) -> DmaPlan:
        """The instructions of all waves, in LDS order: instruction j of wave w is number ``j * waves + w``."""
        return _st_8x32_plan(self)

    def load(self, dst: TileTensor, src: TileTensor) -> None:
        """Execute it: as :meth:`SubTileLoaderLDS.load`; ``dst`` is ``BN x depth`` without gaps, its sub-tiles numbered
        as the class says: a flat tile tensor of as many elements."""
        size, plan = self.dtype.itemsize, self.plan
        check_tile("dst", dst, LDS, self.dtype, (self.BN * self.depth,))
        check_tile("src", src, DRAM, self.dtype, (self.BN, self.depth))
        if not dst.is_row_major:
            raise ValueError(f"dst is {dst.layout}: must be {self.BN * self.depth} elements without gaps")
        base, voffset, records = resource_of(src, plan.row, plan.col, np.ndim(dst.offset))
        target = np.asarray(dst.offset)[..., None] * size + dst.memory.base + plan.offset * size
        buffer_load_lds(dst.memory, target, src.memory, base, voffset, 16, records)


@functools.cache
def _st_8x32_plan(loader: SubTileLoaderLDS_st_8x32) -> DmaPlan:
    size = loader.dtype.itemsize
    byte = 16 * np.arange(loader.BN * loader.depth * size // 16).reshape(-1, _LANES)
    sub, inside = byte // 512, byte % 512
    across = loader.depth // loader.BK
    row = 8 * (sub // across) + inside // 64
    col = loader.BK * (sub % across) + inside % 64 // size
    return DmaPlan(frozen(row), frozen(col), frozen(byte[:, 0] // size), 16 // size)
