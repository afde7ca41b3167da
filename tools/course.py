"""How long each notebook of the course takes a reader: what is in it, and minutes by a plain model.

    python tools/course.py          # a table; notebooks that have not run with this package run first
    python tools/course.py --still  # without running: no seconds, and no pictures

A model, no measurement: 200 words of prose and 40 lines of code in a minute, half a minute for a picture and for a
guess, a minute and a half for a question. Seconds are those that all cells together took when the notebook ran.
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHORTEST, LONGEST = 10, 25
"""Minutes of a notebook of the course."""
OURS = ("<svg", "kvlab-view")
"""What is in the HTML of a drawing, a lockstep, a report."""


class Size(NamedTuple):
    """What is in a notebook; ``lines`` of code without blank ones, ``seconds`` that its cells took when it ran."""

    words: int
    lines: int
    pictures: int
    guesses: int
    questions: int
    seconds: float

    @property
    def minutes(self) -> float:
        return (self.words / 200 + self.lines / 40 + self.pictures / 2 + self.guesses / 2 + self.questions * 1.5
                + self.seconds / 60)


def size(notebook: Any) -> Size:
    """Of a notebook, with its outputs or without.

    What cells print is not counted; a picture is an output that is more than text: a drawing, a lockstep, a report.
    """
    prose, code, outputs, seconds = [], [], [], 0.0
    for cell in notebook["cells"]:
        (prose if cell["cell_type"] == "markdown" else code).append(cell["source"])
        outputs += [one.get("data", {}) for one in cell.get("outputs", ())]
        times = cell.get("metadata", {}).get("execution", {})
        if "shell.execute_reply" in times:
            began, ended = (datetime.fromisoformat(times[name].replace("Z", "+00:00"))
                            for name in ("iopub.status.busy", "shell.execute_reply"))
            seconds += (ended - began).total_seconds()
    text, source = "\n".join(prose), "\n".join(code)
    return Size(
        words=len(re.findall(r"[^\W_]+(?:[-.,'’_][^\W_]+)*", re.sub(r"\]\([^)]*\)", "]", text))),
        lines=sum(bool(line.strip()) for line in source.splitlines()),
        pictures=sum("image/png" in one or any(ours in one.get("text/html", "") for ours in OURS) for one in outputs),
        guesses=len(re.findall(r"\bpredict\(", source)),
        questions=len(re.findall(r"\bask\(", source)),
        seconds=seconds,
    )


def main() -> None:
    """Print a row for each notebook."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--still", action="store_true", help="do not run them")
    still = parser.parse_args().still
    import nbformat

    from kvlab.common.text_table import text_columns
    from tools.website.build import executed

    paths = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    sizes = [size(nbformat.read(path, as_version=4) if still else executed(path)) for path in paths]
    rows = [(path.stem, *one[:-1], f"{one.seconds:.0f}", f"{one.minutes:.0f}")
            for path, one in zip(paths, sizes, strict=True)]
    table = [("notebook", *Size._fields, "minutes"), *(tuple(map(str, row)) for row in rows)]
    print(*text_columns(table, left=[0]), sep="\n")
    print(f"all: {sum(one.minutes for one in sizes) / 60:.1f} hours")


if __name__ == "__main__":
    main()
