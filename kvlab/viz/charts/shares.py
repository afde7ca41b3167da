"""Shares of their ceilings that kernels reach, task by task, beside their peers: a dot for each on a line from 0 to 100
%."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.marks import dot, ring
from kvlab.viz.pen.palette import ACCENT, BANKS
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas
from kvlab.viz.pen.text import text_width

ROW, TOP = 18.0, 34.0
RIGHT = 104.0  # of the columns of numbers
HUES = tuple(BANKS[4 * group] for group in (7, 4, 1, 2, 6))


def draw_shares(
    tasks: Sequence[tuple[str, Mapping[str, float]]], *, title: str | None = None, caption: str | None = None
) -> Picture:
    """Rows of dots: ``(task, {implementation: share of its ceiling})``; the first implementation is the one looked at.

    A share is a fraction of 1, above 0 and at most 1.1. Beside each row: the first one's share, and how many times as
    fast as its fastest peer it is. ValueError without a task, without a share, or for shares out of range.

    >>> picture = draw_shares([("decode", {"kvlab": 0.95, "FA3": 0.94}), ("append", {"kvlab": 0.87, "vLLM": 0.68})])
    >>> picture.title
    'kvlab is as fast as its fastest peer, or faster, in 2 of 2 tasks'
    """
    if not tasks or not all(shares for _, shares in tasks):
        raise ValueError("tasks is empty, or one of them has no share: must be at least one share each")
    for task, shares in tasks:
        for who, share in shares.items():
            if not (math.isfinite(share) and 0 < share <= 1.1):
                raise ValueError(f"{task!r}: share {share!r} of {who} must be above 0 and at most 1.1")
    ours = next(iter(tasks[0][1]))
    if any(next(iter(shares)) != ours for _, shares in tasks):
        raise ValueError(f"every task must begin with the same implementation, {ours!r}")
    peers = list(dict.fromkeys(who for _, shares in tasks for who in shares if who != ours))
    colours = {who: HUES[n % len(HUES)] for n, who in enumerate(peers)}
    left = max(text_width(task, 11) for task, _ in tasks) + 16
    end = WIDTH - RIGHT

    def x_of(share: float) -> float:
        return left + (end - left) * share / 1.1

    canvas = Canvas()
    x = left
    for who in (ours, *peers):
        _mark(canvas, x + 5, 6, colours.get(who), None)
        canvas.text(x + 15, 10, who, size=11, weight=600 if who == ours else None)
        x += 34 + text_width(who, 11)
    bottom = TOP + ROW * len(tasks)
    for percent in range(0, 101, 20):
        at = x_of(percent / 100)
        canvas.line(at, TOP - 4, at, bottom, opacity=0.75 if percent == 100 else 0.14)
        canvas.text(at, bottom + 14, f"{percent} %", size=LABEL, anchor="middle", opacity=QUIET)
    canvas.text(x_of(0), bottom + 28, "of what memory or the tensor cores allow", size=LABEL, opacity=QUIET)
    canvas.text(end + 44, TOP - 8, ours, size=LABEL, anchor="end", opacity=QUIET)
    canvas.text(WIDTH, TOP - 8, "× peer", size=LABEL, anchor="end", opacity=QUIET)
    for n, (task, shares) in enumerate(tasks):
        y = TOP + ROW * n + ROW / 2
        canvas.line(left, y, end, y, opacity=0.14)
        canvas.text(0, y + 4, task, size=11)
        for who in [*peers, ours]:  # ours on top
            if who in shares:
                _mark(
                    canvas, x_of(shares[who]), y, colours.get(who), f"{who}, {task}: {shares[who]:.1%} of the ceiling"
                )
        canvas.text(end + 44, y + 4, f"{100 * shares[ours]:.0f} %", size=11, anchor="end", weight=600)
        lead = _lead(shares, ours)
        if lead is not None:
            canvas.text(WIDTH, y + 4, f"{lead:.2f}", size=11, anchor="end", weight=600 if lead >= 1 else None)
    canvas.extend(WIDTH, bottom + 30)
    return canvas.picture(title or _title(tasks, ours), caption or _CAPTION)


_CAPTION = (
    "Each row is a task; its dots are what the implementations reach of the ceiling that binds it, measured in turns "
    "in one run. The right-hand column is how many times as fast as its fastest peer the filled dot is."
)


def _mark(canvas: Canvas, x: float, y: float, peer: str | None, title: str | None) -> None:
    """A filled dot in the accent colour, or a ring of a peer's colour."""
    if peer is None:
        dot(canvas, x, y, ACCENT, title)
    else:
        ring(canvas, x, y, peer, 2.2, title)


def _lead(shares: Mapping[str, float], ours: str) -> float | None:
    """Ratio to the fastest peer; None without one."""
    rest = [share for who, share in shares.items() if who != ours]
    return shares[ours] / max(rest) if rest else None


def _title(tasks: Sequence[tuple[str, Mapping[str, float]]], ours: str) -> str:
    leads = [lead for _, shares in tasks if (lead := _lead(shares, ours)) is not None]
    ahead = sum(lead >= 1 for lead in leads)
    return f"{ours} is as fast as its fastest peer, or faster, in {ahead} of {len(leads)} tasks"
