"""compute-sanitizer on one small case of each kernel, memcheck and racecheck, recorded as JSON.

    python tests/gpu/sanitizer.py --output tests/data/hardware/sanitizer.json [--sanitizer PATH]

Each kernel and tool has a process of its own. Canaries and poison are the other tests' work: this one asks the hardware
tool whether an access leaves an allocation, or two of a block race in shared memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from kvlab import attention

TOOLS = ("memcheck", "racecheck")
N, PAGE, B = 100, 16, 2


def random(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def integers(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def paged(*row: int) -> Any:
    return random(20, PAGE, *row)


def table() -> Any:
    return torch.arange(14, dtype=torch.int32, device="cuda").flip(0).reshape(B, 7)


def run(name: str) -> None:
    """Launch one kernel on two sequences of 100 and 37 keys."""
    lens, starts = integers(N, 37), integers(0, 9, 17)
    if name == "mha_decode":
        q, k, v = random(B, 4, 64), paged(2, 64), paged(2, 64)
        attention.mha_decode_paged(q, k, v, table(), lens, num_splits=3, backend="triton")
    elif name == "mha_decode_hopper":  # blocks enough that stages are used again; the last one is cleaned
        q, k, v = random(B, 4, 64), paged(2, 64), paged(2, 64)
        attention.mha_decode_paged(q, k, v, table(), lens, num_splits=1, backend="hopper")
    elif name == "mha_decode_streaming":
        q = random(B, 4, 64)
        attention.mha_decode_streaming_paged(q, paged(2, 64), paged(2, 64), table(), lens, num_splits=3)
    elif name == "mha_decode_fp8":
        k, v = (paged(2, 64).to(torch.float8_e4m3fn) for _ in "kv")
        attention.mha_decode_paged(random(B, 4, 64), k, v, table(), lens, k_scale=0.5, v_scale=2.0, backend="triton")
    elif name in ("mha_prefill", "mha_prefill_hopper"):
        backend = "hopper" if name.endswith("hopper") else "triton"
        q, k, v = random(1, N, 4, 128), random(1, N, 2, 128), random(1, N, 2, 128)
        attention.mha_prefill(q, k, v, backend=backend)
    elif name == "mha_prefill_hopper_fp8":
        q, k, v = (random(1, N, heads, 128).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
        attention.mha_prefill(q, k, v, backend="hopper")
    elif name == "mha_prefill_hopper_tiles":  # 320, so that buffers are used again
        q, k, v = random(1, 80 * 128, 4, 128), random(1, N, 2, 128), random(1, N, 2, 128)
        attention.mha_prefill(q, k, v, causal=False, backend="hopper")
    elif name == "mha_prefill_hopper_paged":
        q, k, v = random(17, 4, 128), paged(2, 128), paged(2, 128)
        attention.mha_prefill_paged(q, k, v, table(), lens, starts, backend="hopper")
    elif name == "mha_prefill_paged":
        q, k, v = random(17, 4, 64), paged(2, 64), paged(2, 64)
        attention.mha_prefill_paged(q, k, v, table(), lens, starts, backend="triton")
    elif name == "mla_decode":
        attention.mla_decode_paged(random(B, 16, 576), paged(576), table(), lens, num_splits=2)
    elif name == "mla_decode_hopper":  # five blocks, so that stages are used again; the last one is cleaned
        pages = torch.arange(20, dtype=torch.int32, device="cuda").flip(0)[None]
        q = random(1, 4, 16, 576)
        attention.mla_decode_paged(q, paged(576), pages, integers(300), num_splits=1, backend="hopper")
    elif name == "mla_prefill":
        k, v = random(137, 2, 128), random(137, 2, 128)
        keys = integers(0, N, N + 37)
        attention.mla_prefill_paged(random(17, 2, 192), k, v, paged(576), table(), lens, starts, keys)
    elif name == "kv_store":
        k, v, slots = random(9, 2, 64), random(9, 2, 64), torch.arange(9, device="cuda") * 7
        attention.kv_store_paged(k, v, paged(2, 64), paged(2, 64), slots)
    torch.cuda.synchronize()


CASES = (
    "mha_decode", "mha_decode_hopper", "mha_decode_streaming", "mha_decode_fp8", "mha_prefill", "mha_prefill_paged",
    "mha_prefill_hopper", "mha_prefill_hopper_fp8", "mha_prefill_hopper_tiles", "mha_prefill_hopper_paged",
    "mla_decode", "mla_decode_hopper", "mla_prefill", "kv_store",
)


def checked(program: str, case: tuple[str, str]) -> dict[str, Any]:
    """What the tool says of a kernel."""
    name, tool = case
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--case", name]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    said = [line for line in lines if "SUMMARY" in line]
    races = [line for line in lines if "access at" in line]  # the two sides of each pair
    return {
        "kernel": name, "tool": tool, "exit": done.returncode, "said": said, "races": races[:200],
        "error": done.stderr[-300:].strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="only launch this kernel, without the tool")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program, if not that of the PATH")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.case:
        run(options.case)
        return
    version = subprocess.run([options.sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(partial(checked, options.sanitizer), [(name, tool) for name in CASES for tool in TOOLS]))
    for line in found:
        print(line["kernel"], line["tool"], "exit", line["exit"], *line["said"], line["error"])
    record = {
        "command": "python tests/gpu/sanitizer.py", "card": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__,
            "compute-sanitizer": version.split("Version ")[1].split()[0],
        },
        "runs": found,
    }
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    if any(line["exit"] for line in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
