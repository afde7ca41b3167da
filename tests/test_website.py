"""The site's contents: every page, notebook and room is in them. Rests on looking.

`make site` builds it and checks links.
"""

from __future__ import annotations

from pathlib import Path

import kvlab
from tools.website import explorers, pages, twins

ROOT = Path(__file__).resolve().parents[1]


def test_every_page_and_notebook_is_in_the_contents() -> None:
    listed = [name for names in pages.NAVIGATION.values() for name in names]
    there = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    there |= {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert len(listed) == len(set(listed))
    assert set(listed) == there | {"README", "CONTRIBUTING", "explorers", "api/index"}


def test_every_room_with_public_names_has_a_page() -> None:
    rooms = {room.split(".")[1] for room in pages.ROOMS}
    assert rooms >= set(kvlab._ROOMS) - {"triton_support"}
    assert "PagedKVCache" in pages.public("kvlab.cache")
    assert "RegTileLoader" not in pages.public("kvlab.staging"), "it is on the page of hardware"


def test_pages_load_nothing_from_elsewhere() -> None:
    """A law: what an explorer runs is no module, which a browser would not load from a file, and names no address."""
    script = explorers.script()
    assert "\nexport " not in script
    assert "import(" not in script
    assert "https://" not in (script + explorers.style()).replace("https://www.w3.org", "")
    assert explorers.page().count('type="kvlab/explorer"') >= 5


def test_twins_have_the_words_of_pictures(tmp_path: Path) -> None:
    twins.write(tmp_path, {"docs/command": "# The command\n\nIt runs. And more.\n"})
    text = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert "- [The command](docs/command.md): It runs.\n" in text
    assert (tmp_path / "docs" / "command.md").exists()
    assert "It runs. And more." in (tmp_path / "llms-full.txt").read_text(encoding="utf-8")
