"""The writer: runs, extent, escaping.

These rest on laws: a run covers the cells that it stands for, a text is escaped once.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from kvlab.viz.pen.palette import BANKS
from kvlab.viz.pen.svg import BoxGrid, Canvas
from kvlab.viz.pen.text import number, text_width, wrap


def areas(svg: str) -> dict[str, float]:
    """Filled area by colour, from the path's own numbers."""
    found: dict[str, float] = {}
    for d, fill in re.findall(r'<path d="(M[^"]*z)" fill="([^"]*)"', svg):
        for w, h in re.findall(r"h([\d.]+)v([\d.]+)h-", d):
            found[fill] = found.get(fill, 0.0) + float(w) * float(h)
    return found


def test_merged_runs_cover_their_cells() -> None:
    rng = np.random.default_rng(0)
    index = rng.integers(-2, 3, (20, 30))
    canvas = Canvas()
    xs = 7 * np.arange(30) + np.where(np.arange(30) >= 12, 11, 0)  # a fold's gap must not be filled
    canvas.cells(BoxGrid(xs, 5 * np.arange(20), 7, 5), index, BANKS)
    covered = areas(canvas.picture("t", "c").body)
    for key in (0, 1, 2):
        assert covered[BANKS[key]] == 35 * (index == key).sum()
    assert covered["url(#@hatch)"] == 35 * (index == -1).sum()
    assert sum(covered.values()) == 35 * (index != -2).sum()


def test_equal_neighbours_are_one_run() -> None:
    canvas = Canvas()
    canvas.cells(BoxGrid([0, 5, 10, 15], [0], 5, 5), [[1, 1, 1, 1]], BANKS, rules=False)
    assert canvas.picture("t", "c").body.count("M0 0h20v5h-20z") == 1


def test_strings_are_escaped() -> None:
    canvas = Canvas()
    canvas.text(0, 0, "a < b & c")
    canvas.rect(0, 0, 1, 1, title="x > y")
    canvas.labels([0], [0], ["<"], [None])
    canvas.hover(BoxGrid([0, 1], [0], 1, 1), "%d < %d\nbank %s", [1, 2], [3, 4], [["&", "b"]])
    picture = canvas.picture('<"title">', 'caption & "quotes".')
    assert "a &lt; b &amp; c" in picture.svg
    assert "<title>1 &lt; 3\nbank" in picture.svg
    assert 'aria-label="&lt;&quot;title&quot;&gt;. caption &amp; &quot;quotes&quot;."' in picture.svg


def test_what_xml_cannot_write_is_replaced() -> None:
    """Rests on XML 1.0: control characters have no escape; one in a name would make the whole picture unreadable."""
    canvas = Canvas()
    canvas.text(0, 0, "a\x00b\x1b[0m\ttab")
    assert "a\ufffdb\ufffd[0m\ttab" in ElementTree.fromstring(canvas.picture("t", "c").svg).itertext()


def test_half_a_character() -> None:
    """Rests on UTF-8, which holds no lone surrogate: replaced inside, named where it is the caller's title."""
    canvas = Canvas()
    canvas.text(0, 0, "a\udc80b")
    assert "a\ufffdb" in ElementTree.fromstring(canvas.picture("t", "c").svg.encode()).itertext()
    for title, caption, name in (("a\ud800", "c", "title"), ("t", "\udfffc", "caption")):
        with pytest.raises(ValueError, match=rf"^{name} .* has half a character") as caught:
            canvas.picture(title, caption)
        assert type(caught.value) is ValueError


def test_small_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"text 'x' of 8 px is smaller than 9.0 px"):
        Canvas().text(0, 0, "x", size=8)
    with pytest.raises(ValueError, match=r"labels of 8 px"):
        Canvas().labels([0], [0], ["x"], [None], size=8)


def test_wrong_index_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 2\) does not fit 1 rows and 3 columns"):
        Canvas().cells(BoxGrid([0, 1, 2], [0], 1, 1), [[0, 0]], BANKS)


def test_hover_accepts_any_text_of_the_caller() -> None:
    canvas = Canvas()
    canvas.hover(BoxGrid([0], [0], 1, 1), "%s", [["50 % & <more>"]])
    assert "50 % &amp; &lt;more&gt;" in canvas.picture("t", "c").body


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0, -0.0, 10, 100.0, 1 / 3, -2.5)] == ["0", "0", "10", "100", "0.33", "-2.5"]


def test_wrapped_lines_fit() -> None:
    text = "the eight rows of a column lie in eight bank groups instead of one"
    lines = wrap(text, 160, 12)
    assert " ".join(lines) == text
    assert all(text_width(line, 12) <= 160 for line in lines)
