"""The scene of a pipeline: events by stage, below them the bytes of shared memory at the event that is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvlab.viz.pen.picture import Picture
from kvlab.viz.timeline import draw_timeline

from .scene import Knob, Scene

if TYPE_CHECKING:
    from kvlab.staging import Timeline
    from kvlab.viz.pipeline import Pipeline, PipelineRun, Ranges

ALL = "none"
COLUMNS, ROWS = 64, 24
"""Cells of the picture of the memory."""
MOST_EVENTS = 600


def of_pipeline(pipeline: Pipeline) -> Scene:
    """A pipeline, with a choice of the wait that is left out."""
    from kvlab.viz.pipeline import draw_pipeline

    whole = pipeline.whole
    if whole.fault is not None:
        raise ValueError(f"pipeline ends in {whole.fault}: must run through with all of its waits")
    chunk = 16
    while -(-pipeline.nbytes // chunk) > COLUMNS * ROWS:
        chunk *= 2
    runs = {ALL: whole} | {name: pipeline.run(number) for number, name in enumerate(pipeline.waits)}
    told = [_run(run, chunk) for run in runs.values()]
    removed = [-1, *whole.ordering]
    data = {"chunk": chunk, "chunks": -(-pipeline.nbytes // chunk), "columns": COLUMNS, "bytes": pipeline.nbytes}
    return _scene(data, [*runs], told, removed, lambda: draw_pipeline(pipeline))


def of_timeline(timeline: Timeline) -> Scene:
    """The events alone: a stage is a row of the memory, all of which a copy brings."""
    lanes = _lanes([timeline])
    rows: dict[Any, Any] = {lane: [[at * COLUMNS, (at + 1) * COLUMNS]] for at, lane in enumerate(lanes)}
    events = [[*event[:3], _warps(event[3]), event[4], rows.get(_lane(event), [])] for event in timeline]
    data = {"chunk": 0, "chunks": COLUMNS * len(lanes), "columns": COLUMNS, "bytes": 0}
    return _scene(data, [ALL], [{"events": events, "fault": None}], [-1], lambda: draw_timeline(timeline))


def _run(run: PipelineRun, chunk: int) -> dict[str, Any]:
    """A run as the module takes it: bytes counted in cells."""
    events = [
        [event.kind, event.what, event.stage, _warps(event.warps), event.nbytes, _cells(ranges, chunk)]
        for event, ranges in zip(run.events, run.touched, strict=True)
    ]
    fault = None
    if run.fault is not None:
        between = getattr(run.fault, "byte_range", None)
        kind, later = getattr(run.fault, "kind", "deadlock"), getattr(run.fault, "later", None)
        fault = {
            "words": str(run.fault), "kind": kind, "missing": getattr(run.fault, "missing", ""),
            "lane": None if later is None else [str(later.what).split()[0], later.stage],
            "cells": [] if between is None else _cells([between], chunk),
        }
    return {"events": events, "fault": fault}


def _scene(
    data: dict[str, Any], names: list[str], runs: list[dict[str, Any]], removed: list[int], still: Callable[[], Picture]
) -> Scene:
    most = max(len(run["events"]) + (run["fault"] is not None) for run in runs)
    if not 0 < most <= MOST_EVENTS:
        raise ValueError(f"{most} events: must be 1 to {MOST_EVENTS}; take fewer tiles")
    lanes = [list(lane) for lane in _lanes(run["events"] for run in runs)]
    data |= {"names": names, "runs": runs, "removed": removed, "lanes": lanes}
    knobs = {
        "without": Knob("without", ALL, options=tuple(names)),
        "event": Knob("event", min(most, 3), high=most),
    }
    return Scene("pipeline", data, knobs, still)


def _lane(event: Any) -> tuple[str, int | None] | None:
    """Buffer and stage that an event touches; None for one of the warps."""
    ordering = ("wait", "barrier", "arrive", "expect", "commit", "fence")
    return None if event[0] in ordering else (str(event[1]).split()[0], event[2])


def _lanes(runs: Iterable[Iterable[Any]]) -> list[tuple[str, int | None]]:
    found = {lane: None for events in runs for event in events if (lane := _lane(event)) is not None}
    return sorted(found, key=lambda lane: (lane[0], -1 if lane[1] is None else lane[1]))


def _warps(warps: tuple[int, ...]) -> str:
    return f"warp{'s' * (len(warps) > 1)} {', '.join(map(str, warps))}" if warps else ""


def _cells(ranges: Ranges, chunk: int) -> list[list[int]]:
    """Cells (first, past the last) that byte ranges touch, neighbours joined."""
    found: list[list[int]] = []
    for first, end in ranges:
        a, b = first // chunk, -(-end // chunk)
        if found and a <= found[-1][1]:
            found[-1][1] = max(b, found[-1][1])
        else:
            found.append([a, b])
    return found
