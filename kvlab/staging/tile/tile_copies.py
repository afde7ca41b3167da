"""Whole tiles from DRAM into shared memory by a CTA's threads, 16 bytes each, every copy stated to ``hazards``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.hardware import TmaDescriptor, cp_async, tma
from kvlab.layout import TileTensor
from kvlab.memory import AddressSpace, Memory
from kvlab.staging.record.async_barrier import AsyncBarrier
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic

from .copy_plan import TileCopyPlan, copy_plan
from .iterator import valid_keys

IntArray = np.ndarray[Any, np.dtype[np.int64]]


class ConversionRows:
    """Rows of ``width`` bytes, as they lie in DRAM, with a record of their own; ``plan`` is that of the tile that is
    made from them, ``columns`` elements a vector."""

    def __init__(self, width: int, tile: TileTensor, plan: TileCopyPlan, columns: int) -> None:
        rows, size, programs = int(plan.row.max()) + 1, tile.dtype.itemsize, len(valid_keys(tile))
        self.plan = copy_plan(rows, width, tile.shape[1] * size, plan.warps)
        self.address = self.plan.row * width + self.plan.byte
        self.read_address = plan.row * width + plan.byte // 16 * columns * size
        self.smem = Memory(rows * width, space=AddressSpace.SHARED, name="plain rows", programs=programs)
        self.hazards = Hazards(self.smem, plan.warps)
        self.filled = self.hazards.footprint(self.address, 16, self.plan.warp)
        self.used = self.hazards.footprint(self.read_address, columns * size, plan.warp)

    def copy(self, role: str, tile: TileTensor) -> IntArray:
        """A tile by cp.async; all warps have read the one before, and wait for this one. Bytes of each warp."""
        source, valid = self.plan.source_of(tile)
        self.hazards.barrier()
        self.hazards.copy_async(self.filled, f"{role} copy")
        cp_async(self.smem, self.address[None], tile.memory, source, 16, valid)
        self.hazards.commit_group()
        self.hazards.wait_group(0)
        self.hazards.barrier()
        return self.plan.bytes_by_warp(valid)


def copy_boxes(
    smem: Memory, hazards: Hazards, box: TmaDescriptor, at: tuple[Any, ...], address: IntArray, into: Footprint,
    bar: AsyncBarrier, what: str, stage: int | None = None,
) -> None:
    """Boxes of TMA at the coordinates ``at`` into shared memory, in flight until ``bar``, which expects their bytes.

    address : where each box lands, ``[1, ...]`` where ``smem`` has programs. into : the bytes, and the issuing warp."""
    hazards.copy_bulk(into, bar, address.size * box.transaction_bytes, what, stage)
    tma.load(box, at, smem, address)


class TileCopies:
    """The copies of one launch, each of which is stated to ``hazards`` and counted by ``traffic``.

    place : ``place(at)`` is the plan of the tile that comes to the place ``at``, a role or one of its stages, and the
        byte address of each of its vectors ``[n]`` in ``smem``, which has programs."""

    def __init__(
        self, smem: Memory, hazards: Hazards, traffic: Traffic, place: Callable[[str], tuple[TileCopyPlan, IntArray]]
    ) -> None:
        self.smem, self.hazards, self.traffic, self.place = smem, hazards, traffic, place
        self._footprints: dict[str, Footprint] = {}
        self._plain: dict[str, ConversionRows] = {}

    def by_registers(self, role: str, dram: Memory, offset: IntArray, size: int, at: str | None = None) -> None:
        """Rows at element ``offset`` ``[programs, rows]`` of ``dram``, negative where there is none: zeros. To the
        place ``at`` (None: the role's)."""
        place = role if at is None else at
        plan, address = self.place(place)
        source, valid = plan.source(offset, size)
        self.smem.store(address[None], dram.load(source, np.uint8, 16, mask=valid))
        self.hazards.write(self.filled(place), f"{role} write")
        self.traffic.move("DRAM->SMEM", plan.bytes_by_warp(valid))

    def by_cp_async(
        self, role: str, tile: TileTensor, stage: int = 0, at: str | None = None, active: Any = slice(None)
    ) -> None:
        """The rows of a K or V tile into a stage, whose place is ``at`` (None: the role's), in flight until its group
        has been waited for. ``active`` ``[programs]``: whose traffic is counted."""
        place = role if at is None else at
        plan, address = self.place(place)
        source, valid = plan.source_of(tile)
        self.hazards.copy_async(self.filled(place), f"{role} copy", stage)
        cp_async(self.smem, address[None], tile.memory, source, 16, valid)
        counted = valid[active]
        self.traffic.move("DRAM->SMEM", plan.bytes_by_warp(counted))
        self.traffic.issue(f"{role} copy", np.full(plan.warps, len(plan.row) // (32 * plan.warps) * len(counted)))

    def by_store(self, role: str, tile: TileTensor, stage: int = 0, at: str | None = None) -> None:
        """The rows of a K or V tile through registers into a stage, whose place is ``at`` (None: the role's)."""
        place = role if at is None else at
        plan, address = self.place(place)
        source, valid = plan.source_of(tile)
        self.hazards.write(self.filled(place), f"{role} write", stage)
        self.smem.store(address[None], tile.memory.load(source, np.uint8, 16, mask=valid))
        self.traffic.move("DRAM->SMEM", plan.bytes_by_warp(valid))

    def by_conversion(self, role: str, tile: TileTensor, dtype: np.dtype[Any], by_block: Any = None) -> None:
        """The rows of a tile of another dtype: by cp.async into plain rows of their own, from there through
        registers, where they become ``dtype``, to their place. ``by_block``: what they are multiplied by there, in
        float32, ``[programs, rows, blocks of 128 columns]``."""
        plan, address = self.place(role)
        columns, size = 16 // dtype.itemsize, tile.dtype.itemsize
        width = -(-(int(plan.byte.max()) // dtype.itemsize + columns) * size // 16) * 16
        if role not in self._plain:
            self._plain[role] = ConversionRows(width, tile, plan, columns)
        plain = self._plain[role]
        self.traffic.move("DRAM->SMEM", plain.copy(role, tile))
        self.hazards.barrier()
        plain.hazards.read(plain.used, f"{role} convert")
        vectors = plain.smem.load(plain.read_address[None], tile.dtype, columns)
        read = vectors.size * size
        if by_block is not None:
            block = np.minimum(plan.byte // dtype.itemsize // 128, by_block.shape[2] - 1)  # in the padding: of zeros
            vectors = vectors.astype(np.float32) * by_block[:, plan.row, block][..., None]
        self.smem.store(address[None], vectors.astype(dtype))
        self.hazards.write(self.filled(role), f"{role} write")
        self.traffic.move("SMEM->registers", read)
        self.traffic.move("registers->SMEM", vectors.size * dtype.itemsize)

    def filled(self, at: str) -> Footprint:
        """The bytes of a place that each warp brings."""
        plan, address = self.place(at)
        return self.once(at, address, 16, plan.warp)

    def once(self, at: str, address: IntArray, nbytes: int, warp: IntArray) -> Footprint:
        """The footprint of a place: ``nbytes`` at each address, by ``warp``; the same whenever it is asked for."""
        if at not in self._footprints:
            self._footprints[at] = self.hazards.footprint(address, nbytes, warp)
        return self._footprints[at]
