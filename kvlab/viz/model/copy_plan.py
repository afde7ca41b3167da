"""The plan of a copy: which lane fetches which vector of the source tile, and where it puts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.common.drawn import Drawn
from kvlab.hardware import get_arch
from kvlab.memory import as_dtype

AMD = "gfx950"
"""Whose loaders to LDS are known."""
MOST = 1 << 20


@dataclass(frozen=True, eq=False)
class CopyPlan(Drawn):
    """Moves of every lane of every instruction of a copy.

    name            of the instruction or the loader
    shape           rows and columns of the source tile, in elements
    dtype           of an element
    row, col        [instructions, lanes] the first element that each lane fetches, -1 where it does nothing; the first
                    instruction is the one that is emphasised
    width           elements that a lane moves with one instruction
    destination     [instructions, lanes] byte address in shared memory; None for a copy to registers
    warp            [instructions] which warp executes each
    arch            whose shared memory it is: how many banks it has

    Raises ValueError for arrays of different shapes or vectors outside the tile."""

    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    row: npt.NDArray[np.int64]
    col: npt.NDArray[np.int64]
    width: int
    destination: npt.NDArray[np.int64] | None = None
    warp: npt.NDArray[np.int64] | None = None
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        get_arch(self.arch)
        row, col = (np.atleast_2d(np.asarray(a, np.int64)) for a in (self.row, self.col))
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "col", col)
        warp = np.zeros(len(row), np.int64) if self.warp is None else np.asarray(self.warp, np.int64)
        object.__setattr__(self, "warp", warp)
        if self.destination is not None:
            object.__setattr__(self, "destination", np.atleast_2d(np.asarray(self.destination, np.int64)))
        for name in ("col", "destination"):
            value = getattr(self, name)
            if value is not None and value.shape != row.shape:
                raise ValueError(f"{name} of shape {value.shape} does not fit row of shape {row.shape}")
        if warp.shape != row.shape[:1]:
            raise ValueError(f"warp of shape {warp.shape} does not fit {row.shape[0]} instructions")
        if row.max() >= self.shape[0] or col.max() + self.width > self.shape[1]:
            raise ValueError(
                f"{self.name}: row {row.max()}, columns {col.max()}..{col.max() + self.width - 1} are outside the tile "
                f"of {self.shape[0]} x {self.shape[1]}"
            )

    @classmethod
    def of(cls, loader: Any, shape: tuple[int, int] | None = None, dtype: Any = "bf16") -> CopyPlan:
        """The plan of a loader of :mod:`kvlab.hardware` or of a register layout, on a tile of ``shape``.

        - :class:`~kvlab.hardware.RegTileLoader`: each worker's vectors, to registers, in waves as on gfx950
        - :class:`~kvlab.hardware.SubTileLoaderLDS` and ``SubTileLoaderLDS_st_8x32`` (which knows its shape): to the LDS
          of gfx950
        - :class:`~kvlab.layout.LinearLayout` of registers, lanes and warps (a blocked load of ``dtype``), its
          contiguous registers as vectors of up to 16 bytes

        >>> from kvlab.hardware import SubTileLoaderLDS
        >>> plan = CopyPlan.of(SubTileLoaderLDS("bf16"), (32, 32))
        >>> plan.row.shape, plan.destination[1, :2].tolist()
        ((2, 64), [1024, 1040])
        """
        extent = (loader.BN, loader.depth) if hasattr(loader, "BN") else shape
        if extent is not None and math.prod(extent) > MOST:
            raise ValueError(f"shape {tuple(extent)} of {loader!r}: tiles of up to {MOST} elements can be planned")
        if hasattr(loader, "in_dims"):
            return _of_layout(cls, loader, as_dtype(dtype))
        if hasattr(loader, "thread_layout"):
            return _of_registers(cls, loader, _needed(loader, shape))
        if hasattr(loader, "plan"):
            return _of_dma(cls, loader, shape)
        raise ValueError(
            f"{loader!r} is no loader with a plan: must be RegTileLoader, SubTileLoaderLDS, SubTileLoaderLDS_st_8x32 "
            "or a LinearLayout of registers"
        )

    @classmethod
    def of_cp_async(
        cls, row: Any, col: Any, destination: Any, shape: tuple[int, int], dtype: Any, nbytes: int = 16
    ) -> CopyPlan:
        """``cp.async``: [..., lanes] of the first element that each lane fetches, and the byte where it lands; one
        instruction of one warp for each of the leading axes.

        >>> lane = np.arange(32)
        >>> CopyPlan.of_cp_async(lane // 4, lane % 4 * 8, lane * 16, (8, 32), "bf16").width
        8
        """
        width = nbytes // as_dtype(dtype).itemsize
        arrays = np.broadcast_arrays(*(np.asarray(a, np.int64) for a in (row, col, destination)))
        r, c, d = (a.reshape(-1, a.shape[-1]) for a in arrays)
        return cls(f"cp.async.{nbytes}", shape, as_dtype(dtype), r, c, width, d, np.arange(len(r)))

    @property
    def lanes(self) -> int:
        """Lanes of an instruction."""
        return self.row.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a lane moves with one instruction."""
        size: int = self.width * self.dtype.itemsize
        return size

    def bundles(self) -> list[npt.NDArray[np.int64]]:
        """Neighbouring lanes of the first instruction that fetch from one row."""
        active = np.flatnonzero(self.row[0] >= 0)
        row = self.row[0, active]
        return np.split(active, np.flatnonzero((np.diff(row) != 0) | (np.diff(active) != 1)) + 1)


def _needed(loader: Any, shape: Sequence[int] | None) -> tuple[int, int]:
    if shape is None or len(shape) != 2:
        raise ValueError(f"shape is {shape!r}: must be (rows, columns) of the tile that {loader!r} loads")
    return int(shape[0]), int(shape[1])


def _of_registers(cls: type[CopyPlan], loader: Any, shape: tuple[int, int]) -> CopyPlan:
    where = loader.vectors(shape)  # [workers, vectors, 2]
    workers, vectors = where.shape[:2]
    lanes = min(get_arch(AMD).warp_size, workers)
    per_warp = where.reshape(workers // lanes, lanes, vectors, 2).transpose(0, 2, 1, 3).reshape(-1, lanes, 2)
    warp = np.repeat(np.arange(workers // lanes), vectors)
    return cls(
        type(loader).__name__, shape, loader.dtype, per_warp[..., 0], per_warp[..., 1], loader.width, warp=warp,
        arch=AMD,
    )


def _of_dma(cls: type[CopyPlan], loader: Any, shape: Sequence[int] | None) -> CopyPlan:
    if callable(loader.plan):
        rows, columns = _needed(loader, shape)
        plan, warp = loader.plan(rows, columns), None
    else:
        rows, columns, plan = loader.BN, loader.depth, loader.plan
        warp = np.arange(len(plan.row)) % (loader.num_threads // plan.row.shape[1])
    size = loader.dtype.itemsize
    lane = np.arange(plan.row.shape[1])
    target = plan.offset[:, None] * size + lane * plan.width * size
    name, extent = type(loader).__name__, (rows, columns)
    return cls(name, extent, loader.dtype, plan.row, plan.col, plan.width, target, warp, AMD)


def _of_layout(cls: type[CopyPlan], layout: Any, dtype: np.dtype[Any]) -> CopyPlan:
    if len(layout.shape) != 2 or not {"register", "lane"} <= set(layout.in_dims):
        raise ValueError(f"{layout!r} is not a map from register, lane and warp to two coordinates")
    width = 1
    for bit, vector in enumerate(layout.bases["register"]):
        if vector != [0, 1 << bit] or width * dtype.itemsize >= 16:
            break
        width *= 2
    sizes = [layout.in_dims.get(name, 1) for name in ("warp", "register", "lane")]
    index = np.indices(sizes)[:, :, ::width]
    given = {name: i for name, i in zip(("warp", "register", "lane"), index, strict=True) if name in layout.in_dims}
    row, col = (np.asarray(a).reshape(-1, sizes[2]) for a in layout(**given))
    warp = np.repeat(np.arange(sizes[0]), sizes[1] // width)
    return cls("blocked load", layout.shape, dtype, row, col, width, warp=warp)
