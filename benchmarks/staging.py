"""Staged emulation of one MHA decode beside Triton's interpreter: the same problem and tile sizes, in the same run.

    python benchmarks/staging.py [--repeat 3] [--output FILE]

bfloat16, 4 sequences of 4096 keys, 32 query and 8 KV heads, depth 128, pages of 128 keys in random order. The emulator
moves every byte through shared memory and fragments, counts it, and checks every access for hazards; the interpreter
runs the kernel's statements on whole tiles. One JSON line an architecture: seconds are the best of ``--repeat`` runs,
``ratio`` is interpreter / emulator. Both results must agree and come near float64, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.attention.mha_decode import emulator
from kvlab.attention.mha_decode.config import DecodeProblem, choose_config
from kvlab.attention.mha_decode.reference import reference
from kvlab.common.arrays import to_numpy, to_torch
from kvlab.memory import bfloat16
from kvlab.staging import Timeline, Traffic
from kvlab.triton_support.child import run

B, Hq, Hkv, D, CONTEXT, PAGE = 4, 32, 8, 128, 4096, 128
ARCHS = ("gfx950", "sm_90")
TOLERANCE = 0.004  # of outputs of about 0.05: twice the rounding of P and O to bfloat16
KERNEL = "kvlab.attention.mha_decode.kernel:launch"


def inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    pages = B * CONTEXT // PAGE
    k, v = (rng.standard_normal((pages, PAGE, Hkv, D), np.float32).astype(bfloat16) for _ in range(2))
    q = rng.standard_normal((B, 1, Hq, D), np.float32).astype(bfloat16)
    table = rng.permutation(pages).reshape(B, -1).astype(np.int32)
    return q, k, v, table, np.full(B, CONTEXT, np.int32)


def best(repeat: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the fastest of ``repeat`` calls, after one that is not counted; and what the last one returned."""
    result, seconds = call(), []
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def measure(arch: str, arguments: tuple[Any, ...], exact: np.ndarray[Any, Any], repeat: int) -> dict[str, Any]:
    problem = DecodeProblem(B, 1, Hq, Hkv, D, D, 2, PAGE, CONTEXT)
    config = choose_config(problem, num_splits=1, arch=arch)
    options: dict[str, Any] = {"scale": D**-0.5, "config": config}
    traffic = Traffic(timeline=Timeline())
    emulator.launch(*arguments, **options, arch=arch, traffic=traffic)
    emulated, (ours, _) = best(repeat, lambda: emulator.launch(*arguments, **options, arch=arch, traffic=Traffic()))
    tensors = [to_torch(x) for x in arguments]
    interpreted, (theirs, _) = best(repeat, lambda: run(KERNEL, *tensors, **options))
    error = max(float(np.abs(x.astype(np.float64) - exact).max()) for x in (ours, to_numpy(theirs)))
    return {
        "benchmark": "staging", "arch": arch, "shape": f"B{B}-H{Hq}x{Hkv}-D{D}-ctx{CONTEXT}-page{PAGE}-bf16",
        "BM": config.BM, "BN": config.BN, "emulator_seconds": round(emulated, 3),
        "interpreter_seconds": round(interpreted, 3), "ratio": round(interpreted / emulated, 1),
        "max_error": round(error, 6), "events_checked": len(traffic.trace()),
        "dram_to_smem_bytes": traffic.moved["DRAM->SMEM"], "smem_wavefronts": traffic.total("wavefronts"),
        "python": platform.python_version(), "numpy": np.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the lines to this file as well")
    options = parser.parse_args()
    arguments = inputs()
    exact, _ = reference(*arguments, scale=D**-0.5)
    failed = False
    for arch in ARCHS:
        line = measure(arch, arguments, exact, options.repeat)
        print(json.dumps(line), flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
        failed = failed or line["max_error"] > TOLERANCE or line["ratio"] < 10
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
