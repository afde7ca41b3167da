"""Shared memory as rows of slots, and the lanes of one instruction laid over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.hardware.banks.wavefront_explain import listed

from ..pen.axis import Axis
from ..pen.palette import ACCENT, BANKS, INK, text_on
from ..pen.svg import Canvas

Int64 = npt.NDArray[np.int64]

UNTOUCHED, OUTSIDE, ZEROS = -1, -2, -3
"""Rows of a slot that holds none of the tile: nobody wrote it, it is outside the image, it was filled with zeros."""

ROOMY = 84.0
"""From this width on, a slot holds its own name (left) and the lane that reads it (right)."""


@dataclass(frozen=True)
class Image:
    """Slots in rows, computed where they are looked at.

    of          slots [n] -> [n, 2] the (row, vector) of the tile that lies there, for ``count`` slots
    row_bytes   of a row of the picture
    banks       of 4 bytes that the memory has"""

    of: Callable[[Int64], Int64]
    count: int
    slot_bytes: int
    base: int
    row_bytes: int
    banks: int

    @classmethod
    def over(cls, slots: Any, slot_bytes: int, base: int, row_bytes: int, banks: int) -> Image:
        """Of a :class:`kvlab.staging.SwizzledTile`, of something else with an ``owner()``, or of integers [..., 2]."""
        if hasattr(slots, "owner_of"):
            return cls(slots.owner_of, slots.rows * slots.vectors, slot_bytes, slots.base, row_bytes, banks)
        tile = np.asarray(slots.owner() if hasattr(slots, "owner") else slots)
        if tile.ndim < 2 or tile.shape[-1] != 2 or not np.issubdtype(tile.dtype, np.integer):
            raise ValueError(
                f"slots has shape {tile.shape} and dtype {tile.dtype}: must be integers [..., 2]: (row, vector)"
            )
        shape = tile.shape[:-1]

        def of(slot: Int64) -> Int64:
            return tile[np.unravel_index(slot, shape)].astype(np.int64)

        return cls(of, math.prod(shape), slot_bytes, base, row_bytes, banks)

    @property
    def columns(self) -> int:
        return self.row_bytes // self.slot_bytes

    @property
    def rows(self) -> int:
        """Rows of the picture."""
        return -(-(self.end - self.start) // self.row_bytes)

    @property
    def start(self) -> int:
        """The byte address of the first image row."""
        return self.base - self.base % self.row_bytes

    @property
    def end(self) -> int:
        return self.base + self.slot_bytes * self.count

    def address(self, rows: Int64) -> Int64:
        """[rows, columns] byte addresses."""
        return self.start + self.row_bytes * rows[:, None] + self.slot_bytes * np.arange(self.columns)

    def at(self, rows: Int64) -> tuple[Int64, Int64]:
        """[rows, columns] row and vector of the tile; OUTSIDE where there is none."""
        slot = (self.address(rows) - self.base) // self.slot_bytes
        there = (slot >= 0) & (slot < self.count)
        pair = np.full((*slot.shape, 2), OUTSIDE, np.int64)
        pair[there] = self.of(slot[there])
        return pair[..., 0], pair[..., 1]


@dataclass(frozen=True)
class Lanes:
    """The addresses of one instruction: lane -> (byte address, phase); empty without an instruction."""

    address: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    nbytes: int
    access: Any

    @classmethod
    def of(cls, access: Any, addresses: Any, nbytes: int, phase: Any, image: Image) -> Lanes:
        if access is not None:
            addresses = np.where(access.active, access.addresses, -1)
            nbytes, phase = access.op.nbytes, access.phase
        address = np.asarray([] if addresses is None else addresses, np.int64).ravel()
        served = np.zeros(len(address), np.int64) if phase is None else np.asarray(phase, np.int64).ravel()
        if served.shape != address.shape:
            raise ValueError(f"phase of shape {served.shape} does not fit addresses of shape {address.shape}")
        outside = address[(address >= 0) & ((address < image.base) | (address + nbytes > image.end))]
        if outside.size:
            raise ValueError(f"address is {outside[0]}: must be in the image, bytes {image.base}..{image.end - 1}")
        return cls(address, served, nbytes, access)

    def groups(self) -> list[tuple[int, list[int], int]]:
        """(byte address, lanes that read there, phase of the first of them)."""
        found: dict[int, list[int]] = {}
        for lane, address in enumerate(self.address.tolist()):
            if address >= 0:
                found.setdefault(address, []).append(lane)
        return [(address, lanes, int(self.phase[lanes[0]])) for address, lanes in found.items()]

    def at(self, address: int, nbytes: int) -> str:
        """The hover line of a slot: who reads it."""
        here = (self.address >= 0) & (self.address < address + nbytes) & (self.address + self.nbytes > address)
        readers = [f"T{lane} (phase {self.phase[lane]})" for lane in np.flatnonzero(here).tolist()]
        return f"\nread by {', '.join(readers)}" if readers else ""

    def draw(
        self, canvas: Canvas, columns: Axis, rows: Axis, image: Image, index: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Outlines and lane names; returns which of the shown slots have no room left for their own name."""
        taken = np.zeros(index.shape, bool)
        px = columns.cell / image.slot_bytes
        place = {row: k for k, row in enumerate(rows.index.tolist())}
        for first in (False, True):  # the first phase lies on top
            for address, lanes, phase in self.groups():
                row, byte = divmod(address - image.start, image.row_bytes)
                if (phase == 0) != first or row not in place:
                    continue
                k, x = place[row], float(columns.edge[0]) + px * byte
                y, width = float(rows.edge[k]), px * self.nbytes
                slot = byte // image.slot_bytes
                fill = text_on(BANKS[index[k, slot]]) if index[k, slot] >= 0 else INK
                if first:
                    canvas.look_here(x + 1, y + 1, width - 2, rows.cell - 2, 3.0 if width > 40 else 2.0)
                else:
                    inset = 2.5 if width > 40 else 1.5  # off the edge: the page may have the outline's colour
                    across, down = width - 2 * inset, rows.cell - 2 * inset
                    canvas.rect(x + inset, y + inset, across, down, stroke=fill, stroke_width=1.3)
                if columns.cell < ROOMY or self.nbytes < image.slot_bytes:
                    taken[k, slot : (byte + self.nbytes - 1) // image.slot_bytes + 1] = True
                name = f"T{lanes[0]}" if len(lanes) == 1 else f"T{lanes[0]} +{len(lanes) - 1}"
                if width >= 6.1 * len(name) + 4:
                    roomy = columns.cell >= ROOMY and width > 40
                    at, anchor = (x + width - 6, "end") if roomy else (x + width / 2, "middle")
                    middle = y + rows.cell / 2 + 3.5
                    canvas.text(at, middle, name, mono=True, size=10, weight=700, anchor=anchor, fill=fill)
        return taken

    def keys(self) -> list[tuple[str, str, str]]:
        if not self.groups():
            return []
        if self.phase.max() == 0:
            return [("none", ACCENT, "read by lane T…")]
        others = ("none", INK, "thin outline: lanes of the other phases")
        first = np.flatnonzero(self.phase == 0)
        named = f" ({listed(first.tolist())})" if (np.diff(first) != 1).any() else ""
        return [("none", ACCENT, f"lanes T… of the first phase{named}"), others]
