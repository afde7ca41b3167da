"""The command line of a benchmark that needs a CUDA GPU, and the JSON record that it writes."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

__all__ = ["call_milliseconds", "facts", "host_milliseconds", "run"]


def run(
    script: str, words: str | None, measure: Callable[..., dict[str, Any]], backends: tuple[str, ...] = (),
    *, sweeps: bool = True,
) -> None:
    """Print what ``measure(sweep=...)`` found, after the command, the card and the versions; write it where asked to.

    script : the file, from the root of the repository.
    words : the benchmark's docstring, for ``--help``.
    backends : those that may be asked for, the first by default; ``measure(sweep=..., backend=...)`` then.
    sweeps : whether ``measure`` takes ``sweep``.
    """
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes (printed in any case)")
    if sweeps:
        parser.add_argument("--sweep", action="store_true", help="time other tile sizes as well")
    if backends:
        parser.add_argument("--backend", choices=backends, default=backends[0], help="which kernel (%(default)s)")
    asked = vars(parser.parse_args())
    output = asked.pop("output")
    if not torch.cuda.is_available():
        sys.exit(f"{script} needs a CUDA GPU: times hold only there")
    command = f"python {script}" + " --sweep" * asked.get("sweep", False)
    if backends and asked["backend"] != backends[0]:
        command += f" --backend {asked['backend']}"
    record = {"command": command, **facts(), **measure(**asked)}
    text = json.dumps(record, indent=1)
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")


def call_milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call, its launches among it, the L2 flushed before each."""
    return float(triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median"))


def host_milliseconds(call: Callable[[], Any], calls: int = 30) -> float:
    """What a call takes on the host: so many after each other without waiting for the GPU, over their number; the best
    of five rounds, as what else the host does only adds to it.
    """
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls * 1e3)
    torch.cuda.synchronize()
    return min(rounds)


def facts() -> dict[str, Any]:
    """The card, its driver, the date and the versions."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "card": torch.cuda.get_device_name(), "driver": driver.stdout.split("\n")[0], "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "numpy": np.__version__,
        },
    }
