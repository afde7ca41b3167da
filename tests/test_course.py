"""The course as a whole: no word of the field before the cell that explains it, something to mend on the way.

Rests on laws of the course: who reads the notebooks in their order meets each word of the glossary explained.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from kvlab.exercises.course import QUESTIONS

ROOT = Path(__file__).resolve().parents[1]
# Words of the glossary that notebooks use as everybody does, or only by their names in code.
EVERYDAY = {"BM", "BN", "BK", "format", "group", "item", "machine", "mirror", "schedule", "sink", "step", "unit"}


def words() -> list[str]:
    """First column of the glossary and of the words of notebook 0."""
    tables = (ROOT / "docs/glossary.md").read_text(), next(text for _, text in cells() if "## Twenty words" in text)
    rows = [line.split("|")[1] for table in tables for line in table.splitlines() if re.match(r"\| [\w ,]+\|", line)]
    return sorted({word.strip() for row in rows for word in row.split(",")} - EVERYDAY - {"word", ""})


@functools.cache
def cells() -> list[tuple[str, str]]:
    """Notebook and text of each Markdown cell, in the order of the course; without formulas, code and addresses."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                found.append((path.stem, re.sub(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", "".join(cell["source"]))))
    return found


def test_no_word_comes_before_its_explanation() -> None:
    """A word is explained where it stands in italics or in a first column of a table: in the first cell that has it."""
    missing, known = [], words()
    for word in known:
        sort = 0 if any(letter.isupper() for letter in word) else re.IGNORECASE
        used = re.compile(rf"(?<![\w/.]){re.escape(word)}(?:e?s)?(?![\w/])", sort)
        stands = rf"\b{re.escape(word)}"
        said = re.compile(rf"\*[^*\n]*{stands}[^*\n]*\*|^\|[^|]*{stands}[^|]*\|", sort | re.MULTILINE)
        first = next(((name, text) for name, text in cells() if used.search(text)), None)
        if first and not said.search(first[1]):
            missing.append((word, *first))
    assert len(known) > 50
    assert not missing


def test_a_notebook_has_something_to_mend() -> None:
    """A piece that is broken bears the word Debug. Notebook 0 is the map: nothing is built there yet."""
    found = {name[:2] for name, text in cells() if re.search(r"^## Debug: |\*\* Debug it\.", text, re.MULTILINE)}
    assert {name[:2] for name in QUESTIONS} - found == {"00"}
