"""Everything that shows itself, inside the pages of others, measured by a browser.

Rests on: WCAG 2 (contrast of at least 4.5), and laws (text is whole, apart and inside its box; what we show has in
every host the styles that it has on an empty page; nothing that a picture needs is missing).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import FILES

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("host", FILES)
def test_what_shows_itself_is_legible_and_its_own(
    host: str, page: Callable[..., Any], bare: Any, outputs: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    around = FILES[host](outputs)
    tab = page(around.prefers)
    tab.open(around.html, tmp_path)
    exhibits = tab.exhibits(around.exhibits, list(outputs))
    assert not tab.faults_of(exhibits)
    assert not tab.changed(exhibits, bare[around.dark])
    assert not tab.errors
    assert not tab.scrolls_sideways()


FIRST = "document.querySelector('svg.kvlab').getBoundingClientRect().width"
HALVED = """document.querySelectorAll("svg.kvlab").forEach((one) => {
  one.style.width = one.getAttribute("width") / 2 + "px"; })"""


@pytest.mark.parametrize("prefers", ["light", "dark"])
def test_pictures_of_half_their_size_are_whole(
    prefers: str, page: Callable[..., Any], outputs: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """As a page that is seen at 50 % has them: letters are rounded to other widths."""
    around = FILES["plain page" if prefers == "light" else "plain page, dark"](outputs)
    tab = page(prefers)
    tab.open(around.html, tmp_path)
    wide = tab.tab.evaluate(FIRST)
    tab.tab.evaluate(HALVED)
    exhibits = tab.exhibits(around.exhibits, list(outputs))
    assert tab.tab.evaluate(FIRST) == pytest.approx(wide / 2, abs=1)
    assert not tab.faults_of(exhibits)
