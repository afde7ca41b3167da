"""The measure itself: each fault that it looks for is told of a page that has it.

Rests on: laws, and WCAG 2's contrast of black, greys and white (#999 on white has 2.85, #777 on black 4.69).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab.viz.pen.svg import Canvas

pytestmark = pytest.mark.browser

GOOD = '<text x="9" y="30">one</text><text x="60" y="30">two</text>'
ONE = '<text x="9" y="30" fill="#000">one</text>'
DRAWN = {
    "nothing": (GOOD, []),
    "overlap": (GOOD + '<text x="14" y="31">three</text>', ['overlap: "one" and "three"']),
    "clipped": (GOOD + '<text x="185" y="30">much too long</text>', ['clipped: "much too long"']),
    "pale": (GOOD + '<text x="9" y="60" fill="#999">pale</text>', ['contrast 2.85: "pale"']),
    "pale, inactive": (GOOD + '<text x="9" y="60" fill="#999" class="inactive">pale</text>', []),
    "faint": (GOOD + '<text x="9" y="60" opacity=".4">faint</text>', ['contrast 2.85: "faint"']),
    "on a dark box": ('<rect width="99" height="99" fill="#444"/>' + ONE, ['contrast 2.16: "one"']),
    "on a box seen through": ('<rect width="99" height="99" fill="#444" opacity=".1"/>' + ONE, []),
    "covered": (GOOD + '<rect x="55" y="15" width="60" height="20" fill="#eee"/>', ['covered by rect: "two"']),
}
VIEWED = {
    "cut off": ('<div style="width:60px;overflow:hidden;white-space:nowrap">much too long</div>', ["clipped"]),
    "spaces where a line breaks": (
        '<div style="width:60px;overflow:hidden"><pre style="white-space:pre-wrap">one two      three</pre></div>',
        [],
    ),
    "pale": ('<p style="color:#999">pale</p>', ["contrast 2.85"]),
    "over another": ('<p>below</p><p style="margin-top:-30px">above</p>', ["overlap"]),
    "aligned right": ('<table><tr><td style="text-align:right">1<tr><th>2</table>', ["aligned right"]),
    "too wide": ('<p style="width:400px">wide</p>', ["wider than its column"]),
}


def faults(page: Callable[..., Any], body: str, folder: Path) -> list[str]:
    tab = page(width=300)
    tab.open(f'<!doctype html><body><div class="output" style="width:200px">{body}</div>', folder)
    found: list[str] = tab.faults(tab.tab.query_selector(".output"))
    return found


@pytest.mark.parametrize("name", DRAWN)
def test_faults_of_pictures(name: str, page: Callable[..., Any], tmp_path: Path) -> None:
    shapes, told = DRAWN[name]
    svg = f'<svg class="kvlab" width="200" height="100" font-family="monospace" font-size="12">{shapes}</svg>'
    assert faults(page, svg, tmp_path) == told


@pytest.mark.parametrize("name", VIEWED)
def test_faults_of_views(name: str, page: Callable[..., Any], tmp_path: Path) -> None:
    body, told = VIEWED[name]
    found = faults(page, f'<div class="kvlab-view">{body}</div>', tmp_path)
    assert {fault.partition(":")[0] for fault in found} >= set(told)
    assert bool(found) == bool(told)


@pytest.mark.parametrize(
    "rule, told",
    [
        ("td{text-align:right}", "text-align=right"),
        ("tr:nth-child(odd){background:#eee}", "background-color=rgb(238, 238, 238)"),
        ("td{border:1px solid red}", "border-top-width=1px"),
        ("pre{font-size:30px}", "font-size=30px"),
        ("svg text{letter-spacing:2px}", "letter-spacing=2px"),
    ],
)
def test_styles_of_a_host_are_seen(rule: str, told: str, page: Callable[..., Any], tmp_path: Path) -> None:
    body = '<div class="kvlab-view"><table><tr><td>1<tr><td>2</table><pre>3</pre></div>'
    svg = '<svg class="kvlab"><text y="20">4</text></svg>'
    tab, before = page(), []
    for style in ("", rule):
        tab.open(f'<style>{style}</style><div class="output">{body}{svg}</div>', tmp_path)
        exhibits = {"one": tab.tab.query_selector(".output")}
        if not style:
            before = tab.styles(exhibits["one"])
    ((_, changed),) = tab.changed(exhibits, {"one": before}).items()
    assert told in changed[0][0]
    assert told not in changed[0][1]


def test_errors_and_pages_that_scroll_are_seen(page: Callable[..., Any], tmp_path: Path) -> None:
    tab = page(width=300)
    tab.open("<script>undefined.x</script><img src=data:image/png;base64,><p style=width:400px>wide", tmp_path)
    assert tab.errors
    assert tab.scrolls_sideways()


@pytest.mark.parametrize("word", ["mmWWMM" * 8, "Sw<3,3,3>o(8,8):(8,1)" * 3, "0123456789" * 5])
def test_a_long_word_of_a_title_or_caption_is_whole(word: str, page: Callable[..., Any], tmp_path: Path) -> None:
    """Rests on the browser's measure of the text."""
    canvas = Canvas()
    for name, title, caption in (("title", word, "c"), ("caption", "t", word)):
        picture = canvas.picture(title, caption)
        tab = page(width=1500)
        tab.open(f'<!doctype html><body><div class="output">{picture.svg}</div>', tmp_path)
        assert tab.faults(tab.tab.query_selector(".output")) == [], name
