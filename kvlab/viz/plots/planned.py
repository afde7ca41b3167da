"""Charts of what is worked out: bytes and time against the context, and the schedule of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.viz.charts.byte_budget import ByteBudget
from kvlab.viz.charts.schedule import SharedWork, colour_of, draw_schedule, of_one_head
from kvlab.viz.pen.palette import BANKS

from .chart import Chart, drawn_in, finished, plain

HUES = tuple(BANKS[4 * group + 1] for group in (7, 1, 4, 2, 6, 0))


def plot_context(
    budget: ByteBudget, *, batches: Sequence[int] = (1, 16, 64), contexts: Sequence[int] = (), dtype: str = "bf16",
    page_size: int = 16, ax: Any = None,
) -> Chart:
    """Time of a decode step (left axis) and the bytes that it moves (right axis) against the context length.

    budget      heads and rates of a machine, a :class:`kvlab.viz.ByteBudget`
    batches     a line for each number of sequences
    contexts    keys of each sequence; powers of two from 128 to 2^20 unless given
    ax          axes of matplotlib to draw in; None makes a figure

    ValueError without a batch, and for what the budget refuses.

    >>> from kvlab.viz import ByteBudget
    >>> plot_context(ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14), batches=(64,)).title
    '64 sequences: 0.0112 ms of 128 keys, 88.7 ms of 1,048,576; DRAM bounds them'
    """
    if not batches:
        raise ValueError("batches is empty: must be one number of sequences at least")
    keys = np.array(contexts if len(contexts) else 2 ** np.arange(7, 21))
    axes, ink, own = drawn_in(ax, 400)
    bounds: dict[str, None] = {}
    for number, batch in enumerate(batches):
        steps = [budget.at(batch=batch, context=int(n), page_size=page_size, dtype=dtype) for n in keys]
        bounds |= dict.fromkeys(step.bound for step in steps)
        colour = HUES[number % len(HUES)]
        axes.plot(keys, [1e3 * step.seconds for step in steps], color=colour, linewidth=2, marker="o", ms=4,
                  label=f"{batch} sequence{'s' * (batch > 1)}: time")
        axes.plot(keys, [1e3 * step.nbytes / budget.bandwidth for step in steps], color=ink, linestyle=":", alpha=0.8,
                  label="bytes (right axis)" if number == len(batches) - 1 else None)
    rate = budget.bandwidth / 1e12  # GB of a ms
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="keys of each sequence", ylabel="ms of a decode step")
    axes.grid(alpha=0.2, color=ink)
    right = axes.twinx()
    right.set(yscale="log", ylim=[rate * end for end in axes.get_ylim()], ylabel="GB moved")
    right.tick_params(axis="y", which="both", colors=ink)
    right.yaxis.label.set_color(ink)
    right.spines["top"].set_visible(not own)
    plain(axes.xaxis, axes.yaxis, right.yaxis)
    axes.legend(loc="upper left", fontsize="small", frameon=False, labelcolor=ink)
    ends = [budget.at(batch=batches[-1], context=int(n), page_size=page_size, dtype=dtype) for n in (keys[0], keys[-1])]
    verb = "bounds" if [*bounds] in (["DRAM"], ["shared memory"]) else "bound"
    title = (
        f"{batches[-1]} sequence{'s' * (batches[-1] > 1)}: {1e3 * ends[0].seconds:.3g} ms of {keys[0]:,} keys, "
        f"{1e3 * ends[1].seconds:.3g} ms of {keys[-1]:,}; {' and '.join(bounds)} {verb} them"
    )
    caption = (
        "Lines with dots: the least time of a step. Dotted: the bytes that it moves, by the right axis, which is the "
        "left one times the bandwidth; where the two part, DRAM is not what bounds."
    )
    return finished(axes, own, title, caption)


def plot_schedule(schedule: SharedWork, *, ax: Any = None) -> Chart:
    """Work of each program of one KV head, key blocks across, coloured by sequence, as the schedule shares it.

    schedule    of :func:`kvlab.attention.plan`; its first walk is shown. ValueError without a unit
    ax          axes of matplotlib to draw in; None makes a figure

    >>> from kvlab.attention import plan
    >>> plot_schedule(plan([9000, 300, 500, 700], q_heads=8, kv_heads=2, programs=16)).title
    '4 sequences on 16 programs: the busiest does 1.01 of the mean; with a tile each, 6.73'
    """
    told = draw_schedule(schedule)
    units, row = of_one_head(schedule)
    cost = units["last"] - units["first"] + schedule.config.overhead
    axes, ink, own = drawn_in(ax, 380)
    order = np.argsort(row, kind="stable")
    row, cost, sequence = row[order], cost[order], units["sequence"][order]
    before = np.cumsum(cost) - cost
    first = np.searchsorted(row, row)  # of each unit, the first of its program
    axes.barh(row, cost, left=before - before[first], height=0.86, color=[colour_of(int(one)) for one in sequence])
    ends = np.bincount(row, cost)
    axes.axvline(float(ends.mean()), color=ink, linewidth=1.2, linestyle="--")
    axes.annotate("the mean", (float(ends.mean()), -0.5), xytext=(0, 4), textcoords="offset points", ha="center",
                  color=ink)
    axes.set(xlabel=f"time, in key blocks of {schedule.config.block} keys", ylabel="program of one KV head")
    axes.set_ylim(len(ends) - 0.5, -0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return finished(axes, own, told.title, "Each bar is a unit, its colour the sequence; the dashed line is where all "
                    "programs would end if they had the same work.")
