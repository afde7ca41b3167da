"""Pages of our own: the demo's and mirror's. Rests on: as ``test_hosts.py``; a page fits a narrow window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def demo(tmp_path_factory: Any) -> str:
    """The page about a small capture: one layer, 12 prompt tokens, a step."""
    from kvlab.demo.__main__ import main

    folder = tmp_path_factory.mktemp("demo")
    q, k, v = (np.random.default_rng(3).standard_normal((13, heads, 64), np.float32) for heads in (4, 2, 2))
    np.savez(folder / "small.npz", q=q, k=k, v=v, prompt_tokens=12)
    assert main(["--input", str(folder / "small.npz"), "--output", str(folder)]) == 0
    return (folder / "index.html").read_text(encoding="utf-8")


def mirror(name: str) -> str:
    from gallery import runs

    html: str = runs()[name].to_html(full=True)
    return html


@pytest.mark.parametrize("prefers", ["light", "dark"])
@pytest.mark.parametrize("name", ["demo", "lockstep", "lockstep that differs"])
def test_a_page_is_legible(
    name: str, prefers: str, page: Callable[..., Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tab = page(prefers)
    tab.open(request.getfixturevalue("demo") if name == "demo" else mirror(name), tmp_path)
    assert not tab.faults(tab.tab.query_selector("body"))
    assert not tab.errors
    assert not tab.scrolls_sideways()


def test_the_demo_fits_a_narrow_window(demo: str, page: Callable[..., Any], tmp_path: Path) -> None:
    tab = page(width=700)
    tab.open(demo, tmp_path)
    assert not tab.scrolls_sideways()
