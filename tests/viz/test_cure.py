"""A conflict and its cure: both counts of the measured rule on one screen (law: the wavefronts of the two accesses)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.hardware import wavefronts
from kvlab.staging import SwizzledTile
from kvlab.viz import draw_cure, draw_punch_card

LANE, WAVE = np.arange(32), np.arange(64)
TILE = SwizzledTile(rows=64, row_bytes=128)
TILES = TILE.plain(), TILE
READS = [wavefronts("ldmatrix.x4", tile.address(LANE % 8, LANE // 8)) for tile in TILES]
AMD = [
    wavefronts("ds_read_b128", at, arch="gfx950") for at in (WAVE % 16 * 256 + WAVE // 16 * 16, WAVE * 16)
]


@pytest.mark.parametrize(
    ("reads", "tiles"), [(READS, TILES), (READS, None), (AMD, None)], ids=["sm_90", "plain", "amd"]
)
def test_both_are_seen_on_one_screen(reads, tiles, sound, overlaps) -> None:
    picture = draw_cure(*reads, tiles=tiles)
    sound(picture)
    assert picture.width <= 900
    assert picture.height <= 720
    assert not overlaps(picture)
    assert f"{reads[0].wavefronts} wavefronts as it is, {reads[1].wavefronts} cured" in picture.title
    marks = re.findall(r"<title>lane (\d+), phase (\d+), pass (\d+) of (\d+)", picture.svg)
    assert len(marks) == sum(read.words[read.active].size for read in reads)
    assert {int(of) for *_, of in marks} == {phase.passes for read in reads for phase in read.phases}


@pytest.mark.parametrize("reads", [READS, AMD], ids=["sm_90", "amd"])
def test_a_card_alone_fits_one_screen(reads) -> None:
    for read in reads:
        assert draw_punch_card(read).height <= 720


def test_the_tiles_name_what_lies_there(sound) -> None:
    """Law: a tile and its swizzled image hold the same vectors, each once."""
    texts = [t.text for t in sound(draw_cure(*READS, tiles=TILES)).iter("{http://www.w3.org/2000/svg}text")]
    for vector in range(8):
        assert texts.count(f"3,{vector}") == 2


@pytest.mark.parametrize(
    ("reads", "tiles", "message"),
    [
        ((READS[0], AMD[0]), None, "conflict is of sm_90, cure of gfx950"),
        (READS, TILES[:1], "tiles are 1: must be two"),
        (READS, [np.stack(np.divmod(np.arange(8), 8), -1)] * 2, "which lie outside"),
    ],
)
def test_bad_input_is_refused(reads, tiles, message) -> None:
    with pytest.raises(ValueError, match=message):
        draw_cure(*reads, tiles=tiles)
