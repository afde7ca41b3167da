"""Work of each program of a persistent attention kernel, before and after the work is shared equally."""

from __future__ import annotations

import heapq
from typing import Any, Protocol

import numpy as np

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH, Axis, axis
from kvlab.viz.pen.legend import keys
from kvlab.viz.pen.palette import BANKS, INK, PAPER, order_colours
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas

GUTTER, HEIGHT, APART = 56.0, 216.0, 28.0
ROWS, BARS = 140, 2500
"""Programs and bars that a panel shows at most."""
LONGER = 4
"""How many times as long as the shared work the axis is at most."""
IDLE = 0.13

Array = np.ndarray[Any, Any]
Bars = tuple[Array, Array, Array]
"""(row, sequence, key blocks) of bars, each row's in the order of time."""


class SharedWork(Protocol):
    """Work of persistent programs, as :class:`kvlab.attention.Schedule` tells it."""

    problem: Any
    config: Any
    num_keys: Array
    tokens: Array
    rest: Any

    @property
    def units(self) -> Any:
        """Units: ``program``, ``kv_head``, ``sequence``, ``tile``, and their key blocks, ``first`` to ``last``."""

    @property
    def teams(self) -> int:
        """Teams of programs that walk side by side."""

    @property
    def programs(self) -> int:
        """Programs of all KV heads."""


def draw_schedule(schedule: SharedWork, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Programs down, time in key blocks across, coloured by sequence: a program for each tile (above), and as the
    schedule shares the work (below). Idle time is grey.

    Programs of one KV head are shown: those of the others do the same. The light beginning of a bar is what a unit
    costs beside its keys. Above, tiles go to the programs in order, each to the next that is free. Where sequences of
    many new tokens are walked after the others, their walk has panels of its own. Raises ValueError for a schedule
    without a unit.

    >>> from kvlab.attention import plan
    >>> draw_schedule(plan([9000, 300, 500, 700], q_heads=8, kv_heads=2, programs=16)).title
    '4 sequences on 16 programs: the busiest does 1.01 of the mean; with a tile each, 6.73'
    """
    canvas, y, walks = Canvas(), 0.0, _walks(schedule)
    if not walks:
        raise ValueError("schedule has no unit: must have a sequence with a key to be drawn")
    told = []
    for walk in walks:
        y, ends = _walk(canvas, y, walk, f", tiles of {walk.config.BM} rows" if walks[1:] else "")
        told.append(ends)
    _legend(canvas, y - APART + 10, walks)
    return canvas.picture(title or _title(walks, told), caption or _CAPTION)


def _walks(schedule: SharedWork | None) -> list[SharedWork]:
    """The walks of a step that have a unit."""
    if schedule is None:
        return []
    return [schedule][: len(schedule.units)] + _walks(schedule.rest)


def _walk(canvas: Canvas, y: float, schedule: SharedWork, tiles: str) -> tuple[float, list[Array]]:
    """The two panels of a walk and their axis, from y on: (where they end, work of each program in both)."""
    names = f"a program for each tile{tiles}", f"shared equally{tiles}"
    units, row = of_one_head(schedule)
    rows, overhead = schedule.teams * schedule.config.together, schedule.config.overhead
    size = units["last"] - units["first"]
    shared = row, units["sequence"], size + overhead
    alone = _tile_each(units, size, rows, overhead)
    ends = [np.bincount(bars[0], bars[2], minlength=rows) for bars in (alone, shared)]
    end = min(int(ends[0].max()), LONGER * int(ends[1].max()))
    end = max(end, int(ends[1].max()))
    cell = min(14.0, max(1.5, HEIGHT / min(rows, ROWS)))
    for name, bars, until in zip(names, (alone, shared), ends, strict=True):
        busy = until.max() / until.mean()
        canvas.text(GUTTER, y + 10, name, size=11, weight=600)
        words = f"the busiest does {busy:.2f} of the mean, {1 / busy:.0%} of the time is work"
        if until.max() > end:
            words += f"; it ends at {int(until.max()):,}, right of this picture"
        canvas.text(WIDTH, y + 10, words, size=LABEL, anchor="end", opacity=QUIET)
        down = axis(rows, cell, y + 18, limit=ROWS, head=100, tail=30)
        _panel(canvas, down, bars, until, end, overhead)
        y = down.end + APART
    _scale(canvas, y - APART, end, schedule.config.block)
    return y + APART, ends


def of_one_head(schedule: SharedWork) -> tuple[Any, Array]:
    """Units of one KV head of each team, and the row of each: its program, counted among those."""
    together, lanes = schedule.config.together, schedule.config.lanes(schedule.problem.kv_heads)
    units = schedule.units[schedule.units["program"] % lanes < together]
    return units, units["program"] // lanes * together + units["program"] % together


_CAPTION = (
    "Each line is a program of one KV head; the colours are sequences. A program that has a long sequence alone keeps "
    "all others waiting; cut into units of equal time, all end together, and the parts of a sequence are merged "
    "afterwards."
)


def _tile_each(units: Any, size: Array, rows: int, overhead: int) -> Bars:
    """Whole tiles, in order, each on the program that is free first."""
    tiles, which = np.unique(units[["sequence", "kv_head", "tile"]], return_inverse=True)
    blocks = np.bincount(which, size).astype(np.int64) + overhead
    free = [(0, row) for row in range(rows)]
    taken = []
    for cost in blocks.tolist():
        at, row = free[0]
        heapq.heapreplace(free, (at + cost, row))
        taken.append(row)
    order = np.argsort(taken, kind="stable")
    return np.array(taken)[order], tiles["sequence"][order], blocks[order]


def _panel(canvas: Canvas, down: Axis, bars: Bars, until: Array, end: int, overhead: int) -> None:
    """The bars of the shown rows; bars too narrow to be seen are put together with those that follow."""
    px = (WIDTH - GUTTER) / end
    wide = px * min(int(until.max()), end)
    narrow = max(2.0, (WIDTH - GUTTER) * len(down.index) / BARS)
    height = down.cell - (1.0 if down.cell >= 4 else 0.0)
    bounds = np.searchsorted(bars[0], np.arange(len(until) + 1))
    for row, y in zip(down.index.tolist(), down.edge.tolist(), strict=True):
        canvas.rect(GUTTER, y, wide, height, fill=INK, opacity=IDLE, title=f"program {row}: idle")
        mine = slice(bounds[row], bounds[row + 1])
        left = GUTTER
        group: list[tuple[int, float]] = []
        for sequence, cost in zip(bars[1][mine].tolist(), bars[2][mine].tolist(), strict=True):
            group.append((sequence, cost))
            if px * sum(cost for _, cost in group) >= narrow:
                left = _bar(canvas, (left, y, px, height), group, overhead, row)
                group = []
        if group:
            _bar(canvas, (left, y, px, height), group, overhead, row)
    for at, hidden in down.gaps:
        canvas.text(GUTTER, at + 3.5, f"⋮  {hidden} more programs", size=LABEL, opacity=QUIET)
    canvas.text(GUTTER - 8, float(down.centre[0]) + 3.5, "program 0", size=LABEL, anchor="end", opacity=QUIET)
    if len(down.index) > 1 and down.end - float(down.edge[0]) > 24:
        canvas.text(GUTTER - 8, float(down.centre[-1]) + 3.5, str(len(until) - 1), size=LABEL, anchor="end",
                    opacity=QUIET)


def _bar(
    canvas: Canvas, place: tuple[float, float, float, float], group: list[tuple[int, float]], overhead: int, row: int
) -> float:
    """One bar of one sequence or of several, at (x, y, px of a key block, height); where it ends."""
    x, y, px, height = place
    cost = sum(cost for _, cost in group)
    inside, begin = min(px * cost, WIDTH - x), px * overhead
    names = [sequence for sequence, _ in group]
    who = f"sequence {names[0]}" if names[0] == names[-1] else f"sequences {names[0]} to {names[-1]}"
    if inside > 0:
        told = f"program {row}, {who}: {cost:g} key blocks with the beginning"
        canvas.rect(x, y, inside, height, fill=colour_of(names[0]), title=told)
        if begin >= 1 and len(group) == 1:
            canvas.rect(x, y, min(begin, inside), height, fill=PAPER, opacity=0.5)
    return x + px * cost


def colour_of(sequence: int) -> str:
    """The colour of a sequence: eight hues in turn, then the same darker or lighter.

    >>> colour_of(0) == colour_of(32), colour_of(0) == colour_of(8)
    (True, False)
    """
    return BANKS[int(order_colours(sequence))]


def _scale(canvas: Canvas, y: float, end: int, block: int) -> None:
    """The axis of time below the panels."""
    whole = 10 ** int(np.log10(end))
    step = next((step for step in (whole, whole // 2, whole // 5) if step and end // step >= 4), max(whole // 5, 1))
    for at in range(0, end + 1, step):
        x = GUTTER + (WIDTH - GUTTER) * at / end
        canvas.line(x, y + 2, x, y + 6, opacity=0.5)
        canvas.text(x, y + 17, f"{at:,}", size=LABEL, anchor="middle" if x < WIDTH - 12 else "end", opacity=QUIET)
    canvas.text(GUTTER, y + 31, f"time, in key blocks of {block} keys", size=LABEL, opacity=QUIET)


def _legend(canvas: Canvas, y: float, walks: list[SharedWork]) -> None:
    """The longest sequences, idle time, and the beginning of a unit."""
    there, num_keys = np.unique(np.concatenate([walk.units["sequence"] for walk in walks])), walks[0].num_keys
    longest = there[np.argsort(-num_keys[there], kind="stable")[:3]].tolist()
    entries = [(colour_of(one), "", f"sequence {one}: {int(num_keys[one]):,} keys") for one in longest]
    bottom = keys(canvas, GUTTER, y, [*entries, ("none", "none", "other colours: other sequences")][: len(there)])
    canvas.rect(GUTTER, bottom, 12, 12, fill=INK, opacity=IDLE)
    canvas.text(GUTTER + 18, bottom + 10, "idle", size=LABEL, opacity=QUIET)
    canvas.rect(GUTTER + 60, bottom, 12, 12, fill=colour_of(longest[0]))
    canvas.rect(GUTTER + 60, bottom, 12, 12, fill=PAPER, opacity=0.5)
    canvas.text(GUTTER + 78, bottom + 10, "beginning of a unit", size=LABEL, opacity=QUIET)
    canvas.extend(WIDTH, bottom + 16)


def _title(walks: list[SharedWork], told: list[list[Array]]) -> str:
    alone, shared = (
        " and ".join(f"{ends[which].max() / ends[which].mean():.2f}" for ends in told) for which in range(2)
    )
    count = sum(int((walk.tokens > 0).sum()) for walk in walks)
    where = f" on {walks[0].programs} programs: the busiest does" if not walks[1:] else " in two walks: the busiest do"
    return f"{count} sequence{'s' * (count > 1)}{where} {shared} of the mean; with a tile each, {alone}"
