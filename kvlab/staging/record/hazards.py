"""Asynchrony of shared memory: what is in flight, who has waited for it, and which accesses nothing orders.

Every warp has a clock, and so has everything that works beside the warps: the copies of each warp (cp.async groups, DMA
instructions: first in, first out), its wgmma reads, its writes as the async proxy sees them, and each mbarrier that
TMA reports to. ``known[w, agent]`` is the time up to which warp w knows that the agent's work is done: a wait moves a
warp's knowledge of its own copies, a barrier spreads the knowledge of the warps that meet. An access is ordered after
an earlier one if each of its warps knows of it (vector clocks, as race detectors have them).

The lanes of a warp count as one. All CTAs of a launch do the same, so one record serves all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.hardware import BarrierDeadlock
from kvlab.memory import Memory

from .async_barrier import AsyncBarrier
from .flights import Flights
from .footprint import ByteCells, Footprint
from .hazard_record import AccessRecord, Partitions
from .hazard_words import Hazard, Side
from .timeline import Timeline

Array = np.ndarray[Any, Any]


class Hazards(AccessRecord, Drawn):
    """The record of one shared memory. Every access, wait and barrier of the CTA is stated to it, in program order.

    Parameters
    ----------
    memory : the shared memory; its programs share the record.
    warps : of the CTA, at most 31.
    arch : whose names the messages use.
    timeline : takes the events, if given.
    cells : a partition of an equal memory that several records share, with the footprints made from it.
    partitions : the warps of each, where they are specialised; messages name them.

    Raises :class:`Hazard` where two accesses are not ordered, and
    :class:`~kvlab.hardware.BarrierDeadlock` where a wait would never end.

    >>> smem = Memory(256)
    >>> hazards = Hazards(smem, warps=2)
    >>> halves = hazards.footprint(np.array([[[0], [128]]]), 128)    # warp 0 copies the first half, warp 1 the second
    >>> both = hazards.region(0, 256)
    >>> hazards.copy_async(halves, "k copy")
    >>> hazards.commit_group()
    >>> hazards.wait_group(0)
    >>> hazards.read(both, "k read")
    Traceback (most recent call last):
        ...
    kvlab.staging.Hazard: memory, bytes [0, 128): k read by warp 1, of what k copy by warp 0, still \
brings; missing: a barrier after cp.async.wait_group in warp 0
    >>> hazards.barrier()
    >>> hazards.read(both, "k read")
    """

    def __init__(
        self, memory: Memory, warps: int, *, arch: str = "sm_90", timeline: Timeline | None = None,
        cells: ByteCells | None = None, partitions: Partitions = None,
    ) -> None:
        super().__init__(memory, warps, arch, cells, partitions)
        self.timeline = timeline
        self._all = tuple(range(warps))
        self._every = frozenset(self._all)
        self._mma: Array = np.zeros(warps, np.int64)  # groups of wgmma reads of each warp
        self._stores: Array = np.zeros(warps, np.int64)  # bulk stores of each warp
        self._arrived: dict[int, set[int]] = {}
        self._barriers: list[AsyncBarrier] = []
        self._flights = Flights(timeline)

    # Footprints.

    def footprint(self, address: Any, nbytes: int, warp: Any = None) -> Footprint:
        """Footprint of an access: byte addresses ``[..., warps, lanes]``, ``nbytes`` at each; or addresses ``[...]`` of
        the warps ``warp`` ``[...]``. Make it once and keep it."""
        return self.cells.footprint(address, nbytes, warp)

    def footprint_inside(self, address: Array, nbytes: int, warp: Array) -> Footprint:
        """:meth:`footprint` of what lies inside the memory: it is the memory that refuses the rest."""
        inside = (address >= self.cells.base) & (address + nbytes <= self.cells.base + self.cells.nbytes)
        return self.footprint(address[inside], nbytes, np.broadcast_to(warp, address.shape)[inside])

    def region(self, start: int, nbytes: int, warps: tuple[int, ...] | None = None) -> Footprint:
        """``nbytes`` bytes from ``start`` on, which each of ``warps`` (all unless given) touches."""
        return self.cells.region(start, nbytes, self._all if warps is None else warps)

    # Accesses.

    def write(self, at: Footprint, what: str, stage: int | None = None) -> None:
        """Ordinary stores of warps."""
        self._expect_running(at.warps)
        self._check_write(at, self.known, what, stage)
        self._stamp_write(at, 0, np.diagonal(self.known), what, stage)
        self._event("write", what, stage, at.warps, int(at.moved.sum()))

    def write_equal(self, at: Footprint, what: str, stage: int | None = None, values: Hashable = None) -> None:
        """Ordinary stores of values that other warps put there, too, under the same name, in whatever order: who has
        stored them need not know of the others. Whoever stores other values there must know of all.

        values : tells what is put: other ``values`` are other ones, of the same name, too.

        >>> hazards = Hazards(Memory(64), warps=2)
        >>> for warp in (0, 1):
        ...     hazards.write_equal(hazards.region(0, 64, (warp,)), "zeros")
        ...     hazards.read(hazards.region(0, 64, (warp,)), "read")
        >>> hazards.write(hazards.region(0, 64, (1,)), "ones")
        Traceback (most recent call last):
            ...
        kvlab.staging.Hazard: memory, bytes [0, 64): ones by warp 1, may come before read by warp 0, is \
done; missing: a barrier between warp 0 and warp 1
        >>> hazards.write_equal(hazards.region(0, 64, (0,)), "zeros", values="of another row")
        Traceback (most recent call last):
            ...
        kvlab.staging.Hazard: memory, bytes [0, 64): zeros by warp 0, may come before read by warp 1, is \
done; missing: a barrier between warp 1 and warp 0
        """
        self._expect_running(at.warps)
        if self._check_equal(at, what, stage, values):
            self._stamp_read(at, 0, np.diagonal(self.known), what, stage)
        else:
            self._check_unwritten(at, self.known, what, stage)  # first: it is the cause where others read, too
            self._check_unread(at, what, stage)
            self._under[at.cells] = self._written[at.cells]
            self._stamp_write(at, 0, np.diagonal(self.known), what, stage, values)
            self._tick(list(at.warps))  # others may come to know of this, not of what follows
        self._event("write", what, stage, at.warps, int(at.moved.sum()))

    def read(self, at: Footprint, what: str, stage: int | None = None) -> None:
        """Ordinary loads and ldmatrix of warps: done when the next statement begins."""
        self._expect_running(at.warps)
        self._check_read(at, self.known, what, stage)
        self._stamp_read(at, 0, np.diagonal(self.known), what, stage)
        self._event("read", what, stage, at.warps, int(at.moved.sum()))

    def copy_async(self, at: Footprint, what: str, stage: int | None = None, instructions: Any = None) -> None:
        """A cp.async or DMA of warps: in flight until each has waited.

        instructions : ``[warps]``, how many DMA instructions (buffer_load lds) these are: each counts by itself, none
            is committed. None for cp.async, which :meth:`commit_group` takes into a group."""
        self._expect_running(at.warps)
        self._check_write(at, self.known, what, stage)
        if instructions is None:
            time = self._issued + 1
        else:
            if np.shape(instructions) != (self.warps,) or np.min(instructions) < 0:
                raise ValueError(f"instructions is {instructions}: must be a number for each of {self.warps} warps")
            self._issued += np.asarray(instructions, np.int64)
            time = self._issued.copy()
        self._stamp_write(at, 2 * self.warps, time, what, stage)
        warps, moved = list(at.warps), int(at.moved.sum())
        self._event("copy", what, stage, at.warps, moved)
        self._flights.begin(2 * self.warps + np.array(warps), time[warps], self.agents, what, stage, at.warps, moved)

    def copy_bulk(self, at: Footprint, barrier: AsyncBarrier, nbytes: int, what: str, stage: int | None = None) -> None:
        """A TMA copy that the one warp of ``at`` issues: in flight until who reads has waited for ``barrier``.

        nbytes : what the copy reports to the barrier."""
        self._expect_one(at)
        self._check_write(at, self._proxy_view(), what, stage)
        agent, time = barrier.agent, barrier.phases + 1
        self._issuer[agent] = at.warps[0]
        times = np.full(self.warps, time)
        self._stamp_write(at, agent, times, what, stage, single=True)
        self._event("copy", what, stage, at.warps, nbytes)
        self._flights.begin(np.array([agent]), np.array([time]), self.agents, what, stage, at.warps, nbytes)
        barrier.complete_tx(nbytes)

    def read_async(self, at: Footprint, what: str, stage: int | None = None, *, last: bool = True) -> None:
        """A wgmma of warps that reads its operands in shared memory: reads until it is waited for.

        last : whether it ends a group (wgmma.commit_group)."""
        self._expect_running(at.warps)
        self._check_read(at, self._proxy_view(), what, stage)
        self._stamp_read(at, 3 * self.warps, self._mma + 1, what, stage)
        self._mma[list(at.warps)] += last
        self._event("read in flight", what, stage, at.warps, int(at.moved.sum()))

    def store_bulk(self, at: Footprint, what: str, stage: int | None = None) -> None:
        """A TMA store that the one warp of ``at`` issues, and its commit: reads shared memory until that warp has
        waited (:meth:`wait_store`)."""
        self._expect_one(at)
        self._check_read(at, self._proxy_view(), what, stage)
        self._stores[list(at.warps)] += 1
        self._stamp_read(at, 5 * self.warps, self._stores, what, stage)
        self._event("read in flight", what, stage, at.warps, int(at.moved.sum()))

    # Waits and barriers.

    def commit_group(self, warps: tuple[int, ...] | None = None) -> None:
        """Take the copies since the last one into a group (cp.async.commit_group)."""
        warps = self._all if warps is None else warps
        self._expect_running(warps)
        chosen = list(warps)
        self._issued[chosen] += 1
        self._event("commit", "commit_group", None, warps)

    def wait_group(self, n: int = 0, warps: tuple[int, ...] | None = None) -> None:
        """Each warp waits until at most ``n`` of its groups (AMD: DMA instructions, vmcnt) are in flight."""
        chosen = self._waiting(warps, n)
        self._wait(chosen, 2, self._issued, self._wait_name, n)
        self._flights.land(self.known)

    def wait_mma(self, n: int = 0, warps: tuple[int, ...] | None = None) -> None:
        """Each warp waits until at most ``n`` of its wgmma reads are in flight (wgmma.wait_group)."""
        chosen = self._waiting(warps, n)
        self._wait(chosen, 3, self._mma, "wgmma.wait_group", n)

    def wait_store(self, n: int = 0, warps: tuple[int, ...] | None = None) -> None:
        """Each warp waits until at most ``n`` of its bulk stores still read (cp.async.bulk.wait_group.read)."""
        chosen = self._waiting(warps, n)
        self._wait(chosen, 5, self._stores, "cp.async.bulk.wait_group.read", n)

    def fence_async(self, warps: tuple[int, ...] | None = None) -> None:
        """Makes writes that the warps know of visible to TMA and wgmma (fence.proxy.async)."""
        warps = self._all if warps is None else warps
        self._expect_running(warps)
        chosen, W = list(warps), self.warps
        for plain, seen in ((0, W), (2 * W, 4 * W)):  # ordinary writes, copies
            new = np.maximum(self.known[chosen, seen : seen + W], self.known[chosen, plain : plain + W])
            self.known[chosen, seen : seen + W] = new
        self._tick(chosen)  # what follows is not covered
        self._event("fence", "fence.proxy.async", None, warps)

    def barrier(
        self, warps: tuple[int, ...] | None = None, expected: tuple[int, ...] | None = None, name: int = 0
    ) -> None:
        """``warps`` arrive at barrier ``name`` (bar.sync, s_barrier) and go on when all ``expected`` have.

        Both are all warps unless given. A warp that has arrived states nothing before the others have, too:
        BarrierDeadlock."""
        warps = self._all if warps is None else warps
        expected = self._all if expected is None else expected
        self._expect_running(warps)
        if not set(warps) <= set(expected):
            extra = sorted(set(warps) - set(expected))
            raise Hazard(
                "barrier", self.name, None, Side(f"barrier {name}: arrival of warps {extra}"), None,
                f"a barrier that counts them: this one expects warps {list(expected)}",
            )
        arrived = self._arrived.setdefault(name, set())
        arrived |= set(warps)
        self._event("barrier", f"barrier {name}", None, warps)
        if arrived == set(expected):
            del self._arrived[name]
            chosen = sorted(arrived)
            self.known[chosen] = self.known[chosen].max(axis=0)
            self._tick(chosen)
            self._flights.land(self.known)

    def mbarrier(self, name: str, arrivals: int = 1) -> AsyncBarrier:
        """A new mbarrier whose phases need ``arrivals`` arrivals."""
        made = AsyncBarrier(self, name, self.agents, arrivals)
        self._barriers.append(made)
        self._add_agent(name)
        for other in self._barriers:
            other.grow(self.agents)
        return made

    def finish(self) -> None:
        """The end of the CTA: BarrierDeadlock if a warp still waits at a barrier, Hazard if a copy, a bulk store or a
        wgmma is in flight. One that writes or reads shared memory behind the end touches the bytes of the next CTA."""
        self._expect_running(self._all)
        self._check_end()

    def _waiting(self, warps: tuple[int, ...] | None, n: int) -> Array:
        """The warps that wait until at most ``n`` of something are in flight."""
        chosen = self._all if warps is None else warps
        self._expect_running(chosen)
        if n < 0:
            raise ValueError(f"a wait for all but {n}: must be 0 or more")
        return np.array(chosen)

    def _wait(self, warps: Array, kind: int, issued: Array, name: str, n: int) -> None:
        """``warps`` know of all but the ``n`` newest of what their agents of a kind were given."""
        agents = kind * self.warps + warps
        self._learn(warps, agents, issued[warps] - n)
        for agent, count in zip(agents.tolist(), issued[warps].tolist(), strict=True):
            self._last_wait[agent] = (name, n, count)
        self._event("wait", f"{name}({n})", None, tuple(warps.tolist()))

    def _learn(self, warps: Array, agents: Array, done: Array) -> None:
        """Each of ``warps`` knows that its agent is done up to a time."""
        self.known[warps, agents] = np.maximum(self.known[warps, agents], done)

    def _expect_one(self, at: Footprint) -> None:
        """One thread issues what the TMA unit does."""
        self._expect_running(at.warps)
        if len(at.warps) != 1:
            raise ValueError(f"warps {at.warps} of a bulk copy: must be one, that which issues it")

    def _tick(self, warps: list[int]) -> None:
        """A new moment for warps that have told others, or the async proxy, what they did."""
        self.known[warps, warps] += 1

    def _expect_running(self, warps: tuple[int, ...]) -> None:
        if not self._every.issuperset(warps) or len(set(warps)) < len(warps):
            raise ValueError(f"warps is {warps}: must be different ones of 0 to {self.warps - 1}")
        for name, arrived in self._arrived.items():
            stuck = arrived & set(warps)
            if stuck:
                missing = sorted(set(self._all) - arrived)
                raise BarrierDeadlock(
                    f"{self.name}: warps {sorted(arrived)} wait at barrier {name} for ever: warps {missing} do not "
                    f"arrive"
                )

    def _event(self, kind: str, what: str, stage: int | None, warps: tuple[int, ...], nbytes: int = 0) -> None:
        if self.timeline is not None:
            self.timeline.add(kind, what, stage, warps, nbytes)
