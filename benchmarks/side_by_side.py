"""kvlab beside its peers: runs the side-by-side benchmark and keeps its record.

    python benchmarks/side_by_side.py --bench DIR --record benchmarks/results/attention_peers_h100.json --peers .peers

DIR holds the benchmark (``bench_attention.py``, ``peers.py``, ``prepare_peers.py``, which fetches the peers); options
that are not named here are the benchmark's own (``--tasks``, ``--impls``, ``--seconds``, ...; ``--smoke`` tries it on a
CPU and leaves no record). It checks every output against float64, captures each implementation in a CUDA graph and
samples them in turns, the L2 flushed before each sample; ``kvlab_adapter.py`` is how it calls kvlab. The record has
card, driver, versions, date, command, and what each implementation took; ``kvlab_plan`` is kvlab with work lists made
before. ``--tasks more`` runs :mod:`more_tasks`. Compare ratios, not times, of different runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = ("ms", "p10", "p90", "samples", "tflops", "gbs", "fraction", "vs_best", "err", "error")
BENCH = "KVLAB_BENCH_DIR"  #: tells the benchmark's worker, a process of its own, where the benchmark is


def record(run: dict[str, Any], command: str) -> dict[str, Any]:
    """What a run of bench_attention.py wrote, without what only its own table needs."""
    meta = run["meta"]
    card, driver, *_ = (part.strip() for part in meta["gpu_before"].split(","))
    return {
        "command": command, "card": card, "driver": driver, "date": meta["date"],
        "versions": {name: meta[name] for name in ("torch", "triton", "cuda", "cudnn")},
        "peers": meta.get("peers", {}), "ceilings": run["ceilings"],
        "tasks": {
            task["name"]: {
                "params": {k: v for k, v in task["params"].items() if k not in ("new", "cached", "lens", "flex")},
                "best_peer": task["best"],
                "implementations": {
                    name: {key: row[key] for key in KEPT if key in row} for name, row in task["impls"].items()
                },
            }
            for task in run["tasks"]
        },
    }


def with_more(build: Callable[..., Any]) -> Callable[..., Any]:
    """The benchmark's kvlab, with what that leaves out: prefill of e4m3 q, k and v, and MLA over lists of slots."""

    def built(case: Any, x: Any, peers: Any) -> Any:
        import kvlab_adapter

        if hasattr(x, "indices"):
            return lambda: kvlab_adapter.mla_sparse(x.q, x.pool, x.indices, x.scale)
        if case.op != "prefill" or not case.p.get("fp8"):
            return build(case, x, peers)
        return lambda: kvlab_adapter.prefill(x.q, x.k, x.v, causal=x.causal, scale=x.scale)

    return built


def with_plan(build: Callable[..., Any]) -> Callable[..., Any]:
    """kvlab where the lists of its calls are made before, outside of what is timed, as the metadata of FA3 is."""

    def built(case: Any, x: Any, peers: Any) -> Any:
        import kvlab_adapter

        return kvlab_adapter.with_plan(build(case, x, peers))

    return built


def benchmark(arguments: list[str]) -> None:
    """bench_attention.py with ``arguments``; its worker is this file, so that it has the same kvlab."""
    sys.path[:0] = [os.environ[BENCH], str(Path(__file__).parent)]
    os.environ["KVLAB_ADAPTER_DIR"] = str(Path(__file__).parent)
    import bench_attention
    import more_tasks
    import peers
    import sparse_mla

    bench_attention.__file__ = __file__
    sparse_mla.add(bench_attention)
    if any(told.startswith("more") for told in arguments):
        more_tasks.add(bench_attention)
    peers.IMPLS["kvlab"] = with_more(peers.IMPLS["kvlab"])
    peers.IMPLS["kvlab_plan"] = with_plan(peers.IMPLS["kvlab"])
    peers.OTHER_LAYOUT.add("kvlab_plan")  # no peer
    sys.argv[1:] = arguments
    bench_attention.main()


def main() -> None:
    if "--worker" in sys.argv:
        return benchmark(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True, help="the directory of bench_attention.py")
    parser.add_argument("--record", type=Path, required=True, help="the JSON to write")
    options, rest = parser.parse_known_args()
    os.environ[BENCH] = str(options.bench.resolve())
    command = f"python benchmarks/side_by_side.py --bench DIR --record {options.record.name} {shlex.join(rest)}".strip()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "bench.json")
        benchmark([*rest, "--out", str(out)])
        run = json.loads(out.read_text())
    if not run["meta"]["smoke"]:
        options.record.write_text(json.dumps(record(run, command), indent=1) + "\n")


if __name__ == "__main__":
    main()
