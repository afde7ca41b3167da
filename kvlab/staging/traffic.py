"""Counting what moves: bytes on each edge, and the shared-memory passes of each access."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """What one launch moved.

    ``moved[edge]`` is in bytes, with edges such as ``"DRAM->SMEM"`` and ``"SMEM->registers"``; ``wavefronts``,
    ``ideal`` and
    ``unswizzled`` count, for each reading or writing role, the passes that shared memory took, the fewest possible, and
    what the same access would take without the swizzle.

    >>> t = Traffic()
    >>> t.move("DRAM->SMEM", 4096)
    >>> t.access("K read", wavefronts=8, ideal=8, unswizzled=64)
    >>> t.moved["DRAM->SMEM"], t.total("wavefronts"), t.total("unswizzled")
    (4096, 8, 64)
    """

    moved: Counter[str] = field(default_factory=Counter)
    wavefronts: Counter[str] = field(default_factory=Counter)
    ideal: Counter[str] = field(default_factory=Counter)
    unswizzled: Counter[str] = field(default_factory=Counter)

    def move(self, edge: str, nbytes: int) -> None:
        self.moved[edge] += int(nbytes)

    def access(self, role: str, *, wavefronts: int, ideal: int, unswizzled: int) -> None:
        self.wavefronts[role] += int(wavefronts)
        self.ideal[role] += int(ideal)
        self.unswizzled[role] += int(unswizzled)

    def total(self, kind: str) -> int:
        """Sum over all roles of ``"wavefronts"``, ``"ideal"`` or ``"unswizzled"``."""
        return sum(getattr(self, kind).values())
