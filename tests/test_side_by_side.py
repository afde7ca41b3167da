"""The runner of the side-by-side benchmark. Rests on a benchmark made up here, with the interfaces of the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).parents[1] / "benchmarks" / "side_by_side.py"

PEERS = """
import kvlab_adapter
IMPLS = {"kvlab": lambda case, x, peers: lambda: "the benchmark's own"}
"""

BENCH = """
import argparse, json, os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace as N

sys.path.insert(0, os.environ["KVLAB_ADAPTER_DIR"])
all_cases, make_inputs, Case = list, None, None

def main():
    parser = argparse.ArgumentParser()
    for name in ("--out", "--tasks", "--log"):
        parser.add_argument(name)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.worker:
        subprocess.run([sys.executable, __file__, "--worker", *sys.argv[1:], "--log", options.out], check=True)
        return
    import kvlab_adapter
    from peers import IMPLS
    kvlab_adapter.prefill = lambda q, k, v, **kw: f"{q}{k}{v}, {sorted(kw.items())}"
    x = N(q="q", k="k", v="v", causal=True, scale=0.5)
    rows = {f"{op} {fp8}": {"out": IMPLS["kvlab"](N(op=op, p={"fp8": fp8}), x, None)(), "ms": 1.0, "spread": 0.1}
            for op in ("prefill", "decode") for fp8 in (False, True)}
    meta = dict(gpu_before="card, 1.2, 0 MHz", date="2026-11-28", torch="t", triton="3", cuda="c", cudnn=9,
                smoke=options.smoke)
    tasks = [dict(name=options.tasks, params={"lens": [1], "d": 64}, best="fa3", impls=rows)]
    print(json.dumps(rows))
    Path(options.log).write_text(json.dumps(dict(meta=meta, ceilings={}, tasks=tasks)))
"""


def run(folder: Path, *arguments: str) -> tuple[dict[str, dict[str, str]], Path]:
    (folder / "peers.py").write_text(PEERS)
    (folder / "bench_attention.py").write_text(BENCH)
    record = folder / "record.json"
    command = [sys.executable, RUNNER, "--bench", folder, "--record", record, "--tasks", "a", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), record


def test_the_workers_kvlab_takes_fp8_prefill_and_the_record_keeps_what_was_run(tmp_path: Path) -> None:
    rows, path = run(tmp_path)
    own = "the benchmark's own"
    assert {name: row["out"] for name, row in rows.items()} == {
        "prefill False": own, "prefill True": "qkv, [('causal', True), ('scale', 0.5)]",
        "decode False": own, "decode True": own,
    }
    record = json.loads(path.read_text())
    assert (record["card"], record["driver"], record["date"]) == ("card", "1.2", "2026-11-28")
    assert record["command"] == "python benchmarks/side_by_side.py --bench DIR --record record.json --tasks a"
    task = record["tasks"]["a"]
    assert task["params"] == {"d": 64}
    assert task["best_peer"] == "fa3"
    assert task["implementations"]["prefill True"] == {"ms": 1.0}


def test_a_smoke_run_leaves_no_record(tmp_path: Path) -> None:
    assert not run(tmp_path, "--smoke")[1].exists()
