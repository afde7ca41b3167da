"""Shared-memory images: slots, lanes, folds (law: byte address = base + slot * slot_bytes, bank = byte / 4 mod 32)."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.hardware import wavefronts
from kvlab.viz import draw_shared_memory
from kvlab.viz.pen.palette import BANKS

SVG = "{http://www.w3.org/2000/svg}"
LANE = np.arange(32)


def image(rows: int, vectors: int, swizzled: bool = True) -> np.ndarray:
    """The (row, vector) in each slot of a tile whose vectors are XORed with their row."""
    row, vector = np.divmod(np.arange(rows * vectors), vectors)
    return np.stack([row, vector ^ (row % 8 if swizzled else 0)], axis=1)


def address(rows: int, vectors: int, row: np.ndarray, vector: np.ndarray, swizzled: bool = True) -> np.ndarray:
    return 16 * (row * vectors + (vector ^ (row % 8 if swizzled else 0)))


def test_every_slot_tells_what_lies_there(sound, hovers, overlaps) -> None:
    picture = draw_shared_memory(image(16, 8), base=1024)
    found = hovers(sound(picture))
    assert len(found) == 16 * 8
    assert found[8 * 3 + 5] == "byte 1488, bank 20\nrow 3 of the tile, vector 6"
    assert not overlaps(picture)
    assert picture.title == "Tile of 16 rows x 128 bytes: vector 0 of its first 8 rows lies in 8 bank groups"


def test_lanes_are_named_where_they_read(sound, hovers, overlaps) -> None:
    read = address(16, 8, LANE % 16, LANE // 16)
    picture = draw_shared_memory(image(16, 8), access=wavefronts("ldmatrix.x4", read))
    root = sound(picture)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert all(texts.count(f"T{lane}") == 1 for lane in range(32))
    found = hovers(root)
    for lane in range(32):
        assert f"T{lane} (phase {lane // 8})" in found[read[lane] // 16]
    assert picture.title == "ldmatrix.x4: 4 wavefronts, ideal 4"
    assert not overlaps(picture)


def test_plain_arrays_do_as_well_as_the_object() -> None:
    read = address(16, 8, LANE % 16, LANE // 16)
    access = wavefronts("ldmatrix.x4", read)
    by_arrays = draw_shared_memory(
        image(16, 8), addresses=read, lane_bytes=16, phase=LANE // 8, title=access.instruction
    )
    by_object = draw_shared_memory(image(16, 8), access=access, title=access.instruction)
    assert by_arrays == by_object


def test_a_folded_image_keeps_the_rows_that_are_read(sound, hovers) -> None:
    read = address(128, 16, 64 + LANE % 16, LANE // 16)
    picture = draw_shared_memory(image(128, 16), access=wavefronts("ldmatrix.x4", read))
    found = hovers(sound(picture))
    assert sum("read by" in text for text in found) == 32
    assert len(found) < 256 * 8
    assert len(hovers(sound(draw_shared_memory(image(128, 16), fold=False)))) == 256 * 8


def test_untouched_slots_are_hatched_and_said(sound, hovers) -> None:
    slots = image(4, 8)
    slots[20:] = -1
    picture = draw_shared_memory(slots)
    found = hovers(sound(picture))
    assert sum("nobody wrote here" in text for text in found) == 12
    assert "hatch)" in picture.svg
    assert "hatch" not in draw_shared_memory(image(4, 8)).svg


def test_a_swizzle_is_seen_in_the_colours(sound) -> None:
    """Law: the hue of a slot is that of its logical column of 16 bytes, so that plain rows are stripes and a swizzle of
    128 bytes has every hue once in every column of the image."""
    plain, swizzled = (draw_shared_memory(image(8, 8, s), title="a tile") for s in (False, True))
    for column in range(8):
        starts = []
        for picture in (plain, swizzled):
            sound(picture)
            (d,) = re.findall(rf'd="(M[^"]*z)" fill="{BANKS[4 * column]}"', picture.body)
            starts.append(re.findall(r"M([\d.]+) ", d))
        assert len(starts[0]) == len(starts[1]) == 8
        assert (len(set(starts[0])), len(set(starts[1]))) == (1, 8)
    quarters = np.stack([np.divmod(np.arange(256), 32)[0], np.arange(256) % 32], axis=1)  # slots of 4 bytes
    body = draw_shared_memory(quarters, slot_bytes=4).body
    assert all(f'fill="{BANKS[4 * column]}"' in body for column in range(8))


def test_colour_is_the_bank_or_the_row(sound) -> None:
    by_bank = draw_shared_memory(image(16, 8), colour="bank")
    sound(by_bank)
    for group in range(8):  # a column of the image is one group of banks: one run in each of 16 rows
        (d,) = re.findall(rf'd="(M[^"]*z)" fill="{BANKS[4 * group]}"', by_bank.body)
        assert d.count("M") == 16
        assert len(set(re.findall(r"M([\d.]+) ", d))) == 1
    by_row = draw_shared_memory(image(8, 8), colour="row")
    for row in range(8):  # a row of the image is one row of the tile: one run
        (d,) = re.findall(rf'd="(M[^"]*z)" fill="{BANKS[4 * row]}"', by_row.body)
        assert d.count("M") == 1


def test_a_base_inside_a_row_leaves_the_slots_before_empty(sound, hovers) -> None:
    found = hovers(sound(draw_shared_memory(np.stack([LANE, LANE], 1), slot_bytes=4, base=64)))
    assert found[16].startswith("byte 64, bank 16\nrow 0")
    assert sum("outside the image" in text for text in found) == 32


def test_rules_separate_stages(sound, overlaps) -> None:
    picture = draw_shared_memory(np.concatenate([image(8, 8)] * 2), rules={0: "stage 0", 1024: "stage 1"})
    texts = [t.text for t in sound(picture).iter(f"{SVG}text")]
    assert {"stage 0", "stage 1"} <= set(texts)
    assert not overlaps(picture)


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_lanes_of_every_width(nbytes: int, sound, hovers, overlaps) -> None:
    picture = draw_shared_memory(image(16, 8), access=wavefronts(f"ld.shared.b{8 * nbytes}", LANE * nbytes))
    assert sum("read by" in text for text in hovers(sound(picture))) == 32 * nbytes // 16
    assert not overlaps(picture)


def test_anything_with_an_owner_can_be_drawn() -> None:
    tile = SimpleNamespace(base=256, owner=lambda: image(16, 8))
    assert draw_shared_memory(tile) == draw_shared_memory(image(16, 8), base=256)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"slots": np.zeros((4, 3), int)}, r"slots has shape \(4, 3\)"),
        ({"slots": np.zeros((4, 2))}, "type float64"),
        ({"slots": image(2, 8), "slot_bytes": 24}, "slot_bytes is 24: must divide row_bytes 128"),
        ({"slots": image(2, 8), "colour": "heat"}, "colour is 'heat': must be one of 'column', 'row', 'bank'"),
        ({"slots": image(2, 8), "addresses": [0, 256]}, r"address is 256: must be in the image, bytes 0\.\.255"),
        ({"slots": image(2, 8), "rules": {100: "x"}}, "rule at byte 100 is not the start of a row"),
        ({"slots": image(2, 8), "addresses": [0], "phase": [0, 1]}, r"phase of shape \(2,\)"),
    ],
)
def test_bad_input_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_shared_memory(**kwargs)
