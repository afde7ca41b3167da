"""``pytest -m gpu`` on a machine with a GPU, recorded as JSON.

    python tests/gpu/suite.py [-n 14] [--output tests/data/hardware/gpu_suite.json]

``-n`` processes share the GPU and the compiling. What pytest prints is printed; its exit status is this program's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
#: Where tests marked gpu are: to collect from all of tests/ takes longer than to run some of them.
ROOMS = ("tests/gpu", "tests/integrations", "tests/triton_support/test_interpreter_gpu.py")


def summary(junit: Path) -> dict[str, Any]:
    """Of a JUnit file of pytest: how many tests, how many passed, failed and were skipped, and the names of the failed.

    An error in a fixture is a failure.
    """
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    outcome = [{child.tag for child in case} for case in cases]
    wrong = [bool(tags & {"failure", "error"}) for tags in outcome]
    skipped = sum("skipped" in tags for tags in outcome)
    return {
        "tests": len(cases), "passed": len(cases) - sum(wrong) - skipped, "failed": sum(wrong), "skipped": skipped,
        "failures": [f"{c.get('classname')}::{c.get('name')}" for c, bad in zip(cases, wrong, strict=True) if bad],
    }


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=14, help="processes")
    parser.add_argument("--output", type=Path, help="where the record goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", str(options.n), "--dist", "worksteal"]
        command += ["--tb=short", "-p", "no:cacheprovider", f"--junitxml={junit}", *ROOMS]
        status = subprocess.run(command, cwd=ROOT).returncode
        if not junit.exists():
            sys.exit(f"pytest wrote no report, exit status {status}")
        found = summary(junit)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_record

    record = {"command": f"python tests/gpu/suite.py -n {options.n}", **gpu_record.facts(), **found}
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
