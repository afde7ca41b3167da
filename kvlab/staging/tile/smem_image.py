"""Contents of every 16 bytes of a buffer's shared memory: a vector of a key, zeros, or nothing; for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import get_arch

IntArray = np.ndarray[Any, np.dtype[np.int64]]
NOBODY, ZEROS = -1, -3


@dataclass(frozen=True)
class Area:
    """A part of the image: the byte address that it begins at, the stage, and in words what is meant to lie there."""

    address: int
    stage: int
    words: str


@dataclass(frozen=True, eq=False)
class SmemImage:
    """The image of the shared memory of one CTA.

    base     byte address of the first slot
    slots    ``[slots, 2]``: the row of the DRAM tile and the 16-byte vector of that row which lie in each 16 bytes;
             -1 where the buffer has loaded nothing, -3 where a copy put zeros, as the tile has no such row
    areas    where stages and blocks begin

    >>> image = SmemImage.empty(256, 1024, [Area(256, 0, "stage 0")])
    >>> image.put(slot=np.array([1, 0]), row=np.array([0, 7]), vector=np.array([5, 6]), valid_rows=1)
    >>> image.owner()[:3].tolist()
    [[-3, -3], [0, 5], [-1, -1]]
    """

    base: int
    slots: IntArray
    areas: tuple[Area, ...]

    @classmethod
    def empty(cls, base: int, nbytes: int, areas: list[Area]) -> SmemImage:
        """Mask of the slots where nothing was loaded."""
        return cls(base, np.full((nbytes // 16, 2), NOBODY, np.int64), tuple(areas))

    def put(self, slot: IntArray, row: IntArray, vector: IntArray, valid_rows: int) -> None:
        """Vectors land in their slots (arrays that broadcast); those of rows past ``valid_rows`` as zeros. What lands
        behind the image is left out."""
        slot, row, vector = np.broadcast_arrays(slot, row, vector)
        inside = (slot >= 0) & (slot < len(self.slots))
        held = np.where((row < valid_rows)[..., None], np.stack([row, vector], axis=-1), ZEROS)
        self.slots[slot[inside]] = held[inside]

    def addresses(self, itemsize: int) -> IntArray:
        """Byte address of every element of the tile ``[rows, columns]``, behind the image's first byte.

        ValueError if a vector of the tile lies nowhere.

        >>> image = SmemImage.empty(256, 64, [Area(256, 0, "two rows of 32 bytes")])
        >>> image.put(np.array([[3, 1], [2, 0]]), np.array([[0], [1]]), np.array([[0, 1]]), valid_rows=2)
        >>> image.addresses(8).tolist()
        [[48, 56, 16, 24], [32, 40, 0, 8]]
        """
        held = np.flatnonzero(self.slots[:, 0] >= 0)
        row, vector = self.slots[held].T
        first = np.full((row.max(initial=0) + 1, vector.max(initial=0) + 1), NOBODY)
        first[row, vector] = 16 * held
        if (first < 0).any():
            missing = np.argwhere(first < 0)[0].tolist()
            raise ValueError(f"vector {missing[1]} of row {missing[0]} is not in the image: load whole tiles")
        n = 16 // itemsize
        return (first[..., None] + itemsize * np.arange(n)).reshape(len(first), -1)

    def stage(self, number: int) -> SmemImage:
        """The image of one stage. ValueError if there is no such one."""
        stages = sorted({area.stage for area in self.areas})
        if number not in stages:
            raise ValueError(f"stage is {number}: must be one of {stages}")
        areas = tuple(area for area in self.areas if area.stage == number)
        size = len(self.slots) // len(stages)
        first = (areas[0].address - self.base) // 16
        return SmemImage(areas[0].address, self.slots[first : first + size], areas)

    def owner(self) -> IntArray:
        """``slots``, by the name that pictures ask for."""
        return self.slots


def slots_of(addresses: IntArray, itemsize: int, slot_bytes: int = 16) -> IntArray:
    """Contents of each slot of shared memory, for pictures: ``[slots, 2]`` the row and the piece of ``slot_bytes`` of
    that row, -1 where nothing does.

    addresses   ``[rows, columns]``: bytes from the first slot to each element, of ``itemsize`` bytes

    ValueError where a piece is not kept together.

    >>> slots_of(4 * np.arange(16).reshape(2, 8)[::-1], itemsize=4).tolist()
    [[1, 0], [1, 1], [0, 0], [0, 1]]
    """
    n = slot_bytes // itemsize
    first = addresses[:, ::n]
    whole = first.repeat(n, axis=1) + np.arange(addresses.shape[1]) % n * itemsize
    if (first % slot_bytes).any() or not np.array_equal(addresses, whole):
        raise ValueError(f"addresses do not keep pieces of {slot_bytes} bytes of a row together")
    slots = np.full((int(first.max()) // slot_bytes + 1, 2), NOBODY, np.int64)
    slots[first // slot_bytes] = np.moveaxis(np.indices(first.shape), 0, -1)
    return slots


def dma_slots(offset: IntArray, itemsize: int, first: int = 0) -> IntArray:
    """The slots that DMA instructions fill, 16 bytes a lane: ``offset`` ``[n]`` in elements -> ``[n, 64]``."""
    return first + offset[:, None] * itemsize // 16 + np.arange(get_arch("gfx950").warp_size)


def stage_areas(
    held: dict[int, tuple[Any, Any]], stages: int, stage_bytes: int, address: int, program: int, *, blocks: int = 1,
    width: int = 0, name: str = "block", first: dict[int, int] | None = None,
) -> list[Area]:
    """The stages from byte ``address`` on, each of ``blocks`` of ``width`` columns one after the other.

    ``held``: first key and valid rows ``[programs]`` of each loaded stage; ``first``: its first column, 0 unless given.

    >>> held = {0: (np.array([64]), np.array([36]))}
    >>> [area.words for area in stage_areas(held, 2, 4096, 0, 0, blocks=2, width=32)][1:3]
    ['stage 0, keys 64–99, block 1: columns 32–63', 'stage 1, not loaded, block 0: columns 0–31']
    """
    areas = []
    for stage in range(stages):
        for b in range(blocks):
            column = b * width + (first or {}).get(stage, 0)
            columns = f", {name} {column // width}: columns {column}–{column + width - 1}" if width else ""
            where = address + stage * stage_bytes + b * stage_bytes // blocks
            areas.append(Area(where, stage, f"{_keys(held, stage, program)}{columns}"))
    return areas


def _keys(held: dict[int, tuple[Any, Any]], stage: int, program: int) -> str:
    """A stage and the keys in it, in words."""
    if stage not in held:
        return f"stage {stage}, not loaded"
    first, valid = (int(part[program]) for part in held[stage])
    return f"stage {stage}, keys {first}–{first + valid - 1}" if valid else f"stage {stage}, no key"
