"""Events of a CTA, in order: copies issued and landed, reads, waits, barriers; for drawing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.common.drawn import Drawn


class Event(NamedTuple):
    """One event.

    kind    ``"copy"`` (issued, in flight from now on), ``"landed"``, ``"write"``, ``"read"``, ``"read in flight"`` (a
            wgmma that was issued), ``"commit"``, ``"wait"``, ``"barrier"``, ``"arrive"``, ``"expect"``, ``"fence"``
    what    the access or the barrier, such as ``"k copy"`` or ``"full[0]"``
    stage   of the pipeline, or None
    warps   that did it
    nbytes  of one CTA, moved by all of these warps; 0 where nothing moves

    >>> Event("copy", "k copy", stage=0, warps=(0, 1), nbytes=8192).nbytes
    8192
    """

    kind: str
    what: str
    stage: int | None
    warps: tuple[int, ...]
    nbytes: int = 0


@dataclass
class Timeline(Drawn):
    """The events of one CTA; those of a launch are the same in every CTA.

    >>> line = Timeline()
    >>> line.add("copy", "k copy", 0, (0, 1), 4096)
    >>> line.add("wait", "wait_group(0)", None, (0, 1))
    >>> [event.kind for event in line], line.of_stage(0)
    (['copy', 'wait'], [Event(kind='copy', what='k copy', stage=0, warps=(0, 1), nbytes=4096)])
    """

    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, what: str, stage: int | None, warps: tuple[int, ...], nbytes: int = 0) -> None:
        """The next event."""
        self.events.append(Event(kind, what, stage, warps, nbytes))

    def of_stage(self, stage: int) -> list[Event]:
        """The events that touch a stage."""
        return [event for event in self.events if event.stage == stage]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


class BesideTimeline(Timeline):
    """For a second model of the same threads, in the events of the first: it adds what it moves; waits, barriers and
    fences are the first one's, unless they are its ``own``."""

    own = False

    def add(self, kind: str, what: str, stage: int | None, warps: tuple[int, ...], nbytes: int = 0) -> None:
        if self.own or "wgmma" in what or kind not in ("wait", "barrier", "fence"):
            super().add(kind, what, stage, warps, nbytes)
