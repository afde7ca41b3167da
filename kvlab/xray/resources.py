"""Registers, spills, shared memory and occupancy of a compiled kernel: CTAs that an SM holds, and what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvlab.hardware import get_arch

#: CUDA Programming Guide, compute capabilities; AMD: four SIMDs of eight waves (CDNA 3 and 4 ISA)
WARPS_SM: Mapping[str, int] = MappingProxyType({
    "sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48, "gfx942": 32, "gfx950": 32,
})
CTAS_SM: Mapping[str, int] = MappingProxyType({
    "sm_80": 32, "sm_86": 16, "sm_89": 24, "sm_90": 32, "sm_100": 32, "sm_120": 24, "gfx942": 16, "gfx950": 16,
})


@dataclass(frozen=True)
class Resources:
    """Needs of a CTA, and how many fit on an SM (AMD: a CU).

    registers a thread; ``spills`` bytes (AMD: registers); ``stack`` and ``shared`` in bytes; ``warps`` of a CTA.

    >>> small = Resources("sm_90", registers=32, spills=0, stack=0, shared=1024, warps=4)
    >>> small.ctas, small.limiter, small.occupancy
    (16, 'registers and warps', 1.0)
    >>> print(Resources("sm_90", registers=168, spills=0, stack=0, shared=163840, warps=12))
    168 registers, no spill, 163840 B shared memory, 12 warps: 1 CTA an SM, 12 of 64 warps (19%), limited by registers \
and shared memory
    """

    target: str
    registers: int
    spills: int
    stack: int
    shared: int
    warps: int

    @property
    def limits(self) -> dict[str, int]:
        """CTAs that fit by each resource alone."""
        arch = get_arch(self.target)
        if arch.vendor == "nvidia":
            a_warp = -(-self.registers * 32 // 256) * 256
            by_warps = arch.registers_sm // 4 // max(1, a_warp) * 4 // self.warps
            reserved = -(-(self.shared + 1024) // 128) * 128
        else:
            a_warp = max(8, -(-self.registers // 8) * 8)
            by_warps = min(8, 512 // a_warp) * 4 // self.warps
            reserved = max(self.shared, 1)
        return {
            "registers": by_warps, "shared memory": arch.shared_bytes_sm // reserved,
            "warps": WARPS_SM[self.target] // self.warps, "CTAs": CTAS_SM[self.target],
        }

    @property
    def ctas(self) -> int:
        """CTAs that an SM holds at a time."""
        return min(self.limits.values())

    @property
    def limiter(self) -> str:
        """The resource of which there is least; two or more of them joined."""
        limits = self.limits
        return " and ".join(name for name, count in limits.items() if count == min(limits.values()))

    @property
    def occupancy(self) -> float:
        """Warps that an SM holds, of those that it could."""
        return self.ctas * self.warps / WARPS_SM[self.target]

    def __str__(self) -> str:
        unit = "B" if self.target.startswith("sm_") else "registers"
        spilled = f"{self.spills} {unit} spilled" if self.spills else "no spill"
        held = self.ctas * self.warps
        return (
            f"{self.registers} registers, {spilled}, {self.shared} B shared memory, {self.warps} "
            f"warp{'s' * (self.warps != 1)}: {self.ctas} CTA{'s' * (self.ctas != 1)} an SM, {held} of "
            f"{WARPS_SM[self.target]} warps ({self.occupancy:.0%}), limited by {self.limiter}"
        )
