"""The demo: its exit status, its table and its page on small captures; bad input is told, not shown as a traceback.

Rests on: the float64 reference (through the demo's own bound), and laws (a page is self-contained; a fault is found).
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kvlab.attention.mha_decode import emulator
from kvlab.data import load_capture, load_smollm2
from kvlab.demo import pictures
from kvlab.demo.__main__ import main
from kvlab.demo.steps import grow, paged_cache

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One layer, 20 prompt tokens and 2 steps of 4 query heads over 2 KV heads, float32."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((22, heads, 64), np.float32) for heads in (4, 2, 2))
    path = tmp_path / "small.npz"
    np.savez(path, q=q, k=k, v=v, prompt_tokens=20)
    return path


@pytest.mark.interpreter
def test_a_users_capture_is_decoded_and_shown(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", str(small), "--output", str(tmp_path / "out"), "--page-size", "5"]) == 0
    printed = capsys.readouterr().out
    assert "every sibling is within its bound and no step differs" in printed
    assert len(re.findall(r"^ +0 +[01] +2[12] .* none$", printed, re.M)) == 2
    page = (tmp_path / "out" / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!#)', page), "the page must not need other files"
    assert page.count("<svg") >= 5
    assert "kernel.py: attend" in page
    assert "emulator.py: attend" in page


@pytest.mark.interpreter
def test_an_emulator_that_differs_is_found(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "LN2", np.float32(0.7))  # a wrong lse at the end, seen by lockstep only
    monkeypatch.setattr(emulator, "LOG2E", 1.5)  # a wrong scale, seen by both
    assert main(["--input", str(small), "--output", str(tmp_path)]) == 1


def test_unfilled_slots_are_poison_and_steps_see_only_what_is_stored(small: Path) -> None:
    capture = load_capture(small)
    pool = paged_cache(capture, page_size=5)
    keys = pool.get_key_cache(0)
    assert np.isfinite(keys.load(0, 1, np.arange(20), 0, width=64)).all()
    assert np.isnan(np.asarray(pool.blocks, np.float32)).mean() > 0.3
    grow(pool, capture, 20, 21)
    assert np.isfinite(keys.load(0, 1, 20, 0, width=64)).all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "nowhere.npz"], "nowhere.npz"),
        (["--input", "{file}"], "has no k, v"),
    ],
)
def test_bad_input_is_told(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "only_q.npz"
    np.savez(path, q=np.zeros((10, 4, 64), np.float32))
    assert main([a.format(file=path) for a in arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_readmes_picture_is_the_demos() -> None:
    """docs/path_of_a_byte.svg is what the demo draws of the embedded capture today."""
    capture = load_smollm2()
    pool, config = paged_cache(capture, page_size=16), pictures.shown_config(capture)
    chapter = pictures.path(capture, pool, config, len(capture.layers) // 2, pictures.shown_token(capture))
    assert chapter is not None
    assert (ROOT / "docs" / "path_of_a_byte.svg").read_text() == chapter.pictures[0].svg
    ElementTree.fromstring(chapter.pictures[0].svg)
