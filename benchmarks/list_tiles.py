"""Chunks over e4m3 caches and of groups that are no power of two, on a GPU: Hopper's tiles over a list beside the
portable walk.

    python benchmarks/list_tiles.py --output benchmarks/results/list_tiles_h200.json

us of a call that makes its lists, medians of replays of CUDA graphs, the L2 flushed before each; "apart": the largest
difference of the two over the largest output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gpu_record
import numpy as np
import torch
from balanced_decode import captured, times

from kvlab.attention import attend_paged, explain
from kvlab.attention.mha_prefill.hopper_config import BOX_GROUPS

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = {"bf16": (BF16, BF16), "bf16 / e4m3": (BF16, E4M3), "e4m3": (E4M3, E4M3)}
"""Of q, and of K and V."""
CHUNKS = [(128, 1000 * (i + 1)) for i in range(16)]
MIXED = [(512, 2048 * (i + 1)) for i in range(4)] + [(1, 1 + 8191 * i // 59) for i in range(60)]
TASKS: dict[str, tuple[list[tuple[int, int]], tuple[int, int]]] = {
    "16 chunks of 128 on 1k to 16k, groups of 8": (CHUNKS, (32, 4)),
    "4 chunks of 512 and 60 decodes, groups of 8": (MIXED, (32, 4)),
    "32 x 64 new on 4k, groups of 4": ([(64, 4096)] * 32, (32, 8)),
    "128 prompts of 64 to 500, groups of 4": ([(64 + 436 * i // 127,) * 2 for i in range(128)], (32, 8)),
    "16 chunks of 128 on 1k to 16k, groups of 7": (CHUNKS, (28, 4)),
    "4 chunks of 512 and 60 decodes, groups of 7": (MIXED, (28, 4)),
}
"""New tokens and keys of each sequence; heads."""


def inputs(lens: list[tuple[int, int]], heads: tuple[int, int], dtypes: tuple[Any, Any]) -> tuple[torch.Tensor, ...]:
    """The arrays of a call on pages of 16, which are shuffled."""
    random = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    new, keys = np.array(lens, np.int32).T
    counts = -(-keys // 16)
    q = random((int(new.sum()), heads[0], 128)).to(dtypes[0])
    k, v = (random((int(counts.sum()), 16, heads[1], 128)).to(dtypes[1]) for _ in range(2))
    table = np.zeros((len(lens), counts.max()), np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = np.random.default_rng(0).permutation(counts.sum())
    ints = table, keys, np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return q, k, v, *(torch.from_numpy(x).cuda() for x in ints)


def one(task: str, dtypes: str) -> dict[str, Any]:
    """Times of a task."""
    lens, heads = TASKS[task]
    arrays, most = inputs(lens, heads, DTYPES[dtypes]), max(new for new, _ in lens)
    call = partial(attend_paged, *arrays, max_seqlen_q=most)
    calls = {backend: partial(call, backend=backend) for backend in ("triton", "auto")}
    portable, chosen = (made().float() for made in calls.values())
    apart = float((chosen - portable).abs().max() / portable.abs().max())
    walks = [walk.module or "portable" for walk in explain(attend_paged, *arrays, max_seqlen_q=most).config.walks]
    graphs = {name: captured(made) for name, made in calls.items()}
    return {"task": task, "dtypes": dtypes, "walks": walks, "apart": apart} | times(graphs)


def measure() -> dict[str, Any]:
    """All tasks."""
    found = []
    for task, (_, (q_heads, kv_heads)) in TASKS.items():
        for dtypes in DTYPES:
            if dtypes == "e4m3" and q_heads // kv_heads not in BOX_GROUPS:
                continue  # Hopper's tiles take q of e4m3 by boxes alone
            found.append(one(task, dtypes))
            print(found[-1], flush=True)
    return {"tasks": found}


if __name__ == "__main__":
    gpu_record.run("benchmarks/list_tiles.py", __doc__, measure, sweeps=False)
