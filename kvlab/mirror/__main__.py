"""``python -m kvlab.mirror [operation ..]``: the coverage of these operations' twins, by default of all."""

from __future__ import annotations

import sys
from pathlib import Path

from kvlab.mirror.covered import coverage

if __name__ == "__main__":
    folder = Path(__file__).parents[1] / "attention"
    known = sorted(
        ".".join(("kvlab", *path.parent.relative_to(folder.parent).parts))
        for path in folder.rglob("config.py") if "TWINS" in path.read_text(encoding="utf-8")
    )
    for name in sys.argv[1:] or known:
        print(f"{name}\n{coverage(name)}\n")
