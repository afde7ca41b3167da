"""The demo: its exit status, its table and its page on small captures; bad input is told, not shown as a traceback.

Rests on: the float64 reference (through the demo's own bound), and laws (a page is self-contained; a fault is found).
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from kvlab.attention.mha_decode import emulator
from kvlab.attention.mha_decode.config import DecodeConfig
from kvlab.attention.tiles import online_softmax
from kvlab.data import load_capture, load_smollm2
from kvlab.demo import pictures
from kvlab.demo import summary as table
from kvlab.demo.__main__ import main
from kvlab.demo.steps import Step, decode, grow, paged_cache
from kvlab.memory import UnwrittenRead
from kvlab.staging import SwizzledTile, Traffic
from kvlab.viz import draw_one_diagonal

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
    monkeypatch.setattr(online_softmax, "LN2", 0.7)  # a wrong lse at the end, seen by lockstep only
    terms = emulator.row_terms
    monkeypatch.setattr(emulator, "row_terms", lambda scale, *rest: terms(1.04 * scale, *rest))  # seen by both
    assert main(["--input", str(small), "--output", str(tmp_path)]) == 1


@pytest.mark.interpreter
def test_float32_of_depth_128_takes_each_machines_own_tiles(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((9, heads, 128), np.float32) for heads in (2, 1, 1))
    np.savez(tmp_path / "deep.npz", q=q, k=k, v=v, prompt_tokens=8)
    assert main(["--input", str(tmp_path / "deep.npz"), "--output", str(tmp_path)]) == 0
    assert "not emulated" not in (tmp_path / "index.html").read_text()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_capture_without_a_prompt(dtype: str, tmp_path: Path) -> None:
    q, k, v = np.random.default_rng(5).standard_normal((3, 1, 2, 64)).astype(dtype)
    np.savez(tmp_path / "short.npz", q=q, k=k, v=v)  # fewer than 8 tokens: all are decode steps
    assert main(["--input", str(tmp_path / "short.npz"), "--output", str(tmp_path)]) == 0
    assert "token 0, in pictures" in (tmp_path / "index.html").read_text()


def test_a_fault_of_the_emulator_is_no_reason_to_leave_it_out(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: object, **options: object) -> None:
        raise UnwrittenRead("smem: read of 4 bytes at address 32, which nothing has written")

    monkeypatch.setattr(emulator, "attend", faulty)
    with pytest.raises(UnwrittenRead):
        next(decode(load_capture(small), paged_cache(load_capture(small), page_size=5)))


def test_missing_packages_and_unwritable_folders_are_told_before_the_work(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--input", str(small), "--output", str(small)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(small) in printed.err
    monkeypatch.setattr("kvlab.demo.__main__.missing", lambda: ("torch", "triton"))
    assert main(["--input", str(small), "--output", str(tmp_path / "out")]) == 2
    hint = "pip install -e '.[kernels]', in kvlab's own folder"
    assert capsys.readouterr().err == f"kvlab demo: needs torch and triton: {hint}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["encrypted", "petabytes", "damaged"])
def test_a_bad_archive_is_one_sentence(
    fault: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(small.read_bytes())
    if fault == "encrypted":
        for mark, flag in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the bit "encrypted"
            content[content.index(mark) + flag] |= 1
        small.write_bytes(content)
    else:
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1073741824, 1048576, 8), }\n"
        header = header if fault == "petabytes" else header[:30] + b"\n"
        with zipfile.ZipFile(small, "w") as archive:
            for key in "qkv":
                archive.writestr(f"{key}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert main(["--input", str(small), "--output", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"kvlab demo: {small}: ")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_page_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--page-size", text])
    assert f"--page-size: {text!r} is not an integer of at least 1" in capsys.readouterr().err


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
    """docs/path_of_a_byte.svg is what the demo draws of the embedded capture today, docs/one_diagonal.svg its tile."""
    capture = load_smollm2()
    pool, config = paged_cache(capture, page_size=16), pictures.shown_config(capture)
    chapter = pictures.path(capture, pool, config, len(capture.layers) // 2, pictures.shown_token(capture))
    assert chapter is not None
    assert (ROOT / "docs" / "path_of_a_byte.svg").read_text() == chapter.pictures[0].svg
    ElementTree.fromstring(chapter.pictures[0].svg)
    place = SwizzledTile(config.BN, capture.head_dim * capture.dtype.itemsize)
    drawn = draw_one_diagonal(place, small=True, title="A swizzled key: 8 lanes in 1 pass, not 8")
    assert (ROOT / "docs" / "one_diagonal.svg").read_text() == drawn.svg


def test_the_table_counts_in_kib() -> None:
    """Rests on the definition: a KiB is 1024 bytes."""
    traffic = Traffic()
    traffic.move("DRAM->SMEM", 64 << 10)
    traffic.move("SMEM->registers", 128 << 10)
    step = Step(0, 0, 21, DecodeConfig(16, 64, (64, 0), (64, 0), 1, 1), {}, 1e-5, {"sm_90": traffic}, {})
    assert re.search(r" 64 > +128 ", table.line(step, gpu=False))


def test_a_step_that_differs_in_lockstep_is_not_ok() -> None:
    """Law: a difference counts even where the result is within its bound."""
    config = DecodeConfig(16, 64, (64, 0), (64, 0), 1, 1)
    difference = SimpleNamespace(twin="attend", step="mask", output="s")
    step = Step(0, 0, 21, config, {"sm_90": 0.0}, 1e-5, {}, {"sm_90": SimpleNamespace(first_difference=difference)})
    assert (step.ok, step.difference) == (False, "sm_90 attend.mask: s")
