"""Errors of siblings against a reference, as shares of what is allowed: a mark for each comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.palette import ACCENT, ALARM, INK
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas
from kvlab.viz.pen.text import text_width

ROW, TOP, RIGHT, DECADES = 24.0, 26.0, 70.0, 4


def draw_errors(
    siblings: Mapping[str, Sequence[tuple[float, float]]], *, title: str | None = None, caption: str | None = None
) -> Picture:
    """Rows of marks: for each sibling its errors, each with the largest error that is allowed.

    siblings    name -> pairs (error, allowed) of one unit; an error of 0 is at the left edge

    ValueError without a sibling or a comparison, for an error below 0 and for what is allowed not being above 0.

    >>> draw_errors({"emulator": [(1e-4, 1e-3), (2e-4, 1e-3)], "kernel": [(5e-4, 1e-3)]}).title
    'All 3 comparisons are within what is allowed; the largest is half of it (kernel)'
    """
    if not siblings or not all(siblings.values()):
        raise ValueError("siblings is empty, or one of them has no comparison: must be at least one each")
    for name, pairs in siblings.items():
        for error, allowed in pairs:
            if not (error >= 0 and math.isfinite(allowed) and allowed > 0):
                raise ValueError(f"{name!r}: error {error!r} of {allowed!r} allowed: must be at least 0 of more than 0")
    shares = {name: [error / allowed for error, allowed in pairs] for name, pairs in siblings.items()}
    most = max(max(row) for row in shares.values())
    high = max(0, math.ceil(math.log10(most))) if 1 < most < math.inf else 0
    low = high - DECADES
    left = max(text_width(name, 12) for name in siblings) + 20
    end = WIDTH - RIGHT

    def x_of(share: float) -> float:
        at = (math.log10(share) - low) / (high - low) if share > 0 else 0.0
        return left + (end - left) * min(max(at, 0.0), 1.0)

    canvas = Canvas()
    bottom = TOP + ROW * len(siblings)
    for power in range(low, high + 1):
        x = x_of(10.0**power)
        canvas.line(x, TOP - 4, x, bottom, opacity=0.9 if power == 0 else 0.15, width=1.6 if power == 0 else 1.0)
        canvas.text(x, bottom + 15, f"{10.0**power:g}", size=LABEL, anchor="middle", opacity=QUIET)
    canvas.text(x_of(1.0), TOP - 10, "allowed", size=11, anchor="middle")
    canvas.text(left, bottom + 30, "error as a share of what is allowed", size=LABEL, opacity=QUIET)
    canvas.text(WIDTH, TOP - 10, "largest", size=LABEL, anchor="end", opacity=QUIET)
    for number, (name, row) in enumerate(shares.items()):
        y = TOP + ROW * number
        canvas.text(0, y + 16, name, size=12)
        for share, (error, allowed) in zip(row, siblings[name], strict=True):
            bad = not share <= 1
            told = f"{name}: {error:.2e}, allowed {allowed:.2e}"
            canvas.rect(
                x_of(share) - 1.5, y + 4, 3, ROW - 8, fill=ALARM if bad else ACCENT, opacity=1.0 if bad else 0.55,
                title=told,
            )
        canvas.text(WIDTH, y + 16, f"{max(row):.2g}", size=11, anchor="end", weight=600)
        canvas.line(left, y + ROW, end, y + ROW, stroke=INK, opacity=0.12)
    canvas.extend(WIDTH, bottom + 32)
    return canvas.picture(title or _title(shares, most), caption or _CAPTION)


_CAPTION = "Each mark is one comparison with the reference; right of the line an error is larger than it may be."


def _title(shares: Mapping[str, Sequence[float]], most: float) -> str:
    count = sum(map(len, shares.values()))
    bad = sum(not share <= 1 for row in shares.values() for share in row)
    who = max(shares, key=lambda name: max(shares[name]))
    if bad:
        some = f"{bad} of {count} comparisons {'is' if bad == 1 else 'are'}"
        return f"{some} outside of what is allowed; the largest is {most:.2g} times that ({who})"
    part = "half of it" if f"{most:.1f}" == "0.5" else f"{most:.2g} of it"
    return f"All {count} comparisons are within what is allowed; the largest is {part} ({who})"
