"""A timeline of stages: copies in flight until they land, reads, waits and barriers, and where something goes wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .pen.axis import LABEL, QUIET, WIDTH
from .pen.palette import ALARM, BANKS, INK, PAPER
from .pen.picture import Picture
from .pen.svg import Canvas
from .pen.text import text_width, wrap

if TYPE_CHECKING:
    from kvlab.staging import Hazard

GUTTER, TOP = 96.0, 62.0
LANE, BAR, APART = 40.0, 22.0, 8.0
STEP = (7.0, 30.0)
MOST = 2000
ORDERING = ("wait", "barrier", "arrive", "expect", "commit", "fence")
"""Events of the warps that touch no stage: marks in the line of the warps."""


@dataclass(frozen=True)
class _Step:
    """One event at place ``x`` of the order; ``lands`` what it lets land."""

    at: int
    kind: str
    what: str
    lane: tuple[str, int | None] | None
    warps: tuple[int, ...]
    nbytes: int


@dataclass
class _Flight:
    """A copy: issued at ``start``, landed at ``end`` (None: never), replaced at ``until``."""

    lane: tuple[str, int | None]
    step: _Step
    end: int | None = None
    until: int | None = None

    def in_flight(self, at: int) -> bool:
        """Tells whether the copy is on its way at place ``at``."""
        end = self.end if self.end is not None else at + 1
        return self.step.kind == "copy" and self.step.at < at <= end and (self.until is None or at < self.until)


def draw_timeline(
    events: Iterable[Any], *, hazard: Hazard | None = None, start: int | None = None, count: int = 90,
    title: str | None = None, caption: str | None = None,
) -> Picture:
    """Draws the events of the stages of shared memory, in order from left to right.

    events    rows of (kind, what, stage, warps[, nbytes]), such as those of :class:`kvlab.staging.Timeline`, or of the
              one that a :class:`kvlab.staging.Hazards` keeps. Kinds:
              ``"copy"`` (in flight from now on), ``"landed"``, ``"write"``, ``"read"``, ``"read in flight"``, and in
              the line of the warps ``"wait"``, ``"barrier"``, ``"commit"``, ``"arrive"``, ``"expect"``, ``"fence"``.
              The first word of ``what`` names the buffer: ``"k copy"`` and ``"k read"`` of stage 0 share a line
    hazard    a :class:`kvlab.staging.Hazard` that ended the events: its ``later`` access is drawn in red at the end,
              and its message below
    start, count   the events shown: ``count`` from number ``start`` on, landings not counted; by default from the first
              one on, or with a hazard so that it is seen. Of more than some thousand events only those around are
              looked at

    Time is the order of the program, not seconds. Raises ValueError for an event of an unknown kind or without fields.

    >>> draw_timeline([("copy", "k copy", 0, (0, 1), 4096), ("wait", "wait_group(0)", None, (0, 1)),
    ...                ("landed", "k copy", 0, (0, 1), 4096), ("read", "k read", 0, (0, 1), 4096)]).title
    '1 copy, 1 read: every read comes after its copy has landed'
    """
    if hasattr(events, "timeline"):
        if events.timeline is None:
            raise ValueError(f"events is {events!r}: must be a record with a timeline")
        events = events.timeline
    every, begin = list(events), 0
    if len(every) > MOST:
        begin = (
            len(every) - MOST if hazard is not None and start is None else max(0, min(start or 0, len(every) - MOST))
        )
    known = every[begin : begin + MOST]
    steps, flights, lands = _order(known)
    if start is None:
        start = max(0, len(steps) - count) if hazard is not None else 0
    elif begin:
        start = 0
    lanes = _lanes(steps, hazard)
    last = max((step.at for step in steps), default=-1)
    first, end = start, min(start + count - 1, last)
    whole = end + (hazard is not None and end == last) - first + 1
    px = min(STEP[1], max(STEP[0], (WIDTH - GUTTER - 12) / (whole + 1)))
    draw = _Drawing(Canvas(), lanes, first, end, px)
    draw.frame(last, len(every) > len(known))
    early = _early(steps, flights)
    for flight in flights:
        draw.flight(flight, hazard is not None and flight.end is None and flight.lane == _lane_of(hazard.earlier))
    for step in steps:
        draw.step(step, lands.get(step.at, []))
    for step in early:
        draw.cross(step.lane, step.at, f"{step.what}: the copy has not landed")
    if hazard is not None and end == last:
        draw.hazard(hazard, last + 1)
    draw.legend(steps, hazard)
    return draw.canvas.picture(
        title or _title(steps, early, hazard, len(every) > len(known)),
        caption or _caption(bool(early) or hazard is not None),
    )


def _order(events: Iterable[Any]) -> tuple[list[_Step], list[_Flight], dict[int, list[_Flight]]]:
    """The events numbered, landings at the place of what let them land; the copies; who landed at each place."""
    steps: list[_Step] = []
    flights: list[_Flight] = []
    lands: dict[int, list[_Flight]] = {}
    open_ones: dict[object, list[_Flight]] = {}
    at = -1
    for event in events:
        try:
            kind, what, stage, warps, *rest = event
        except (TypeError, ValueError):
            raise ValueError(f"event is {event!r}: must be (kind, what, stage, warps[, nbytes])") from None
        known = ("copy", "landed", "write", "read", "read in flight", *ORDERING)
        if kind not in known:
            raise ValueError(f"event {event!r}: kind is {kind!r}: must be one of {', '.join(known)}")
        lane = None if kind in ORDERING else (str(what).split()[0], stage)
        if kind == "landed":
            flying = [f for f in flights if f.lane == lane and f.end is None and f.step.what == what]
            for flight in flying[:1]:
                flight.end = at
                lands.setdefault(at, []).append(flight)
            continue
        at += 1
        step = _Step(at, kind, str(what), lane, tuple(warps), int(rest[0]) if rest else 0)
        steps.append(step)
        if lane is not None and kind in ("copy", "write"):
            for flight in open_ones.get(lane, []):
                if flight.step.at < at:
                    flight.until = at
            flights.append(_Flight(lane, step, end=at if kind == "write" else None))
            open_ones[lane] = [flights[-1]]
    return steps, flights, lands


def _early(steps: list[_Step], flights: list[_Flight]) -> list[_Step]:
    """The reads of what is in flight."""
    flying: dict[object, list[_Flight]] = {}
    coming = iter(sorted(flights, key=lambda flight: flight.step.at))
    following = next(coming, None)
    found = []
    for step in steps:
        while following is not None and following.step.at < step.at:
            flying.setdefault(following.lane, []).append(following)
            following = next(coming, None)
        if step.kind.startswith("read"):
            here = flying[step.lane] = [flight for flight in flying.get(step.lane, []) if flight.in_flight(step.at)]
            found += [step] if here else []
    return found


def _lanes(steps: list[_Step], hazard: Any) -> list[tuple[str, int | None]]:
    found = {step.lane: None for step in steps if step.lane is not None}
    if hazard is not None:
        found |= {lane: None for lane in (_lane_of(hazard.later), _lane_of(hazard.earlier)) if lane is not None}
    order = list(found)
    return sorted(order, key=lambda lane: (next(i for i, other in enumerate(order) if other[0] == lane[0]),
                                           -1 if lane[1] is None else lane[1]))


def _lane_of(side: Any) -> tuple[str, int | None] | None:
    if side is None or not str(side.what).split() or str(side.what).split()[0] in ("barrier", "copies", "the"):
        return None
    return str(side.what).split()[0], side.stage


class _Drawing:
    """Places of the parts: a line for each stage, a column for each event."""

    def __init__(self, canvas: Canvas, lanes: list[Any], first: int, end: int, px: float) -> None:
        self.canvas, self.lanes, self.first, self.end, self.px = canvas, lanes, first, end, px
        self.right = GUTTER

    def x(self, at: float) -> float:
        """The middle of a column; before the first or after the last at the edge."""
        return GUTTER + self.px * (min(max(at, self.first - 0.5), self.end + 1.5) - self.first + 0.5)

    def y(self, lane: Any) -> float:
        """The top of the bar in a line."""
        return TOP + LANE * self.lanes.index(lane) + APART

    @property
    def bottom(self) -> float:
        return TOP + LANE * len(self.lanes)

    def inside(self, at: int) -> bool:
        return self.first <= at <= self.end

    def frame(self, last: int, others: bool) -> None:
        c, right = self.canvas, self.x(self.end) + self.px / 2 + 4
        c.text(0, TOP - 14, "all warps", size=11)
        for lane in self.lanes:
            name = lane[0].upper() if len(lane[0]) == 1 else lane[0]
            c.text(0, self.y(lane) + 15, name if lane[1] is None else f"{name}, stage {lane[1]}", size=11)
            c.line(GUTTER, self.y(lane) + BAR + APART, right, self.y(lane) + BAR + APART, opacity=0.18)
        c.text(GUTTER, 10, "the program's order →", size=LABEL, opacity=QUIET)
        hidden = [f"{self.first} events before" if self.first else "", f"{last - self.end} more" * (last > self.end)]
        if others:
            hidden = ["there are others before or after"]
        if any(hidden):
            c.text(WIDTH, 10, ", ".join(word for word in hidden if word), size=LABEL, anchor="end", opacity=QUIET)
        c.extend(right, self.bottom)

    def flight(self, flight: _Flight, late: bool) -> None:
        """A dashed bar until the copy lands, then the bytes until they are replaced; red if it is the hazard's."""
        start, until = flight.step.at, self.end + 1.5 if flight.until is None else flight.until
        landed = min(until if flight.end is None else flight.end, until)
        if until < self.first or start > self.end:
            return
        y, colour = self.y(flight.lane), 4 * (self.lanes.index(flight.lane) % 8)
        x0, x1, x2 = (self.x(at) for at in (start, landed, until))
        told = f"{flight.step.what}, {_bytes(flight.step.nbytes)}{_warps(flight.step.warps)}"
        if x1 > x0:
            self.canvas.rect(x0, y, x1 - x0, BAR, fill=BANKS[colour + 1], opacity=0.28)
            self.canvas.rect(
                x0, y, x1 - x0, BAR, stroke=ALARM if late else INK, stroke_width=2.4 if late else 1.3, dash="4 3",
                title=f"{told}\nin flight",
            )
        if flight.end is not None and x2 > x1:
            self.canvas.rect(x1, y, x2 - x1, BAR, fill=BANKS[colour + 2], title=f"{told}\nlanded")

    def step(self, step: _Step, lands: list[_Flight]) -> None:
        if not self.inside(step.at):
            return
        x, c = self.x(step.at), self.canvas
        told = f"event {step.at}: {step.what}{_bytes(step.nbytes, ', ')}{_warps(step.warps)}"
        if step.lane is None:
            self._ordering(step, lands, told)
            return
        y = self.y(step.lane)
        if step.kind == "write":
            c.path(f"M{x:g} {y + BAR - 1:g}l-5 -9h10z", fill=INK)
        elif step.kind != "copy":
            dash = "2 2" if step.kind == "read in flight" else None
            c.path(f"M{x:g} {y - 3:g}V{y + BAR + 3:g}", stroke=PAPER, stroke_width=5.0)
            c.path(f"M{x:g} {y - 3:g}V{y + BAR + 3:g}", stroke=INK, stroke_width=2.4, dash=dash)
        c.rect(x - self.px / 2, y - 4, self.px, BAR + 8, title=told)

    def _ordering(self, step: _Step, lands: list[_Flight], told: str) -> None:
        """A mark in the line of the warps; what a wait lets land gets an arrow."""
        x, y, c = self.x(step.at), TOP - 18, self.canvas
        if step.kind == "barrier":
            c.line(x, y - 8, x, self.bottom, opacity=0.55, width=1.2)
            c.rect(x - 3.5, y - 6, 7, 12, fill=INK)
        elif step.kind == "wait":
            c.path(f"M{x:g} {y - 6:g}l6 6l-6 6l-6 -6z", fill=PAPER, stroke=INK, stroke_width=1.6)
        else:
            c.path(f"M{x:g} {y - 5:g}v10", stroke=INK, stroke_width=1.6, opacity=0.6)
        for flight in lands:
            c.arrow([(x, y + 7), (x, self.y(flight.lane) - 1)], width=1.4)
        c.rect(x - self.px / 2, y - 9, self.px, 18, title=told)

    def cross(self, lane: Any, at: int, told: str) -> None:
        """An access that nothing orders."""
        if not self.first <= at <= self.end + 1:
            return
        x, y = self.x(at), self.y(lane)
        self.canvas.path(f"M{x - 7:g} {y + BAR / 2 - 7:g}l14 14m0 -14l-14 14", stroke=ALARM, stroke_width=3.2)
        self.canvas.rect(x - 11, y - 3, 22, BAR + 6, stroke=ALARM, stroke_width=2.6, title=told)

    def hazard(self, hazard: Any, at: int) -> None:
        """The access that came too early, and what is missing."""
        c, lane = self.canvas, _lane_of(hazard.later) or _lane_of(hazard.earlier)
        if lane is not None:
            self.cross(lane, at, str(hazard))
        y = self.bottom + 18
        for line in wrap(f"✕ {hazard}", WIDTH, 11):
            c.text(0, y, line, size=11, fill=ALARM, weight=600)
            y += 15

    def legend(self, steps: list[_Step], hazard: Any) -> None:
        kinds = {step.kind for step in steps}
        c, y, x = self.canvas, self.canvas.bottom + 14, 0.0
        entries: list[tuple[str, str]] = [("flight", "copy in flight"), ("landed", "landed")] if "copy" in kinds else []
        entries += [(k, w) for k, w in (("read", "read"), ("write", "write"), ("wait", "wait"), ("barrier", "barrier"))
                    if k in kinds]
        for kind, words in entries:
            if kind == "flight":
                c.rect(x, y, 22, 12, fill=BANKS[1], opacity=0.28)
                c.rect(x, y, 22, 12, stroke=INK, stroke_width=1.2, dash="4 3")
            elif kind == "landed":
                c.rect(x, y, 22, 12, fill=BANKS[2])
            elif kind == "read":
                c.path(f"M{x + 10:g} {y - 1:g}v14", stroke=INK, stroke_width=2.4)
            elif kind == "write":
                c.path(f"M{x + 10:g} {y + 11:g}l-5 -9h10z", fill=INK)
            elif kind == "wait":
                c.path(f"M{x + 10:g} {y:g}l6 6l-6 6l-6 -6z", stroke=INK, stroke_width=1.6)
            else:
                c.rect(x + 7, y, 7, 12, fill=INK)
            c.text(x + 28, y + 10, words, size=LABEL, opacity=QUIET)
            x += 28 + text_width(words, LABEL) + 20
        c.extend(x, y + 14)


def _bytes(nbytes: int, before: str = "") -> str:
    return f"{before}{nbytes} bytes" if nbytes else ""


def _warps(warps: tuple[int, ...]) -> str:
    return f"\nwarp{'s' * (len(warps) > 1)} {', '.join(map(str, warps))}" if warps else ""


def _title(steps: list[_Step], early: list[_Step], hazard: Any, others: bool) -> str:
    if hazard is not None:
        return f"{hazard.kind}: {hazard.later}"
    copies, writes, reads = (sum(step.kind.startswith(kind) for step in steps) for kind in ("copy", "write", "read"))
    text = f"{copies} cop{'ies' if copies != 1 else 'y'}"
    if not copies and writes:
        text = f"{writes} write{'s' * (writes != 1)}"
    text = f"{'Of many events ' * others}{text}, {reads} read{'s' * (reads != 1)}"
    if early:
        return f"{text}: {len(early)} read{'s' * (len(early) > 1)} before the copy has landed"
    return f"{text}: every read comes after its {'copy has landed' if copies or not writes else 'write'}"


def _caption(wrong: bool) -> str:
    text = "A line for each stage of shared memory, from left to right in the program's order. A copy is in flight, "
    text += "dashed, until a wait (diamond, with an arrow) has let it land; a barrier crosses all lines."
    return text + (" Red: the access that nothing orders." if wrong else "")
