"""The site: notebooks that have run, the documents and the reference, as pages that need no network.

    python -m tools.website.build [--out FOLDER] [--without-notebooks]    # `make site`

Notebooks run once for a state of the package, two at a time; what they showed is kept in build/website/executed.
A link that leads nowhere, or anything else that Sphinx warns of, is an error.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from traitlets.config import Config

from tools.website import explorers, pages, twins

ROOT, WORK = pages.ROOT, pages.WORK


def main(arguments: list[str] | None = None) -> int:
    """Build the site; the exit code is 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the pages; default: site")
    parser.add_argument("--without-notebooks", action="store_true", help="show them without outputs")
    given = parser.parse_args(arguments)
    start = time.monotonic()
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    notebooks = collect(source, run=not given.without_notebooks)
    _say(f"{len(notebooks)} notebooks are there", start)
    shutil.rmtree(given.out, ignore_errors=True)
    shutil.rmtree(WORK / "extra", ignore_errors=True)
    twins.write(WORK / "extra", texts_of(notebooks))
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-d", str(WORK / "trees"),
              "-c", str(Path(__file__).parent), str(source), str(given.out)]
    if subprocess.run(sphinx, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        return 1
    _say(f"{given.out / 'index.html'} is written", start)
    return 0


def collect(source: Path, *, run: bool) -> dict[str, Any]:
    """Put all pages below ``source``, as they lie in the checkout: page -> notebook."""
    source.mkdir(parents=True)
    for name in pages.COPIED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    for path in (source / "docs").glob("*.md"):  # an anchor is a target of links
        path.write_text(re.sub(r'^<a id="(.+)"></a>$', r"(\1)=", path.read_text("utf-8"), flags=re.MULTILINE), "utf-8")
    for name in pages.LINKED:
        (source / name).symlink_to(ROOT / name)
    static = source / "_static"
    written = {
        "index.md": pages.index(), "explorers.md": explorers.page(), "api/index.md": pages.api_index(),
        "_static/explorer.js": explorers.script(), "_static/explorer.css": explorers.style(),
        **{f"api/{room}.md": pages.api(room) for room in pages.ROOMS},
    }
    static.mkdir()
    (source / "api").mkdir()
    for name, text in written.items():
        (source / name).write_text(text, encoding="utf-8")
    (source / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.py"):
        if not path.stem[0].isdigit():
            shutil.copy(path, source / "notebooks")
    found = {}
    with ThreadPoolExecutor(2) as pool:
        paths = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
        for path, notebook in zip(paths, pool.map(executed if run else _stored, paths), strict=True):
            found[f"notebooks/{path.stem}"] = copy.deepcopy(notebook)
            for cell in explorers.alive(notebook).cells:
                cell.source = twins.without_tex(cell.source) if cell.cell_type == "markdown" else cell.source
            nbformat.write(notebook, source / "notebooks" / path.name)
    return found


def _stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def executed(path: Path) -> Any:
    """The notebook with its outputs: run, or as it ran with this package."""
    kept = WORK / "executed" / f"{path.stem}-{_key(path)}.ipynb"
    if kept.exists():
        return _stored(kept)
    notebook = _stored(path)
    with tempfile.TemporaryDirectory(prefix="kvlab-") as folder:  # the names of sockets must be short
        sockets = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}})
        place = {"metadata": {"path": str(path.parent)}}
        client = nbclient.NotebookClient(notebook, resources=place, config=sockets, timeout=600, startup_timeout=300)
        client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    kept.parent.mkdir(parents=True, exist_ok=True)
    for old in kept.parent.glob(f"{path.stem}-*"):
        old.unlink()
    nbformat.write(notebook, kept)
    return notebook


def _key(path: Path) -> str:
    """What a notebook's outputs depend on: itself and the package."""
    digest = hashlib.sha256(path.read_bytes())
    files = [one for one in (ROOT / "kvlab").rglob("*") if one.is_file() and "__pycache__" not in one.parts]
    for one in sorted([*files, *path.parent.glob("[a-z]*.py")]):
        digest.update(one.read_bytes())
    return digest.hexdigest()[:16]


def texts_of(notebooks: dict[str, Any]) -> dict[str, str]:
    """The Markdown of every page."""
    from tools.website.reference import room_text

    texts = {name: twins.notebook_text(notebook) for name, notebook in notebooks.items()}
    texts |= {f"api/{room}": room_text(room) for room in pages.ROOMS}
    paths = {name: ROOT / f"{name}.md" for names in pages.NAVIGATION.values() for name in names}
    return texts | {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.exists()}


def _say(what: str, start: float) -> None:
    print(f"kvlab: {what} [{time.monotonic() - start:.0f} s]", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
