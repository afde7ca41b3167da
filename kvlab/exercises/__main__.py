"""``python -m kvlab.exercises NOTEBOOK.ipynb ... --output DIR``: the notebooks with their questions answered."""

from __future__ import annotations

import argparse
from pathlib import Path

from .solving import solve

WHAT = "Notebooks with their questions answered."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.exercises", description=WHAT)
    parser.add_argument("notebooks", nargs="+", type=Path, help="notebooks of the course, .ipynb")
    parser.add_argument("--output", type=Path, default=Path("solved"), help="their folder (default: solved)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for path in options.notebooks:
        target = options.output / path.name
        print(f"{target}: {len(solve(path, target))} questions")


if __name__ == "__main__":
    main()
