"""Pages and files of our own: the demo's and mirror's pages, pictures as files, the files that the documents show.

Rests on: as ``test_hosts.py``; a page fits a narrow window, the demo's five screens until something is unfolded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab import viz
from kvlab.viz.pen.host import document

pytestmark = pytest.mark.browser


DOCUMENTS = sorted((Path(__file__).parents[2] / "docs").glob("*.svg"))


def demo(folder: Path) -> str:
    """The page that ``make demo`` writes, about the first step of each layer."""
    from kvlab.data import load_smollm2
    from kvlab.demo.page import write_page
    from kvlab.demo.steps import decode, paged_cache

    capture = load_smollm2()
    pool = paged_cache(capture, page_size=16)
    steps = [*islice(decode(capture, pool), len(capture.layers))]
    return write_page(folder, capture, pool, steps, None).read_text(encoding="utf-8")


def demo_of_a_users_capture(folder: Path) -> str:
    """The page about one layer, 12 prompt tokens, a step."""
    from kvlab.demo.__main__ import main

    q, k, v = (np.random.default_rng(3).standard_normal((13, heads, 64), np.float32) for heads in (4, 2, 2))
    np.savez(folder / "small.npz", q=q, k=k, v=v, prompt_tokens=12)
    assert main(["--input", str(folder / "small.npz"), "--output", str(folder)]) == 0
    return (folder / "index.html").read_text(encoding="utf-8")


def lockstep(name: str, folder: Path) -> str:
    from gallery import runs

    html: str = runs()[name].to_html(full=True)
    return html


def saved_svg(folder: Path) -> str:
    """The files of every picture, one after another."""
    from gallery import GALLERY

    files = [viz.save(viz.draw(make()), folder / f"{number}.svg") for number, make in enumerate(GALLERY.values())]
    return document("Files", "".join(file.read_text(encoding="utf-8") for file in files))


def saved_html(folder: Path) -> str:
    from gallery import followed

    return viz.save(followed(), folder / "picture.html").read_text(encoding="utf-8")


PAGES: dict[str, Callable[[Path], str]] = {
    "demo": demo,
    "demo of a user's capture": demo_of_a_users_capture,
    **{name: partial(lockstep, name) for name in ("lockstep", "lockstep, two twins", "lockstep that differs")},
    "pictures as .svg": saved_svg,
    "a picture as .html": saved_html,
    **{path.name: lambda _, path=path: document(path.name, path.read_text(encoding="utf-8")) for path in DOCUMENTS},
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_legible_and_fits_a_narrow_window(name: str, page: Callable[..., Any], tmp_path: Path) -> None:
    html = PAGES[name](tmp_path)
    for prefers in ("light", "dark"):
        tab = page(prefers)
        tab.open(html, tmp_path)
        if name.startswith("demo"):
            assert tab.tab.evaluate("document.documentElement.scrollHeight") <= 5 * 900, "screens"
        tab.tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert not tab.faults(tab.tab.query_selector("body")), prefers
        assert not tab.errors
        assert not tab.scrolls_sideways()
    tab = page(width=700)
    tab.open(html, tmp_path)
    assert not tab.scrolls_sideways()
