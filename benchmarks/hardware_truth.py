"""Everything that the emulator claims about the chip, asked of the chip: the records under tests/data/hardware.

    python benchmarks/hardware_truth.py [--only images fragments accesses kernels] [--output tests/data/hardware]

Needs a Hopper GPU with torch and Triton, nvcc (CUDA 12.8 or newer) and, for accesses and kernels, Nsight Compute with
access to the counters. The CPU tests tests/hardware/test_truth*.py compare the emulator with what is recorded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import gpu_record
from truth import accesses, fragments, images, profiler, records, whole

PARTS = {
    "images": images.record,
    "fragments": fragments.record,
    "accesses": accesses.record,
    "kernels": whole.record,
}


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=records.FOLDER)
    options = parser.parse_args()
    facts = gpu_record.facts()
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    facts["versions"] |= {"nvcc": re.findall(r"V([\d.]+)", nvcc)[0], "ncu": profiler.version()}
    failed = False
    for part in options.only:
        start = time.perf_counter()
        head = {"command": f"python benchmarks/hardware_truth.py --only {part}", **facts}
        try:
            records.write(options.output, part, {**head, **PARTS[part]()})
        except Exception:  # the other parts are worth having
            traceback.print_exc()
            failed = True
        print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
