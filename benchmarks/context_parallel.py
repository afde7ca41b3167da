"""Context-parallel decode over ranks: correctness and time of one long sequence on several GPUs, beside one GPU's.

    python benchmarks/context_parallel.py --output benchmarks/results/context_parallel.json [--ranks 1 2 4] [--smoke]

One sequence (32 query heads, 8 KV heads, D 128, bfloat16) of 131,072 and of 1,048,576 keys in pages of 64. A rank
has its share of the pages, "contiguous" or "round_robin", and a copy of all of them for "one", the same call on one
GPU. One process a GPU over NCCL. Times are medians of replays of a CUDA graph, collectives among it, taken in turns, of
the slowest rank; us. Before each the L2 is flushed by reading and ranks meet in a small collective. "part" is a
rank's own kernel over its pages, "gather" a collective of the size of a result; "eager" is the call of "contiguous"
without a graph. Each result is held against float64, the same bits are asked of all ranks, and a graph is replayed with
another length. `--smoke`: two processes on the CPU over gloo in the emulator, a few keys; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpu_record
import torch
from balanced_decode import exact
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp

from kvlab.attention import mha_decode_paged
from kvlab.integrations.distributed import PLACEMENTS, all_gather_heads, context_parallel_decode, context_shard

Q_HEADS, KV_HEADS, DEPTH, PAGE = 32, 8, 128, 64
CONTEXTS, SMOKE_CONTEXTS = (131_072, 1_048_576), (512,)
SAMPLES = 40
MOST_ERROR = 2.0**-6
"""Of the largest output, of what bfloat16 rounds: P, a rank's result, the merged one."""
Arrays = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Call = Callable[[], Any]


def inputs(keys: int, device: str) -> Arrays:
    """q ``[1, Hq, D]``, K, V, table and length, the same at all ranks; pages shuffled."""
    generator = torch.Generator(device).manual_seed(keys)
    made: dict[str, Any] = {"device": device, "generator": generator}
    kv = torch.randn((2, keys // PAGE, PAGE, KV_HEADS, DEPTH), dtype=torch.bfloat16, **made)
    q = torch.randn((1, Q_HEADS, DEPTH), dtype=torch.bfloat16, **made)
    table = torch.randperm(keys // PAGE, **made).to(torch.int32)[None]
    return q, kv[0], kv[1], table, torch.tensor([keys], dtype=torch.int32, device=device)


def share(arrays: Arrays, rank: int, ranks: int, placement: str) -> Arrays:
    """The arrays of a rank: its pages, shuffled anew, and its table of them."""
    q, k, v, table, lens = arrays
    columns = table.shape[1] // ranks
    rows = table[0].view(ranks, columns)[rank] if placement == "contiguous" else table[0].view(columns, ranks)[:, rank]
    order = torch.randperm(columns, device=q.device, generator=torch.Generator(q.device).manual_seed(rank))
    mine = rows[order].long()
    return q, k[mine], v[mine], order.argsort().to(torch.int32)[None], lens


def true_output(arrays: Arrays) -> Tensor:
    """Float64 output ``[Hq, D]``, a KV head at a time."""
    q, k, v, table, lens = arrays
    group, n = Q_HEADS // KV_HEADS, int(lens)
    outs = [
        exact((q[:, None, h * group : (h + 1) * group], k[:, :, h : h + 1], v[:, :, h : h + 1], table, lens), 0, n)[0]
        for h in range(KV_HEADS)
    ]
    return torch.cat(outs, 1)[0]


def captured(call: Call) -> Call:
    """The replay of a graph of a call that has run before; on the CPU the call."""
    if not torch.cuda.is_available():
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        call()
    return graph.replay


def times(calls: dict[str, Call], group: Any, device: str, samples: int) -> dict[str, float]:
    """us of each, the median of samples in turns at this rank."""
    cuda = device != "cpu"
    flush, meet = torch.empty((64 << 20) if cuda else 1, device=device), torch.zeros(1, device=device)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            for _ in range(10 if cuda else 1):  # the host is far ahead when ranks meet
                flush.sum()
            dist.all_reduce(meet, group=group)
            if cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                end.synchronize()
                found[name].append(1e3 * begin.elapsed_time(end))
            else:
                start = time.perf_counter()
                call()
                found[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in found.items()}


def one(keys: int, ranks: int, group: Any, told: Any, device: str) -> dict[str, Any]:
    """Correctness and times of a context over so many ranks; ``told`` is their group of the CPU."""
    rank, cpu = dist.get_rank(), device == "cpu"
    backend: Any = "emulator" if cpu else "auto"
    arrays = inputs(keys, device)
    lens, true = arrays[-1], true_output(arrays)
    largest = float(true.abs().max())

    def gathered(mine: Any) -> list[Any]:
        every = [None] * ranks
        dist.all_gather_object(every, mine, group=told)
        return every

    def error(out: Tensor, expected: Tensor) -> float:
        return float((out[0].double() - expected.double()).abs().max()) / largest

    alone: Call = lambda: mha_decode_paged(*arrays, backend=backend)  # noqa: E731
    record: dict[str, Any] = {"keys": keys, "ranks": ranks, "error_of_one": error(alone(), true)}
    graphs, eager, outs, shares = {"one": captured(alone)}, {}, {}, {}
    for placement in PLACEMENTS:
        mine = shares[placement] = share(arrays, rank, ranks, placement)
        out = outs[placement] = torch.full_like(arrays[0], float("nan"))
        call = eager[placement] = lambda mine=mine, out=out, placement=placement: context_parallel_decode(
            *mine, group=group, placement=placement, out=out, backend=backend)
        call()
        record[f"error_of_{placement}"] = error(out, true)
        bits = gathered(out.cpu())
        record[f"same_bits_of_{placement}"] = all(torch.equal(bits[0], other) for other in bits)
        graphs[placement] = captured(call)

    lens.fill_(keys * 3 // 5 + 7)  # the same graphs
    expected = alone()[0].clone()
    for placement in PLACEMENTS:
        outs[placement].fill_(float("nan"))
        graphs[placement]()
        record[f"difference_of_{placement}_replayed"] = error(outs[placement], expected)
    lens.fill_(keys)

    q, *pages = shares["contiguous"]
    own = context_shard(pages[2], PAGE, group=group).before(lens).to(lens.dtype)
    part: Call = lambda: mha_decode_paged(q, *pages[:3], own, return_lse=True, backend=backend)  # noqa: E731
    gather: Call = lambda: all_gather_heads(q, group=group, check=False)  # noqa: E731
    for name, call in (("part", part), ("gather", gather)):
        call()
        graphs[name] = captured(call)
    found = times(graphs | {"eager": eager["contiguous"]}, group, device, 2 if cpu else SAMPLES)
    slowest = {name: max(one[name] for one in gathered(found)) for name in found}
    record |= {name: round(us, 1) for name, us in slowest.items()}
    record |= {f"speed_up_of_{name}": round(slowest["one"] / slowest[name], 3) for name in PLACEMENTS}
    record["TB_per_s_of_one"] = round(4e-6 * keys * KV_HEADS * DEPTH / slowest["one"], 3)
    errors = {name: value for name, value in record.items() if name.startswith(("error", "difference"))}
    wrong = [name for name, value in errors.items() if not value <= MOST_ERROR]
    wrong += [name for name in record if name.startswith("same_bits") and not record[name]]
    if wrong:
        raise RuntimeError(f"{', '.join(wrong)}: must be at most {MOST_ERROR}, and bits the same; {record}")
    return record


def rank_of(rank: int, folder: str, asked: list[int], smoke: bool) -> None:
    """What a process does."""
    device, most = "cpu" if smoke else f"cuda:{rank}", max(asked)
    if smoke:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    rendezvous: dict[str, Any] = {"init_method": f"file://{folder}/ranks", "rank": rank, "world_size": most}
    dist.init_process_group("gloo" if smoke else "nccl", timeout=timedelta(seconds=100), **rendezvous)
    everyone, records = dist.new_group(backend="gloo"), []
    for ranks in asked:
        group, told = dist.new_group(range(ranks)), dist.new_group(range(ranks), backend="gloo")
        for keys in SMOKE_CONTEXTS if smoke else CONTEXTS:
            if rank < ranks:
                records.append(one(keys, ranks, group, told, device))
                if rank == 0:
                    print(json.dumps(records[-1]), flush=True)
            dist.barrier(everyone)  # on the CPU: GPUs that have no part are idle
            if not smoke:
                torch.cuda.empty_cache()
    if rank == 0:
        Path(folder, "records.json").write_text(json.dumps(records))
    sys.stdout.flush()
    os._exit(0)  # graphs hold communicators, which would wait for each other


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes (printed in any case)")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (1, 2, 4, as many as there are GPUs)")
    parser.add_argument("--smoke", action="store_true", help="two processes on the CPU")
    asked = parser.parse_args()
    there = 2 if asked.smoke else torch.cuda.device_count()
    ranks = asked.ranks or [n for n in (1, 2, 4) if n <= there]
    if not ranks or max(ranks) > there:
        sys.exit(f"benchmarks/context_parallel.py needs a CUDA GPU for each rank: {there} are here; or --smoke")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (folder, ranks, asked.smoke), nprocs=max(ranks))
        records = json.loads(Path(folder, "records.json").read_text())
    command = "python benchmarks/context_parallel.py --ranks " + " ".join(map(str, ranks)) + " --smoke" * asked.smoke
    facts = {} if asked.smoke else {**gpu_record.facts(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    text = json.dumps({"command": command, **facts, "contexts": records}, indent=1)
    print(text)
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
