"""Counting what moves: bytes on each edge, and the instructions and shared-memory passes of each access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvlab.common.drawn import Drawn

from .timeline import Event, Timeline


class Ending(Protocol):
    """Mixin of objects that end with the launch."""

    def end(self) -> None: ...


@dataclass
class Traffic(Drawn):
    """Counts of the data that one launch moved.

    ``moved[edge]`` is in bytes, with edges such as ``"DRAM->SMEM"`` and ``"SMEM->registers"``; ``wavefronts``,
    ``ideal`` and ``unswizzled`` count, for each reading or writing role, the passes that shared memory took, the fewest
    possible, and what the same access would take without the swizzle; ``instructions`` counts those of a warp, where
    the structure tells them.

    A count may be given for each warp, ``[warps]``: the counters take its sum, :meth:`per_warp` keeps the parts. With a
    ``timeline`` the events of a CTA are kept, too: :meth:`trace`.

    >>> t = Traffic()
    >>> t.move("DRAM->SMEM", 4096)
    >>> t.access("K read", wavefronts=np.array([5, 3]), ideal=8, unswizzled=64, instructions=np.array([2, 2]))
    >>> t.moved["DRAM->SMEM"], t.total("wavefronts"), t.total("unswizzled"), t.instructions["K read"]
    (4096, 8, 64, 4)
    >>> t.per_warp("wavefronts", "K read").tolist(), t.per_warp("ideal", "K read").tolist()
    ([5, 3], [])
    """

    moved: Counter[str] = field(default_factory=Counter)
    wavefronts: Counter[str] = field(default_factory=Counter)
    ideal: Counter[str] = field(default_factory=Counter)
    unswizzled: Counter[str] = field(default_factory=Counter)
    instructions: Counter[str] = field(default_factory=Counter)
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    _warps: dict[tuple[str, str], np.ndarray[Any, Any]] = field(default_factory=dict, repr=False, compare=False)
    _ctas: list[Ending] | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def launch(self) -> Iterator[None]:
        """One launch: the CTAs that begin inside end with it, and then have nothing in flight."""
        outer, self._ctas = self._ctas, []
        try:
            yield
            for cta in self._ctas:
                cta.end()
        finally:
            self._ctas = outer

    def begin(self, cta: Ending) -> None:
        """A CTA of the launch, if there is one."""
        if self._ctas is not None:
            self._ctas.append(cta)

    def move(self, edge: str, nbytes: Any) -> None:
        """Bytes on an edge: an int or ``[warps]``."""
        self._add("moved", edge, nbytes)

    def access(self, role: str, *, wavefronts: Any, ideal: Any, unswizzled: Any, instructions: Any = 0) -> None:
        """Passes and instructions of a role: ints or ``[warps]``."""
        self._add("wavefronts", role, wavefronts)
        self._add("ideal", role, ideal)
        self._add("unswizzled", role, unswizzled)
        self.issue(role, instructions)

    def issue(self, role: str, instructions: Any) -> None:
        """Instructions of a role that are no access of shared memory's lanes, such as a DMA: an int or ``[warps]``."""
        if np.any(instructions):
            self._add("instructions", role, instructions)

    def total(self, kind: str) -> int:
        """Sum over all roles of ``"wavefronts"``, ``"ideal"``, ``"unswizzled"`` or ``"instructions"``."""
        return sum(getattr(self, kind).values())

    def per_warp(self, kind: str, key: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Contribution of each warp to ``kind[key]``: ``[warps]``; empty where only sums were given."""
        return self._warps.get((kind, key), np.zeros(0, np.int64)).copy()

    def trace(self) -> list[Event]:
        """The events of one CTA in order: copies issued and landed, reads, writes, waits, barriers.

        ValueError unless made with ``timeline=Timeline()``."""
        if self.timeline is None:
            raise ValueError("traffic without a timeline: events are kept by Traffic(timeline=Timeline())")
        return list(self.timeline)

    def _add(self, kind: str, key: str, count: Any) -> None:
        if isinstance(count, int):
            getattr(self, kind)[key] += count
            return
        parts = np.asarray(count, np.int64)
        getattr(self, kind)[key] += int(parts.sum())
        if not parts.ndim:
            return
        old = self._warps.get((kind, key))
        if old is None or old.size != parts.size:
            self._warps[kind, key] = new = np.zeros(max(0 if old is None else old.size, parts.size), np.int64)
            if old is not None:
                new[: old.size] = old
            old = new
        old[: parts.size] += parts
