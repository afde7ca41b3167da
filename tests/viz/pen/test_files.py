"""Files: the ending decides the format (PNG's own signature and size; a page and a file that need nothing else)."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvlab.viz import Picture, draw, draw_layout, save
from kvlab.viz.pen.files import _converters

LAYOUT = np.arange(16).reshape(4, 4)


def test_svg_and_html(tmp_path) -> None:
    assert save(LAYOUT, tmp_path / "a.svg").read_text() == draw(LAYOUT).svg
    text = save(LAYOUT, tmp_path / "a.html").read_text()
    assert text.startswith("<!doctype html>")
    assert draw(LAYOUT).inline in text
    assert "prefers-color-scheme:dark" in draw(LAYOUT).svg
    assert "light-dark(" in text


def test_png_has_the_asked_size(tmp_path) -> None:
    if not any(available() for available, _ in _converters()):
        pytest.skip("no converter for PNG is installed")
    picture = draw_layout(LAYOUT)
    data = picture.save(tmp_path / "a.png", theme="dark", scale=1).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert abs(width - picture.width) <= 1
    assert abs(height - picture.height) <= 1


def test_png_without_a_converter_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvlab.viz.pen.files._converters", list)
    with pytest.raises(ValueError, match="pip install cairosvg"):
        save(LAYOUT, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_bad_endings_and_objects_write_nothing(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.svg, \.html or \.png"):
        save(LAYOUT, tmp_path / "a.pdf")
    with pytest.raises(ValueError, match="cannot draw"):
        save(object(), tmp_path / "a.svg")
    with pytest.raises(ValueError, match="theme is 'sepia': must be one of light, dark"):
        draw(LAYOUT).resolved("sepia")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), 10**400, 1e9, "2", None, True, 1j])
def test_a_scale_that_gives_no_pixels(tmp_path, scale) -> None:
    for name in ("a.png", "a.svg"):
        with pytest.raises(ValueError, match=r"^scale .*: must be a number greater than 0, at most 100"):
            draw(LAYOUT).save(tmp_path / name, scale=scale)
    assert not list(tmp_path.iterdir())


def test_a_picture_has_both_forms() -> None:
    picture = draw(LAYOUT)
    assert isinstance(picture, Picture)
    assert draw(picture) is picture
    assert picture._repr_svg_() == picture.svg
    assert picture._repr_html_() == picture.inline
