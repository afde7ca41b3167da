"""Chromium, the objects that are looked at, and what is measured of them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlab.viz.pen.files import browser

HERE = Path(__file__).parent
PATIENCE = 240_000  # ms for anything of a browser: as much as a loaded machine may need, for what otherwise never comes
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def outputs() -> dict[str, dict[str, str]]:
    """What a notebook stores of each object of the gallery."""
    from gallery import GALLERY
    from hosts import outputs_of

    return outputs_of({name: make() for name, make in GALLERY.items()})


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The installed browser, driven by Playwright, which downloads none."""
    if browser() is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox"] if root else []
        options.append("--disable-dev-shm-usage")
        with driver.chromium.launch(executable_path=browser(), args=options, timeout=PATIENCE) as running:
            yield running


class Page:
    """A tab that takes nothing from outside this machine and remembers what went wrong in it."""

    def __init__(self, browser: Any, prefers: str, width: int = 1280, height: int = 1600):
        self.tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=prefers)
        self.tab.set_default_timeout(PATIENCE)
        self.errors: list[str] = []
        self.tab.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.route("**/*", self._only_here)

    @staticmethod
    def _only_here(route: Any) -> None:
        """Scripts of other machines, which nbconvert's template asks for, come and are empty; JupyterLab hears that
        there are no language servers, which it takes for an error otherwise.
        """
        url = route.request.url.partition("?")[0]
        if url.endswith("/lsp/status"):
            route.fulfill(status=200, json={"version": 2, "sessions": {}, "specs": {}})
        elif url.startswith(("http://127.0.0.1", "http://localhost", "file:", "data:", "blob:")):
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
        """What measure.js finds in one exhibit."""
        found: list[str] = exhibit.evaluate(_script("measure"))
        return found

    def styles(self, exhibit: Any) -> list[str]:
        """The computed style of every element of our tables and pictures, as far as a host could change it."""
        found: list[str] = exhibit.evaluate(_script("styles"))
        return found

    def faults_of(self, exhibits: dict[str, Any]) -> dict[str, list[str]]:
        """The faults of those that have any."""
        return {name: found for name, exhibit in exhibits.items() if (found := self.faults(exhibit))}

    def changed(self, exhibits: dict[str, Any], bare: dict[str, list[str]]) -> dict[str, list[tuple[str, str]]]:
        """Where the styles here differ from those on an empty page: the first of each exhibit."""
        both = {name: [*zip(self.styles(exhibit), bare[name], strict=True)] for name, exhibit in exhibits.items()}
        return {name: apart[:1] for name, pairs in both.items() if (apart := [p for p in pairs if p[0] != p[1]])}

    def scrolls_sideways(self) -> bool:
        return bool(self.tab.evaluate("document.documentElement.scrollWidth > innerWidth"))


@functools.cache
def _script(name: str) -> str:
    return (HERE / f"{name}.js").read_text(encoding="utf-8")


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


@pytest.fixture(scope="module")
def bare(chromium: Any, outputs: dict[str, dict[str, str]], tmp_path_factory: Any) -> dict[bool, dict[str, list[str]]]:
    """The styles of each exhibit on an empty page, light (False) and dark (True)."""
    from hosts import FILES

    found = {}
    for host in (FILES["plain page"](outputs), FILES["plain page, dark"](outputs)):
        one = Page(chromium, host.prefers)
        one.open(host.html, tmp_path_factory.mktemp("bare"))
        found[host.dark] = {name: one.styles(e) for name, e in one.exhibits(host.exhibits, list(outputs)).items()}
        one.tab.close()
    return found
