"""Punch cards: every word of every lane once, counts as the measured rule says.

The rule rests on instructions counted on an H100 (tests/data/h100_wavefronts.json); its implementation in
``kvlab.hardware`` is tested against those records. Here the card must show the same numbers, also from plain arrays.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.hardware import wavefronts
from kvlab.viz import draw, draw_punch_card

LANE = np.arange(32)
WAVE = np.arange(64)
ROWS = LANE % 8 * 128 + LANE // 8 * 16
CASES = {
    "ldmatrix-conflict": wavefronts("ldmatrix.x4", ROWS),
    "ldmatrix-swizzled": wavefronts("ldmatrix.x4", ROWS ^ (ROWS >> 7 & 7) << 4),
    "b32-stride-2": wavefronts("ld.shared.b32", LANE * 8),
    "b64-masked": wavefronts("ld.shared.b64", LANE * 8, mask=0x55555555),
    "b128-broadcast": wavefronts("ld.shared.b128", LANE * 0),
    "gfx950": wavefronts("ds_read_b128", WAVE % 16 * 256 + WAVE // 16 * 16, arch="gfx950"),
    "gfx950-write": wavefronts("ds_write_b64", WAVE * 16, arch="gfx950"),
    "gfx942": wavefronts("ds_read_b128", WAVE % 16 * 160 + WAVE // 16 * 16, arch="gfx942"),
}


def marks(text: str) -> list[tuple[int, int, int, int]]:
    """(lane, phase, byte, bank) of every mark."""
    return [
        tuple(map(int, found))
        for found in re.findall(
            r"<title>lane (\d+), phase (\d+), pass \d+ of \d+\nbyte (\d+): word \d+, bank (\d+)<", text
        )
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_mark_for_every_word_of_every_active_lane(name: str, sound, overlaps) -> None:
    access = CASES[name]
    picture = draw(access)
    sound(picture)
    want = [
        (int(lane), int(access.phase[lane]), 4 * int(word), int(word) % access.bank_count)
        for lane in np.flatnonzero(access.active)
        for word in access.words[lane]
    ]
    assert sorted(marks(picture.svg)) == sorted(want)
    assert f"{access.wavefronts} wavefront" in picture.title
    assert f"ideal {access.ideal}" in picture.title
    assert ("provisional" in picture.title) == access.provisional
    for served, phase in enumerate(access.phases):
        if phase.passes:
            assert f"phase {served}: {phase.passes} pass" in picture.svg
    assert not overlaps(picture)


@pytest.mark.parametrize("name", CASES)
def test_plain_arrays_give_the_same_card(name: str) -> None:
    access = CASES[name]
    card = draw_punch_card(
        addresses=np.where(access.active, access.addresses, -1),
        lane_bytes=access.op.nbytes,
        phase=access.phase,
        banks=access.bank_count,
        title=access.headline(),
        words=access.explain().partition("\n")[2],
    )
    assert card.body == draw_punch_card(access, title=access.headline()).body


@pytest.mark.parametrize("mask", [None, 0x00F0_F00F_0FF0_FF0F])
def test_lanes_of_a_phase_stand_together(mask: int | None) -> None:
    """Law: from top to bottom the phases follow one another, though their lanes are no neighbours on gfx950; inactive
    lanes stay with the one before them, and every lane has a row of its own.
    """
    access = wavefronts("ds_read_b128", WAVE * 16, mask, arch="gfx950")
    picture = draw(access)
    found = re.findall(r'<path d="M[\d.]+ ([\d.]+)[^>]*><title>lane (\d+), phase (\d+)', picture.svg)
    by_height = sorted({(float(y), int(phase), int(lane)) for y, lane, phase in found if phase in "01"})
    assert [phase for _, phase, _ in by_height] == sorted(phase for _, phase, _ in by_height)
    assert len({y for y, _, _ in by_height}) == len({lane for _, _, lane in by_height})
    if mask is None:
        assert [lane for _, phase, lane in by_height if phase == 0] == [*range(4), *range(12, 16), *range(20, 28)]
        assert "lanes 0-3, 12-15" in picture.svg


def test_an_instruction_without_active_lanes(sound) -> None:
    assert draw_punch_card(addresses=[-1, -1]).title == "0 wavefronts, ideal 0: no lane is active"
    sound(draw(wavefronts("ld.shared.b32", LANE * 4, mask=0)))


def test_colliding_lanes_are_named_in_words() -> None:
    text = draw(CASES["b32-stride-2"]).svg
    assert "Bank 0: bytes 0 (lane 0), 128 (lane 16)." in text
    assert "conflicts</text>" in text  # the key of the red bars
    assert "there is no conflict" in draw(CASES["ldmatrix-swizzled"]).svg


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"addresses has shape \(0,\)"),
        ({"addresses": [0, 2]}, "multiples of 4"),
        ({"addresses": [0, 4], "lane_bytes": 6}, "lane_bytes 6"),
        ({"addresses": [0, 4], "phase": [0]}, r"phase of shape \(1,\) does not fit"),
    ],
)
def test_bad_input_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_punch_card(**kwargs)


def test_eight_phases_have_eight_marks() -> None:
    """Law: the mark alone tells the phase, by its outline and whether it is filled."""
    text = draw_punch_card(addresses=np.arange(8) * 4, phase=np.arange(8)).svg
    found = re.findall(r'<path d="M[\d.]+ [\d.]+([^"]*)" (fill="\w+")[^>]*><title>lane (\d), phase \3', text)
    assert len({(re.sub(r"[-\d. ]", "", outline), fill) for outline, fill, _ in found}) == len(found) == 8
