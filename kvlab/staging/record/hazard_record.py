"""State of every byte of a shared memory: who wrote and who read it last, and when, on whose clock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from kvlab.hardware import get_arch
from kvlab.memory import Memory

from .footprint import ByteCells, Footprint
from .hazard_words import Hazard, Side

Array = np.ndarray[Any, Any]
Partitions = Mapping[str, tuple[int, ...]] | None
NEVER, KINDS = -1, 6
IN_FLIGHT = 2, 3, 5  # kinds of agents that work beside the warps


class AccessRecord:
    """Clocks of the warps and of what works beside them, and the last accesses to each cell of the memory.

    Agents are numbered: the W warps, their ordinary writes as the async proxy sees them, their copies, their wgmma
    reads, their copies as the async proxy sees them, their bulk stores, and then the mbarriers. ``known``
    ``[warps, agents]`` is the time up to which a warp knows that the agent's work is done; ``known[w, w]`` is the
    warp's own clock."""

    FIELDS = ("_written", "_read", "_write_label", "_read_label", "_under")

    def __init__(self, memory: Memory, warps: int, arch: str, cells: ByteCells | None, partitions: Partitions) -> None:
        self.name, self.warps = memory.name, warps
        self.cells = ByteCells(memory.nbytes, warps, memory.base) if cells is None else cells
        if (self.cells.nbytes, self.cells.warps, self.cells.base) != (memory.nbytes, warps, memory.base):
            raise ValueError(
                f"cells of {self.cells.nbytes} bytes from {self.cells.base} on and {self.cells.warps} warps: must be "
                f"of {memory.nbytes} from {memory.base} on and {warps}"
            )
        self._partition = {warp: name for name, members in (partitions or {}).items() for warp in members}
        self.agents = KINDS * warps
        self.known: Array = np.zeros((warps, self.agents), np.int64)
        self.known[:, :warps] = np.eye(warps, dtype=np.int64)
        self._issued: Array = np.zeros(warps, np.int64)  # groups of copies, or copies, of each warp
        self._last_wait: dict[int, tuple[str, int, int]] = {}  # of an agent: its wait, how many it left, issued by then
        self._written: Array = np.full((1, self.agents), NEVER, np.int64)  # [cells, agents] time of the last access
        self._read: Array = np.full((1, self.agents), NEVER, np.int64)
        self._write_label: Array = np.zeros((1, self.agents), np.int64)
        self._read_label: Array = np.zeros((1, self.agents), np.int64)
        self._under: Array = np.full((1, self.agents), NEVER, np.int64)  # as _written, before equal values were put
        self._labels: dict[tuple[str, int | None, Hashable], int] = {}  # what, its stage, the values put
        self._refined = 0
        self._barrier_names: list[str] = []
        self._issuer: dict[int, int] = {}  # of an mbarrier's agent: the warp that has issued copies to it
        self._nvidia = get_arch(arch).vendor == "nvidia"

    def _add_agent(self, name: str) -> None:
        """One more mbarrier."""
        self._barrier_names.append(name)
        self.agents += 1
        for field in ("known", *self.FIELDS):
            fill = NEVER if field in ("_written", "_read", "_under") else 0
            setattr(self, field, np.pad(getattr(self, field), ((0, 0), (0, 1)), constant_values=fill))

    @property
    def _wait_name(self) -> str:
        return "cp.async.wait_group" if self._nvidia else "s_waitcnt vmcnt"

    def _proxy_view(self) -> Array:
        """Knowledge of the warps, with ordinary writes and copies as the async proxy sees them."""
        view, W = self.known.copy(), self.warps
        view[:, :W] = view[:, W : 2 * W]
        view[:, 2 * W : 3 * W] = view[:, 4 * W : 5 * W]
        return view

    def _follow(self, at: Footprint | None = None) -> None:
        """Split the record as the cells were. ValueError for a footprint in another memory."""
        if at is not None and at.of is not self.cells:
            raise ValueError(f"a footprint in other cells than those of {self.name}: must be made by its record")
        for parents in self.cells.parents[self._refined :]:
            for field in self.FIELDS:
                setattr(self, field, getattr(self, field)[parents])
        self._refined = len(self.cells.parents)

    def _label(self, what: str, stage: int | None, values: Hashable = None) -> int:
        return self._labels.setdefault((what, stage, values), len(self._labels))

    def _check_read(self, at: Footprint, known: Array, what: str, stage: int | None) -> None:
        self._follow(at)
        late = (self._written[at.cells][:, None] > known) & at.touches[..., None]  # [cells, warps, agents]
        if late.any():
            self._raise(at, late, known, self._write_label, "read", Side(what, None, stage))

    def _check_write(self, at: Footprint, known: Array, what: str, stage: int | None) -> None:
        self._check_unread(at, what, stage)
        self._check_unwritten(at, known, what, stage)

    def _check_unread(self, at: Footprint, what: str, stage: int | None) -> None:
        self._follow(at)
        late = (self._read[at.cells][:, None] > self.known) & at.touches[..., None]
        if late.any():
            self._raise(at, late, self.known, self._read_label, "overwritten while read", Side(what, None, stage))

    def _check_unwritten(self, at: Footprint, known: Array, what: str, stage: int | None) -> None:
        self._follow(at)
        late = (self._written[at.cells][:, None] > known) & at.touches[..., None]
        if late.any():
            self._raise(at, late, known, self._write_label, "overwritten while written", Side(what, None, stage))

    def _check_equal(self, at: Footprint, what: str, stage: int | None, values: Hashable) -> bool:
        """Tells whether ordinary stores of that name and ``values`` have just written all cells of ``at``. Then the
        warps need to know only of what was written before, and know of those from now on."""
        self._follow(at)
        W, cells = self.warps, at.cells
        times, labels = self._written[cells, :W], self._write_label[cells, :W]
        if not ((times != NEVER) & (labels == self._label(what, stage, values))).any(axis=1).all():
            return False
        late = (self._under[cells][:, None] > self.known) & at.touches[..., None]
        if late.any():
            self._raise(at, late, self.known, self._write_label, "overwritten while written", Side(what, None, stage))
        new = np.where(at.touches[..., None], times[:, None], NEVER).max(axis=0)  # [warps, W]
        self.known[:, :W] = np.maximum(self.known[:, :W], new)
        return True

    def _check_end(self) -> None:
        """Checks that nothing is in flight: some warp knows of all that works beside the warps that it is done."""
        self._follow()
        W, best = self.warps, self.known.max(axis=0)
        beside = np.arange(self.agents) >= KINDS * W
        beside |= np.isin(np.arange(self.agents) // W, IN_FLIGHT)
        for times, labels in ((self._written, self._write_label), (self._read, self._read_label)):
            late = (times > best) & beside  # [cells, agents]
            if late.any():
                cell, agent = (int(i[0]) for i in np.nonzero(late))
                earlier = self._earlier(agent, int(labels[cell, agent]))
                both = self.cells.byte_range(np.flatnonzero(late[:, agent]))
                time = int(times[cell, agent])
                missing = self._missing(agent, earlier.warp, earlier.warp, time, self.known)
                end = Side("the end of the CTA")
                weak = self._too_weak(agent, time)
                raise Hazard("in flight at the end", self.name, earlier, end, both, missing, weak)

    def _earlier(self, agent: int, label: int) -> Side:
        """Acts of an agent."""
        what, stage, _ = list(self._labels)[label]
        owner = agent % self.warps if agent < KINDS * self.warps else self._issuer.get(agent)
        return Side(what, owner, stage, None if owner is None else self._partition.get(owner))

    def _stamp_write(
        self, at: Footprint, first: int, time: Array, what: str, stage: int | None, values: Hashable = None,
        *, single: bool = False,
    ) -> None:
        """Agents ``first + warp`` (``single``: ``first`` alone) have written the cells of ``at``, and nobody read."""
        cells, agents = at.cells, slice(first, first + 1 if single else first + self.warps)
        stamps = np.where(at.touches, time, NEVER)
        self._written[cells] = NEVER
        self._read[cells] = NEVER
        self._written[cells, agents] = stamps.max(axis=1, keepdims=True) if single else stamps
        self._write_label[cells, agents] = self._label(what, stage, values)

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
        earlier = self._earlier(agent, int(labels[at.cells[cell], agent]))
        flying = agent // self.warps >= 2
        name = how if how != "read" else "read in flight" if flying else "read not ordered"
        times = self._read if labels is self._read_label else self._written
        time = int(times[at.cells[cell], agent])
        missing = self._missing(agent, earlier.warp, warp, time, known)
        raise Hazard(
            name, self.name, earlier, Side(later.what, warp, later.stage, self._partition.get(warp)),
            self.cells.byte_range(both), missing, self._too_weak(agent, time),
        )

    def _too_weak(self, agent: int, time: int) -> str:
        """In words: the agent's warp has waited since, but let too much be in flight. "" where it has not, or where the
        wait reaches and something else is missing."""
        wait, left, issued = self._last_wait.get(agent, ("", 0, 0))
        if issued < time or self.known[agent % self.warps, agent] >= time:
            return ""
        return f"{wait} in warp {agent % self.warps} leaves {left} in flight, <= {issued - time} needed"

    def _missing(self, agent: int, owner: int | None, warp: int | None, time: int, known: Array) -> str:
        """Means that would let ``warp`` know that the agent was done."""
        W = self.warps
        if agent >= KINDS * W or owner is None or warp is None:
            name = self._barrier_names[agent - KINDS * W]
            who = "" if warp is None or warp == owner else f" of warp {warp}"
            return f"a wait{who} for {name}, phase {(time - 1) % 2} (its completion number {time})"
        if agent // W in (0, 2) and self.known[warp, agent] >= time and known is not self.known:
            before = f"in warp {owner} before the barrier" if agent < W else f"in warp {warp} after the wait"
            return f"fence.proxy.async {before}"
        if agent // W == 0:
            return f"a barrier between warp {owner} and warp {warp}"
        if agent // W == 3:
            wait = "wgmma.wait_group"
        elif agent // W == 5:
            wait = "cp.async.bulk.wait_group.read"
        else:
            wait = self._wait_name
            if self._nvidia and time > self._issued[owner]:
                return f"cp.async.commit_group, then {wait} in warp {owner}"
        if self.known[owner, agent] < time:
            return f"{wait} in warp {owner}" + ("" if owner == warp else ", then a barrier")
        return f"a barrier after {wait} in warp {owner}"
