"""Everything that the emulator claims about the chip, asked of the chip: the records under tests/data/hardware.

    python benchmarks/hardware_truth.py [--only images fragments accesses copies kernels] [--output tests/data/hardware]

Needs a Hopper GPU with torch and Triton, and kvlab where Python finds it (`pip install -e .` or PYTHONPATH=.). What
else a part needs: fragments, accesses and copies nvcc (CUDA 12.8 or newer); accesses, copies and kernels Nsight Compute
with access to the counters (root, as a rule), and nothing else on the GPU. A part that fails does not keep the others
from being written: each runs in a process of its own, since a fault ends what a process may do with the GPU. An
interrupted part goes on where it stopped when it is called again. The CPU tests tests/hardware/test_*.py compare the
emulator with what is recorded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from truth import accesses, chip, copies, fragments, images, profiler, records, whole

PARTS: dict[str, Callable[[records.Steps], dict[str, Any]]] = {
    "images": images.record,
    "fragments": fragments.record,
    "accesses": accesses.record,
    "copies": copies.record,
    "kernels": whole.record,
}


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--output", type=Path, default=records.FOLDER)
    options = parser.parse_args()
    try:
        about = facts()
    except RuntimeError as error:
        sys.exit(str(error))
    if len(options.only) == 1:
        sys.exit(not write(options.only[0], options.output, about))
    command = [sys.executable, __file__, "--output", str(options.output), "--only"]
    failed = [part for part in options.only if subprocess.run([*command, part]).returncode]
    print(f"failed: {', '.join(failed)}" if failed else "all parts are written")
    sys.exit(bool(failed))


def write(part: str, output: Path, about: dict[str, Any]) -> bool:
    """Record a part, say how long it took, and whether it is written."""
    start = time.perf_counter()
    head = {"command": f"python benchmarks/hardware_truth.py --only {part}", **about}
    step = records.Steps(output, part, head)
    try:
        records.write(output, part, {**head, **PARTS[part](step)})
        step.forget()
    except Exception as error:  # the other parts are worth having
        traceback.print_exc()
        kept = f"; {len(step.done)} finished steps are kept in {step.path}" if step.done else ""
        print(f"{part}: {error}{kept}", flush=True)
        return False
    print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
    return True


def facts() -> dict[str, Any]:
    """The card, its driver, the date, the versions, of the tools those that are there; RuntimeError without Hopper."""
    import gpu_record
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("hardware_truth.py needs a Hopper GPU")
    found = gpu_record.facts()
    for tool, version in (("nvcc", _nvcc_version), ("ncu", profiler.version)):
        try:
            found["versions"][tool] = version()
        except RuntimeError as missing:
            print(missing, flush=True)
    return found


def _nvcc_version() -> str:
    text = subprocess.run([chip.nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"V([\d.]+)", text)[0]


if __name__ == "__main__":
    main()
