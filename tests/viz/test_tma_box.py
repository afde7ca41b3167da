"""TMA boxes: the picture's shared memory is what the copy itself writes (kvlab.hardware.tma, recorded on an H100)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.hardware import (
    TmaDescriptor,
    create_kv_tile,
    create_tensor_tile,
    create_tma_tile_gather4,
    fold_kv_descriptor,
    tma,
)
from kvlab.memory import Memory
from kvlab.viz import draw, draw_tma_box

TENSOR = (1 + np.arange(64 * 128, dtype=np.int32).reshape(64, 128)).view(np.float32)
BOXES = {
    "inside": ((16, 32), "128B", (16, 32), 0),
    "below": ((16, 32), "128B", (56, 96), 1024),
    "above": ((16, 8), "64B", (-4, 16), 128),
    "right": ((8, 32), "128B", (0, 112), 0),
    "outside": ((8, 8), "32B", (64, 0), 256),
    "plain": ((8, 4), "none", (3, 4), 0),
}


def slots(titles: list[str], base: int) -> dict[int, str]:
    """Byte address of each 16-byte slot -> what lies there."""
    found = {}
    for title in titles:
        match = re.match(r"byte (\d+), bank \d+\n(.*)", title)
        if match and match[2] != "outside the image" and int(match[1]) >= base:
            found[int(match[1])] = match[2]
    return found


@pytest.mark.parametrize("name", BOXES)
def test_the_image_is_what_the_copy_writes(name: str, sound, hovers, overlaps) -> None:
    box, swizzle, coords, address = BOXES[name]
    descriptor = TmaDescriptor.of(TENSOR, box, swizzle)
    memory = Memory(descriptor.image_bytes, base=address)
    tma.load(descriptor, coords, memory, address)
    picture = draw_tma_box(descriptor, coords, address=address)
    found = slots(hovers(sound(picture)), address)
    assert not overlaps(picture)
    image = descriptor.image(address)[:, ::4]
    for (row, vector), where in np.ndenumerate(image):
        value = memory.load(np.array(where), np.int32, 4)
        want = f"row {row} of the tile, vector {vector}" if value.any() else "zeros: outside the tensor"
        assert found.pop(where) == want
        if value.any():
            assert value[0] == 1 + (coords[0] + row) * 128 + coords[1] + 4 * vector
    assert set(found.values()) <= {"nobody wrote here"}


def test_tiles_of_several_boxes(sound, hovers, overlaps) -> None:
    tile = create_tensor_tile(TENSOR, (16, 64), "128B")
    picture = draw_tma_box(tile, (8, 32))
    found = slots(hovers(sound(picture)), 0)
    memory = Memory(16 * 64 * 4)
    tile.async_copy(memory, 0, (32, 8))  # innermost first
    for address, what in found.items():
        row, vector = map(int, re.fullmatch(r"row (\d+) of the tile, vector (\d+)", what).groups())
        assert memory.load(np.array(address), np.int32, 1)[0] == 1 + (8 + row) * 128 + 32 + 4 * vector
    assert len(found) == 16 * 16
    assert "2 boxes fill the tile" in picture.svg
    assert not overlaps(picture)


def test_gathered_rows(sound, hovers) -> None:
    tile, rows = create_tma_tile_gather4(TENSOR, 32, "128B", tile_height=8), [3, 1, 40, 1, 5, 9, 2, 6]
    picture = draw_tma_box(tile, rows=rows)
    found = slots(hovers(sound(picture)), 0)
    memory = Memory(8 * 128)
    tile.async_copy_gather4_tile(memory, 0, rows)
    for address, what in found.items():
        row, vector = map(int, re.fullmatch(r"row (\d+) of the tile, vector (\d+)", what).groups())
        assert memory.load(np.array(address), np.int32, 1)[0] == 1 + rows[row] * 128 + 4 * vector
    assert picture.title.startswith("TMA gather of 8 x 32")
    words = " ".join(re.findall(r">([^<>]+)</text>", picture.svg))
    assert "A copy takes four rows from anywhere, 128 bytes of each; 2 fill the tile; the mbarrier counts" in words


def test_more_dimensions(sound, overlaps) -> None:
    keys = np.zeros((40, 2, 128), np.float16)
    picture = draw_tma_box(create_kv_tile(keys, 16, 128), (32, 1, 0))
    sound(picture)
    assert "8 of 16 rows lie in the tensor, the others arrive as zeros" in picture.title
    assert not overlaps(picture)
    sound(draw(fold_kv_descriptor(np.zeros((64, 2, 128), np.float16), 16, 128)))
    sound(draw(TmaDescriptor.of(np.zeros(64, np.float32), (16,))))
    strided = TmaDescriptor.of(np.zeros((64, 64), np.float32), (16, 32), "128B", element_strides=(2, 1))
    assert "2 of 8 rows" in draw_tma_box(strided, (60, 0)).title


def test_bad_input_is_refused() -> None:
    descriptor = TmaDescriptor.of(TENSOR, (8, 8))
    for how, message in (
        ({"address": 64}, "address is 64: must be a multiple of 128 bytes"),
        ({"coords": (0, 1)}, "the last times 4 B a multiple of 16"),
        ({"coords": (0, 0, 0)}, "must be 2, slowest first"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_tma_box(descriptor, **how)
    with pytest.raises(ValueError, match=r"rows \[1\] are 1, the tile has 8"):
        draw_tma_box(create_tma_tile_gather4(TENSOR, 32, tile_height=8), rows=[1])
