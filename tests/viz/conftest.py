"""What every picture must fulfil, as one fixture: ``sound(picture)`` returns the parsed SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

SVG = "{http://www.w3.org/2000/svg}"


def _font_sizes(element: ElementTree.Element, inherited: float, found: list[float]) -> None:
    size = float(element.get("font-size", inherited))
    if element.tag == f"{SVG}text":
        found.append(size)
    for child in element:
        _font_sizes(child, size, found)


def _sound(picture: Any) -> ElementTree.Element:
    for text in (picture.svg, picture.inline, picture.resolved("light"), picture.resolved("dark")):
        root = ElementTree.fromstring(text)  # well-formed XML
        assert root.get("role") == "img"
        assert root.get("aria-label") == picture.spoken
        assert picture.title in picture.spoken  # who hears the picture is told the finding
        assert picture.caption in picture.spoken
        assert len(picture.caption) > 20
        assert picture.caption.endswith(".")
        title = root.find(f"{SVG}title")
        assert title is not None
        assert title.text == picture.title
        sizes: list[float] = []
        _font_sizes(root, 16.0, sizes)
        assert min(sizes) >= 9  # smaller text is a hover title
        references = re.findall(r"(?:href|src)\s*=|url\(([^)]*)\)|@import|<script|<image|<foreignObject", text)
        assert all(reference.startswith("#kv") for reference in references)  # nothing from outside the file
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "@hatch" not in text
    for theme in ("light", "dark"):
        assert "var(" not in picture.resolved(theme)
        assert "currentColor" not in picture.resolved(theme)
    assert picture.width <= 900  # a notebook column
    shown = " ".join("".join(t.itertext()) for t in root.iter(f"{SVG}text"))
    for word in picture.title.split():
        assert word in shown
    return ElementTree.fromstring(picture.svg)


@pytest.fixture
def sound() -> Callable[[Any], ElementTree.Element]:
    """Checks the rules that hold for every picture."""
    return _sound


def _hovers(root: ElementTree.Element) -> list[str]:
    return [title.text or "" for group in root.iter(f"{SVG}g") if group.get("class") == "hover"
            for title in group.iter(f"{SVG}title")]


@pytest.fixture
def hovers() -> Callable[[ElementTree.Element], list[str]]:
    """The hover titles of the cells, in order."""
    return _hovers


def _overlaps(picture: Any) -> list[tuple[str, str]]:
    """Texts of one line that run into each other, by the writer's own estimate of widths."""
    from kvlab.viz.pen.text import text_width

    lines: dict[tuple[str, float], list[tuple[float, float, str]]] = {}

    def visit(element: ElementTree.Element, shift: str, inherited: dict[str, str]) -> None:
        here = {**inherited, **element.attrib}
        shift += element.get("transform", "")
        if element.tag == f"{SVG}text" and element.get("aria-hidden") is None and element.text:
            wide = text_width(element.text, float(here["font-size"]), "mono" in here.get("font-family", ""))
            left = float(element.get("x", 0)) - {"middle": wide / 2, "end": wide}.get(here.get("text-anchor", ""), 0.0)
            lines.setdefault((shift, float(element.get("y", 0))), []).append((left, left + wide, element.text))
        for child in element:
            visit(child, shift, {k: v for k, v in here.items() if k in ("font-size", "font-family", "text-anchor")})

    visit(ElementTree.fromstring(picture.svg), "", {})
    return [(a[2], b[2]) for line in lines.values() for a, b in pairwise(sorted(line)) if a[1] > b[0] + 1.5]


@pytest.fixture
def overlaps() -> Callable[[Any], list[tuple[str, str]]]:
    """Pairs of texts on one line that would overlap."""
    return _overlaps


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The registered pictures, a copy for one test."""
    from kvlab.common import drawn

    monkeypatch.setattr(drawn, "_DRAWERS", dict(drawn._DRAWERS))
    return drawn._DRAWERS
