"""The page of formats is that of the catalogue, each format with an anchor of its own. Rests on the package itself."""

from __future__ import annotations

from pathlib import Path

from kvlab.formats import CATALOGUE
from tools import formats

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_written_from_the_catalogue() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert text == formats.page()
    anchors = [known.anchor for known in CATALOGUE.values()]
    assert len(set(anchors)) == len(anchors)
    assert [f'<a id="{anchor}"></a>' in text for anchor in anchors] == [True] * len(anchors)
    assert {"the-656-byte-row", "the-584-byte-row"} <= set(anchors)
