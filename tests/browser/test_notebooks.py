"""Every notebook as a reader finds it on the web: run, made a page by nbconvert, light and dark.

Rests on: as ``test_hosts.py``; a notebook shows at least two pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import OURS, nbconverted

pytestmark = pytest.mark.browser

SOURCES = sorted((Path(__file__).parents[2] / "notebooks").glob("[0-9]*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
def test_a_notebook_is_legible(
    source: Path, page: Callable[..., Any], executed: Callable[[Path], Any], tmp_path: Path
) -> None:
    notebook = executed(source)
    notebook.cells = [cell for cell in notebook.cells if "answered" not in cell.metadata.get("tags", [])]
    for theme, prefers in (("light", "dark"), ("dark", "light")):
        tab = page(prefers)
        tab.open(nbconverted(notebook, theme), tmp_path)
        tab.tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        found = tab.tab.query_selector_all(OURS)
        assert len(found) >= 2
        assert not tab.faults_of({f"picture {number}, {theme}": one for number, one in enumerate(found, 1)})
        assert not tab.errors
        assert not tab.scrolls_sideways()
