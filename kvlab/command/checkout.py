"""``kvlab lab`` and ``kvlab bench``: what lies beside the package in its repository."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from kvlab.command.answers import Answer

ROOT = Path(__file__).parents[2]


def folder(name: str) -> Path:
    """A folder of the repository. ValueError where the package is installed without one."""
    found = ROOT / name
    if not found.is_dir():
        raise ValueError(f"{name} are not part of the installed package: must be in a clone of kvlab's repository")
    return found


def lab(arguments: Sequence[str]) -> int:
    """Opens the notebooks in JupyterLab; the exit code is its own."""
    notebooks = folder("notebooks")
    if importlib.util.find_spec("jupyterlab") is None:
        raise ImportError("jupyterlab is not installed: pip install -e '.[notebooks]', in kvlab's own folder")
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(notebooks), *arguments]).returncode


def benchmarks() -> dict[str, str]:
    """Each benchmark and the first line of what it says of itself."""
    found = {}
    for path in sorted(folder("benchmarks").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def listed() -> Answer:
    """``kvlab bench`` without a name."""
    found = benchmarks()
    width = max(map(len, found))
    lines = [f"[bold]{name:{width}}[/bold]  {escape(words)}" for name, words in found.items()]
    return Answer("\n".join(lines), {"benchmarks": found})


def bench(name: str, arguments: Sequence[str]) -> int:
    """Runs one benchmark of the repository; the exit code is its own."""
    known = benchmarks()
    if name not in known:
        raise ValueError(f"benchmark is {name!r}: must be one of {', '.join(known)}")
    path = folder("benchmarks") / f"{name}.py"
    return subprocess.run([sys.executable, str(path), *arguments], cwd=ROOT).returncode
