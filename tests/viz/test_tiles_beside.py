"""Two images of one tile: what is counted as different (law: of a permutation and itself), and what is seen."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.staging import SwizzledTile
from kvlab.viz import draw_tiles_beside

NAMES = ("emulated", "compiled")
TILE = SwizzledTile(rows=48, row_bytes=256)
SVG = "{http://www.w3.org/2000/svg}"


def pairs(rows, vectors):
    return np.stack(np.divmod(np.arange(rows * vectors), vectors), axis=-1)


def test_equal_images_are_said_to_be_so(sound, overlaps) -> None:
    picture = draw_tiles_beside(TILE, TILE.owner(), names=NAMES)
    texts = [text.text for text in sound(picture).iter(f"{SVG}text")]
    assert picture.title == "emulated and compiled: the same piece of the tile in all 768 slots"
    assert picture.width <= 900
    assert picture.height <= 720
    assert not overlaps(picture)
    assert texts.count("7,15") == 2, "in both, among the first 16 rows of 128 bytes"
    assert texts.count("80 more rows") == 2


@pytest.mark.parametrize("moved", [1, 5])
def test_slots_that_differ_are_counted(moved: int) -> None:
    other = TILE.owner().copy()
    other[100 : 100 + 2 * moved] = other[100 : 100 + 2 * moved][::-1]
    assert f"in {2 * moved} of 768 slots" in draw_tiles_beside(TILE, other, names=NAMES).title


def test_a_longer_image_differs_where_the_other_ends() -> None:
    """As padding makes it: what is behind the shorter one is counted, and drawn as nobody's."""
    short, gap = pairs(8, 8), np.full((8, 2), -1)
    picture = draw_tiles_beside(short, np.concatenate([short[:32], gap, short[32:]]), names=NAMES, rows=8)
    assert "in 40 of 72 slots" in picture.title
    assert "hatch" in picture.svg


def test_small_slots_have_the_colour_of_their_column_of_16_bytes() -> None:
    """Law: an image in slots of 8 bytes has the colours of the same image in slots of 16."""
    pictures = [draw_tiles_beside(image, image, names=NAMES, slot_bytes=size).resolved()
                for image, size in ((pairs(8, 8), 16), (pairs(8, 16), 8))]
    fills = [set(re.findall(r'<path[^>]*fill="(#\w+)"', picture)) for picture in pictures]
    assert fills[0] == fills[1]
    assert len(fills[0]) == 8


@pytest.mark.parametrize(
    ("slots", "rows", "message"),
    [
        (pairs(8, 8), 0, "rows 0: at least 1 is drawn"),
        (np.zeros((8, 3), np.int64), 8, r"slots has shape \(8, 3\)"),
        (SwizzledTile(rows=1 << 16, row_bytes=128), 8, "524288 slots: up to 262144 can be compared"),
    ],
)
def test_bad_input_is_refused(slots, rows, message) -> None:
    with pytest.raises(ValueError, match=message):
        draw_tiles_beside(TILE, slots, names=NAMES, rows=rows)
