"""Meanings of colours: banks, rows, lanes, and the few words of light and dark.

A bank's colour is a hue for its 16-byte group (8 groups in a row of 128 bytes) and a lightness for the 4-byte bank
inside the group. Neighbouring groups have hues far apart; the eight hues differ in lightness as well, and all 32 greys
are different, so that the groups survive greyscale and the common colour-vision deficiencies (``tests/viz`` measures
the distances for normal, protan, deutan and tritan vision and in grey).

Everything that is not data is neutral: ``INK`` is the page's own text colour, and the few other words are CSS
variables with a fallback for a light page."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

BANKS: tuple[str, ...] = (
    "#5845a4", "#6252ad", "#6d5fb4", "#776db7",  # indigo
    "#d69468", "#e1a177", "#ebaf89", "#f2bd9c",  # apricot
    "#936295", "#9e6ea0", "#a87caa", "#b08ab2",  # plum
    "#bacd66", "#c7da78", "#d4e78d", "#e2f3a6",  # lime
    "#538f6b", "#619a77", "#72a685", "#84b194",  # green
    "#d6a3d0", "#e1b1dc", "#ecbfe6", "#f5cdf0",  # pink
    "#955303", "#9f6021", "#a86d37", "#af7b4e",  # brown
    "#5f93e1", "#6da0eb", "#7eadf2", "#90b9f7",  # blue
)
"""The colour of each of 32 banks: ``BANKS[4 * group + bank_in_group]``."""

LANES: tuple[str, ...] = (
    "#d5d2f2", "#fbe0cf", "#e6d3e6", "#eaf3c9", "#cfe6d8", "#f6dff3", "#ead8c6", "#d3e4fb",
)
"""A light hue for each quad of lanes (four lanes), the hues of :data:`BANKS` in the same order."""

THEMES: dict[str, dict[str, str]] = {
    "light": {"ink": "#1c1f26", "paper": "#ffffff", "accent": "#c4006a", "alarm": "#c9201c"},
    "dark": {"ink": "#e6e8ec", "paper": "#15171c", "accent": "#ff6fb5", "alarm": "#ff7a70"},
}

INK = "currentColor"
PAPER = "var(--kvlab-paper,#ffffff)"
ACCENT = "var(--kvlab-accent,#c4006a)"
ALARM = "var(--kvlab-alarm,#c9201c)"


def bank_colours(bank: npt.ArrayLike, banks: int = 32) -> npt.NDArray[np.int64]:
    """The index into :data:`BANKS` of each bank; -1 stays -1 (no bank: hatched).

    With 64 banks (gfx950) the two halves share colours: the upper 32 repeat the lower 32.

    >>> bank_colours([0, 5, 37, -1], banks=64)
    array([ 0,  5,  5, -1])
    """
    index = np.asarray(bank, dtype=np.int64)
    if index.size and (index.min() < -1 or index.max() >= banks):
        raise ValueError(f"banks {index.min()}..{index.max()} are not in -1..{banks - 1}")
    return np.where(index < 0, -1, index % len(BANKS))


def order_colours(number: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The index into :data:`BANKS` that tells rows or columns of a tile apart: hue by ``number % 8``, lightness by
    ``number // 8 % 4``; -1 stays -1.

    >>> order_colours([0, 1, 8, 33, -1])
    array([ 0,  4,  1,  4, -1])
    """
    index = np.asarray(number, dtype=np.int64)
    return np.where(index < 0, -1, 4 * (index % 8) + index // 8 % 4)


def lane_colours(lane: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The index into :data:`LANES` of each lane: one hue for a quad; -1 stays -1.

    >>> lane_colours([0, 3, 4, 32, -1])
    array([ 0,  0,  1,  0, -1])
    """
    index = np.asarray(lane, dtype=np.int64)
    return np.where(index < 0, -1, index // 4 % len(LANES))


@functools.cache
def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) of ``#rrggbb``, 0 for black to 1 for white.

    >>> luminance("#ffffff")
    1.0
    """
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return round(float(linear @ (0.2126, 0.7152, 0.0722)), 6)


@functools.cache
def text_on(colour: str) -> str:
    """Black or white: the text colour with the larger contrast on ``colour`` (the same in light and dark).

    >>> text_on("#5845a4"), text_on("#e2f3a6")
    ('#ffffff', '#000000')
    """
    dark, light = "#000000", "#ffffff"
    background = luminance(colour)
    on_dark = (background + 0.05) / 0.05
    return dark if on_dark >= 1.05 / (background + 0.05) else light
