"""The site that `make site` has built, walked from file to file: nothing is missing, nothing comes from elsewhere.

Rests on what a browser says of each page. Left out where no site is built.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.website import pages

SITE = Path(__file__).resolve().parents[2] / "site"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no site is built: make site"),
]


def test_every_page_is_whole(page: Callable[..., Any]) -> None:
    names = ["index", *(name for names in pages.NAVIGATION.values() for name in names)]
    names += [f"api/{room}" for room in pages.ROOMS]
    outside: list[str] = []
    tab = page()
    tab.tab.on("request", lambda one: one.url.startswith(("file:", "data:", "blob:")) or outside.append(one.url))
    for name in names:
        tab.tab.goto((SITE / f"{name}.html").as_uri())
        assert not tab.errors, name
        for width in (400, 1280):  # a telephone, a desk
            tab.tab.set_viewport_size({"width": width, "height": 900})
            assert not tab.scrolls_sideways(), (name, width)
        stored = tab.tab.locator("script[type='kvlab/explorer']").count()
        assert tab.tab.locator(".kvlab-explorer svg").count() == stored, name
        assert (SITE / f"{name}.md").exists() or name in ("index", "explorers", "api/index"), name
    assert not outside


def test_explorers_move_and_follow_the_theme(page: Callable[..., Any]) -> None:
    tab = page("dark")
    tab.tab.goto((SITE / "explorers.html").as_uri())
    first = tab.tab.locator(".kvlab-explorer").first
    before = first.inner_html()
    first.locator(".picture").focus()
    tab.tab.keyboard.press("ArrowRight")
    assert first.inner_html() != before
    assert first.evaluate("(e) => getComputedStyle(e).colorScheme") == "dark"
    assert not tab.faults(first.element_handle())


def test_words_are_found_without_a_server(page: Callable[..., Any]) -> None:
    tab = page()
    tab.tab.goto((SITE / "search.html").as_uri() + "?q=wavefronts")
    tab.tab.wait_for_selector("#search-results li a")
    assert tab.tab.locator("#search-results li").count() > 3
