"""Notebooks with their questions answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvlab.common.checks import require

from .asking import question


def solution(name: str) -> str:
    """The code that answers a question. ValueError for an unknown name.

    >>> solution("02.offset"), solution("02.transposed")
    ('offset = 389', "transposed = '(32,8):(1,40)'")
    """
    asked = question(name)
    return asked.solution or f"{name[3:]} = {asked.answer!r}"


def solve(source: Path, target: Path) -> list[str]:
    """Write a notebook with the cell before each ``ask`` answered: the names of its questions, in their order.

    source, target   the ``.ipynb`` as it is, and the one that is written

    Raises ValueError where a question has no cell with the tag "question" before it.
    """
    notebook = json.loads(source.read_text(encoding="utf-8"))
    asked: list[str] = []
    free: list[dict[str, Any]] = []
    for cell in notebook["cells"]:
        if "question" in cell["metadata"].get("tags", []):
            free.append(cell)
        for name in re.findall(r'\bask\("([^"]+)"', "".join(cell["source"])) if cell["cell_type"] == "code" else ():
            require(free, f"{source.name} asks {name}", "after a cell with the tag question")
            free.pop()["source"] = solution(name).splitlines(keepends=True)
            asked.append(name)
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return asked
