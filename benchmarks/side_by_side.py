"""The record of a side-by-side run: card, driver, versions, date, command, and what each implementation took.

    KVLAB_ADAPTER_DIR=benchmarks python bench_attention.py --peers .peers --tasks prefill --out bench.json
    python benchmarks/side_by_side.py bench.json benchmarks/results/prefill_h100.json

bench_attention.py checks every output against float64, captures each implementation in a CUDA graph and samples them in
turns, the L2 flushed before each sample; ``kvlab_adapter.py`` is how it calls kvlab. Compare ratios, not times, of
different runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KEPT = ("ms", "p10", "p90", "samples", "tflops", "gbs", "fraction", "vs_best", "err", "error")


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
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the JSON that bench_attention.py wrote")
    parser.add_argument("output", type=Path)
    parser.add_argument("--command", default="KVLAB_ADAPTER_DIR=benchmarks python bench_attention.py")
    options = parser.parse_args()
    found = record(json.loads(options.run.read_text()), options.command)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
