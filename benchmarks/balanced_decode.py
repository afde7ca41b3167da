"""Decode over a schedule on a GPU: correctness and time of uneven batches, beside decode as it is chosen without one.

    python benchmarks/balanced_decode.py --output benchmarks/results/balanced_decode.json [--sweep]

The uneven decode and draft tasks of the side-by-side benchmark, with its lengths. "made" makes the work list in each
call, "listed" has it from before, as the layers of a step share one; by Hopper's kernel where it takes the call, and by
the "portable" one. Times are medians of replays of a CUDA graph,
taken in turns, the L2 flushed by reading 256 MB before each; us. Each result is held against float64 for the longest,
the shortest and the first sequences, over poisoned memory, and again after replays with other lengths, 0 among them.
`of_read`: bytes of K and V over what a reading kernel reaches in the same run. `--sweep` times other units, programs
and tiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu_record
import torch
from mha_decode import read_bandwidth
from schedule import Task, equal_tasks, traffic_tasks

from kvlab.attention import mha_decode_paged
from kvlab.attention.attend_paged.config import Walk, WalkConfig, choose_walks, schedule_problem
from kvlab.attention.attend_paged.hopper_config import with_rings
from kvlab.attention.attend_paged.kernel import launch
from kvlab.attention.mha_decode.config import problem_of
from kvlab.attention.schedule.kernel import launch as make_list

TASKS = (
    "traffic_decode_b128_lognormal_p16", "traffic_decode_b64_onelong_p16", "traffic_decode_b32_twolong_p64",
    "traffic_decode_fp8_b128_lognormal_p16", "traffic_draft4_p16", "traffic_draft8_p64", "traffic_decode_b16_1k_p16",
    "traffic_decode_b4_200k_p64", "decode_b64_ctx4k_p16", "decode_b1_ctx128k_p16", "decode_b256_ragged1k_p16",
)
SAMPLES = 40
Arrays = tuple[torch.Tensor, ...]


def inputs(task: Task) -> Arrays:
    """q ``[B, S, Hq, D]``, K, V, table and lengths on the GPU; pages shuffled, what no sequence has is NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    page = 16 if task.name.endswith("p16") else 64
    counts = [-(-n // page) for n in task.lens]
    pages = sum(counts) + 1
    kv = torch.randn((2, pages, page, task.kv_heads, 128), dtype=torch.bfloat16, device="cuda", generator=generator)
    q = torch.randn((len(task.lens), task.new[0], task.q_heads, 128), dtype=torch.bfloat16, device="cuda",
                    generator=generator)
    order = torch.randperm(sum(counts), device="cuda", generator=generator).to(torch.int32)
    table = torch.full((len(counts), max(counts)), pages - 1, dtype=torch.int32, device="cuda")
    kv[:, pages - 1] = float("nan")
    at = 0
    for b, n in enumerate(counts):
        table[b, :n] = order[at : at + n]
        if task.lens[b] % page:
            kv[:, order[at + n - 1].long(), task.lens[b] % page :] = float("nan")
        at += n
    if task.key_bytes == 256:
        kv = kv.to(torch.float8_e4m3fn)
    return q, kv[0], kv[1], table, torch.tensor(task.lens, dtype=torch.int32, device="cuda")


def exact(arrays: Arrays, b: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 output ``[S, Hq, D]`` and lse ``[S, Hq]`` of sequence ``b`` with ``n`` keys."""
    q, k, v, table, _ = arrays
    tokens, q_heads, depth = q.shape[1:]
    kv_heads, group = k.shape[2], q_heads // k.shape[2]
    if n == 0:
        shape = tokens, q_heads
        return torch.zeros((*shape, depth), dtype=torch.float64, device=q.device), torch.full(
            shape, -float("inf"), dtype=torch.float64, device=q.device)
    pages = table[b, : -(-n // k.shape[1])].long()
    keys, values = (x[pages].flatten(0, 1)[:n].double() for x in (k, v))
    scores = torch.einsum("shgd,nhd->hgsn", q[b].double().view(tokens, kv_heads, group, depth), keys) * depth**-0.5
    seen = torch.arange(n, device=q.device) <= n - tokens + torch.arange(tokens, device=q.device)[:, None]
    scores = scores.masked_fill(~seen, -float("inf"))
    out = torch.einsum("hgsn,nhd->shgd", scores.softmax(-1).nan_to_num(), values)
    return out.reshape(tokens, q_heads, depth), scores.logsumexp(-1).permute(2, 0, 1).reshape(tokens, q_heads)


def error(arrays: Arrays, out: torch.Tensor, lse: torch.Tensor, lens: list[int]) -> float:
    """Largest error relative to the largest output of the sequences looked at; NaN where lse or a NaN is wrong."""
    looked = {0, len(lens) - 1, lens.index(max(lens)), lens.index(min(lens))}
    worst = 0.0
    for b in looked:
        true, true_lse = exact(arrays, b, lens[b])
        known = ~true_lse.isinf()
        if not torch.equal(lse[b].isinf(), true_lse.isinf()) or not bool(out[b].isfinite().all()):
            return float("nan")
        if known.any() and float((lse[b].double() - true_lse)[known].abs().max()) > 1e-3:
            return float("nan")
        worst = max(worst, float((out[b].double() - true).abs().max() / true.abs().max().clamp(min=1e-30)))
    return worst


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of a call that has run before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def samples(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, list[float]]:
    """us of each graph's replays, in turns, the L2 flushed before each."""
    flush = torch.empty(64 << 20, dtype=torch.float32, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(SAMPLES):
        for name, graph in graphs.items():
            flush.sum()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(1e3 * begin.elapsed_time(end))
    return found


def times(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """us of each, the median of its samples."""
    return {name: round(statistics.median(found), 1) for name, found in samples(graphs).items()}


def variants(config: Walk, sweep: bool) -> dict[str, Walk]:
    """Configurations of the portable walk by name: the chosen one, and what may be better."""
    found = {"portable listed": config}
    if sweep:
        s, t = config.schedule, config.tiles
        found |= {f"block {b} overhead {o}": replace(config, schedule=replace(s, block=b, overhead=o))
                  for b, o in ((16, 0), (16, 2), (16, 8), (64, 1))}
        found |= {f"programs {n}": replace(config, schedule=replace(s, programs=132 * n)) for n in (2, 4, 6)}
        found |= {f"stages {n}": replace(config, tiles=replace(t, num_stages=n)) for n in (2, 4)}
        found["128 keys"] = replace(config, tiles=replace(t, BN=128, num_stages=2))
    return found


def one(task: Task, sweep: bool) -> dict[str, Any]:
    """Correctness and times of a task."""
    arrays = inputs(task)
    q, k, v, table, lens = arrays
    problem, scale = problem_of(q, k, v, table), 128**-0.5
    walks = choose_walks(problem, problem.tokens)
    (portable,), (config,) = walks.walks, with_rings(walks, problem, problem.tokens, 132).walks
    listed = schedule_problem(problem, *(1 << 30, 0))
    out = torch.full_like(q, float("nan"))
    kept: list[Any] = []

    def call(tried: Walk, made: bool) -> Callable[[], Any]:
        again: dict[Any, Any] = {}
        works = None if made else make_list(lens, problem=listed, config=tried.schedule)
        kept.append(works)
        walks = WalkConfig((tried,))
        return lambda: launch(*arrays, scale=scale, config=walks, out=out, works=works, again=again)

    first, lse = call(config, True)()
    found: dict[str, Any] = {"task": task.name, "error": error(arrays, first, lse, list(task.lens))}
    graphs = {"made": captured(call(config, True))}
    before = out.clone()
    graphs["made"].replay()
    found["same_bits"] = torch.equal(before, out)
    generator = torch.Generator().manual_seed(1)
    shares = torch.rand(len(task.lens), generator=generator)
    other = (shares * torch.tensor(task.lens)).to(torch.int32)
    other[::3] = 0
    lens.copy_(other)
    out.fill_(float("nan"))
    result: list[Any] = []
    graph = captured(lambda: result.append(launch(*arrays, scale=scale, config=WalkConfig((config,)), out=out)))
    lens.copy_(torch.tensor(task.lens, dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    found["error_of_other_lengths"] = error(arrays, *result[-1], list(task.lens))
    graphs["portable made"] = captured(call(portable, True))
    for name, tried in ({"listed": config} | variants(portable, sweep)).items():
        try:
            graphs[name] = captured(call(tried, False))
        except Exception as reason:  # a tile that does not fit is a result
            found[name] = f"failed: {str(reason)[:80]}"
    if task.new[0] <= 4:
        graphs["as chosen today"] = captured(lambda: mha_decode_paged(*arrays, out=out))
    found |= times(graphs)
    read = read_bandwidth(k) * 1e3
    found["of_read"] = round(task.bytes / read / found["listed"], 3)
    kept.clear()
    return found


def measure(sweep: bool) -> dict[str, Any]:
    """All tasks."""
    every = traffic_tasks() | equal_tasks()
    found = []
    for name in TASKS:
        found.append(one(every[name], sweep))
        print(found[-1], flush=True)
        torch.cuda.empty_cache()
    return {"tasks": found}


if __name__ == "__main__":
    gpu_record.run("benchmarks/balanced_decode.py", __doc__, measure)
