"""Global memory seen by a warp: the 32-byte sectors that one instruction touches, and what misalignment costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import count
from kvlab.common.drawn import Drawn
from kvlab.hardware._arrays import Array, BoolArray, IntArray, mask_lanes
from kvlab.layout.algebra.int_tuple import at_once

SECTOR_BYTES = 32


def sectors(addresses: Any, nbytes: int, mask: Any = None) -> Array:
    """Number of different 32-byte sectors of DRAM or L2 that one warp access touches: ``[...]``.

    ``addresses`` ``[..., lanes]`` in bytes, absolute: an access that starts off a sector touches one more. ``nbytes``
    a lane moves. ``mask`` as in :func:`~kvlab.hardware.count_wavefronts`. The least possible for a full warp is
    ``lanes * nbytes / 32``; :func:`coalescing` explains the difference.

    >>> lane = np.arange(32)
    >>> sectors(np.stack([lane * 16, lane * 16 + 8, lane * 256]), 16).tolist()
    [16, 17, 32]
    """
    address, active = _checked(addresses, nbytes, mask)
    return _different(address, nbytes, active, SECTOR_BYTES)


@dataclass(frozen=True, eq=False, repr=False)
class Coalescing(Drawn):
    """Result of :func:`coalescing` for one warp access to global memory.

    addresses    ``[lanes]`` bytes;  ``active`` ``[lanes]`` bool;  ``nbytes`` a lane
    sectors      32-byte sectors that move
    useful       different bytes that the lanes want
    ideal        the fewest sectors that could hold the useful bytes
    lines        128-byte cache lines touched
    misaligned   bytes from the start of its sector to the lowest address

    >>> c = coalescing(np.arange(32) * 4 + 8, 4)
    >>> c
    Coalescing(32 lanes x 4 bytes: 5 sectors, ideal 4, 80% useful)
    >>> c.misaligned, c.lines
    (8, 2)
    """

    addresses: IntArray
    active: BoolArray
    nbytes: int
    sectors: int
    useful: int
    lines: int

    @property
    def ideal(self) -> int:
        """The fewest sectors that hold as many bytes."""
        return -(-self.useful // SECTOR_BYTES)

    @property
    def excess(self) -> int:
        """Sectors that move beyond the ideal."""
        return self.sectors - self.ideal

    @property
    def efficiency(self) -> float:
        """Useful bytes of those that move; 1 where nothing moves."""
        return self.useful / (self.sectors * SECTOR_BYTES) if self.sectors else 1.0

    @property
    def misaligned(self) -> int:
        """Bytes from the start of its sector to the lowest address."""
        return int(self.addresses[self.active].min(initial=2**62)) % SECTOR_BYTES if self.active.any() else 0

    def explain(self) -> str:
        """In words: sectors against the ideal, and whether misalignment, gaps or both make the difference.

        >>> print(coalescing(np.arange(32) * 4 + 8, 4).explain())
        32 lanes x 4 bytes: 5 sectors, ideal 4, 80% useful.
        The lowest address, 8, lies 8 bytes past a multiple of 32: the 128 contiguous bytes straddle 5 sectors \
instead of 4.
        >>> print(coalescing(np.arange(32) * 64, 4).explain())
        32 lanes x 4 bytes: 32 sectors, ideal 4, 12% useful.
        Neighbouring lanes are 64 bytes apart: every lane has a sector of its own and uses 4 of its 32 bytes.
        """
        lines = [self.headline() + "."]
        if not self.active.any():
            return "No lane is active: nothing moves."
        where = np.unique(self.addresses[self.active])
        span = int(where[-1]) + self.nbytes - int(where[0])
        if not self.excess:
            whole = self.efficiency == 1
            lines.append("Every byte that moves is wanted." if whole else "Fewer sectors cannot hold these bytes.")
        elif span == self.useful:
            lines.append(
                f"The lowest address, {where[0]}, lies {self.misaligned} bytes past a multiple of {SECTOR_BYTES}: the "
                f"{self.useful} contiguous bytes straddle {self.sectors} sectors instead of {self.ideal}."
            )
        else:
            lines.append(self._gaps(where))
        asked = self.nbytes * int(self.active.sum())
        if self.useful < asked:
            lines.append(f"Lanes share bytes: {asked} are asked for, {self.useful} of them differ.")
        return "\n".join(lines)

    def _gaps(self, where: IntArray) -> str:
        steps = np.unique(np.diff(where))
        apart = f"{steps[0]} bytes apart" if steps.size == 1 else f"{steps[0]} to {steps[-1]} bytes apart"
        if self.sectors == where.size and self.nbytes <= steps[0]:
            return (
                f"Neighbouring lanes are {apart}: every lane has a sector of its own and uses {self.nbytes} of its "
                f"{SECTOR_BYTES} bytes."
            )
        moved = self.sectors * SECTOR_BYTES
        start = f"; the lowest address, {where[0]}, lies {self.misaligned} bytes past a sector's start"
        return f"Lanes are {apart}: {moved - self.useful} of {moved} bytes move unused{start * bool(self.misaligned)}."

    def headline(self) -> str:
        """One line: lanes, bytes, sectors, ideal, useful share."""
        lanes = int(self.active.sum())
        return (
            f"{lanes} lane{'s' * (lanes != 1)} x {self.nbytes} byte{'s' * (self.nbytes != 1)}: {self.sectors} "
            f"sector{'s' * (self.sectors != 1)}, ideal {self.ideal}, {self.efficiency:.0%} useful"
        )

    def __repr__(self) -> str:
        return f"Coalescing({self.headline()})"


def coalescing(addresses: Any, nbytes: int, mask: Any = None) -> Coalescing:
    """The sectors of ONE warp access to global memory against the fewest possible, with words for the difference.

    ``addresses`` ``[lanes]``, ``nbytes`` and ``mask`` as in :func:`sectors`.

    >>> coalescing(np.arange(32) * 16, 16)
    Coalescing(32 lanes x 16 bytes: 16 sectors, ideal 16, 100% useful)
    """
    address, active = _checked(addresses, nbytes, mask)
    if address.ndim != 1:
        raise ValueError(f"addresses of shape {address.shape} are not those of one instruction; use sectors")
    count = [int(_different(address, nbytes, active, unit)) for unit in (SECTOR_BYTES, 1, 128)]
    return Coalescing(address, np.array(active), nbytes, *count)


def _checked(addresses: Any, nbytes: int, mask: Any) -> tuple[IntArray, BoolArray]:
    address = np.asarray(addresses)
    if address.dtype.kind not in "iu" or address.ndim < 1:
        raise ValueError(f"addresses has shape {address.shape} and dtype {address.dtype}: must be int [..., lanes]")
    at_once(count("nbytes", nbytes, 1), "bytes of a lane")
    return address.astype(np.int64), mask_lanes(mask, address.shape)


def _different(address: IntArray, nbytes: int, active: BoolArray, unit: int) -> Array:
    """How many different units of ``unit`` bytes the active lanes touch: ``[...]``."""
    first, last = address // unit, (address + nbytes - 1) // unit
    span = first[..., None] + np.arange((nbytes - 2) // unit + 2)  # [..., lanes, units a lane may touch]
    touched = np.where(active[..., None] & (span <= last[..., None]), span, -1)
    ordered = np.sort(touched.reshape(*address.shape[:-1], touched.shape[-2] * touched.shape[-1]), axis=-1)
    new = ordered >= 0
    new[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    count: Array = new.sum(axis=-1)
    return count
