"""A pipeline that can be run again without one of its waits: its events, their bytes, the hazard that appears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.hardware import BarrierDeadlock
from kvlab.memory import AddressSpace, Memory
from kvlab.staging import Hazard, Hazards, Timeline
from kvlab.staging.record.timeline import Event

from .pen.picture import Picture
from .timeline import draw_timeline

MOST = 32
"""Waits and barriers that are left out one after the other."""
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class PipelineRun:
    """One run: its events, for each the byte ranges (first, past the last) that it touches, and what ended it.

    ordering    for each wait, barrier and fence of the program, in order, the number of its event
    fault       the :class:`kvlab.staging.Hazard` or BarrierDeadlock that ended the run, or None
    """

    events: tuple[Event, ...]
    touched: tuple[Ranges, ...]
    ordering: tuple[int, ...]
    fault: Hazard | BarrierDeadlock | None


@dataclass(frozen=True)
class Pipeline(Drawn):
    """A program over one shared memory, which can be run with all of its waits and barriers or without one.

    program    ``program(memory, hazards)`` states what a CTA does: it gives both to the buffers that it makes
    nbytes     of the shared memory
    warps, arch    of the CTA

    >>> def program(memory, hazards):
    ...     tile = hazards.region(0, 256)
    ...     hazards.copy_async(tile, "k copy", 0)
    ...     hazards.commit_group()
    ...     hazards.wait_group(0)
    ...     hazards.barrier()
    ...     hazards.read(tile, "k read", 0)
    >>> pipeline = Pipeline(program, nbytes=256, warps=2)
    >>> pipeline.waits
    ('cp.async.wait_group(0), event 2', 'barrier 0, event 4')
    >>> pipeline.run().fault is None, pipeline.run(without=1).fault.kind
    (True, 'read in flight')
    """

    program: Callable[[Memory, Hazards], None]
    nbytes: int
    warps: int
    arch: str = "sm_90"

    def run(self, without: int | None = None) -> PipelineRun:
        """The run without the wait or barrier of that number; with all of them unless given."""
        memory = Memory(self.nbytes, space=AddressSpace.SHARED)
        record, fault = _Watched(memory, self.warps, self.arch, without), None
        try:
            self.program(memory, record)
        except (Hazard, BarrierDeadlock) as found:
            fault = found
        events = tuple(record.events)
        touched = tuple(record.touched.get(number, []) for number in range(len(events)))
        return PipelineRun(events, touched, tuple(record.ordering), fault)

    @cached_property
    def whole(self) -> PipelineRun:
        """The run with all waits; ValueError where it ends in a fault itself."""
        return self.run()

    @property
    def waits(self) -> tuple[str, ...]:
        """Waits, barriers and fences that can be left out, with the number of their event."""
        run = self.whole
        return tuple(f"{run.events[at].what}, event {at}" for at in run.ordering[:MOST])


class _Watched(Hazards):
    """A record that skips one statement and keeps which bytes each event touched."""

    def __init__(self, memory: Memory, warps: int, arch: str, without: int | None) -> None:
        self.events = Timeline()
        super().__init__(memory, warps, arch=arch, timeline=self.events)
        self.without, self._seen = without, 0
        self.ordering: list[int] = []
        self.touched: dict[int, Ranges] = {}
        self._at: Any = None
        for name in ("write", "write_equal", "read", "copy_async", "copy_bulk", "read_async", "store_bulk"):
            setattr(self, name, self._touching(getattr(self, name)))
        for name in ("wait_group", "wait_mma", "wait_store", "fence_async", "barrier"):
            setattr(self, name, self._skippable(getattr(self, name)))

    def mbarrier(self, name: str, arrivals: int = 1) -> Any:
        made: Any = super().mbarrier(name, arrivals)
        made.wait = self._skippable(made.wait)
        return made

    def _touching(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def stated(at: Any, *rest: Any, **more: Any) -> Any:
            self._at = at
            try:
                return act(at, *rest, **more)
            finally:
                self._at = None

        return stated

    def _skippable(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def stated(*given: Any, **more: Any) -> None:
            self._seen += 1
            if self._seen - 1 == self.without:
                return
            self.ordering.append(len(self.events))
            act(*given, **more)

        return stated

    def _event(self, kind: str, what: str, stage: int | None, warps: tuple[int, ...], nbytes: int = 0) -> None:
        if self._at is not None:
            self.touched[len(self.events)] = _ranges(self._at)
        super()._event(kind, what, stage, warps, nbytes)


def _ranges(at: Any) -> Ranges:
    """Byte ranges of a footprint, neighbours joined."""
    bits = np.concatenate([[False], at.bits != 0, [False]])
    edges = np.flatnonzero(bits[1:] != bits[:-1]) * at.of.unit + at.of.base
    return [*zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def draw_pipeline(
    pipeline: Pipeline, *, without: int | None = None, title: str | None = None, caption: str | None = None
) -> Picture:
    """Draws the timeline of a :class:`Pipeline`: with all waits and barriers, or without one.

    without    the number of the wait, barrier or fence that is left out, of ``pipeline.waits``

    Raises ValueError for a number of no wait.

    >>> def program(memory, hazards):
    ...     hazards.copy_async(hazards.region(0, 256), "k copy", 0)
    ...     hazards.commit_group()
    ...     hazards.wait_group(0)
    ...     hazards.read(hazards.region(0, 256), "k read", 0)
    >>> draw_pipeline(Pipeline(program, nbytes=256, warps=1), without=0).title
    'Without cp.async.wait_group(0), event 2: read in flight: k read by warp 0, stage 0'
    """
    waits = pipeline.waits
    if without is not None and not 0 <= without < len(waits):
        raise ValueError(f"without is {without}: must be one of the {len(waits)} waits, from 0 on")
    run = pipeline.run(without)
    hazard = run.fault if isinstance(run.fault, Hazard) else None
    if title is None and without is not None:
        found = "nothing goes wrong" if run.fault is None else str(run.fault)
        found = f"{hazard.kind}: {hazard.later}" if hazard is not None else found
        title = f"Without {waits[without]}: {found}"
    return draw_timeline(run.events, hazard=hazard, title=title, caption=caption)
