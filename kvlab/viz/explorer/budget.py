"""The scene of a byte budget: sizes of a decode step, its time under the roofline, and what was recorded."""

from __future__ import annotations

from kvlab.memory import as_dtype
from kvlab.viz.charts.byte_budget import DTYPES, PAGES, ByteBudget, draw_byte_budget

from .scene import Knob, Scene

SWIZZLED = ("swizzled", "plain")


def of_budget(budget: ByteBudget) -> Scene:
    """A budget, with its recorded points."""
    points = [
        {"name": one.name, "flops": one.flops, "bytes": one.nbytes, "seconds": one.seconds,
         "compute": one.level(budget.compute)}
        for one in budget.points
    ]
    data = {
        "query_heads": budget.query_heads, "kv_heads": budget.kv_heads, "head_dim": budget.head_dim,
        "bandwidth": budget.bandwidth, "compute": budget.compute, "shared": budget.shared, "points": points,
        "sizes": {name: as_dtype(name).itemsize for name in DTYPES},
        "conflict": {name: budget.conflict(name) for name in DTYPES},
    }
    knobs = {
        "log2_batch": Knob("sequences", 6, high=9, power=True),
        "log2_context": Knob("keys", 12, low=7, high=17, power=True),
        "page_size": Knob("page", PAGES[0], options=PAGES),
        "dtype": Knob("K and V in", DTYPES[0], options=DTYPES),
        "shared_memory": Knob("shared memory", SWIZZLED[0], options=SWIZZLED),
    }
    if points:
        knobs["point"] = Knob("recorded", 0, high=len(points) - 1)
    return Scene("budget", data, knobs, lambda: draw_byte_budget(budget))
