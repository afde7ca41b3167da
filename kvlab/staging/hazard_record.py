"""What is known of every byte of a shared memory: who wrote and who read it last, and when, on whose clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware import get_arch
from kvlab.memory import Memory

from .footprint import Cells, Footprint
from .hazard_words import Hazard, Side

__all__ = ["AccessRecord"]

Array = np.ndarray[Any, Any]
NEVER, KINDS = -1, 5


class AccessRecord:
    """Clocks of the warps and of what works beside them, and the last accesses to each cell of the memory.

    Agents are numbered: the W warps, their ordinary writes as the async proxy sees them, their copies, their wgmma
    reads, their copies as the async proxy sees them, and then the mbarriers. ``known`` ``[warps, agents]`` is the time
    up to which a warp knows that the agent's work is done; ``known[w, w]`` is the warp's own clock.
    """

    FIELDS = ("_written", "_read", "_write_label", "_read_label")

    def __init__(self, memory: Memory, warps: int, arch: str) -> None:
        self.name, self.warps = memory.name, warps
        self.cells = Cells(memory.nbytes, warps, memory.base)
        self.agents = KINDS * warps
        self.known: Array = np.zeros((warps, self.agents), np.int64)
        self.known[:, :warps] = np.eye(warps, dtype=np.int64)
        self._issued: Array = np.zeros(warps, np.int64)  # groups of copies, or copies, of each warp
        self._written: Array = np.full((1, self.agents), NEVER, np.int64)  # [cells, agents] time of the last access
        self._read: Array = np.full((1, self.agents), NEVER, np.int64)
        self._write_label: Array = np.zeros((1, self.agents), np.int64)
        self._read_label: Array = np.zeros((1, self.agents), np.int64)
        self._labels: dict[tuple[str, int | None], int] = {}
        self._refined = 0
        self._barrier_names: list[str] = []
        self._nvidia = get_arch(arch).vendor == "nvidia"

    def _add_agent(self, name: str) -> None:
        """One more mbarrier."""
        self._barrier_names.append(name)
        self.agents += 1
        for field in ("known", *self.FIELDS):
            fill = NEVER if field in ("_written", "_read") else 0
            setattr(self, field, np.pad(getattr(self, field), ((0, 0), (0, 1)), constant_values=fill))

    @property
    def _wait_name(self) -> str:
        return "cp.async.wait_group" if self._nvidia else "s_waitcnt vmcnt"

    def _proxy_view(self) -> Array:
        """What the warps know, with ordinary writes and copies as the async proxy sees them."""
        view, W = self.known.copy(), self.warps
        view[:, :W] = view[:, W : 2 * W]
        view[:, 2 * W : 3 * W] = view[:, 4 * W : 5 * W]
        return view

    def _follow(self, made: Footprint) -> Footprint:
        """Split the record as the cells were."""
        for parents in self.cells.parents[self._refined :]:
            for field in self.FIELDS:
                setattr(self, field, getattr(self, field)[parents])
        self._refined = len(self.cells.parents)
        return made

    def _label(self, what: str, stage: int | None) -> int:
        return self._labels.setdefault((what, stage), len(self._labels))

    def _check_read(self, at: Footprint, known: Array, what: str, stage: int | None) -> None:
        late = (self._written[at.cells][:, None] > known) & at.touches[..., None]  # [cells, warps, agents]
        if late.any():
            self._raise(at, late, known, self._write_label, "read", Side(what, None, stage))

    def _check_write(self, at: Footprint, known: Array, what: str, stage: int | None) -> None:
        cells, touches = at.cells, at.touches[..., None]
        late = (self._read[cells][:, None] > self.known) & touches
        if late.any():
            self._raise(at, late, self.known, self._read_label, "overwritten while read", Side(what, None, stage))
        late = (self._written[cells][:, None] > known) & touches
        if late.any():
            self._raise(at, late, known, self._write_label, "overwritten while written", Side(what, None, stage))

    def _stamp_write(
        self, at: Footprint, first: int, time: Array, what: str, stage: int | None, single: bool = False
    ) -> None:
        """Agents ``first + warp`` (``single``: ``first`` alone) have written the cells of ``at``, and nobody read."""
        cells, agents = at.cells, slice(first, first + 1 if single else first + self.warps)
        stamps = np.where(at.touches, time, NEVER)
        self._written[cells] = NEVER
        self._read[cells] = NEVER
        self._written[cells, agents] = stamps.max(axis=1, keepdims=True) if single else stamps
        self._write_label[cells, agents] = self._label(what, stage)

    def _stamp_read(self, at: Footprint, first: int, time: Array, what: str, stage: int | None) -> None:
        cells, agents = at.cells, slice(first, first + self.warps)
        self._read[cells, agents] = np.where(at.touches, time, self._read[cells, agents])
        self._read_label[cells, agents] = np.where(
            at.touches, self._label(what, stage), self._read_label[cells, agents]
        )

    def _raise(self, at: Footprint, late: Array, known: Array, labels: Array, how: str, later: Side) -> None:
        """The first of the accesses in ``late`` ``[cells, warps, agents]``."""
        cell, warp, agent = (int(i[0]) for i in np.nonzero(late))
        both = at.cells[late[:, warp, agent]]
        what, stage = list(self._labels)[int(labels[at.cells[cell], agent])]
        kind, W = agent // self.warps, self.warps
        owner = agent % W if agent < KINDS * W else None
        flying = kind >= 2
        name = how if how != "read" else "read in flight" if flying else "read not ordered"
        times = self._read if labels is self._read_label else self._written
        missing = self._missing(agent, owner, warp, int(times[at.cells[cell], agent]), known)
        raise Hazard(
            name, self.name, Side(what, owner, stage), Side(later.what, warp, later.stage),
            self.cells.byte_range(both), missing,
        )  # fmt: skip

    def _missing(self, agent: int, owner: int | None, warp: int, time: int, known: Array) -> str:
        """What would let ``warp`` know that the agent was done."""
        W = self.warps
        if owner is None:
            name = self._barrier_names[agent - KINDS * W]
            return f"a wait of warp {warp} for {name}, phase {(time - 1) % 2} (its completion number {time})"
        if agent // W in (0, 2) and self.known[warp, agent] >= time and known is not self.known:
            before = f"in warp {owner} before the barrier" if agent < W else f"in warp {warp} after the wait"
            return f"fence.proxy.async {before}"
        if agent // W == 0:
            return f"a barrier between warp {owner} and warp {warp}"
        if agent // W == 3:
            wait = "wgmma.wait_group"
        else:
            wait = self._wait_name
            if self._nvidia and time > self._issued[owner]:
                return f"cp.async.commit_group, then {wait} in warp {owner}"
        if self.known[owner, agent] < time:
            return f"{wait} in warp {owner}" + ("" if owner == warp else ", then a barrier")
        return f"a barrier after {wait} in warp {owner}"
