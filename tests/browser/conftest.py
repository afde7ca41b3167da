"""Chromium, the objects that are looked at, and what is measured of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The installed browser, driven by Playwright, which downloads none."""
    from playwright.sync_api import sync_playwright

    from kvlab.viz.files import browser

    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"] if root else []) as running:
            yield running


class Page:
    """A tab that takes nothing from outside this machine and remembers what went wrong in it."""

    def __init__(self, browser: Any, prefers: str, width: int = 1280, height: int = 1600):
        self.tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=prefers)
        self.errors: list[str] = []
        self.tab.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.route("**/*", self._only_here)

    @staticmethod
    def _only_here(route: Any) -> None:
        """nbconvert's template asks for scripts of other machines: they come, and are empty."""
        here = route.request.url.startswith(("http://127.0.0.1", "http://localhost", "file:", "data:", "blob:"))
        if here:
            route.continue_()
        else:
            route.fulfill(status=200, content_type="text/javascript", body="")

    def open(self, html: str, folder: Path) -> None:
        path = folder / "page.html"
        path.write_text(html, encoding="utf-8")
        self.tab.goto(path.as_uri())

    def exhibits(self, selector: str, names: list[str]) -> dict[str, Any]:
        found = self.tab.query_selector_all(selector)
        assert len(found) == len(names)
        return dict(zip(names, found, strict=True))

    def faults(self, exhibit: Any) -> list[str]:
        """What measure.js finds in one exhibit. What scrolls is opened first, so that all of it is seen."""
        exhibit.evaluate("e => e.querySelectorAll('.sources').forEach(s => s.style.maxHeight = 'none')")
        tall = exhibit.evaluate("e => Math.ceil(e.getBoundingClientRect().height)")
        size = self.tab.viewport_size
        if tall + 200 > size["height"]:
            self.tab.set_viewport_size({"width": size["width"], "height": tall + 400})
        exhibit.evaluate("e => e.scrollIntoView({block: 'start', behavior: 'instant'})")
        found: list[str] = exhibit.evaluate((HERE / "measure.js").read_text(encoding="utf-8"))
        return found

    def styles(self, exhibit: Any) -> list[str]:
        """The computed style of every element of our tables and pictures, as far as a host could change it."""
        found: list[str] = exhibit.evaluate((HERE / "styles.js").read_text(encoding="utf-8"))
        return found


@pytest.fixture
def page(chromium: Any) -> Iterator[Callable[..., Page]]:
    """``page(prefers)`` opens a tab."""
    opened: list[Page] = []

    def make(prefers: str = "light", **how: int) -> Page:
        opened.append(Page(chromium, prefers, **how))
        return opened[-1]

    yield make
    for one in opened:
        one.tab.close()
