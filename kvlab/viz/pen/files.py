"""Pictures as files: SVG and HTML by ourselves, PNG through whichever converter is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .host import document

if TYPE_CHECKING:
    from .picture import Picture

MOST_SCALE = 100
"""Pixels for each px: beyond, pictures are larger than converters can hold."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")


def save_picture(picture: Picture, path: str | PathLike[str], *, theme: str = "light", scale: float = 2.0) -> Path:
    """A finished picture in the file ``path``; see :func:`kvlab.viz.save`."""
    target = Path(path)
    whole = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not (whole and 0 < scale <= MOST_SCALE):
        raise ValueError(f"scale is {scale!r}: must be a number greater than 0, at most {MOST_SCALE}, of pixels a px")
    ending = target.suffix.lower()
    if ending not in (".svg", ".html", ".png"):
        raise ValueError(f"path {str(path)!r} must end in .svg, .html or .png")
    if ending == ".png":
        data = _png(picture.resolved(theme), picture.width, picture.height, scale)
    else:
        data = (picture.svg if ending == ".svg" else document(picture.title, picture.inline)).encode()
    target.write_bytes(data)
    return target


def _png(svg: str, width: float, height: float, scale: float) -> bytes:
    for available, convert in _converters():
        if available():
            return convert(svg, width, height, scale)
    raise ValueError(
        "a .png needs a converter: pip install cairosvg, or install rsvg-convert (librsvg) or Chromium; "
        "or save as .svg, which needs nothing"
    )


def _converters() -> list[tuple[Callable[[], bool], Callable[[str, float, float, float], bytes]]]:
    return [
        (lambda: browser() is not None, _with_browser),
        (lambda: importlib.util.find_spec("cairosvg") is not None, _with_cairosvg),
        (lambda: shutil.which("rsvg-convert") is not None, _with_rsvg),
    ]


def browser() -> str | None:
    """The path of an installed Chromium or a relative of it; None where there is none."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def _with_cairosvg(svg: str, width: float, height: float, scale: float) -> bytes:
    data: bytes = importlib.import_module("cairosvg").svg2png(bytestring=svg.encode(), scale=scale)
    return data


def _with_rsvg(svg: str, width: float, height: float, scale: float) -> bytes:
    command = ["rsvg-convert", "--format", "png", "--zoom", f"{scale:g}"]
    return subprocess.run(command, input=svg.encode(), stdout=subprocess.PIPE, check=True).stdout


def _with_browser(svg: str, width: float, height: float, scale: float) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "picture.svg"), Path(folder, "picture.png")
        source.write_text(svg, encoding="utf-8")
        command = [
            str(browser()), "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
            f"--force-device-scale-factor={scale:g}", f"--window-size={-int(-width // 1)},{-int(-height // 1)}",
            f"--screenshot={target}", source.as_uri(),
        ]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=120)
        if not target.exists():
            raise ValueError(f"{command[0]} made no picture; save as .svg, or pip install cairosvg")
        return target.read_bytes()
