"""Charts of what was measured: a roofline, ratios to the fastest peer, errors of siblings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.viz.charts.errors import draw_errors
from kvlab.viz.charts.roofline import FAMILIES, RooflinePoint, draw_roofline
from kvlab.viz.charts.shares import draw_shares
from kvlab.viz.pen.palette import BANKS

from .chart import Chart, drawn_in, finished, plain

AHEAD, BEHIND, BAD = BANKS[4 * 4 + 1], BANKS[4 * 1 + 1], "#c9201c"


def plot_roofline(points: Sequence[RooflinePoint], *, bandwidth: float, compute: float, ax: Any = None) -> Chart:
    """Operations a second over operations a byte: measured kernels (dots) and their peers (rings) under the ceilings.

    points, bandwidth, compute    as :func:`kvlab.viz.draw_roofline` takes them; its errors, too
    ax                            axes of matplotlib to draw in; None makes a figure

    >>> from kvlab.viz import RooflinePoint
    >>> point = RooflinePoint("decode", flops=4e9, nbytes=1e9, seconds=4e-4, peers=(("FA3", 5e-4),))
    >>> plot_roofline([point], bandwidth=3.1e12, compute=7.9e14).title
    'decode reaches 81 % of its ceiling: memory'
    """
    told = draw_roofline(points, bandwidth=bandwidth, compute=compute)
    axes, ink, own = drawn_in(ax, 430)
    colours = {family: FAMILIES[n % len(FAMILIES)] for n, family in enumerate(dict.fromkeys(p.family for p in points))}
    x = np.array([point.intensity for point in points])
    for level in sorted({point.level(compute) for point in points}):
        reach = np.geomspace(min(x.min(), level / bandwidth) / 2, max(x.max(), level / bandwidth) * 4, 200)
        axes.plot(reach, np.minimum(reach * bandwidth, level) / 1e12, color=ink, linewidth=1.6)
        axes.annotate(f"tensor cores {level / 1e12:,.0f} TFLOP/s", (reach[-1], level / 1e12), xytext=(0, 5),
                      textcoords="offset points", ha="right", color=ink)
    for number, point in enumerate(points, 1):
        for _, seconds in point.peers:
            axes.plot(point.intensity, point.flops / seconds / 1e12, "o", mfc="none", mec=ink, ms=7)
        axes.plot(point.intensity, point.rate / 1e12, "o", color=colours[point.family], ms=8,
                  label=f"{number}  {point.name}: {100 * point.rate / point.ceiling(bandwidth, compute):.0f} %")
        axes.annotate(str(number), (point.intensity, point.rate / 1e12), xytext=(8, -12), textcoords="offset points",
                      color=ink)
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte of DRAM", ylabel="TFLOP/s")
    axes.margins(y=0.1)
    plain(axes.xaxis, axes.yaxis)
    axes.grid(alpha=0.2, color=ink)
    axes.legend(loc="lower right", fontsize="small", frameon=False, labelcolor=ink)
    return finished(axes, own, told.title, told.caption)


def plot_ratios(tasks: Sequence[tuple[str, Mapping[str, float]]], *, ax: Any = None) -> Chart:
    """Bars: how many times as fast as its fastest peer the first implementation of each task is.

    tasks    ``(task, {implementation: share of its ceiling})``, as :func:`kvlab.viz.draw_shares` takes them; tasks
             without a peer are left out, ValueError where none has one
    ax       axes of matplotlib to draw in; None makes a figure

    >>> plot_ratios([("decode", {"kvlab": 0.95, "FA3": 0.94}), ("append", {"kvlab": 0.6, "vLLM": 0.68})]).title
    'kvlab is as fast as its fastest peer, or faster, in 1 of 2 tasks'
    """
    told = draw_shares(tasks)
    rows = [(task, [*shares.items()]) for task, shares in tasks if len(shares) > 1]
    if not rows:
        raise ValueError("tasks has no task with a peer: must be one at least, to have a ratio")
    axes, ink, own = drawn_in(ax, 70 + 22 * len(rows))
    ratios, names = [], []
    for task, ((_, ours), *peers) in rows:
        fastest = max(peers, key=lambda peer: peer[1])
        ratios.append(ours / fastest[1])
        names.append(f"{task}  ({fastest[0]})")
    at = np.arange(len(rows))
    axes.barh(at, ratios, color=[AHEAD if ratio >= 1 else BEHIND for ratio in ratios], height=0.7)
    for y, ratio in zip(at, ratios, strict=True):
        axes.annotate(f"{ratio:.2f}", (ratio, y), xytext=(4, 0), textcoords="offset points", va="center", color=ink)
    axes.axvline(1, color=ink, linewidth=1.2)
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.set(xlabel="times as fast as the fastest peer (named)", xlim=(0, 1.12 * max(ratios)))
    return finished(axes, own, told.title, "Each bar is a task, measured in turns in one run; right of the line the "
                    "first implementation is ahead.")


def plot_errors(siblings: Mapping[str, Sequence[tuple[float, float]]], *, ax: Any = None) -> Chart:
    """Distributions of errors: for each sibling a mark for each comparison, as a share of what is allowed.

    siblings    name -> pairs (error, allowed), as :func:`kvlab.viz.draw_errors` takes them; its errors, too
    ax          axes of matplotlib to draw in; None makes a figure

    >>> plot_errors({"emulator": [(1e-4, 1e-3)], "kernel": [(2e-3, 1e-3)]}).title
    '1 of 2 comparisons is outside of what is allowed; the largest is 2 times that (kernel)'
    """
    told = draw_errors(siblings)
    axes, ink, own = drawn_in(ax, 90 + 34 * len(siblings))
    shares = [np.array([error / allowed for error, allowed in pairs]) for pairs in siblings.values()]
    most = max(float(row.max()) for row in shares)
    low = 10.0 ** (max(0, math.ceil(math.log10(most))) - 4 if 0 < most < math.inf else -4)
    for y, row in enumerate(shares):
        colour = [BAD if not share <= 1 else BANKS[4 * 7 + 1] for share in row]
        axes.scatter(np.maximum(row, low), np.full(row.size, y), marker="|", s=220, c=colour, linewidths=2)
        if row.size > 3:
            lower, middle, upper = np.maximum(np.quantile(row, (0.25, 0.5, 0.75)), low)
            axes.plot([lower, upper], [y + 0.34] * 2, color=ink, linewidth=3, solid_capstyle="butt")
            axes.plot(middle, y + 0.34, "o", color=ink, ms=5)
    axes.axvline(1, color=ink, linewidth=1.2)
    axes.annotate("allowed", (1, -0.6), xytext=(4, 0), textcoords="offset points", va="center", color=ink)
    axes.set_yticks(range(len(shares)), list(siblings))
    axes.set(xscale="log", ylim=(len(shares) - 0.4, -0.8), xlabel="error as a share of what is allowed")
    plain(axes.xaxis)
    quartiles = " A bar below the marks spans the middle half of them, its dot the median." \
        if any(row.size > 3 for row in shares) else ""
    return finished(axes, own, told.title, told.caption + quartiles)
