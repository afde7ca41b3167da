"""The runner of the side-by-side benchmark. Rests on a benchmark made up here, with the interfaces of the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kvlab_adapter
from kvlab.attention import mha_decode_paged, plan

RUNNER = Path(__file__).parents[1] / "benchmarks" / "side_by_side.py"

PEERS = """
import kvlab_adapter
IMPLS = {"kvlab": lambda case, x, peers: lambda: "the benchmark's own"}
OTHER_LAYOUT = set()
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
    from peers import IMPLS, OTHER_LAYOUT
    assert OTHER_LAYOUT == {"kvlab_plan"}
    kvlab_adapter.with_plan = lambda call: lambda: f"a plan for {call()}"
    kvlab_adapter.prefill = lambda q, k, v, **kw: f"{q}{k}{v}, {sorted(kw.items())}"
    x = N(q="q", k="k", v="v", causal=True, scale=0.5)
    rows = {f"{op} {fp8}": {"out": IMPLS["kvlab"](N(op=op, p={"fp8": fp8}), x, None)(), "ms": 1.0, "spread": 0.1}
            for op in ("prefill", "decode") for fp8 in (False, True)}
    rows["listed"] = {"out": IMPLS["kvlab_plan"](N(op="decode", p={}), x, None)(), "ms": 1.0}
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
        "decode False": own, "decode True": own, "listed": f"a plan for {own}",
    }
    record = json.loads(path.read_text())
    assert (record["card"], record["driver"], record["date"]) == ("card", "1.2", "2026-11-28")
    assert record["command"] == "python benchmarks/side_by_side.py --bench DIR --record record.json --tasks a"
    task = record["tasks"]["a"]
    assert task["params"] == {"d": 64}
    assert task["best_peer"] == "fa3"
    assert task["implementations"]["prefill True"] == {"ms": 1.0}


def test_a_plan_is_made_once_and_the_result_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks and of uneven decode, and not of decode of equal lengths, which goes over no schedule."""
    made, rng = [], np.random.default_rng(0)
    monkeypatch.setattr("kvlab.attention.mha_prefill.call.takes_list", lambda **_: True)
    monkeypatch.setattr(kvlab_adapter, "plan", lambda *args, **named: made.append(plan(*args, **named)) or made[-1])
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in ((7, 4, 64), *2 * ((9, 16, 2, 64),)))
    table, starts, lens = np.arange(8, dtype=np.int32).reshape(2, 4), np.int32([0, 5, 7]), np.int32([40, 64])
    chunks = partial(kvlab_adapter.prefill_paged, q, k, v, table, starts, lens, 5, 64)
    decode = partial(kvlab_adapter._call, mha_decode_paged, q[:2], k, v, table, lens, balanced=True)
    for calls, call in enumerate((chunks, decode), 1):
        listed = kvlab_adapter.with_plan(call)
        assert np.array_equal(listed(), call())
        assert len(made) == calls
    with pytest.raises(kvlab_adapter.NotAvailable, match="mha_decode_paged: no plan goes with this call"):
        kvlab_adapter.with_plan(partial(kvlab_adapter.decode_paged, q[:2], k, v, table, lens))


def test_a_smoke_run_leaves_no_record(tmp_path: Path) -> None:
    assert not run(tmp_path, "--smoke")[1].exists()
