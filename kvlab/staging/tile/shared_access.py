"""The instructions of one access to shared memory, by all warps of a CTA: executed, stated to hazards, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware import count_wavefronts, get_arch, ldmatrix, stmatrix
from kvlab.memory import Memory
from kvlab.staging.record.footprint import Footprint
from kvlab.staging.record.hazards import Hazards
from kvlab.staging.record.traffic import Traffic

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


def passes_by_warp(instruction: str, address: IntArray, arch: str) -> tuple[IntArray, IntArray]:
    """(wavefronts, ideal) of the accesses at byte addresses ``[instructions, warps, lanes]``: ``[warps]`` each."""
    wavefronts, ideal, _ = count_wavefronts(instruction, address, arch=arch)
    return wavefronts.sum(axis=0), np.broadcast_to(ideal, wavefronts.shape).sum(axis=0)


@dataclass(frozen=True, eq=False)
class SharedAccess:
    """``address`` are bytes ``[instructions, warps, lanes]``, ``nbytes`` those of a lane; for each warp the passes
    taken, the fewest possible, and those without the swizzle: ``[warps]``."""

    name: str
    address: IntArray
    nbytes: int
    wavefronts: IntArray
    ideal: IntArray
    unswizzled: IntArray

    @classmethod
    def of(cls, name: str, address: IntArray, nbytes: int, arch: str, plain: IntArray | None = None) -> SharedAccess:
        """An instruction by its name. ``plain``: the addresses without a swizzle, where there is one."""
        (wavefronts, ideal), (unswizzled, _) = (
            passes_by_warp(name, at if nbytes >= 4 else at // 4 * 4, arch)
            for at in (address, address if plain is None else plain)
        )
        return cls(name, address, nbytes, wavefronts, ideal, unswizzled)

    @classmethod
    def of_elements(
        cls, name: str, address: IntArray, itemsize: int, arch: str, plain: IntArray | None = None
    ) -> SharedAccess:
        """Of elements at bytes ``[threads, ...]``, as many at once as lie side by side, up to 16 bytes. ``name``, as
        ``"ds_read_b"``, has the bits behind it. What is narrower than a word is counted by the words it touches.

        >>> rows = 64 * np.arange(64)[:, None] + 2 * np.arange(4)
        >>> access = SharedAccess.of_elements("ds_read_b", rows, 2, "gfx950")
        >>> access.name, access.address.shape
        ('ds_read_b64', (1, 1, 64))
        """
        lanes, n = get_arch(arch).warp_size, 16 // itemsize
        flat = address.reshape(len(address), -1)
        while n > 1 and (flat.shape[1] % n or _apart(flat, n, itemsize)):
            n //= 2
        first, other = (
            None if at is None else at.reshape(-1, lanes, flat.shape[1] // n, n)[..., 0].transpose(2, 0, 1)
            for at in (address, plain)
        )
        assert first is not None
        return cls.of(f"{name}{max(8 * n * itemsize, 32)}", first, n * itemsize, arch, other)

    @property
    def by_warp(self) -> IntArray:
        """Instructions of each warp."""
        return np.full(self.address.shape[1], self.address.shape[0], np.int64)

    def footprint(self, hazards: Hazards, shift: int = 0) -> Footprint:
        """The bytes that each warp touches, ``shift`` bytes further on; of matrices every lane names a row."""
        return hazards.footprint(self.address + shift, 16 if "matrix" in self.name else self.nbytes)

    def load(self, smem: Memory, dtype: np.dtype[Any], shift: int = 0) -> Array:
        """Values that the access brings to the registers: ``[programs, warps, lanes, instructions, elements]``."""
        address = self.address[None] + shift
        if "matrix" in self.name:
            words = ldmatrix(smem, address, self.nbytes // 4, trans=self.name.endswith("trans"), dtype=dtype)
        else:
            words = smem.load(address, dtype, self.nbytes // dtype.itemsize)
        return np.moveaxis(words, 1, 3)

    def store(self, smem: Memory, values: Array, shift: int = 0) -> None:
        """Put the registers ``[programs, threads, ...]`` there, in the order of the instructions."""
        instructions, warps, lanes = self.address.shape
        registers = values.reshape(len(values), warps, lanes, instructions, self.nbytes // values.itemsize)
        address = self.address[None] + shift
        if "matrix" in self.name:
            stmatrix(smem, address.swapaxes(1, 2), np.moveaxis(registers, 3, 2), self.nbytes // 4)
        else:
            smem.store(address, np.moveaxis(registers, 3, 1))

    def count(self, traffic: Traffic, what: str, programs: int) -> None:
        """Counts passes, instructions and bytes in so many programs; ``what`` ends with ``"read"`` or ``"write"``."""
        traffic.access(
            what, wavefronts=self.wavefronts * programs, ideal=self.ideal * programs,
            unswizzled=self.unswizzled * programs, instructions=self.by_warp * programs,
        )
        edge = "registers->SMEM" if what.endswith("write") else "SMEM->registers"
        traffic.move(edge, self.by_warp * self.address.shape[2] * self.nbytes * programs)


def _apart(address: IntArray, n: int, itemsize: int) -> bool:
    """Tells whether some ``n`` elements do not lie side by side, the first on a multiple of their bytes."""
    first = address[:, ::n]
    together = first[..., None] + itemsize * np.arange(n)
    return bool((first % (n * itemsize)).any() or (together.reshape(address.shape) != address).any())
