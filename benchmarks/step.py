"""A step of 32 layers on a GPU: what one plan adds to it, what lists made in each layer's call would, and what a call
and a plan take on the host.

    python benchmarks/step.py --output benchmarks/results/step_h200.json

"layers": us of a CUDA graph of the layers' calls with a plan from before; "plan_adds": us more with the plan made at
the graph's beginning; "list_adds": us more of each layer where it makes its own list. Medians of replays in turns, the
L2 flushed before each; "spread" is the middle half of "plan_adds" over the replays. "host_ms": milliseconds on the
host of a plan, of a call with it and of a call without, launches among them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_record
from balanced_decode import captured, samples
from list_tiles import CHUNKS, DTYPES, MIXED, inputs
from schedule import traffic_tasks

from kvlab.attention import attend_paged, explain, plan

LAYERS = 32
UNEVEN = [(1, n) for n in traffic_tasks()["traffic_decode_b128_lognormal_p16"].lens]
TASKS: dict[str, tuple[list[tuple[int, int]], tuple[int, int]]] = {
    "128 decodes, lognormal": (UNEVEN, (32, 8)),
    "32 drafts of 8": ([(8, 512 * (i + 1)) for i in range(32)], (32, 8)),
    "16 chunks of 128": (CHUNKS, (32, 8)),
    "4 chunks of 512 and 60 decodes": (MIXED, (32, 8)),
}
"""New tokens and keys of each sequence; heads of 128 columns, bfloat16, pages of 16."""


def one(task: str) -> dict[str, Any]:
    """Times of a task."""
    lens, heads = TASKS[task]
    arrays, most = inputs(lens, heads, DTYPES["bf16"]), max(new for new, _ in lens)
    q, _, _, table, keys, starts = arrays
    make = partial(
        plan, (keys, table.shape[1] * 16), (starts, len(q), most), q_heads=heads[0], kv_heads=heads[1]
    )
    call = partial(attend_paged, *arrays, max_seqlen_q=most)
    made = make()
    planned = partial(call, plan=made)
    own, out = call().float(), planned().float()

    def step(layer: Callable[[], Any]) -> None:
        for _ in range(LAYERS):
            layer()

    def with_plan() -> None:
        step(partial(call, plan=make()))

    us = samples({
        "layers": captured(partial(step, planned)), "plan": captured(with_plan), "lists": captured(partial(step, call)),
    })
    more = [b - a for a, b in zip(us["layers"], us["plan"], strict=True)]
    quarters = statistics.quantiles(more, n=4)
    layers = statistics.median(us["layers"])
    walks = explain(attend_paged, *arrays, max_seqlen_q=most).config.walks
    host = {"plan": make, "call with the plan": planned, "call": call}
    return {
        "task": task, "walks": [walk.module or "portable" for walk in walks],
        "apart": float((own - out).abs().max()), "layers": round(layers, 1), "plan_adds": round(quarters[1], 1),
        "spread": [round(x, 1) for x in quarters[::2]],
        "list_adds": round((statistics.median(us["lists"]) - layers) / LAYERS, 1),
        "host_ms": {name: round(gpu_record.host_milliseconds(run), 4) for name, run in host.items()},
    }


def measure() -> dict[str, Any]:
    """All tasks."""
    found = []
    for task in TASKS:
        found.append(one(task))
        print(found[-1], flush=True)
    return {"layers": LAYERS, "tasks": found}


if __name__ == "__main__":
    gpu_record.run("benchmarks/step.py", __doc__, measure, sweeps=False)
