"""The palette's distances.

They rest on published colour science: OKLab (Ottosson 2020), simulated dichromacy (Machado, Oliveira and Fernandes
2009, severity 1), CIE L* and the contrast of WCAG 2. A distance in OKLab times 100 of about 2 is just
visible side by side.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.viz.pen.palette import BANKS, LANES, THEMES, bank_colours, lane_colours, luminance, order_colours, text_on

VISION = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
LMS = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005]])
OKLAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                  [0.0259040371, 0.7827717662, -0.8086757660]])


def distances(colours: tuple[str, ...], vision: str) -> np.ndarray:
    """OKLab distance times 100 between every two colours as seen with ``vision``: [n, n]."""
    rgb = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ VISION[vision].T, 0, 1)
    lab = 100 * np.cbrt(seen @ LMS.T) @ OKLAB.T
    return np.linalg.norm(lab[:, None] - lab[None], axis=-1)


def lightness() -> np.ndarray:
    """CIE L* of every bank: [group, bank in group]."""
    return 116 * np.cbrt(np.array([luminance(c) for c in BANKS])).reshape(8, 4) - 16


@pytest.mark.parametrize("vision", VISION)
def test_banks_can_be_told_apart(vision: str) -> None:
    d = distances(BANKS, vision)
    assert d[~np.eye(32, dtype=bool)].min() > 3.5  # any two of the 32
    by_step = d.reshape(8, 4, 8, 4)
    same_step = np.stack([by_step[:, s, :, s] for s in range(4)])
    assert same_step[:, ~np.eye(8, dtype=bool)].min() > 6.5  # any two groups
    for group in range(8):  # neighbouring groups, also across the end of a row
        assert same_step[:, group, (group + 1) % 8].min() > 15


def test_banks_survive_greyscale() -> None:
    grey = lightness()
    assert np.diff(np.sort(grey.ravel())).min() > 1.2  # 32 different greys
    assert np.diff(np.sort(grey.mean(axis=1))).min() > 5.5  # the hues differ in lightness too
    assert np.diff(grey, axis=1).min() > 3.5  # banks of a group, in order
    assert np.abs(grey - np.roll(grey, -1, axis=0)).min() > 18  # neighbouring groups


@pytest.mark.parametrize("colour", BANKS + LANES)
def test_text_is_readable_on_every_colour(colour: str) -> None:
    a, b = sorted((luminance(colour), luminance(text_on(colour))))
    assert (b + 0.05) / (a + 0.05) >= 4.5  # WCAG 2, level AA


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("word", ["ink", "accent", "alarm"])
def test_words_are_readable_on_the_page(theme: str, word: str) -> None:
    a, b = sorted(luminance(THEMES[theme][name]) for name in (word, "paper"))
    assert (b + 0.05) / (a + 0.05) >= 4.5


@pytest.mark.parametrize("vision", VISION)
def test_neighbouring_quads_differ(vision: str) -> None:
    d = distances(LANES, vision)
    assert min(d[i, (i + 1) % 8] for i in range(8)) > 2.5


def test_colour_of_a_bank_is_its_group_and_place_in_it() -> None:
    bank = bank_colours(np.arange(64), banks=64)
    assert np.array_equal(bank, np.arange(64) % 32)
    assert np.array_equal(order_colours(np.arange(8)), 4 * np.arange(8))  # eight rows: eight hues
    assert len(np.unique(order_colours(np.arange(32)))) == 32
    assert np.array_equal(lane_colours(np.arange(32)), np.arange(32) // 4)
    with pytest.raises(ValueError, match=r"0\.\.32 are not in -1\.\.31"):
        bank_colours([0, 32])
